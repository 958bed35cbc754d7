"""Convolutions, compiled functions and tensors without data inside ``emulate``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from mixprec.fp64 import emulate

DOUBLE = torch.float64
UNIT = 2.0**-53
COMPILER_WARNS = pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
_CONVOLUTIONS: tuple[Callable[..., Tensor], ...] = (
    functional.conv1d,
    functional.conv2d,
    functional.conv3d,
)
_TRANSPOSED: tuple[Callable[..., Tensor], ...] = (
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
)
SIZES = (7, 6, 5)
WINDOW = (3, 2, 2)
PLAIN: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1},
    {"stride": 3, "padding": 2, "dilation": 2},
    {"groups": 2, "padding": 1},
    {"groups": 4, "stride": 2},
]
SPREAD: list[dict[str, Any]] = [
    {},
    {"stride": 2, "padding": 1, "output_padding": 1},
    {"stride": 2, "padding": 3, "dilation": 3, "output_padding": 2},
    {"groups": 2, "padding": 1},
    {"groups": 4, "stride": 3},
]


def operands(axes: int, transposed: bool, groups: int) -> list[Tensor]:
    weight = (4, 8 // groups) if transposed else (8, 4 // groups)
    shapes = (2, 4, *SIZES[:axes]), (*weight, *WINDOW[:axes]), (8,)
    return [torch.randn(shape, dtype=DOUBLE) for shape in shapes]


def with_gradients(
    convolve: Callable[..., Tensor], tensors: list[Tensor], arguments: dict[str, Any]
) -> tuple[Tensor, ...]:
    """The output, and the gradients by input, weight and bias for a gradient of ones and twos."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = convolve(*leaves, **arguments)
    gradient = torch.arange(out.numel(), dtype=DOUBLE).reshape(out.shape) % 2 + 1
    return out.detach(), *torch.autograd.grad(out, leaves, gradient)


@pytest.mark.parametrize(
    ("axes", "transposed", "arguments"),
    [
        *((axes, False, arguments) for axes in (1, 2, 3) for arguments in PLAIN),
        *((axes, True, arguments) for axes in (1, 2, 3) for arguments in SPREAD),
    ],
)
def test_convolution_and_gradients_are_within_rounding_of_torch_s(
    axes: int, transposed: bool, arguments: dict[str, Any]
) -> None:
    convolve = (_TRANSPOSED if transposed else _CONVOLUTIONS)[axes - 1]
    tensors = operands(axes, transposed, arguments.get("groups", 1))
    native = with_gradients(convolve, tensors, arguments)
    # the same sums of absolute values bound what rounding can change
    sums = with_gradients(convolve, [x.abs() for x in tensors], arguments)
    with emulate() as done:
        found = with_gradients(convolve, tensors, arguments)
    length = max(2 * math.prod(native[0].shape[2:]), 8 * math.prod(WINDOW[:axes])) + 2
    for got, expected, total in zip(found, native, sums, strict=True):
        assert got.shape == expected.shape
        assert got.is_contiguous()
        assert bool(((got - expected).abs() <= length * UNIT * total).all())
    assert {name: row.native for name, row in done.operations.items()} == {
        "convolution": 0,
        "convolution_backward": 0,
    }


def test_convolution_is_the_exact_sum_rounded() -> None:
    # terms that cancel to 2^-40: a native sum of them is rounded on the way
    x = torch.tensor([1e16, 1.0, -1e16, 2.0**-40, 3.0, 1e8, -1e8], dtype=DOUBLE)
    weight = torch.tensor([1.0, 0.1, 1.0], dtype=DOUBLE)
    with emulate():
        found = functional.conv1d(x[None, None], weight[None, None])[0, 0].tolist()
    for position, value in enumerate(found):
        terms = [
            Fraction(float(a)) * Fraction(float(b))
            for a, b in zip(x[position : position + 3], weight, strict=True)
        ]
        exact, size = sum(terms), sum(map(abs, terms))
        assert abs(Fraction(value) - exact) <= Fraction(UNIT) * (abs(exact) + size / 2)


def test_complex_convolution_with_conjugated_views() -> None:
    x, weight = (torch.randn(shape, dtype=torch.complex128) for shape in ((2, 3, 8), (4, 3, 2)))
    native = functional.conv1d(x.conj(), weight)
    with emulate() as done:
        found = functional.conv1d(x.conj(), weight)
    torch.testing.assert_close(found, native, rtol=1e-13, atol=1e-13)
    assert done.native == 0


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_convolution_without_a_batch_and_of_an_empty_one(mode: Callable[[], Any]) -> None:
    x, weight = torch.randn(3, 8, dtype=DOUBLE), torch.randn(4, 3, 2, dtype=DOUBLE)
    native = functional.conv1d(x, weight)
    with mode(), emulate() as done:
        found = functional.conv1d(x, weight)
        empty = functional.conv1d(x[None][:0], weight)
        same = functional.conv1d(x, weight[..., :1], padding="same")
    torch.testing.assert_close(found, native, rtol=1e-13, atol=1e-13)
    assert empty.shape == (0, 4, 7)
    assert same.shape == (4, 8)
    assert done.operations["convolution"].reasons == {"nothing to multiply": 1}


def test_convolution_that_torch_refuses_is_torch_s_error() -> None:
    x = torch.randn(1, 3, 2, dtype=DOUBLE)
    with emulate(), pytest.raises(RuntimeError, match=r"[Kk]ernel size can't be greater"):
        functional.conv1d(x, torch.randn(4, 3, 5, dtype=DOUBLE))


def test_gradients_that_nobody_needs_cost_no_products() -> None:
    x, weight = torch.randn(2, 3, 8, dtype=DOUBLE), torch.randn(4, 3, 2, dtype=DOUBLE)
    products = []
    for needs in itertools.product((True, False), repeat=2):
        if any(needs):
            leaves = [y.clone().requires_grad_(need) for y, need in zip((x, weight), needs)]  # noqa: B905
            with emulate(bits=55) as done:
                functional.conv1d(*leaves).sum().backward()
            products.append(done.operations["convolution_backward"].products)
    # 3 slices of 21 bits: 6 products for each gradient
    assert products == [12, 6, 6]


def test_second_gradients_of_a_convolution() -> None:
    x = torch.randn(1, 2, 5, dtype=DOUBLE, requires_grad=True)
    weight = torch.randn(2, 2, 2, dtype=DOUBLE, requires_grad=True)
    with emulate() as done:
        assert torch.autograd.gradgradcheck(functional.conv1d, (x, weight), fast_mode=True)
    assert done.native == 0


def test_vmap_and_functional_gradients_are_emulated() -> None:
    a, b = torch.randn(5, 2, 4, dtype=DOUBLE), torch.randn(4, 3, dtype=DOUBLE)
    native = torch.func.vmap(torch.func.grad(lambda x: (x @ b).square().sum()))(a)
    with emulate() as done:
        found = torch.func.vmap(torch.func.grad(lambda x: (x @ b).square().sum()))(a)
    torch.testing.assert_close(found, native, rtol=1e-13, atol=1e-13)
    assert done.emulated == 2
    assert done.native == 0


def test_autocast_leaves_double_precision_alone_and_so_it_is_emulated() -> None:
    a, b = torch.randn(4, 4, dtype=DOUBLE), torch.randn(4, 4, dtype=DOUBLE)
    with torch.autocast("cpu", torch.bfloat16), emulate() as done:
        double, half = a @ b, a.float() @ b.float()
    assert (double.dtype, half.dtype) == (DOUBLE, torch.bfloat16)
    tally = done.operations["mm"]
    assert (tally.emulated, tally.reasons) == (1, {"bfloat16": 1})


def test_tensors_without_data_are_not_counted() -> None:
    meta = torch.empty(3, 4, dtype=DOUBLE, device="meta")
    with emulate() as done:
        assert (meta @ meta.mT).shape == (3, 3)
        with FakeTensorMode():
            fake = torch.empty(3, 4, dtype=DOUBLE)
            assert (fake @ fake.mT).shape == (3, 3)
    with FakeTensorMode(), emulate() as inner:
        fake = torch.empty(3, 4, dtype=DOUBLE)
        assert (fake @ fake.mT).shape == (3, 3)
    assert done.operations == inner.operations == {}


def test_subclasses_are_emulated_part_by_part() -> None:
    parts = [torch.randn(2, 4, dtype=DOUBLE), torch.randn(3, 4, dtype=DOUBLE)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    weight = torch.randn(4, 3, dtype=DOUBLE)
    with emulate() as done:
        found = nested @ weight
    torch.testing.assert_close(found.values(), torch.cat(parts) @ weight, rtol=1e-13, atol=1e-14)
    assert done.emulated == 1


@COMPILER_WARNS
@pytest.mark.slow
@pytest.mark.parametrize("is_compiled_before", [True, False])
def test_compiled_functions_run_uncompiled_and_emulated(is_compiled_before: bool) -> None:
    row = torch.tensor([[1e200, -1e200]], dtype=DOUBLE)
    column = torch.tensor([[1e200], [1e200]], dtype=DOUBLE)
    compiled = torch.compile(lambda a, b: (a @ b) + 1)
    if is_compiled_before:
        assert not bool(torch.isfinite(compiled(row, column)))
    with emulate() as done:
        assert compiled(row, column).item() == 1
    assert done.emulated == 1
    assert not bool(torch.isfinite(compiled(row, column)))


@COMPILER_WARNS
@pytest.mark.slow
@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_context_inside_a_compiled_function_is_not_compiled(fullgraph: bool) -> None:
    def multiply(a: Tensor, b: Tensor) -> Tensor:
        with emulate():
            return (a @ b) + 1

    torch._dynamo.reset()  # what it gave up on once it does not look at again
    row = torch.tensor([[1e200, -1e200]], dtype=DOUBLE)
    compiled = torch.compile(multiply, fullgraph=fullgraph)
    if not fullgraph:
        assert compiled(row, row.mT.abs()).item() == 1
        return
    with pytest.raises(RuntimeError, match="called inside a compiled function"):
        compiled(row, row.mT.abs())
