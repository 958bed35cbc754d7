"""statistics.py: counts equal those of a loop over the elements, figures known by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from mixprec.formats import FORMATS
from mixprec.hadamard import hadamard
from mixprec.inspection.statistics import (
    OperandTally,
    ProductStatistics,
    ProductTally,
    StepStatistics,
    tally_operand,
    tally_product,
)
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor, QuantSpec, quantize
from mixprec.recipes import RECIPES
from mixprec.scaling import delayed_state, record_amax, roll_history

E4M3, E2M1 = FORMATS["e4m3"], FORMATS["e2m1"]
SPECS = list(
    dict.fromkeys(spec for recipe in RECIPES.values() for spec in recipe.specs if spec is not None)
)
FLOOR = QuantSpec(format=E2M1, block=(1, 32), scale_rule="e8m0_floor")


def short(spec: QuantSpec) -> str:
    words = [spec.format, spec.scale_rule, *spec.block, spec.rounding]
    return "-".join(map(str, [*words, *["hadamard"] * spec.hadamard]))


def sample(dtype: torch.dtype = torch.float32, transposed: bool = False) -> Tensor:
    """Magnitudes over many binades, an outlier and zeros."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(19, 45, generator=generator)
    x *= (2.5 * torch.randn(19, 45, generator=generator)).exp()
    x[4, 7], x[5] = 3e4, 0.0
    x = x.to(dtype)
    return x.t() if transposed else x


def quantized(x: Tensor, spec: QuantSpec) -> QuantizedTensor:
    """With a history, where there is one, in which a smaller amax is."""
    state = None
    if spec.is_delayed:
        amax = x.abs().float().sum() / 1e4
        state = roll_history(record_amax(delayed_state(spec.amax_history_len), amax))
    return quantize(x, spec, noise=Noise(seed=1), state=state)


def per_element(q: QuantizedTensor, per_block: Tensor | None) -> np.ndarray:
    """One value a block as one an element."""
    rows, columns = q.matrix_shape
    free, contraction = (
        length if size == -1 else size
        for size, length in zip(q.spec.block, (rows, columns), strict=True)
    )
    if per_block is None:
        return np.ones((rows, columns), dtype=np.float32)
    values = per_block.numpy()
    return values[np.arange(rows)[:, None] // free, np.arange(columns)[None] // contraction]


def elements(x: Tensor, q: QuantizedTensor) -> Iterator[tuple[float, float, float]]:
    """Each number, what its rounding is given, and what it became."""
    scale = None if q.scale is None else q.block_scale
    whole = np.float32(1.0 if q.tensor_scale is None else q.tensor_scale.item())
    scaled = x.float().numpy() * per_element(q, q.encode)
    became = q.values.numpy() * per_element(q, scale) * whole
    arrays = (x.double().numpy(), scaled, became)
    return zip(*(array.ravel().tolist() for array in arrays), strict=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("spec", [*SPECS, FLOOR], ids=short)
def test_counts_are_those_of_a_loop(spec: QuantSpec, transposed: bool) -> None:
    x = sample(transposed=transposed)
    q = quantized(x, spec)
    reference = hadamard(x) if spec.hadamard else x
    found = list(elements(reference, q))
    step = 2.0 ** (spec.format.max_exponent - spec.format.mantissa)
    # Python rounds halves to even too
    saturated = sum(round(abs(s) / step) * step > spec.format.max for _, s, _ in found)
    underflowed = sum(a != 0 and b == 0 for a, _, b in found)
    tally = tally_operand(x, q)
    assert tally.elements == reference.numel()
    assert (tally.saturated, tally.underflowed) == (saturated, underflowed)
    signal, noise = (
        math.fsum(a * a for a, _, _ in found),
        math.fsum((b - a) ** 2 for a, _, b in found),
    )
    assert tally.error.signal == pytest.approx(signal, rel=1e-12)
    assert tally.error.noise == pytest.approx(noise, rel=1e-12)
    assert tally.amax == float(reference.abs().max())
    assert tally.range_use == max(abs(s) for _, s, _ in found) / spec.format.max


def test_some_of_these_specifications_saturate_and_some_underflow() -> None:
    tallies = [tally_operand(sample(), quantized(sample(), spec)) for spec in [*SPECS, FLOOR]]
    assert any(tally.saturated for tally in tallies)
    assert any(tally.underflowed for tally in tallies)
    assert not all(tally.saturated for tally in tallies)


def test_figures_of_four_numbers_by_hand() -> None:
    # encode is 448 / 7 = 64; 1e-5 underflows, 2^-10 lies on the grid
    x = torch.tensor([[7.0, 1e-5, -(2.0**-10), 0.0]])
    tally = tally_operand(x, quantize(x, QuantSpec(format=E4M3)))
    row = tally.statistics(layer="fc", product="output", operand="a", name="", format="e4m3")
    assert (row.amax, row.range_use, row.scale, row.elements) == (7.0, 1.0, 1 / 64, 4)
    assert (row.saturation, row.underflow) == (0.0, 0.25)
    expected = 10 * math.log10((49 + 1e-10 + 2.0**-20) / 1e-10)
    assert row.sqnr_db == pytest.approx(expected, rel=1e-6)


def test_an_old_scale_saturates_what_has_grown() -> None:
    x = torch.tensor([[1.0, 2.0, -4.0, 0.5]])
    spec = QuantSpec(format=E4M3, amax_history_len=1)
    state = roll_history(record_amax(delayed_state(1), torch.tensor(1.0)))
    tally = tally_operand(x, quantize(x, spec, state=state))
    assert (tally.saturated, tally.range_use, tally.amax) == (2, 4.0, 4.0)


def test_range_use_falls_with_a_history_of_larger_numbers() -> None:
    x = torch.ones(1, 4)
    spec = QuantSpec(format=E4M3, amax_history_len=1)
    state = roll_history(record_amax(delayed_state(1), torch.tensor(8.0)))
    assert tally_operand(x, quantize(x, spec, state=state)).range_use == 1 / 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_types_give_the_counts_of_their_numbers(dtype: torch.dtype) -> None:
    x, spec = sample(dtype), RECIPES["fp8_blockwise"].output.a
    tally = tally_operand(x, quantized(x, spec))
    wide = tally_operand(x.double(), quantized(x.double(), spec))
    assert (tally.saturated, tally.underflowed) == (wide.saturated, wide.underflowed)
    assert tally.error.noise == pytest.approx(wide.error.noise, rel=1e-6)


def test_an_empty_operand_has_no_error() -> None:
    x = torch.zeros(0, 8)
    for spec in SPECS:
        tally = tally_operand(x, quantized(sample()[:0, :8], spec))
        assert (tally.elements, tally.amax, tally.error.noise) == (0, 0.0, 0.0)
        row = tally.statistics(layer="", product="output", operand="a", name="", format="e4m3")
        assert (row.saturation, row.underflow) == (0.0, 0.0)


def test_a_block_with_an_infinity_is_seen_and_the_others_are_counted() -> None:
    x = torch.ones(2, 32)
    x[0, 3], x[1, 4] = math.inf, 1e-9
    tally = tally_operand(x, quantize(x, QuantSpec(format=E4M3, block=(1, 32))))
    assert math.isnan(tally.error.sqnr_db)
    assert (tally.saturated, tally.underflowed, tally.amax) == (0, 1, math.inf)


def test_a_delayed_scale_saturates_beside_an_infinity() -> None:
    x = torch.tensor([[1e4, math.inf, 1.0]])
    spec = QuantSpec(format=E4M3, amax_history_len=1)
    state = roll_history(record_amax(delayed_state(1), torch.tensor(1.0)))
    assert tally_operand(x, quantize(x, spec, state=state)).saturated == 1


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "mxfp8", "fp8_delayed"])
def test_tallies_of_parts_add_up(recipe: str) -> None:
    spec = RECIPES[recipe].output.a
    parts = [sample()[:8], sample()[8:]]
    tallies = [tally_operand(part, quantized(part, spec)) for part in parts]
    total = tallies[0] + tallies[1]
    assert total.elements == sample().numel()
    assert total.underflowed == sum(tally.underflowed for tally in tallies)
    assert total.saturated == sum(tally.saturated for tally in tallies)
    assert total.amax == 3e4
    assert total.scale == max(tally.scale for tally in tallies)


def test_figures_that_are_no_number_stay_in_a_sum() -> None:
    nothing = ProductTally(signal=0.0, noise=0.0)
    tally = OperandTally(
        amax=math.nan,
        range_use=1.0,
        scale=1.0,
        saturated=0,
        underflowed=0,
        elements=1,
        error=nothing,
    )
    other = replace(tally, amax=2.0)
    assert math.isnan((tally + other).amax)
    assert math.isnan((other + tally).amax)


def test_tally_of_a_product_is_its_error() -> None:
    tally = tally_product(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    assert tally.sqnr_db == 20.0


def test_a_step_is_a_line_of_plain_values_and_knows_its_worst_product() -> None:
    rows = tuple(
        ProductStatistics(layer=name, product="output", name="", sqnr_db=sqnr)
        for name, sqnr in (("a", 31.0), ("b", 17.5), ("c", math.nan))
    )
    step = StepStatistics(step=3, rows=rows)
    assert step.worst == rows[1]
    assert StepStatistics(step=3, rows=rows[2:]).worst is None
    record = json.loads(json.dumps(StepStatistics(step=3, rows=rows[:1]).to_record()))
    assert record == {
        "step": 3,
        "statistics": [
            {"layer": "a", "product": "output", "operand": "", "name": "", "sqnr_db": 31.0}
        ],
    }
