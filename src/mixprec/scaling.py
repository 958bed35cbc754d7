"""Scales: the largest magnitude of each block, the rule from amax to scale, and delayed scaling.

    encode = rule(amax);   values = round(x * encode);   x ~= values * scale,  scale = 1 / encode

A block is (free, contraction) elements of a 2-D operand whose contraction axis is last; -1 is the
whole axis. Divisions are done in float64 and rounded once to float32, which gives the bits of a
float32 division and does not depend on approximate division in a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Block = tuple[int, int]
AmaxComputeAlgo = Literal["max", "most_recent"]

_FLT_MAX = torch.finfo(torch.float32).max


def _num_blocks(length: int, size: int) -> int:
    return 1 if size == -1 else -(-length // size)


def block_amax(x: Tensor, block: Block) -> Tensor:
    """The largest |x| of each block.

    Args:
        x: [rows, columns], any floating-point type and strides, contraction last.
        block: (free, contraction) elements; -1 for the whole axis. The last block may be short.

    Returns:
        [ceil(rows / free), ceil(columns / contraction)] in x's type, without rounding. NaN where
        the block holds a NaN; 0 for an empty block.
    """
    rows, columns = x.shape
    free = rows if block[0] == -1 else block[0]
    contraction = columns if block[1] == -1 else block[1]
    if x.numel() == 0:
        return x.new_zeros((_num_blocks(rows, block[0]), _num_blocks(columns, block[1])))
    if (free, contraction) == (rows, columns):
        low, high = torch.aminmax(x)
        return torch.maximum(high, -low).reshape(1, 1)
    if free == 1 and contraction == columns:
        # two reductions read x twice and still beat writing |x| once
        return torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
    if rows % free or columns % contraction:
        # a padded 0 never exceeds an |x|, so a short last block keeps its own amax
        x = torch.nn.functional.pad(x, (0, -columns % contraction, 0, -rows % free))
    blocks = x.abs().unflatten(1, (-1, contraction)).unflatten(0, (-1, free))
    return blocks.amax((1, 3))


def expand_blocks(per_block: Tensor, block: Block, shape: tuple[int, int]) -> Tensor:
    """One value a block, repeated to broadcast against an operand of ``shape``."""
    # by index: Inductor of torch 2.13 reads past the end of a repeated block that is cut short
    for axis, (size, length) in enumerate(zip(block, shape, strict=True)):
        if size not in (-1, 1) and per_block.shape[axis] != 1:
            index = torch.arange(length, device=per_block.device) // size
            per_block = per_block.index_select(axis, index)
    return per_block


def _encode_real(amax: Tensor, largest: float) -> Tensor:
    # amax - amax is 0, or NaN where amax is not finite
    return ((amax - amax + largest) / amax).clamp_(max=_FLT_MAX).to(torch.float32)


def _encode_pow2(amax: Tensor, largest: float) -> Tensor:
    # clearing the mantissa of NaN gives inf, so NaN is added again
    encode = _encode_real(amax, largest)
    bits = encode.to(torch.float64).view(torch.int64)
    power = (bits & ~((1 << 52) - 1)).view(torch.float64).to(torch.float32)
    return power + (encode - encode)


class ScaleRule(NamedTuple):
    """From amax to the factor that quantises.

    encode: Function of amax (float64; 0 is handled by the caller) and the format's largest value;
        float32, NaN where amax is not finite.
    is_power_of_two: Whether scales are powers of two, so that multiplying by them is exact.
    """

    encode: Callable[[Tensor, float], Tensor]
    is_power_of_two: bool


SCALE_RULES: Mapping[str, ScaleRule] = MappingProxyType(
    {
        "real": ScaleRule(_encode_real, is_power_of_two=False),
        "pow2": ScaleRule(_encode_pow2, is_power_of_two=True),
    }
)
"""``real``: encode = min(max / amax, FLT_MAX). ``pow2``: that with its mantissa bits cleared."""


def encode_and_scale(
    amax: Tensor, rule: str, largest: float, min_amax: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The factor that quantises and the scale that brings back, for each block.

    Args:
        amax: Largest magnitudes of the blocks, any shape and floating-point type.
        rule: A name in ``SCALE_RULES``.
        largest: The format's largest finite value.
        min_amax: Floor under amax, applied before the test for zero.

    Returns:
        encode and scale, float32, of amax's shape.

    Edge cases: amax = 0 gives 1 and 1; a non-finite amax gives NaN and NaN; an amax so small that
    max / amax overflows gives encode = FLT_MAX (pow2: 2^127).
    """
    wide = amax.to(torch.float64)
    if min_amax:
        wide = wide.clamp(min=min_amax)
    encode = SCALE_RULES[rule].encode(wide, largest).masked_fill_(wide == 0, 1.0)
    return encode, encode.to(torch.float64).reciprocal_().to(torch.float32)


class DelayedState(NamedTuple):
    """State of delayed scaling for one operand; float32 tensors.

    history: [length], newest first, 0 where nothing was entered yet.
    pending: 0-d, the largest finite amax recorded since the last roll.
    nonfinite: 0-d, how many recorded amaxes were not finite since the last roll.
    """

    history: Tensor
    pending: Tensor
    nonfinite: Tensor


def delayed_state(length: int, device: torch.device | str | None = None) -> DelayedState:
    """An empty state with room for ``length`` amaxes."""
    if length < 1:
        raise ValueError(f"length: got {length}; a history holds at least 1 amax; pass 1 or more")
    return split_state(torch.zeros(length + 2, dtype=torch.float32, device=device))


def split_state(packed: Tensor) -> DelayedState:
    """The state that a float32 tensor [..., length + 2] holds, as views of it."""
    return DelayedState(
        history=packed[..., :-2], pending=packed[..., -2], nonfinite=packed[..., -1]
    )


def join_state(state: DelayedState) -> Tensor:
    """One float32 tensor [..., length + 2] that holds a state; the inverse of ``split_state``."""
    return torch.cat((state.history, state.pending[..., None], state.nonfinite[..., None]), dim=-1)


def delayed_amax(state: DelayedState, algo: AmaxComputeAlgo, own: Tensor) -> Tensor:
    """The amax that the scale is made of: from the history, or the data's own while it is empty.

    Args:
        state: The operand's state.
        algo: ``max`` of the history, or its ``most_recent`` entry.
        own: [1, 1], the amax of the data at hand.

    Returns:
        [1, 1] float32.
    """
    past = state.history.amax() if algo == "max" else state.history[0]
    return torch.where(past > 0, past, own.to(torch.float32))


def record_amax(state: DelayedState, amax: Tensor) -> DelayedState:
    """The state after one use: amaxes combine by maximum, non-finite ones are only counted."""
    amax = amax.to(torch.float32).reshape(())
    finite = amax.nan_to_num(nan=0.0, posinf=0.0)
    return state._replace(
        pending=torch.maximum(state.pending, finite), nonfinite=state.nonfinite + (amax != finite)
    )


def roll_history(state: DelayedState) -> DelayedState:
    """The state after a step: a pending amax above 0 enters the history, the oldest one leaves.

    Leading axes are states of their own.
    """
    rolled = torch.cat((state.pending[..., None], state.history[..., :-1]), dim=-1)
    history = torch.where(state.pending[..., None] > 0, rolled, state.history)
    return discard_pending(state._replace(history=history))


def discard_pending(state: DelayedState) -> DelayedState:
    """The state after a step that was skipped: what its uses recorded is forgotten."""
    zero = torch.zeros_like(state.pending)
    return state._replace(pending=zero, nonfinite=zero.clone())
