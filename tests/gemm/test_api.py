"""The public product: shapes, types, results in a narrow format, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from oracles import round_array
from quant_oracles import assert_product, assert_quantized, with_distinct_products
from torch import Tensor

from mixprec import GemmSpec, Noise, QuantizedTensor, QuantSpec, quantize, quantized_matmul
from mixprec.formats import FORMATS
from mixprec.gemm import IMPLS, resolve
from mixprec.recipes import RECIPES
from mixprec.scaling import delayed_state

E4M3, E2M1 = FORMATS["e4m3"], FORMATS["e2m1"]
TENSOR, ROW = QuantSpec(format=E4M3), QuantSpec(format=E4M3, block=(1, -1), scale_rule="pow2")
STOCHASTIC = QuantSpec(format=E2M1, block=(1, 16), rounding="stochastic")
NOISE = Noise(seed=3, step=2, stream=40)
BOTH = GemmSpec(a=TENSOR, b=TENSOR)


def check(a: Tensor, b: Tensor, spec: GemmSpec, bias: Tensor | None = None) -> None:
    """The product equals that of the operands quantised by hand, within the bound."""
    out = quantized_matmul(a, b, spec, bias=bias)
    left = a if spec.a is None else quantize(a, spec.a)
    right = b if spec.b is None else quantize(b, spec.b)
    assert out.shape == (*a.shape[:-1], b.shape[0])
    assert out.dtype == a.dtype
    assert_product(out, left, right, bias)


@pytest.mark.parametrize("shape", [(32,), (5, 32), (2, 3, 32), (2, 0, 32), (0, 32), (3, 0), (0,)])
@pytest.mark.parametrize(
    "spec", [BOTH, GemmSpec(a=ROW, b=ROW), GemmSpec(), GemmSpec(a=TENSOR), GemmSpec(b=ROW)]
)
def test_leading_axes_are_rows(spec: GemmSpec, shape: tuple[int, ...]) -> None:
    check(torch.randn(shape), torch.randn(6, shape[-1]), spec, torch.randn(6))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_result_has_the_type_of_a(dtype: torch.dtype) -> None:
    a, b = torch.randn(4, 40).to(dtype), torch.randn(6, 40).to(dtype)
    for spec in (BOTH, GemmSpec(a=ROW, b=ROW), GemmSpec()):
        check(a, b, spec, torch.randn(6))
    assert quantized_matmul(quantize(a, TENSOR), b, BOTH).dtype == torch.float32


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_result_in_a_type_asked_for(out_dtype: torch.dtype) -> None:
    a, b = torch.randn(7, 33), torch.randn(9, 33)
    out = quantized_matmul(a, b, BOTH, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    assert_product(out, quantize(a, TENSOR), quantize(b, TENSOR))


def test_quantised_operands_are_taken_as_they_are() -> None:
    a, b = torch.randn(2, 3, 40), torch.randn(5, 40)
    want = quantized_matmul(a, b, BOTH)
    q = quantize(a, TENSOR), quantize(b, TENSOR)
    for left, right in ((q[0], q[1]), (a, q[1]), (q[0], b)):
        assert torch.equal(quantized_matmul(left, right, BOTH), want)


def test_packed_operands_of_odd_length_multiply() -> None:
    spec = QuantSpec(format=E2M1, block=(1, 16), scale_rule="pow2")
    a, b = torch.randn(2, 3, 37), torch.randn(5, 37)
    product = GemmSpec(a=spec, b=spec)
    check(a, b, product)
    given = quantized_matmul(quantize(a, spec), quantize(b, spec), product)
    assert torch.equal(given, quantized_matmul(a, b, product))


def test_no_strides_matter() -> None:
    a, b = torch.randn(40, 6), torch.randn(40, 9)
    for spec in (BOTH, GemmSpec(a=ROW, b=ROW), GemmSpec()):
        check(a.t(), b.t(), spec)
        check(a[:1, :1].expand(5, 8), b[:8].t(), spec)


def test_bias_of_any_type_is_added_in_float32_before_rounding() -> None:
    a, b = torch.eye(2, dtype=torch.bfloat16), torch.tensor([[1.0, 0], [0, 1]]).bfloat16()
    spec = GemmSpec(a=replace(TENSOR, scale_rule="none"), b=replace(TENSOR, scale_rule="none"))
    bias = torch.tensor([2.0**-8 + 2.0**-12, 2.0**-8 - 2.0**-12])
    out = quantized_matmul(a, b, spec, bias=bias)
    assert out.diagonal().tolist() == [1 + 2.0**-7, 1.0]
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        typed = torch.randn(5).to(dtype)
        check(torch.randn(4, 20), torch.randn(5, 20), BOTH, typed)


@pytest.mark.parametrize("out_spec", [TENSOR, ROW, QuantSpec(format=E2M1, block=(1, 16))])
def test_result_in_a_narrow_format_is_the_float32_result_quantised(out_spec: QuantSpec) -> None:
    a, b, bias = torch.randn(2, 5, 40), torch.randn(24, 40), torch.randn(24)
    wide = quantized_matmul(a, b, BOTH, bias=bias)
    q, amax = quantized_matmul(a, b, BOTH, bias=bias, out_spec=out_spec, return_amax=True)
    assert isinstance(q, QuantizedTensor)
    assert q.shape == (2, 5, 24)
    assert_quantized(q, wide, out_spec)
    assert amax == wide.abs().max()
    assert amax.shape == ()
    half = quantized_matmul(
        a.bfloat16().float(), b, BOTH, out_spec=out_spec, out_dtype=torch.bfloat16
    )
    assert_quantized(half, quantized_matmul(a.bfloat16().float(), b, BOTH), out_spec)


def rounded_result(name: str, saturate: bool = False) -> GemmSpec:
    """High-precision operands, a result rounded to a format without a scale."""
    return GemmSpec(
        out=QuantSpec(format=FORMATS[name], scale_rule="none", saturate=saturate),
    )


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32"])
def test_result_is_rounded_once_to_its_format_and_held_in_its_type(
    name: str, out_dtype: torch.dtype
) -> None:
    # sums of few integers are exact, and half of them lie between two numbers of 16 bits
    a, b = torch.randint(-99, 100, (40, 3)).float(), torch.randint(-99, 100, (30, 3)).float()
    bias = torch.randint(-(2**20), 2**20, (30,)) * 2.0**-7
    sums = a.double() @ b.double().t() + bias.double()
    assert torch.equal(sums.float().double(), sums)
    out = quantized_matmul(a, b, rounded_result(name), bias=bias, out_dtype=out_dtype)
    want = torch.from_numpy(round_array(sums.numpy(), FORMATS[name], "nearest_even"))
    assert out.dtype == out_dtype
    assert torch.equal(out, want.to(out_dtype))
    assert not torch.equal(want, sums)


@pytest.mark.parametrize("impl", ["emulated", "scaled_mm"])
def test_rounded_results_of_quantised_operands_lie_within_the_bound(impl: str) -> None:
    a, b, bias = torch.randn(3, 5, 40), torch.randn(7, 40), torch.randn(7)
    for name in ("bf16", "fp16"):
        spec = replace(BOTH, out=rounded_result(name).out)
        out = quantized_matmul(a, b, spec, bias=bias, impl=impl)
        assert out.dtype == torch.float32
        assert_product(out, quantize(a, TENSOR), quantize(b, TENSOR), bias, spec.out)


def test_rounded_result_beyond_the_range_is_infinite_or_the_largest_number() -> None:
    a = torch.tensor([[65519.0], [65520.0], [-65520.0], [math.inf], [math.nan]])
    one = torch.ones(1, 1)
    free = quantized_matmul(a, one, rounded_result("fp16"))
    kept = quantized_matmul(a, one, rounded_result("fp16", saturate=True))
    assert free.flatten()[:4].tolist() == [65504.0, math.inf, -math.inf, math.inf]
    assert kept.flatten()[:4].tolist() == [65504.0, 65504.0, -65504.0, math.inf]
    assert free[4].isnan()
    assert kept[4].isnan()


def test_subnormal_result_is_a_multiple_of_the_smallest_number() -> None:
    a = torch.tensor([[1.4], [1.5], [2.5], [0.5], [-0.4]]) * 2.0**-24
    out = quantized_matmul(a, torch.ones(1, 1), rounded_result("fp16")).flatten() * 2.0**24
    assert out.tolist() == [1.0, 2.0, 2.0, 0.0, 0.0]


def test_amax_is_that_of_the_rounded_result_where_the_product_rounds_it() -> None:
    a = torch.tensor([[1 + 2.0**-9]])
    out, amax = quantized_matmul(a, torch.ones(1, 1), rounded_result("bf16"), return_amax=True)
    assert (out.item(), amax.item()) == (1.0, 1.0)


@pytest.mark.parametrize(
    "out",
    [
        TENSOR,
        QuantSpec(format=FORMATS["bf16"], scale_rule="none", rounding="stochastic"),
        replace(TENSOR, amax_history_len=2),
    ],
)
def test_result_takes_no_scale_and_no_noise(out: QuantSpec) -> None:
    with pytest.raises(
        ValueError, match=r"out: got QuantSpec\(.*rounded to nearest without a scale"
    ):
        GemmSpec(out=out)


def test_amax_is_that_of_the_result_before_it_is_rounded() -> None:
    a, b = torch.randn(9, 40), torch.randn(24, 40)
    wide = quantized_matmul(a, b, BOTH)
    out, amax = quantized_matmul(a, b, BOTH, out_dtype=torch.bfloat16, return_amax=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, wide.bfloat16())
    assert amax.dtype == torch.float32
    assert amax == wide.abs().max()
    assert quantized_matmul(a[:0], b, BOTH, return_amax=True)[1] == 0
    a[0, 0] = math.nan
    assert quantized_matmul(a, b, BOTH, return_amax=True)[1].isnan()


def test_format_name_serves_as_out_spec() -> None:
    a, b = torch.randn(9, 40), torch.randn(24, 40)
    q = quantized_matmul(a, b, BOTH, out_spec="e5m2")
    assert isinstance(q, QuantizedTensor)
    assert q.spec == QuantSpec(format=FORMATS["e5m2"])


def test_each_operand_draws_from_its_own_stream() -> None:
    a, b = torch.randn(4, 32), torch.randn(5, 32)
    spec = GemmSpec(a=STOCHASTIC, b=STOCHASTIC)
    q = quantized_matmul(a, b, spec, noise=NOISE, out_spec=STOCHASTIC)
    left = quantize(a, STOCHASTIC, noise=NOISE)
    right = quantize(b, STOCHASTIC, noise=replace(NOISE, stream=41))
    wide = quantized_matmul(left, right, spec)
    assert_product(wide, left, right)
    assert isinstance(q, QuantizedTensor)
    assert_quantized(q, wide, STOCHASTIC, replace(NOISE, stream=42))


def test_scales_multiply_the_result() -> None:
    unscaled = quantize(torch.ones(16, 16), replace(TENSOR, min_amax=448.0))
    a, b = (replace(unscaled, scale=torch.tensor([[scale]])) for scale in (2.0, 3.0))
    spec = GemmSpec(a=a.spec, b=b.spec)
    for impl in ("emulated", "scaled_mm"):
        assert (quantized_matmul(a, b, spec, impl=impl) == 96).all()
    assert a.dequantize()[0, 0] == 2


def test_no_gradient_passes() -> None:
    a, b = torch.randn(4, 8, requires_grad=True), torch.randn(5, 8, requires_grad=True)
    for spec in (BOTH, GemmSpec(), GemmSpec(a=TENSOR)):
        assert not quantized_matmul(a, b, spec).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", with_distinct_products(RECIPES))
def test_autocast_and_matmul_precision_change_no_bit(recipe: str, dtype: torch.dtype) -> None:
    a, b = torch.randn(20, 40).to(dtype), torch.randn(12, 40).to(dtype)
    for spec in (RECIPES[recipe].output, RECIPES[recipe].grad_weight):
        if any(side is not None and side.is_delayed for side in (spec.a, spec.b)):
            continue
        plain = quantized_matmul(a, b, spec, noise=Noise(seed=0))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(quantized_matmul(a, b, spec, noise=Noise(seed=0)), plain)
        torch.set_float32_matmul_precision("medium")
        try:
            assert torch.equal(quantized_matmul(a, b, spec, noise=Noise(seed=0)), plain)
        finally:
            torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "specs", [BOTH, GemmSpec(a=ROW, b=ROW), GemmSpec(a=ROW, b=TENSOR)], ids=str
)
def test_native_and_emulated_agree_within_the_bound(specs: GemmSpec) -> None:
    a, b, bias = torch.randn(3, 5, 40), torch.randn(7, 40), torch.randn(7)
    for impl in ("emulated", "scaled_mm"):
        out = quantized_matmul(a, b, specs, bias=bias, impl=impl)
        assert specs.a is not None
        assert specs.b is not None
        assert_product(out, quantize(a, specs.a), quantize(b, specs.b), bias)


def test_auto_chooses_the_emulation_on_a_cpu_and_says_why() -> None:
    q = quantize(torch.randn(16, 16), TENSOR)
    chosen, reason = resolve(q, q, torch.float32)
    assert chosen == "emulated"
    assert "CPU" in reason
    assert resolve(q, q, torch.float32, "scaled_mm") == ("scaled_mm", "asked for")
    assert IMPLS == ("scaled_mm", "bf16_mm", "fp16_mm", "emulated", "exact")
    assert reason.count("device: got cpu") == 1


A, B = torch.ones(4, 8), torch.ones(5, 8)


@pytest.mark.parametrize(
    ("a", "b", "options", "match"),
    [
        (A, torch.ones(5, 7), {}, r"b: got 7 elements along the contraction; a has 8"),
        (A, torch.ones(8), {}, r"b: got shapes \(4, 8\) and \(8,\)"),
        (A, torch.ones(2, 5, 8), {}, r"b: got shapes .* b is \[N, K\]"),
        (torch.ones(()), B, {}, r"b: got shapes \(\) and \(5, 8\)"),
        (A, B, {"bias": torch.ones(4)}, r"bias: got shape \(4,\); must be \(5,\)"),
        (A, B, {"bias": torch.ones(1, 5)}, r"bias: got shape \(1, 5\)"),
        (A, B, {"impl": "fast"}, r"impl: got 'fast'; must be one of auto, "),
        (A, B, {"impl": "bf16_mm"}, r"impl: got 'bf16_mm'; .*use impl='auto' or 'emulated'"),
        (A, B, {"out_spec": "e4m9"}, r"format: got 'e4m9'; unknown, did you mean"),
        (quantize(A, ROW), B, {}, r"a: got an operand quantised by .* the product asks for"),
        (A, quantize(B, ROW), {}, r"b: got an operand quantised by "),
        (A, B, {"out_spec": STOCHASTIC}, r"noise: got None; stochastic rounding needs it"),
    ],
)
def test_refusals_name_argument_value_and_rule(
    a: Tensor | QuantizedTensor, b: Tensor | QuantizedTensor, options: dict[str, object], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        quantized_matmul(a, b, BOTH, **options)


def test_refusals_of_specs() -> None:
    delayed = QuantSpec(format=E4M3, amax_history_len=4)
    with pytest.raises(ValueError, match=r"a: got a tensor for delayed scaling; its state"):
        quantized_matmul(A, B, GemmSpec(a=delayed, b=delayed))
    with pytest.raises(ValueError, match=r"noise: got None; stochastic"):
        quantized_matmul(A, B, GemmSpec(a=STOCHASTIC))
    with pytest.raises(ValueError, match=r"a: got an operand quantised by .*asks for None"):
        quantized_matmul(quantize(A, TENSOR), B, GemmSpec())
    with pytest.raises(TypeError, match=r"a: got torch.int64; must be"):
        quantized_matmul(A.long(), B, BOTH)
    with pytest.raises(TypeError, match=r"a: got str; must be a QuantSpec or None"):
        GemmSpec(a="e4m3")  # type: ignore[arg-type]


def test_delayed_operands_multiply_when_quantised_with_their_state() -> None:
    delayed = QuantSpec(format=E4M3, amax_history_len=4)
    a, b = (quantize(x, delayed, state=delayed_state(4)) for x in (torch.randn(4, 8), B))
    assert_product(quantized_matmul(a, b, GemmSpec(a=delayed, b=delayed)), a, b)


@pytest.mark.parametrize("bad", [torch.ones(4, 8, dtype=torch.int64), torch.ones(4, 8).bool()])
def test_high_precision_operands_are_floating_point(bad: Tensor) -> None:
    with pytest.raises(TypeError, match=r"a: got torch\.(int64|bool)"):
        quantized_matmul(bad, B, GemmSpec())


@pytest.mark.parametrize("out_dtype", [torch.int32, torch.float8_e4m3fn])
def test_result_type_is_floating_point_of_16_bits_or_more(out_dtype: torch.dtype) -> None:
    with pytest.raises((TypeError, ValueError), match=r"out_dtype: got torch\."):
        quantized_matmul(A, B, BOTH, out_dtype=out_dtype)


def test_out_spec_of_the_wrong_kind_is_named() -> None:
    with pytest.raises(TypeError, match=r"(format|out_spec): got int"):
        quantized_matmul(A, B, BOTH, out_spec=3)  # type: ignore[arg-type]
