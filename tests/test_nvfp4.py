"""Four-bit elements under e4m3 block scales and a scale of the tensor: what the two levels give."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from block_oracles import scales_of
from quant_oracles import assert_quantized

from mixprec.formats import FORMATS
from mixprec.measure import sqnr_db
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor, QuantSpec, quantize
from mixprec.scale_rules import make_scales

E2M1 = FORMATS["e2m1"]
SPEC = QuantSpec(format=E2M1, block=(1, 16), scale_rule="nvfp4")
SQUARE = replace(SPEC, block=(16, 16))
FLT_MAX = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149


def scales(q: QuantizedTensor) -> list[float]:
    """Block scales, without the tensor's."""
    return q.block_scale.flatten().tolist()


@pytest.mark.parametrize("power", [*range(-149, 128, 12), -127, -126, -117, -116, 127])
def test_scales_of_every_magnitude_of_the_tensor(power: int) -> None:
    parts = (1.0, 1.75, 1.999, 0.3, 2.0**-3, 2.0**-9, 1e-6, 1e-20, 0.0)
    amaxes = torch.tensor([math.ldexp(part, power) for part in parts])
    want, tensor_amax = scales_of(amaxes.tolist(), SPEC)
    encode, codes, found = make_scales(amaxes, "nvfp4", E2M1)
    assert found is not None
    assert found.item() == tensor_amax
    assert codes.tolist() == [scale.kept for scale in want]
    assert encode.tolist() == [float(scale.encode or 0) for scale in want]


def test_floor_under_amax_is_under_the_amax_of_the_tensor_too() -> None:
    x = torch.tensor([[1e-20] * 16 + [0.0] * 16])
    spec = replace(SPEC, min_amax=1e-12)
    assert_quantized(quantize(x, spec), x, spec)


def test_tensor_factor_is_clamped_for_the_smallest_tensors() -> None:
    x = torch.tensor([[SMALLEST, -3 * SMALLEST, 0.0, 1e-40]])
    for size in (1.0, 2.0**20, 2.0**30):
        assert_quantized(quantize(x * size, SPEC), x * size, SPEC)
        assert quantize(x * size, SPEC).dequantize().isfinite().all()


def test_largest_tensors_do_not_overflow() -> None:
    for size in (1e37, 3e38, FLT_MAX):
        x = torch.tensor([[size, -size / 3, 0.0, size / 6]])
        assert_quantized(quantize(x, SPEC), x, SPEC)
        back = quantize(x, SPEC).dequantize()
        assert back.isfinite().all()
        assert back[0, 0].item() == pytest.approx(size, rel=2.0**-22)


def test_block_much_smaller_than_the_tensor_becomes_zeros_of_its_sign() -> None:
    x = torch.full((1, 48), 1.0)
    x[0, 16:32] = 2e-6
    x[0, 20] = -1e-6
    x[0, 32:] = 1e-5
    q = quantize(x, SPEC)
    assert_quantized(q, x, SPEC)
    assert scales(q) == [448.0, 0.0, 2.0**-8]
    back = q.dequantize()
    assert not back[0, 16:32].any()
    assert back[0, 20].signbit()
    assert back[0, 32:].all()


def test_block_alone_is_not_lost_however_small() -> None:
    for size in (0.005, 1e-6, 1e-30):
        back = quantize(torch.full((2, 16), size), SPEC).dequantize()
        assert back[0, 0].item() == pytest.approx(size, rel=2.0**-4)


def test_blocks_beyond_the_range_of_the_block_scales_are_not_clipped() -> None:
    x = torch.ones(2, 32)
    x[0, 0] = 4096.0
    q = quantize(x, SPEC)
    assert scales(q)[0] == 448.0
    assert q.dequantize()[0, 0].item() == pytest.approx(4096.0, rel=2.0**-23)


def test_elements_are_rounded_under_the_scale_that_is_kept() -> None:
    x = torch.randn(16, 64)
    back = quantize(x, SPEC).dequantize()
    again = quantize(back, SPEC).dequantize()
    # the largest element of a block is 6 or 4 of its units, or more where its scale was rounded
    assert ((again - back).abs() <= back.abs() * 2.0**-3).all()
    q = quantize(x, SPEC, packed=False)
    assert q.encode is not None
    assert q.tensor_scale is not None
    product = q.encode * q.block_scale * q.tensor_scale
    assert ((product - 1).abs() <= 2.0**-21).all()


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_error_of_normal_numbers_does_not_depend_on_their_size(size: float) -> None:
    x = torch.randn(64, 64) * size
    back = quantize(x, SPEC).dequantize()
    assert (back - x).norm() < 0.12 * x.norm()
    assert (back != 0).double().mean() > 0.8


def test_powers_of_two_move_through() -> None:
    x = torch.randn(8, 64)
    one = quantize(x, SPEC)
    for power in (-60, -3, 7, 60):
        moved = quantize(x * 2.0**power, SPEC)
        assert torch.equal(moved.codes, one.codes)
        assert torch.equal(moved.scale, one.scale)
        assert torch.equal(moved.dequantize(), one.dequantize() * 2.0**power)


def test_amax_of_the_tensor_is_that_of_its_finite_blocks() -> None:
    x = torch.ones(3, 32)
    x[0, 0], x[1, 0], x[2, 0] = math.inf, math.nan, 7.0
    q = quantize(x, SPEC)
    assert q.tensor_amax is not None
    assert q.tensor_amax.item() == 7.0
    assert q.scale is not None
    assert (q.scale == 127).tolist() == [[True, False], [True, False], [False, False]]
    everything = quantize(x[:2, :16], SPEC)
    assert everything.tensor_amax is not None
    assert everything.tensor_amax.item() == 0
    assert everything.dequantize().isnan().all()


@pytest.mark.parametrize("shape", [(16, 16), (33, 17), (5, 50), (1, 1)], ids=str)
def test_square_blocks_serve_both_contractions(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    once, other = quantize(x, SQUARE), quantize(x.t(), SQUARE)
    assert torch.equal(once.t().dequantize(), other.dequantize())
    assert torch.equal(once.t().codes, other.codes)
    assert torch.equal(once.t().scale, other.scale)
    assert once.t().tensor_amax is once.tensor_amax
    assert_quantized(once.t(), x.t(), SQUARE)


def test_kept_bytes_are_half_a_byte_an_element_and_a_scale_a_block() -> None:
    assert quantize(torch.randn(32, 64), SPEC).nbytes == 32 * 64 // 2 + 32 * 4 + 4
    assert quantize(torch.randn(32, 64), SQUARE).nbytes == 32 * 64 // 2 + 2 * 4 + 4
    assert quantize(torch.randn(3, 17), SPEC).nbytes == 3 * 9 + 3 * 2 + 4


def test_second_level_gains_on_a_power_of_two_scale() -> None:
    x = torch.randn(256, 256)
    mx = QuantSpec(format=E2M1, block=(1, 16), scale_rule="e8m0_rceil")
    nv, other = (sqnr_db(x, quantize(x, spec).dequantize()) for spec in (SPEC, mx))
    assert nv > other + 1


@pytest.mark.parametrize("rule", ["nvfp4", "e8m0_rceil"])
@pytest.mark.parametrize("part", [0.5, 0.25, 1 - 2.0**-10, 2.0**-9, 3 * 2.0**-12])
@pytest.mark.parametrize(("low", "high"), [(2.0, 3.0), (-0.5, 0.0), (4.0, 6.0)])
def test_stochastic_rounding_has_no_bias(low: float, high: float, part: float, rule: str) -> None:
    spec = replace(SPEC, rounding="stochastic", scale_rule=rule)
    # a 6 in every block, so that a step is a step of the elements
    x = torch.full((1034, 1024), low + part * (high - low))
    x[:, ::16] = 6.0 if rule == "e8m0_rceil" else 2688.0
    if rule == "nvfp4":
        x[:, 1:] = x[:, 1:] * torch.where(x[:, 1:] == 2688, 1.0, 448.0)
    q = quantize(x, spec, noise=Noise(seed=11))
    values = q.values[x != x[0, 0]]
    assert values.numel() > 970_000
    assert set(values.unique().tolist()) == {low, high}
    error = math.sqrt(part * (1 - part) / values.numel())
    assert abs((values == high).double().mean().item() - part) <= 4 * error


@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, scale_rule="e8m0_rceil")], ids=str)
def test_exact_values_never_move_and_calls_differ_by_their_key(spec: QuantSpec) -> None:
    spec = replace(spec, rounding="stochastic")
    grid = [0.0, -0.0, 0.5, 1.0, 1.5, -2.0, 3.0, 4.0, -6.0, 6.0]
    size = 1.0 if spec.scale_rule != "nvfp4" else 448.0
    exact = torch.tensor(grid).repeat(400, 16) * size
    q = quantize(exact, spec, noise=Noise(seed=3))
    assert torch.equal(q.values * size, exact)
    x = torch.randn(64, 64)
    first, again, later = (
        quantize(x, spec, noise=Noise(seed=3, step=step)).codes for step in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
