"""Gradients of ``matmul``, first and second, and how it fares under vmap and compilers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact_products import GENERATORS, rounded
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap

from mixprec import fp64

# the import of Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

F64, C128 = torch.float64, torch.complex128
SHAPES = [
    ((4, 5), (5, 3)),
    ((3,), (3,)),
    ((2, 1, 2, 2), (2, 2, 1)),
    ((2, 3), (2, 3, 1)),
    ((3, 2), (2,)),
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"bits": 63, "scheme": "residues"},
    {"output": "nearest"},
    {"rtol": 1e-9},
    {"alpha": -0.5},
]


def leaf(*shape: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


# the everyday checks compare along random directions, the slow ones element by element
FAST = [pytest.param(True, id="fast"), pytest.param(False, id="full", marks=pytest.mark.slow)]


@pytest.mark.parametrize("is_fast", FAST)
@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_gradcheck_of_shapes(
    left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype, is_fast: bool
) -> None:
    a, b = leaf(*left, dtype=dtype), leaf(*right, dtype=dtype)
    assert gradcheck(fp64.matmul, (a, b), eps=1e-6, fast_mode=is_fast)
    assert gradgradcheck(fp64.matmul, (a, b), eps=1e-6, fast_mode=is_fast)


def test_gradcheck_element_by_element() -> None:
    assert gradcheck(fp64.matmul, (leaf(4, 5), leaf(5, 3)), eps=1e-6)
    assert gradcheck(fp64.matmul, (leaf(2, 2, dtype=C128), leaf(2, 1, dtype=C128)))
    assert gradgradcheck(fp64.matmul, (leaf(2, 2), leaf(2, 1)))


@pytest.mark.parametrize("is_fast", FAST)
@pytest.mark.parametrize("dtype", [F64, C128])
@pytest.mark.parametrize("options", OPTIONS)
def test_gradcheck_of_options(options: dict[str, Any], dtype: torch.dtype, is_fast: bool) -> None:
    a, b = leaf(2, 3, dtype=dtype), leaf(3, 2, dtype=dtype)
    multiply = functools.partial(fp64.matmul, **options)
    assert gradcheck(multiply, (a, b), eps=1e-6, fast_mode=is_fast)
    assert gradgradcheck(multiply, (a, b), eps=1e-6, fast_mode=is_fast)


def test_gradcheck_of_a_sum_and_of_the_own_transpose() -> None:
    def affine(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return fp64.matmul(a, b, beta=1.5, alpha=2, c=c)

    assert gradcheck(affine, (leaf(2, 3), leaf(3, 2), leaf(2)))
    assert gradcheck(lambda a: fp64.matmul(a, a.mT), (leaf(2, 3),))
    own = leaf(2, 2, dtype=C128)
    assert gradgradcheck(lambda a: fp64.matmul(a, a.mH), (own,), fast_mode=True)
    assert gradcheck(lambda a: fp64.matmul(a, a.mT, output="double_double")[0], (leaf(2, 3),))


def test_gradients_are_correctly_rounded_products_too() -> None:
    a, b = (x.clone().requires_grad_() for x in GENERATORS["cancelling"](5, 20, 4))
    incoming = GENERATORS["phi 4"](5, 4, 1)[0]
    fp64.matmul(a, b, output="nearest").backward(incoming)
    assert torch.equal(a.grad, rounded(incoming, b.detach().mT))
    assert torch.equal(b.grad, rounded(a.detach().mT, incoming))


def test_backward_is_emulated_with_the_same_options() -> None:
    a, b = leaf(3, 4), leaf(4, 2)
    with fp64.record() as found:
        fp64.matmul(a, b, bits=79, engine="int8", scheme="slices").sum().backward()
    assert [(r.engine, r.parts, r.products) for r in found] == [("int8", 10, 55)] * 3


def test_only_wanted_gradients_are_computed() -> None:
    a, b = leaf(3, 4), torch.randn(4, 2, dtype=F64)
    with fp64.record() as found:
        fp64.matmul(a, b).sum().backward()
    assert len(found) == 2
    assert b.grad is None


def test_a_report_does_not_stop_gradients() -> None:
    a, b = leaf(3, 4), leaf(4, 2)
    found, report = fp64.matmul(a, b, report=True)
    assert not report.error_bound.requires_grad
    found.sum().backward()
    torch.testing.assert_close(a.grad, torch.ones(3, 2).double() @ b.detach().mT)


def test_no_gradient_is_recorded_where_none_is_wanted() -> None:
    a = leaf(3, 3)
    with torch.no_grad():
        assert not fp64.matmul(a, a).requires_grad
    with torch.inference_mode():
        found = fp64.matmul(torch.ones(2, 2).double(), torch.ones(2, 2).double())
    assert torch.equal(found, torch.full((2, 2), 2.0, dtype=F64))


OUTPUTS = ["float64", "double_double", "nearest"]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0), (2, 1)])
def test_vmap_is_a_loop(in_dims: tuple[int | None, ...], output: str) -> None:
    shapes = {
        0: ((6, 3, 4), (6, 4, 2)),
        None: ((3, 4), (4, 2)),
        2: ((3, 4, 6), ()),
        1: ((), (4, 6, 2)),
    }
    a = torch.randn(shapes[in_dims[0]][0], dtype=F64)
    b = torch.randn(shapes[in_dims[1]][1], dtype=F64)
    multiply = functools.partial(
        fp64.matmul, output=output, **({} if output == "nearest" else {"bits": 79})
    )
    found = vmap(multiply, in_dims=in_dims)(a, b)
    loop = [
        multiply(
            a if in_dims[0] is None else a.select(in_dims[0], i),
            b if in_dims[1] is None else b.select(in_dims[1], i),
        )
        for i in range(6)
    ]
    if output == "double_double":
        assert all(
            torch.equal(x, torch.stack(y))
            for x, y in zip(found, zip(*loop, strict=True), strict=True)
        )
    else:
        assert torch.equal(found, torch.stack(loop))


def test_vmap_of_vectors_and_inside_vmap() -> None:
    a, b = torch.randn(5, 6, 3, dtype=F64), torch.randn(5, 6, 3, dtype=F64)
    multiply = functools.partial(fp64.matmul, bits=79)
    found = vmap(vmap(multiply))(a, b)
    loop = [[multiply(x, y) for x, y in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]
    assert torch.equal(found, torch.stack([torch.stack(row) for row in loop]))


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend=backend)


BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("output", OUTPUTS)
def test_compiled_products_are_the_same_in_one_graph(output: str, backend: str) -> None:
    a, b = torch.randn(5, 4, dtype=F64), torch.randn(2, 4, 3, dtype=F64)
    multiply = functools.partial(fp64.matmul, output=output)
    found, expected = compiled(multiply, backend)(a, b), multiply(a, b)
    if output != "double_double":
        found, expected = (found,), (expected,)
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_gradients_are_the_same(backend: str) -> None:
    def step(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return fp64.matmul(a.sin(), b, alpha=0.5, beta=2, c=c, bits=79).cos().sum()

    inputs = leaf(5, 4), leaf(4, 3), leaf(3)
    expected = torch.autograd.grad(step(*inputs), inputs)
    found = torch.autograd.grad(compiled(step, backend)(*inputs), inputs)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_complex_and_dynamic_shapes(backend: str) -> None:
    torch._dynamo.reset()
    multiply = torch.compile(fp64.matmul, fullgraph=True, backend=backend, dynamic=True)
    for m in (3, 5, 8):
        a, b = torch.randn(m, 4, dtype=F64), torch.randn(4, m + 1, dtype=F64)
        assert torch.equal(multiply(a, b), fp64.matmul(a, b))


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_complex_products(backend: str) -> None:
    a, b = torch.randn(3, 4, dtype=C128), torch.randn(3, 4, dtype=C128)
    multiply = compiled(lambda a, b: fp64.matmul(a, b.mH, bits=79), backend)
    assert torch.equal(multiply(a, b), fp64.matmul(a, b.mH, bits=79))


def test_shapes_on_meta_and_fake_tensors() -> None:
    a, b = (
        torch.empty(2, 3, 4, device="meta", dtype=F64),
        torch.empty(4, 5, device="meta", dtype=F64),
    )
    found = fp64.matmul(a, b)
    assert (found.shape, found.device.type, found.dtype) == ((2, 3, 5), "meta", F64)


@pytest.mark.parametrize("kind", ["float64", "double_double"])
def test_the_operator_passes_torchs_own_checks(kind: str) -> None:
    for dtype in (F64, C128):
        a, b = leaf(2, 3, 4, dtype=dtype), leaf(2, 4, 2, dtype=dtype)
        torch.library.opcheck(
            torch.ops.mixprec.fp64_matmul.default, (a, b, "auto", 55, None, "float64", kind)
        )


def test_autocast_does_not_reach_the_products() -> None:
    a, b = torch.randn(4, 5, dtype=F64), torch.randn(5, 4, dtype=F64)
    expected = fp64.matmul(a, b, engine="float32", bits=55)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fp64.matmul(a, b, engine="float32", bits=55), expected)
        assert torch.equal(fp64.matmul(a, b, output="nearest"), rounded(a, b))
