"""Products on BF16 units, on faked GPUs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemm.bound import assert_within_bound
from gemm.fake_cuda import FakeCuda
from mixprec.formats import FORMATS
from mixprec.gemm.impl import bf16_mm
from mixprec.gemm.native import Operand
from mixprec.quantization import QuantSpec, quantize

NARROW = ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e3m2", "e2m3", "e2m1"]
ROW = QuantSpec(format=FORMATS["e4m3"], block=(1, -1), scale_rule="pow2")
BF16 = QuantSpec(format=FORMATS["bf16"], scale_rule="none")
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
) -> Tensor:
    assert bf16_mm.why_not(a, b, out_dtype) is None
    return bf16_mm.matmul(a, b, bias=bias, out_dtype=out_dtype)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("name", [*NARROW, "bf16"])
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_matmul_is_within_the_bound(
    ampere: FakeCuda, m: int, n: int, k: int, name: str, out_dtype: torch.dtype
) -> None:
    spec = BF16 if name == "bf16" else QuantSpec(format=FORMATS[name])
    a, b = quantize(torch.randn(m, k), spec), quantize(torch.randn(n, k), spec)
    for bias in (None, torch.randn(n), torch.randn(n).to(out_dtype)):
        result = product(a, b, bias, out_dtype)
        assert result.dtype == out_dtype
        assert result.is_contiguous()
        assert_within_bound(result, a, b, bias)


@pytest.mark.parametrize("name", NARROW)
def test_operands_reach_torch_with_their_exact_values(ampere: FakeCuda, name: str) -> None:
    a, b = (quantize(torch.randn(5, 7), QuantSpec(format=FORMATS[name])) for _ in range(2))
    product(a, b)
    (call,) = ampere.calls
    assert call.name == "mm"
    assert call.out_dtype == torch.float32
    for given, q in ((call.a, a), (call.b.t(), b)):
        assert given.dtype == torch.bfloat16
        assert torch.equal(given.float(), q.values)


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
            r"a: got blocks of \(1, 32\)",
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
    given = [x if isinstance(x, Tensor) else quantize(torch.ones(4, 64), x) for x in (a, b)]
    why = bf16_mm.why_not(*given, out_dtype)
    assert re.match(reason, why or "")


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (FakeCuda((7, 5)), "device: compute capability 7.5 (Turing) has no BF16 units; 8.0 has"),
        (FakeCuda(kind="cpu"), "device: got cpu; torch.mm with float32 sums"),
        (FakeCuda(kind="rocm"), "device: got rocm; torch.mm with float32 sums"),
    ],
)
def test_why_not_names_the_device(
    fake: FakeCuda, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.install(monkeypatch)
    a = quantize(torch.ones(4, 64), ROW)
    assert (bf16_mm.why_not(a, a, torch.float32) or "").startswith(reason)
    assert bf16_mm.why_slow(a, a) is None


def test_the_cpu_of_this_torch_has_no_such_product() -> None:
    """The reason for refusing it; a torch that has it is one to look at again."""
    x = torch.ones(2, 2, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"aten::mm\.dtype"):
        torch.mm(x, x, out_dtype=torch.float32)
