"""The product in FP32 arithmetic: within the bound of exact arithmetic, for any operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction

import pytest
import torch
from quant_oracles import assert_product, exact_operand, with_distinct_products
from torch import Tensor

from mixprec.formats import FORMATS
from mixprec.gemm.impl import emulated, scaled_mm
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor, QuantSpec, quantize
from mixprec.recipes import RECIPES
from mixprec.scaling import delayed_state, record_amax, roll_history

E4M3, E5M2, E2M1 = (FORMATS[name] for name in ("e4m3", "e5m2", "e2m1"))
TENSOR, ROW = QuantSpec(format=E4M3), QuantSpec(format=E4M3, block=(1, -1), scale_rule="pow2")
Operand = Tensor | QuantizedTensor


def operand(x: Tensor, spec: QuantSpec | None) -> Operand:
    """An operand as a layer makes it; delayed scales after one step of twice the amax."""
    if spec is None:
        return x
    state = None
    if spec.is_delayed:
        amax = 2 * x.abs().amax() if x.numel() else torch.tensor(0.0)
        state = roll_history(record_amax(delayed_state(spec.amax_history_len), amax))
    return quantize(x, spec, noise=Noise(seed=1) if spec.is_stochastic else None, state=state)


def check(
    a: Tensor,
    b: Tensor,
    specs: tuple[QuantSpec | None, QuantSpec | None],
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> None:
    """The product of a and b, quantised, lies within the bound."""
    left, right = operand(a, specs[0]), operand(b, specs[1])
    out = emulated.matmul(left, right, bias=bias, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    assert_product(out, left, right, bias)


SHAPES = [
    (1, 1, 1),
    (16, 16, 16),
    (5, 7, 3),
    (33, 65, 129),
    (4, 3, 0),
    (0, 3, 8),
    (3, 0, 8),
    (7, 9, 1000),
]
PRODUCTS = {
    f"{name}-{role}": (getattr(recipe, role).a, getattr(recipe, role).b)
    for name, recipe in with_distinct_products(RECIPES).items()
    for role in ("output", "grad_input", "grad_weight")
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_of_every_recipe(product: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    for out_dtype in (torch.float32, torch.bfloat16):
        check(torch.randn(m, k), torch.randn(n, k), PRODUCTS[product], torch.randn(n), out_dtype)


def block(contraction: int, rule: str, free: int = 1) -> QuantSpec:
    return QuantSpec(format=E4M3, block=(free, contraction), scale_rule=rule)


@pytest.mark.parametrize("k", [1, 31, 32, 100, 257])
@pytest.mark.parametrize("rules", [("pow2", "pow2"), ("real", "real"), ("real", "pow2")], ids=str)
@pytest.mark.parametrize(
    "blocks",
    [((1, 32), (1, 32)), ((1, 128), (128, 128)), ((1, 32), (16, 48)), ((3, 10), (-1, 7))],
    ids=str,
)
def test_scales_that_change_along_the_contraction(
    blocks: tuple[tuple[int, int], tuple[int, int]], rules: tuple[str, str], k: int
) -> None:
    sizes = torch.logspace(-3, 3, k)
    a, b = torch.randn(9, k) * sizes, torch.randn(20, k) * sizes.flip(0)
    specs = tuple(
        QuantSpec(format=E4M3, block=size, scale_rule=rule)
        for size, rule in zip(blocks, rules, strict=True)
    )
    check(a, b, (specs[0], specs[1]))


@pytest.mark.parametrize("rule", ["pow2", "real"])
@pytest.mark.parametrize("other", [None, TENSOR, ROW, QuantSpec(format=E5M2)])
def test_blocks_meet_operands_of_one_scale(other: QuantSpec | None, rule: str) -> None:
    a, b = torch.randn(6, 70), torch.randn(5, 70) * torch.logspace(-2, 2, 5)[:, None]
    check(a, b, (block(32, rule), other))
    check(b, a, (other, block(32, rule)))


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_every_format_and_result_type(fmt, out_dtype: torch.dtype) -> None:
    if not fmt.signed:
        pytest.skip("a format of scales")
    unscaled = fmt.exponent >= 8
    spec = QuantSpec(format=fmt, scale_rule="none" if unscaled else "real")
    check(torch.randn(5, 40), torch.randn(6, 40), (spec, spec), torch.randn(6), out_dtype)
    check(torch.randn(5, 40), torch.randn(6, 40), (spec, None), None, out_dtype)


def test_sum_is_that_of_fractions() -> None:
    a, b = operand(torch.randn(2, 50), TENSOR), operand(torch.randn(3, 50), ROW)
    out = emulated.matmul(a, b, bias=None, out_dtype=torch.float32)
    left, right = exact_operand(a).tolist(), exact_operand(b).tolist()
    for m, row in enumerate(left):
        for n, column in enumerate(right):
            terms = [Fraction(p) * Fraction(q) for p, q in zip(row, column, strict=True)]
            error = abs(Fraction(out[m, n].item()) - sum(terms))
            assert error <= Fraction(53 + 1, 2**24) * sum(map(abs, terms))


def test_error_is_at_most_twice_that_of_a_float32_product() -> None:
    a, b = operand(torch.randn(64, 500), TENSOR), operand(torch.randn(64, 500), TENSOR)
    assert isinstance(a, QuantizedTensor)
    assert isinstance(b, QuantizedTensor)
    exact = exact_operand(a) @ exact_operand(b).t()
    native = (a.dequantize() @ b.dequantize().t() - exact).abs()
    ours = (emulated.matmul(a, b, bias=None, out_dtype=torch.float32) - exact).abs()
    assert ours.mean() <= 2 * native.mean()


@pytest.mark.parametrize("spec", [ROW, block(8, "real"), block(8, "pow2")])
def test_row_of_nan_stays_in_its_row(spec: QuantSpec) -> None:
    a, b = torch.randn(5, 32), torch.randn(8, 32)
    a[4] = math.nan
    out = emulated.matmul(operand(a, spec), operand(b, spec), bias=None, out_dtype=torch.float32)
    alone = emulated.matmul(
        operand(a[:4], spec), operand(b, spec), bias=None, out_dtype=torch.float32
    )
    assert torch.equal(out[:4], alone)
    assert out[4].isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("spec", [TENSOR, ROW, QuantSpec(format=E2M1, block=(1, 16))])
def test_element_that_is_not_finite_reaches_every_output_of_its_block(
    spec: QuantSpec, bad: float
) -> None:
    a = torch.randn(4, 32)
    a[1, 5] = bad
    check(a, torch.randn(6, 32), (spec, spec))
    check(torch.randn(6, 32), a, (spec, spec))
    out = emulated.matmul(operand(a, spec), torch.randn(6, 32), bias=None, out_dtype=torch.float32)
    assert out[1].isnan().all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=str)
def test_element_that_is_not_finite_under_a_delayed_scale(fmt) -> None:
    spec = QuantSpec(format=fmt, amax_history_len=4)
    state = roll_history(record_amax(delayed_state(4), torch.tensor(4.0)))
    x = torch.rand(3, 8) + 1
    x[1, 2] = math.inf
    q = quantize(x, spec, state=state)
    out = emulated.matmul(q, torch.ones(2, 8), bias=None, out_dtype=torch.float32)
    want = math.nan if fmt is E4M3 else math.inf
    assert out[[0, 2]].isfinite().all()
    assert str(out[1].tolist()) == str([want, want])
    x[1, 2] = math.nan
    out = emulated.matmul(
        quantize(x, spec, state=state), torch.ones(2, 8), bias=None, out_dtype=torch.float32
    )
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_each_output_carries_the_scales_of_its_row_and_column() -> None:
    a = torch.ones(16, 16) * torch.arange(1.0, 17)[:, None]
    b = torch.ones(16, 16) * torch.arange(17.0, 33)[:, None]
    spec = QuantSpec(format=E4M3, block=(1, -1))
    out = emulated.matmul(operand(a, spec), operand(b, spec), bias=None, out_dtype=torch.float32)
    want = 16 * a[:, :1].double() * b[:, 0].double()
    assert ((out - want).abs() <= 2.0**-22 * want).all()
    check(a, b, (spec, spec))


@pytest.mark.parametrize("m", [255, 256, 257])
def test_rows_around_a_multiple_of_the_tile(m: int) -> None:
    a = torch.randn(m, 64) * torch.logspace(-5, 5, m)[:, None]
    check(a, torch.randn(24, 64), (ROW, ROW))


def test_bias_is_added_before_the_result_is_rounded() -> None:
    # in bfloat16, 1 + 2^-8 rounds to 1 when the sum is rounded first; together they are 1 + 2^-7
    spec = QuantSpec(format=E4M3, scale_rule="none")
    a, b = torch.tensor([[1.0, 2.0**-8]]), torch.ones(1, 2)
    bias = torch.tensor([2.0**-8])
    out = emulated.matmul(operand(a, spec), b, bias=bias, out_dtype=torch.bfloat16)
    assert out.item() == 1 + 2.0**-7


@contextmanager
def bfloat16_autocast() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


@contextmanager
def medium_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("setting", [bfloat16_autocast, medium_precision])
@pytest.mark.parametrize("spec", [None, TENSOR, ROW, block(32, "real")])
def test_global_settings_do_not_change_a_bit(
    spec: QuantSpec | None, setting: Callable[[], Iterator[None]]
) -> None:
    a, b = operand(torch.randn(40, 70), spec), operand(torch.randn(30, 70), spec)
    plain = emulated.matmul(a, b, bias=torch.ones(30), out_dtype=torch.float32)
    with setting():
        assert torch.equal(
            emulated.matmul(a, b, bias=torch.ones(30), out_dtype=torch.float32), plain
        )
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("specs", [(TENSOR, TENSOR), (ROW, ROW), (QuantSpec(format=E5M2), TENSOR)])
def test_scaled_product_of_torch_agrees_within_the_bound(
    specs: tuple[QuantSpec, QuantSpec], transposed: bool
) -> None:
    a, b = operand(torch.randn(32, 48), specs[0]), operand(torch.randn(16, 48), specs[1])
    if transposed:
        assert isinstance(b, QuantizedTensor)
        b = QuantizedTensor(
            codes=b.codes.t().contiguous().t(),
            scale=b.scale,
            amax=b.amax,
            spec=b.spec,
            shape=b.shape,
        )
    for out_dtype in (torch.float32, torch.bfloat16):
        out = scaled_mm.matmul(a, b, bias=torch.ones(16), out_dtype=out_dtype)
        assert_product(out, a, b, torch.ones(16))


def test_operands_are_left_as_they_were() -> None:
    a, b = torch.randn(4, 8), torch.randn(5, 8)
    copies = a.clone(), b.clone()
    emulated.matmul(a, b, bias=None, out_dtype=torch.float32)
    q = quantize(a, ROW)
    codes, scale = q.codes.clone(), q.scale.clone()  # type: ignore[union-attr]
    emulated.matmul(q, b, bias=torch.ones(5), out_dtype=torch.float32)
    assert torch.equal(a, copies[0])
    assert torch.equal(b, copies[1])
    assert torch.equal(q.codes, codes)
    assert torch.equal(q.scale, scale)


def test_float64_operands_are_multiplied_in_double() -> None:
    a, b = torch.randn(5, 300, dtype=torch.float64), torch.randn(4, 300, dtype=torch.float64)
    out = emulated.matmul(a, b, bias=None, out_dtype=torch.float64)
    assert ((out - a @ b.t()).abs() <= 300 * 2.0**-53 * (a.abs() @ b.abs().t())).all()


def test_products_are_differentiable_nowhere_and_reproducible() -> None:
    a, b = operand(torch.randn(9, 100), TENSOR), operand(torch.randn(9, 100), TENSOR)
    first = emulated.matmul(a, b, bias=None, out_dtype=torch.float32)
    assert all(
        torch.equal(emulated.matmul(a, b, bias=None, out_dtype=torch.float32), first)
        for _ in range(3)
    )
