"""quantization_error.py: figures that are known by hand, and sums over elements in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from block_oracles import tensor_factor
from quant_oracles import Quantized, quantize_exactly, spans

import mixprec
from mixprec.formats import FORMATS
from mixprec.hadamard import hadamard
from mixprec.noise import Noise
from mixprec.quantization import QuantSpec
from mixprec.quantization_error import quantize_error
from mixprec.recipes import RECIPES
from mixprec.scaling import delayed_state, record_amax, roll_history

E2M1, E4M3 = FORMATS["e2m1"], FORMATS["e4m3"]
NVFP4 = QuantSpec(format=E2M1, block=(1, 16), scale_rule="nvfp4")
MX = QuantSpec(format=E2M1, block=(1, 32), scale_rule="e8m0_rceil")
DELAYED = QuantSpec(format=E4M3, amax_history_len=2)


def test_figures_of_four_numbers_by_hand() -> None:
    # with factor 1: 5 lies halfway and goes to 4, 0.125 goes to 0
    x = torch.tensor([[6.0, 5.0, 0.125, -1.0]])
    figures = quantize_error(x, QuantSpec(format=E2M1, block=(1, 4)))
    ratio = (36 + 25 + 1 / 64 + 1) / (1 + 1 / 64)
    assert figures.sqnr_db == pytest.approx(10 * math.log10(ratio), rel=1e-12)
    assert figures.relative_error == pytest.approx(ratio**-0.5, rel=1e-12)
    assert figures.largest_error == 1 / 6
    assert figures.underflow == 1 / 4
    assert figures.saturation == figures.nonfinite == 0
    assert figures.bits_per_element == 4 + 32 / 4


def decoded(exact: Quantized, spec: QuantSpec) -> np.ndarray:
    """values * block scale * tensor scale, in double precision."""
    values = exact.values * (1 if exact.tensor_amax is None else tensor_factor(exact.tensor_amax))
    rows, columns = (
        spans(length, size) for length, size in zip(values.shape, spec.block, strict=True)
    )
    for i, free in enumerate(rows):
        for j, contraction in enumerate(columns):
            values[np.ix_(free, contraction)] *= exact.scale.reshape(len(rows), -1)[i, j]
    return values


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_blockwise", "mxfp6_e3m2", "nvfp4"])
def test_error_is_that_of_exact_arithmetic(recipe: str) -> None:
    x = torch.randn(5, 37) * torch.logspace(-3, 3, 5)[:, None]
    spec = RECIPES[recipe].output.a
    exact = decoded(quantize_exactly(x, spec), spec)
    pairs = list(zip(x.double().flatten().tolist(), exact.flatten().tolist(), strict=True))
    signal = math.fsum(a * a for a, _ in pairs)
    noise = math.fsum((a - b) ** 2 for a, b in pairs)
    figures = quantize_error(x, spec)
    assert figures.sqnr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-4)
    assert figures.underflow == sum(a != 0 and b == 0 for a, b in pairs) / len(pairs)


def test_elements_that_a_scale_leaves_beyond_the_range_are_saturated() -> None:
    # the rule makes the scale 1 from 7; 6.5 merely rounds to the largest value
    x = torch.tensor([[7.0, 6.5, -7.5, 1.0]])
    spec = QuantSpec(format=E2M1, block=(1, 32), scale_rule="e8m0_floor")
    assert quantize_error(x, spec).saturation == 2 / 4
    assert quantize_error(x, replace(spec, scale_rule="e8m0_ceil")).saturation == 0


def test_a_block_whose_scale_rounds_to_zero_underflows() -> None:
    x = torch.cat([torch.full((1, 16), 1e6), torch.full((1, 16), 1e-6)], dim=1)
    assert quantize_error(x, NVFP4).underflow == 0.5
    assert quantize_error(x[:, 16:], NVFP4).underflow == 0


def test_zeros_do_not_underflow() -> None:
    x = torch.zeros(2, 32)
    x[0, 0] = -0.0
    figures = quantize_error(x, MX)
    assert (figures.underflow, figures.sqnr_db, figures.relative_error) == (0, math.inf, 0)
    assert figures.largest_error == 0


def test_transformed_tensor_is_the_reference() -> None:
    x = torch.randn(4, 20)
    transformed = quantize_error(hadamard(x), NVFP4)
    assert quantize_error(x, replace(NVFP4, hadamard=True)) == transformed
    assert transformed.bits_per_element == 4 + (4 * 2 + 4) * 8 / (4 * 32)


def test_stochastic_rounding_takes_its_noise() -> None:
    x, spec = torch.randn(64, 64), replace(MX, rounding="stochastic")
    first, again, other = (quantize_error(x, spec, noise=Noise(seed=s)) for s in (0, 0, 1))
    assert first == again
    assert first != other
    assert first.sqnr_db < quantize_error(x, MX).sqnr_db - 2
    with pytest.raises(ValueError, match="noise: got None"):
        quantize_error(x, spec)


def test_delayed_scale_is_made_of_the_data_or_of_the_history() -> None:
    x = torch.randn(64, 64)
    now = quantize_error(x, replace(DELAYED, amax_history_len=0))
    assert quantize_error(x, DELAYED) == now
    past = roll_history(record_amax(delayed_state(2), torch.tensor([[0.5]])))
    figures = quantize_error(x, DELAYED, state=past)
    # 448 stands for 0.5: from 464 / 448 * 0.5 on there is no value to go to
    assert figures.saturation == int((x.abs() > 464 / 896).sum()) / x.numel()
    assert figures.sqnr_db < now.sqnr_db


def test_non_finite_block_is_counted_and_makes_the_error_nan() -> None:
    x = torch.randn(2, 64)
    x[1, 40] = math.inf
    figures = quantize_error(x, MX)
    assert figures.nonfinite == 32 / 128
    assert math.isnan(figures.sqnr_db)
    assert math.isnan(figures.relative_error)
    assert math.isnan(figures.largest_error)


@pytest.mark.parametrize("shape", [(0, 16), (4, 0)], ids=str)
@pytest.mark.parametrize("spec", [NVFP4, MX, DELAYED], ids=str)
def test_empty_tensor_has_no_error(spec: QuantSpec, shape: tuple[int, int]) -> None:
    figures = quantize_error(torch.empty(shape), spec)
    assert figures.sqnr_db == math.inf
    assert figures.largest_error == figures.underflow == figures.saturation == 0
    assert figures.bits_per_element == spec.format.bits


def test_float64_is_compared_before_it_is_rounded_to_float32() -> None:
    x = torch.tensor([[1.0, 1 + 2.0**-40]], dtype=torch.float64)
    figures = quantize_error(x, QuantSpec(format=FORMATS["fp16"], block=(1, 1)))
    assert figures.sqnr_db < 300
    assert figures.largest_error > 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (2, 3, 40)], ids=str)
def test_types_and_shapes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    figures = quantize_error(x, NVFP4)
    assert figures == quantize_error(x.float(), NVFP4)
    assert figures.sqnr_db > 10


def test_a_format_stands_for_one_scale_or_none() -> None:
    x = torch.randn(8, 8)
    assert quantize_error(x, "e4m3").bits_per_element == 8 + 32 / 64
    assert quantize_error(x, "bf16").bits_per_element == 16
    assert mixprec.quantize_error(x, "fp32").sqnr_db == math.inf


def test_integers_are_refused() -> None:
    with pytest.raises(TypeError, match="x: got"):
        quantize_error(torch.ones(2, 2, dtype=torch.int32), MX)
