"""scaling.py: amax over blocks, both rules against fractions, and the state of delayed scaling."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from block_oracles import FLT_MAX, encode_factor, floor_log2, to_float32
from oracles import EVERY_FORMAT
from quant_oracles import spans

from mixprec.formats import FORMATS, FloatFormat
from mixprec.scale_rules import make_scales
from mixprec.scaling import (
    DelayedState,
    block_amax,
    delayed_amax,
    delayed_state,
    discard_pending,
    expand_blocks,
    join_state,
    record_amax,
    roll_history,
    split_state,
)

E4M3 = FORMATS["e4m3"]
UP_TO_SEVEN = FloatFormat(exponent=2, mantissa=2)
UP_TO_FOUR = FloatFormat(exponent=2, mantissa=0)
SCALED = [fmt for fmt in EVERY_FORMAT if fmt.signed and fmt.exponent < 8]
BLOCKS = [(-1, -1), (1, -1), (-1, 1), (1, 32), (16, 16), (128, 128), (1, 128), (3, 7), (2, -1)]
TINY = [1e-45, 2e-45, 1e-40, 5.9e-39, 1.17549435e-38, 6.3e-38, 1.316e-36, 1.317e-36, 1.318e-36]


def amaxes() -> list[float]:
    """Positive float32 numbers: the smallest, the largest, powers of two, and their neighbours."""
    powers = np.float32(2.0) ** np.arange(-149, 128, 7, dtype=np.float32)
    near = [np.nextafter(powers, np.float32(end)) for end in (0.0, np.inf)]
    random = np.random.default_rng(0).integers(1, 0x7F800000, 60, np.uint32).view(np.float32)
    every = np.concatenate([powers, *near, random, np.float32(TINY), np.float32([448, 464, 57344])])
    return [float(x) for x in every if 0 < x < np.inf]


@pytest.mark.parametrize("rule", ["real", "pow2"])
@pytest.mark.parametrize("fmt", SCALED, ids=str)
def test_rule_equals_exact_arithmetic(rule: str, fmt: FloatFormat) -> None:
    numbers = amaxes()
    if Fraction(fmt.max) / FLT_MAX < Fraction(2) ** -126:
        numbers = [x for x in numbers if Fraction(fmt.max) / Fraction(x) >= Fraction(2) ** -126]
    encode, scale = make_scales(torch.tensor(numbers), rule, fmt)[:2]
    exact = [encode_factor(rule, Fraction(amax), fmt) for amax in numbers]
    assert encode.tolist() == [float(factor) for factor in exact]
    assert scale.tolist() == [float(to_float32(1 / factor)) for factor in exact]


def test_pow2_is_the_power_below_even_one_ulp_below_a_power() -> None:
    powers = torch.arange(-125.0, 128, dtype=torch.float64).exp2()
    below = powers * (1 - 2.0**-24)
    real = make_scales(7 / below, "real", UP_TO_SEVEN).encode
    encode, scale, _ = make_scales(7 / below, "pow2", UP_TO_SEVEN)
    assert torch.equal(real.double(), below)
    assert torch.equal(encode.double(), powers / 2)
    assert torch.equal(encode * scale, torch.ones(253))


@pytest.mark.parametrize("scale", [0.75, 0.3, 1.5, 2.0**-3, 2.0**-3 - 2.0**-27])
def test_pow2_takes_the_floor_of_the_exponent(scale: float) -> None:
    encode = make_scales(torch.tensor([4 / scale], dtype=torch.float64), "pow2", UP_TO_FOUR).encode
    floors = {0.75: -1, 0.3: -2, 1.5: 0, 2.0**-3: -3, 2.0**-3 - 2.0**-27: -4}
    assert encode.item() == 2.0 ** floors[scale]


@pytest.mark.parametrize("rule", ["real", "pow2"])
def test_special_amaxes(rule: str) -> None:
    amax = torch.tensor([0.0, math.nan, math.inf, 1e-45])
    encode, scale = make_scales(amax, rule, E4M3)[:2]
    assert (encode[0].item(), scale[0].item()) == (1.0, 1.0)
    assert encode[1:3].isnan().all()
    assert scale[1:3].isnan().all()
    assert encode[3].item() == (float(FLT_MAX) if rule == "real" else 2.0**127)
    assert 0 < scale[3].item() < math.inf


def test_min_amax_comes_before_the_test_for_zero() -> None:
    encode = make_scales(torch.tensor([0.0, 1e-20, 1.0]), "real", E4M3, 1e-12).encode
    floor = float(to_float32(Fraction(448) / Fraction(1e-12)))
    assert encode.tolist() == [floor, floor, 448.0]


def test_min_amax_keeps_a_block_with_nan_or_inf_invalid() -> None:
    encode, scale = make_scales(torch.tensor([math.nan, math.inf]), "real", E4M3, 1e-12)[:2]
    assert encode.isnan().all()
    assert scale.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (32, 64), (17, 130), (130, 17), (0, 8), (8, 0)])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_amax_is_the_largest_of_each_block(
    block: tuple[int, int], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    amax = block_amax(x, block)
    numbers = x.double().numpy()
    rows, columns = (spans(length, size) for length, size in zip(shape, block, strict=True))
    want = [
        [np.abs(numbers[np.ix_(free, inner)]).max(initial=0.0) for inner in columns]
        for free in rows
    ]
    assert amax.dtype == dtype
    assert amax.shape == (len(rows), len(columns))
    assert amax.tolist() == want


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_block_amax_is_not_finite_exactly_where_the_block_is_not(
    block: tuple[int, int], bad: float
) -> None:
    x = torch.randn(20, 40)
    x[-1, -1] = bad
    amax = block_amax(x, block)
    assert amax[-1, -1].isnan() if math.isnan(bad) else amax[-1, -1] == math.inf
    assert amax.flatten()[:-1].isfinite().all()


def test_block_amax_reads_any_strides() -> None:
    x = torch.randn(24, 40)
    for view in (x.t(), x[::2, 3::5], x[:1].expand(8, 40), x.flip(0)):
        for block in BLOCKS:
            assert torch.equal(block_amax(view, block), block_amax(view.clone(), block))


def test_negative_numbers_count_by_their_size() -> None:
    assert block_amax(torch.tensor([[-3.0, 2.0]]), (-1, -1)).item() == 3
    assert block_amax(torch.tensor([[-3.0, 2.0]]), (1, 1)).tolist() == [[3, 2]]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_expand_blocks_gives_each_element_its_block(block: tuple[int, int]) -> None:
    shape = (20, 130)
    rows, columns = (spans(length, size) for length, size in zip(shape, block, strict=True))
    per_block = torch.arange(len(rows) * len(columns)).reshape(len(rows), len(columns))
    expanded = expand_blocks(per_block, block, shape).expand(shape)
    for i, free in enumerate(rows):
        for j, inner in enumerate(columns):
            part = expanded[free.start : free.stop, inner.start : inner.stop]
            assert (part == per_block[i, j]).all()


def filled(*amaxes: float, length: int = 4) -> DelayedState:
    """A state in which each amax was recorded in a step of its own."""
    state = delayed_state(length)
    for amax in amaxes:
        state = roll_history(record_amax(state, torch.tensor([[amax]])))
    return state


def test_new_state_is_empty_and_uses_the_data_at_hand() -> None:
    state = delayed_state(16)
    assert state.history.tolist() == [0.0] * 16
    assert (state.pending.item(), state.nonfinite.item()) == (0.0, 0.0)
    for algo in ("max", "most_recent"):
        assert delayed_amax(state, algo, torch.tensor([[1e4]])).tolist() == [[1e4]]


def test_history_must_have_room() -> None:
    with pytest.raises(ValueError, match="length: got 0; a history holds at least 1"):
        delayed_state(0)


def test_roll_puts_the_newest_first_and_drops_the_oldest() -> None:
    assert filled(1, 2, 3).history.tolist() == [3, 2, 1, 0]
    assert filled(1, 2, 3, 4, 5).history.tolist() == [5, 4, 3, 2]
    assert filled(7, 8, length=1).history.tolist() == [8]


def test_max_and_most_recent_read_different_entries() -> None:
    state = filled(8, 2, 5, 3)
    assert delayed_amax(state, "max", torch.tensor([[100.0]])).item() == 8
    assert delayed_amax(state, "most_recent", torch.tensor([[100.0]])).item() == 3


def test_scale_follows_down_after_the_length_of_the_history() -> None:
    state, own = delayed_state(16), torch.tensor([[1.0]])
    for step, amax in enumerate([1e4] + [1e-4] * 16):
        state = roll_history(record_amax(state, torch.tensor([[amax]])))
        recent = delayed_amax(state, "most_recent", own).item()
        assert recent == pytest.approx(amax)
        assert delayed_amax(state, "max", own).item() == pytest.approx(1e4 if step < 16 else 1e-4)


def test_uses_between_two_rolls_combine_by_maximum() -> None:
    state = delayed_state(4)
    for amax in (2.0, 9.0, 4.0):
        state = record_amax(state, torch.tensor([[amax]]))
        assert state.history.tolist() == [0.0] * 4
    assert state.pending.item() == 9
    assert roll_history(state).history.tolist() == [9, 0, 0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_amax_is_counted_and_not_entered(bad: float) -> None:
    state = record_amax(filled(3), torch.tensor([[bad]]))
    assert (state.pending.item(), state.nonfinite.item()) == (0.0, 1.0)
    state = record_amax(record_amax(state, torch.tensor([[2.0]])), torch.tensor([[bad]]))
    assert (state.pending.item(), state.nonfinite.item()) == (2.0, 2.0)
    state = roll_history(state)
    assert state.history.tolist() == [2, 3, 0, 0]
    assert (state.pending.item(), state.nonfinite.item()) == (0.0, 0.0)


def test_zero_amax_and_unused_state_leave_the_history() -> None:
    state = filled(3, 0, 0)
    assert state.history.tolist() == [3, 0, 0, 0]
    assert roll_history(state).history.tolist() == [3, 0, 0, 0]


def test_skipped_step_forgets_what_was_recorded() -> None:
    state = record_amax(filled(3), torch.tensor([[7.0]]))
    state = discard_pending(record_amax(state, torch.tensor([[math.nan]])))
    assert state.history.tolist() == [3, 0, 0, 0]
    assert (state.pending.item(), state.nonfinite.item()) == (0.0, 0.0)


def test_functions_leave_their_arguments() -> None:
    state = record_amax(filled(3), torch.tensor([[7.0]]))
    before = join_state(state).clone()
    for call in (roll_history, discard_pending, lambda s: record_amax(s, torch.tensor([[9.0]]))):
        call(state)
        assert torch.equal(join_state(state), before)


def test_packed_state_is_views_of_one_tensor_with_leading_axes() -> None:
    packed = torch.arange(12.0).reshape(2, 6)
    state = split_state(packed)
    assert state.history.shape == (2, 4)
    assert state.pending.tolist() == [4, 10]
    assert torch.equal(join_state(state), packed)
    state.pending.fill_(0)
    assert packed[:, 4].tolist() == [0, 0]
    rolled = roll_history(split_state(torch.tensor([[1.0, 2, 9, 0], [1.0, 2, 0, 0]])))
    assert rolled.history.tolist() == [[9, 1], [1, 2]]


def test_bfloat16_amax_enters_the_history_exactly() -> None:
    amax = torch.tensor([[3.140625]], dtype=torch.bfloat16)
    assert filled().history.dtype == torch.float32
    assert record_amax(delayed_state(2), amax).pending.item() == 3.140625


def test_exponent_of_the_oracle_itself() -> None:
    for x in (Fraction(1), Fraction(3, 4), Fraction(1, 3), Fraction(7), Fraction(1, 8)):
        exponent = floor_log2(x)
        assert Fraction(2) ** exponent <= x < Fraction(2) ** (exponent + 1)
