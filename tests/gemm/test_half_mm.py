"""Products on units of 16 bits, on faked GPUs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemm.bound import assert_within_bound
from gemm.fake_cuda import FakeCuda
from mixprec.formats import FORMATS
from mixprec.gemm.impl.half_mm import BF16 as BF16_UNITS
from mixprec.gemm.impl.half_mm import FP16 as FP16_UNITS
from mixprec.gemm.impl.half_mm import HalfUnits
from mixprec.gemm.native import Operand
from mixprec.quantization import QuantSpec, quantize
from mixprec.recipes import RECIPES

NARROW = ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e3m2", "e2m3", "e2m1"]
ROW = QuantSpec(format=FORMATS["e4m3"], block=(1, -1), scale_rule="pow2")
BF16 = QuantSpec(format=FORMATS["bf16"], scale_rule="none")
FP16 = replace(BF16, format=FORMATS["fp16"])
SIZES = [(1, 1, 1), (5, 7, 3), (16, 16, 16), (17, 33, 65), (0, 4, 4), (4, 0, 4), (4, 4, 0)]
OUT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda((8, 0)).install(monkeypatch)


def product(
    a: Operand,
    b: Operand,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
    units: HalfUnits = BF16_UNITS,
) -> Tensor:
    assert units.why_not(a, b, out_dtype) is None
    return units.matmul(a, b, bias=bias, out_dtype=out_dtype)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("units", "name"),
    [(units, name) for units in (BF16_UNITS, FP16_UNITS) for name in (*NARROW, str(units.format))],
    ids=str,
)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_matmul_is_within_the_bound(
    ampere: FakeCuda, m: int, n: int, k: int, units: HalfUnits, name: str, out_dtype: torch.dtype
) -> None:
    is_half = name in ("bf16", "fp16")
    spec = QuantSpec(format=FORMATS[name], scale_rule="none" if is_half else "real")
    a, b = quantize(torch.randn(m, k), spec), quantize(torch.randn(n, k), spec)
    for bias in (None, torch.randn(n), torch.randn(n).to(out_dtype)):
        result = product(a, b, bias, out_dtype, units)
        assert result.dtype == out_dtype
        assert result.is_contiguous()
        assert_within_bound(result, a, b, bias)


@pytest.mark.parametrize("units", [BF16_UNITS, FP16_UNITS], ids=str)
@pytest.mark.parametrize("name", NARROW)
def test_operands_reach_torch_with_their_exact_values(
    ampere: FakeCuda, name: str, units: HalfUnits
) -> None:
    a, b = (quantize(torch.randn(5, 7), QuantSpec(format=FORMATS[name])) for _ in range(2))
    product(a, b, units=units)
    (call,) = ampere.calls
    assert call.name == "mm"
    assert call.out_dtype == torch.float32
    for given, q in ((call.a, a), (call.b.t(), b)):
        assert given.dtype == units.dtype
        assert torch.equal(given.float(), q.values)


def test_all_values_of_float16_reach_the_units(ampere: FakeCuda) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16)[None]
    q = quantize(every, replace(FP16, saturate=False))
    one = quantize(torch.ones(1, 2**16), FP16)
    product(q, one, units=FP16_UNITS)
    assert torch.equal(ampere.calls[0].a.nan_to_num(nan=7.0), every.nan_to_num(nan=7.0))


def test_a_float16_operand_in_high_precision_joins_those_of_float16(ampere: FakeCuda) -> None:
    plain = torch.randn(5, 32).half()
    q = quantize(torch.randn(7, 32), FP16)
    assert_within_bound(product(plain, q, units=FP16_UNITS), plain, q)
    assert ampere.calls[0].a is plain


@pytest.mark.parametrize("spec", [ROW, QuantSpec(format=FORMATS["e4m3"]), BF16], ids=str)
def test_a_high_precision_operand_is_multiplied_as_it_is(ampere: FakeCuda, spec: QuantSpec) -> None:
    plain = torch.randn(5, 32).bfloat16()
    q = quantize(torch.randn(7, 32), spec)
    assert_within_bound(product(plain, q), plain, q)
    assert_within_bound(product(q, plain), q, plain)
    assert_within_bound(product(plain, plain.flip(0)), plain, plain.flip(0))
    assert ampere.calls[0].a is plain


def test_every_row_carries_its_own_scale(ampere: FakeCuda) -> None:
    one_to_sixteen = torch.arange(1.0, 17.0)
    unscaled = QuantSpec(format=FORMATS["e4m3"], scale_rule="none")
    ones = replace(quantize(torch.ones(16, 16), unscaled), spec=ROW)
    a = replace(ones, scale=one_to_sixteen[:, None])
    b = replace(ones, scale=2 * one_to_sixteen[:, None])
    assert torch.equal(product(a, b), 32 * one_to_sixteen[:, None] * one_to_sixteen)


def test_a_row_of_nan_stays_in_its_row(ampere: FakeCuda) -> None:
    x, b = torch.randn(5, 32), quantize(torch.randn(8, 32), ROW)
    x[4, 3] = torch.nan
    result = product(quantize(x, ROW), b)
    assert result[4].isnan().all()
    assert torch.equal(result[:4], product(quantize(x[:4], ROW), b))


def test_a_nan_scale_reaches_the_result_of_a_format_without_nan(ampere: FakeCuda) -> None:
    x = torch.randn(4, 8)
    x[1, 2] = torch.inf
    spec = QuantSpec(format=FORMATS["e2m1"], block=(1, -1))
    result = product(quantize(x, spec), quantize(torch.randn(3, 8), spec))
    assert result[1].isnan().all()
    assert result[[0, 2, 3]].isfinite().all()


def test_bias_is_added_in_float32_before_the_rounding(ampere: FakeCuda) -> None:
    """1 + 2^-8 is a tie of bfloat16: rounding the sum or the bias first would give 1."""
    a = torch.tensor([[1.0, 2.0**-8]]).bfloat16()
    b = torch.tensor([[1.0, 1.0], [1.0, 0.0]]).bfloat16()
    bias = torch.tensor([2.0**-20, 2.0**-8 + 2.0**-20])
    expected = torch.full((1, 2), 1.0 + 2.0**-7).bfloat16()
    assert torch.equal(product(a, b, bias, torch.bfloat16), expected)


def test_transposed_operands(ampere: FakeCuda) -> None:
    a, b = quantize(torch.randn(8, 8), "e4m3"), quantize(torch.randn(8, 8), "e4m3")
    assert_within_bound(product(a.t(), b.t()), a.t(), b.t())


@pytest.mark.parametrize(
    ("a", "b", "out_dtype", "reason"),
    [
        (torch.ones(2, 2), ROW, torch.float32, "a: got torch.float32 in high precision"),
        (ROW, torch.ones(2, 2).half(), torch.float32, "b: got torch.float16 in high precision"),
        (QuantSpec(format=FORMATS["fp16"]), ROW, torch.float32, "a: got fp16; its values are no"),
        (
            ROW,
            QuantSpec(format=FORMATS["tf32"], scale_rule="none"),
            torch.float32,
            "b: got tf32; its values are no",
        ),
        (
            QuantSpec(format=FORMATS["e4m3"], block=(1, 32)),
            ROW,
            torch.float32,
            r"a: got blocks of \(1, 32\) scaled by real; BF16 does not hold the values times their",
        ),
        (ROW, ROW, torch.float64, "out_dtype: got torch.float64"),
    ],
)
def test_why_not_names_the_operand_and_the_rule(
    ampere: FakeCuda,
    a: QuantSpec | Tensor,
    b: QuantSpec | Tensor,
    out_dtype: torch.dtype,
    reason: str,
) -> None:
    left, right = (x if isinstance(x, Tensor) else quantize(torch.ones(4, 64), x) for x in (a, b))
    why = BF16_UNITS.why_not(left, right, out_dtype)
    assert re.match(reason, why or "")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (torch.ones(2, 64).bfloat16(), "a: got torch.bfloat16 in high precision; FP16 units take"),
        (quantize(torch.ones(4, 64), BF16), "a: got bf16; its values are no FP16 numbers"),
        (
            quantize(torch.ones(4, 64), RECIPES["mxfp8"].output.a),
            r"a: got blocks of \(1, 32\) scaled by e8m0_rceil; FP16 does not hold the values",
        ),
        (
            quantize(torch.ones(4, 64), RECIPES["nvfp4"].output.a),
            r"a: got blocks of \(1, 16\) scaled by nvfp4; FP16 does not hold",
        ),
    ],
)
def test_units_of_float16_refuse_what_float16_cannot_hold(
    ampere: FakeCuda, given: Operand, reason: str
) -> None:
    why = FP16_UNITS.why_not(given, quantize(torch.ones(4, 64), ROW), torch.float32)
    assert re.match(reason, why or "")


@pytest.mark.parametrize(
    ("units", "fake", "reason"),
    [
        (BF16_UNITS, FakeCuda((7, 5)), "device: compute capability 7.5 (Turing) has no BF16 units"),
        (FP16_UNITS, FakeCuda((6, 1)), "device: compute capability 6.1 (Pascal or older) has no"),
        (BF16_UNITS, FakeCuda(kind="cpu"), "device: got cpu; torch.mm with float32 sums"),
        (FP16_UNITS, FakeCuda(kind="rocm"), "device: got rocm; torch.mm with float32 sums"),
    ],
)
def test_why_not_names_the_device(
    units: HalfUnits, fake: FakeCuda, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.install(monkeypatch)
    a = quantize(torch.ones(4, 64), ROW)
    assert (units.why_not(a, a, torch.float32) or "").startswith(reason)
    assert units.why_slow(a, a) is None


def test_the_cpu_of_this_torch_has_no_such_product() -> None:
    """The reason for refusing it; a torch that has it is one to look at again."""
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.ones(2, 2, dtype=dtype)
        with pytest.raises(NotImplementedError, match=r"aten::mm\.dtype"):
            torch.mm(x, x, out_dtype=torch.float32)
