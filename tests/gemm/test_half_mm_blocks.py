"""Block-scaled operands on units of 16 bits: what bfloat16 holds of values times their scales."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from oracles import code_bits, code_value

from gemm.bound import assert_within_bound
from gemm.fake_cuda import FakeCuda
from mixprec.formats import FORMATS, FloatFormat
from mixprec.gemm import quantized_matmul, resolve
from mixprec.gemm.impl.half_mm import BF16
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor, QuantSpec, quantize
from mixprec.recipes import RECIPES

BLOCKWISE = ["fp8_blockwise", "mxfp8", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4"]
SPECS = {
    (name, product, side): getattr(getattr(RECIPES[name], product), side)
    for name in BLOCKWISE
    for product in ("output", "grad_input", "grad_weight")
    for side in "ab"
}
BF16_TINY = 2.0**-133
NOISE = Noise(seed=3)


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda((8, 0)).install(monkeypatch)


def scale_pairs(spec: QuantSpec) -> list[tuple[int | float, float]]:
    """Every scale that a block can have: as it is kept, and its value."""
    if spec.scale_rule == "pow2":
        return [(2.0**power, 2.0**power) for power in range(-127, 128)]
    kept = FORMATS["e4m3" if spec.scale_rule == "nvfp4" else "e8m0"]
    pairs = [(code, code_value(kept, code)) for code in range(2 ** code_bits(kept))]
    return [(code, value) for code, value in pairs if not value < 0]


def every_pair(spec: QuantSpec) -> tuple[QuantizedTensor, list[list[float]]]:
    """An operand with each code under each scale, and the exact values, a row a scale."""
    fmt, pairs = spec.format, scale_pairs(spec)
    count = 2 ** code_bits(fmt)
    contraction = spec.block[1]
    blocks = -(-count // contraction) + 1  # more than one even for formats of few codes
    width = blocks * contraction
    codes = (torch.arange(width) % count).to(torch.uint8)
    kept = [scale for scale, _ in pairs]
    free = spec.block[0]
    rows = len(pairs) * free
    dtype = torch.float32 if spec.scale_rule == "pow2" else torch.uint8
    whole = torch.ones(1, 1) if spec.scale_rule == "nvfp4" else None
    q = QuantizedTensor(
        codes=codes.expand(rows, width).contiguous(),
        scale=torch.tensor(kept, dtype=dtype)[:, None].expand(-1, blocks).contiguous(),
        amax=None,
        tensor_amax=whole,
        spec=spec,
        shape=torch.Size((rows, width)),
    )
    values = [code_value(fmt, code) for code in range(count)]
    return q, [[value * scale for value in values] for _, scale in pairs]


@pytest.mark.parametrize("key", SPECS, ids=".".join)
def test_every_code_times_every_scale_is_exact_in_bfloat16(
    ampere: FakeCuda, key: tuple[str, str, str]
) -> None:
    """All pairs: exact down to the multiples of 2^-133, infinite only where float32 is."""
    spec = SPECS[key]
    q, exact = every_pair(spec)
    ones = quantize(torch.ones(1, q.shape[1]), "e4m3")
    assert BF16.why_not(q, ones, torch.float32) is None
    BF16.matmul(q, ones, bias=None, out_dtype=torch.float32)
    given = ampere.calls[0].a[:: spec.block[0]].double()
    want = torch.tensor(exact, dtype=torch.float64)
    want = torch.where(want.abs() >= 2.0**128, want.sign() * math.inf, want)
    given = given[:, : want.shape[1]]
    is_held = want.isnan() | want.isinf() | (want == (want / BF16_TINY).round() * BF16_TINY)
    same = (given == want) | (given.isnan() & want.isnan())
    assert same[is_held].all()
    assert ((given - want).abs()[~is_held] <= BF16_TINY / 2).all()
    # which scales these are: those under which the smallest value is below 2^-133
    smallest = min(value for value in map(abs, exact_values(spec.format)) if value > 0)
    scales = torch.tensor([value for _, value in scale_pairs(spec)], dtype=torch.float64)
    assert torch.equal((~is_held).any(1), (scales > 0) & (scales * smallest < BF16_TINY))
    if spec.scale_rule == "nvfp4":
        assert is_held.all()
        assert want.abs()[want != 0].nan_to_num(nan=1.0).min() >= 2.0**-126


def exact_values(fmt: FloatFormat) -> list[float]:
    return [code_value(fmt, code) for code in range(2 ** code_bits(fmt))]


@pytest.mark.parametrize("name", BLOCKWISE)
@pytest.mark.parametrize(("m", "n", "k"), [(5, 7, 3), (17, 33, 200), (130, 140, 384), (4, 4, 0)])
def test_block_scaled_products_are_within_the_bound(
    ampere: FakeCuda, name: str, m: int, n: int, k: int
) -> None:
    for product in ("output", "grad_input", "grad_weight"):
        gemm = getattr(RECIPES[name], product)
        a = quantize(torch.randn(m, k) * 3, gemm.a, noise=NOISE)
        b = quantize(torch.randn(n, k), gemm.b, noise=NOISE)
        bias = torch.randn(n)
        assert BF16.why_not(a, b, torch.bfloat16) is None
        for dtype in (torch.float32, torch.bfloat16):
            result = BF16.matmul(a, b, bias=bias, out_dtype=dtype)
            assert_within_bound(result, a, b, bias)


@pytest.mark.parametrize("name", BLOCKWISE)
def test_auto_takes_the_units_and_gives_the_emulations_numbers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemm = RECIPES[name].output
    a, b = torch.randn(48, 256), torch.randn(160, 256)
    emulated = quantized_matmul(a, b, gemm)
    FakeCuda((8, 0)).install(monkeypatch)
    assert resolve(quantize(a, gemm.a), quantize(b, gemm.b), torch.float32)[0] == "bf16_mm"
    torch.testing.assert_close(quantized_matmul(a, b, gemm), emulated, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", BLOCKWISE)
def test_a_block_with_nan_reaches_its_row_alone(ampere: FakeCuda, name: str) -> None:
    gemm = RECIPES[name].output
    x = torch.randn(6, 256)
    x[2, 40] = torch.nan
    result = BF16.matmul(
        quantize(x, gemm.a),
        quantize(torch.randn(5, 256), gemm.b),
        bias=None,
        out_dtype=torch.float32,
    )
    assert result[2].isnan().all()
    assert result[[0, 1, 3, 4, 5]].isfinite().all()


def test_a_row_scale_joins_block_scales(ampere: FakeCuda) -> None:
    row = QuantSpec(format=FORMATS["e4m3"], block=(1, -1))
    a = quantize(torch.randn(5, 96), RECIPES["mxfp8"].output.a)
    b = quantize(torch.randn(7, 96), row)
    assert_within_bound(BF16.matmul(a, b, bias=None, out_dtype=torch.float32), a, b)


def test_scales_and_values_of_too_many_digits_together_are_refused(ampere: FakeCuda) -> None:
    for mantissa, why in ((7, None), (8, "its values are no BF16 numbers")):
        fmt = FloatFormat(exponent=2, mantissa=mantissa, specials="nan")
        spec = QuantSpec(format=fmt, block=(1, 32), scale_rule="e8m0_rceil")
        q = quantize(torch.randn(4, 64), spec)
        reason = BF16.why_not(q, q, torch.float32)
        assert (reason is None) if why is None else (why in (reason or ""))
    real = QuantSpec(format=FORMATS["e2m1"], block=(1, 32), scale_rule="real")
    q = quantize(torch.randn(4, 64), real)
    assert "does not hold the values times their scales" in (
        BF16.why_not(q, q, torch.float32) or ""
    )


def test_the_product_of_a_recipe_in_high_precision_and_blocks_is_refused(ampere: FakeCuda) -> None:
    gemm = replace(RECIPES["mxfp8"].output, b=None)
    x = torch.randn(4, 64)
    with pytest.raises(ValueError, match=r"b: got torch\.float32 in high precision"):
        quantized_matmul(x, x, gemm, impl="bf16_mm")
