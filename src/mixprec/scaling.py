"""Blocks that share a scale: their largest magnitudes, their factors, and delayed scaling.

A block is (free, contraction) elements of a 2-D operand whose contraction axis is last; -1 is the
whole axis. The rules from amax to scale are in ``scale_rules``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mixprec import loops
from mixprec.noise import cached_elements, piece_starts
from mixprec.rounding import can_look_at

Block = tuple[int, int]
AmaxComputeAlgo = Literal["max", "most_recent"]

_LARGE = 1 << 19
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def num_blocks(length: int, size: int) -> int:
    """How many blocks of a size an axis has; an axis that is one block (-1) always has it."""
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
        return x.new_zeros((num_blocks(rows, block[0]), num_blocks(columns, block[1])))
    if (free, contraction) == (rows, columns):
        # Dynamo does not know the strides of every gradient
        is_turned = not torch.compiler.is_compiling() and is_column_major(x)
        low, high = torch.aminmax(x.t() if is_turned else x)
        # of zeros alone the larger one may be -0
        return torch.maximum(high, -low).reshape(1, 1).abs()
    if loops.serves(x):
        return loops.block_amax(x, (free, contraction))
    if free == 1 and contraction == columns:
        # two reductions read x twice and still beat writing |x| once
        return torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True)).abs()
    if is_column_major(x):
        # reductions are fast along the rows of memory
        return block_amax(x.t(), (block[1], block[0])).t()
    if rows % free or columns % contraction:
        # a padded 0 never exceeds an |x|, so a short last block keeps its own amax
        x = torch.nn.functional.pad(x, (0, -columns % contraction, 0, -rows % free))
    rows_at_once = pieces(x, free)
    if rows_at_once is not None:
        found = x.new_empty((num_blocks(rows, free), num_blocks(columns, contraction)))
        for start in piece_starts(x, 0, rows_at_once):
            part = block_amax(x[start : start + rows_at_once], block)
            found[start // free :][: len(part)] = part
        return found
    x = x.abs()
    if free > 1:
        # of NaN a maximum may come out with a sign, below which it would lie among bits
        x = x.unflatten(0, (-1, free)).amax(1).abs_()
    if contraction == 1:
        return x
    if torch.compiler.is_compiling():
        return x.unflatten(1, (-1, contraction)).amax(2)
    # the bits of |x| have its order, NaN above all; for 16 of them a third of the time
    bits = x.view(_INTEGERS[x.element_size()])
    return bits.unflatten(1, (-1, contraction)).amax(2).view(x.dtype)


def is_column_major(x: Tensor) -> bool:
    """Whether the columns of a matrix lie in memory one after the other."""
    return x.stride(0) == 1 and x.stride(1) > 1


def pieces(x: Tensor, free: int) -> int | None:
    """Rows at once, in whole blocks, of a matrix of which whole temporaries are slow; else None."""
    # temporaries stay in the cache, and in the memory that the allocator keeps
    if torch.compiler.is_compiling() or not x.is_cpu or x.stride(1) != 1:
        return None
    if x.numel() < _LARGE:
        return None
    rows = max(cached_elements() // x.shape[1] // free, 1) * free
    return rows if rows < x.shape[0] else None


def expand_blocks(per_block: Tensor, block: Block, shape: tuple[int, int]) -> Tensor:
    """One value a block, repeated to broadcast against an operand of ``shape``."""
    # by index: Inductor of torch 2.13 reads past the end of a repeated block that is cut short
    for axis, (size, length) in enumerate(zip(block, shape, strict=True)):
        if size not in (-1, 1) and per_block.shape[axis] != 1:
            index = torch.arange(length, device=per_block.device) // size
            per_block = per_block.index_select(axis, index)
    return per_block


def times_blocks(x: Tensor, per_block: Tensor, block: Block, *, in_place: bool = False) -> Tensor:
    """x times one value a block, float32, in the memory layout of x, or in x itself."""
    rows, columns = x.shape
    lengths = zip(block, x.shape, strict=True)
    free, contraction = (length if size == -1 else size for size, length in lengths)
    divides = x.numel() and rows % free == 0 and columns % contraction == 0
    whole_rows = free in (1, rows) and contraction == columns
    is_compiled = torch.compiler.is_compiling()
    if whole_rows or not divides or (is_compiled and in_place):
        factors = expand_blocks(per_block, block, (rows, columns))
        return x.mul_(factors) if in_place else x * factors
    if is_compiled:
        # by strides: of other views Inductor makes the factors again for each element
        per_block = per_block.contiguous().as_strided(per_block.shape, (per_block.shape[1], 1))
    elif x.stride(1) == 1 and free > 1:
        # rows of a block share their scales: repeated once, they serve all of them
        per_block = per_block[..., None].expand(-1, -1, contraction).reshape(-1, columns)
        contraction = 1
    blocks = x.unflatten(1, (-1, contraction)).unflatten(0, (-1, free))
    factors = per_block[:, None, :, None]
    if in_place:
        blocks.mul_(factors)
        return x
    return (blocks * factors).flatten(2, 3).flatten(0, 1)


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


def has_history(state: DelayedState) -> bool:
    """Whether an amax was entered already; False too where asking would wait for a device."""
    return can_look_at(state.history) and bool(state.history[0] > 0)


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
