"""Scheme I: operands cut into slices of few bits, multiplied pair by pair.

    x[r, k] = 2^(e[r] - w + 1) * (sum over p = 1..s of d_p[r, k] * 2^(-w (p - 1))) + rest
    |d_p| <= 2^(w - 1) with -2^(w - 1) the only integer of that size,   |rest| <= 2^(e[r] - w s)

    product = sum over q = 1..s of 2^(-w (q - 1)) * D_q
    D_q = sum of d_p d'_p' with p + p' = q + 1

The slices of one operand lie side by side along the contraction, of the other in reverse order, so
that every anti-diagonal D_q is one product of q k elements: s products in place of s (s + 1) / 2.
For x x^T a pair and its mirror image are each other's transpose and only one of them is computed.

Exactness: slices and anti-diagonals are exact. What is left out is at most ``dropped(w, s)`` * k *
2^(e + e').

Sources: Ozaki, Ogita, Oishi and Rump 2012 (the scheme); Ootomo, Ozaki and Yokota 2024 (integer
units, accumulation along an anti-diagonal); Schwarz et al. 2025 and NVIDIA's cuBLAS documentation
(signs in the leading slice alone, so that s slices of 8 bits keep 8 s - 1).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mixprec.fp64.arithmetic import exponent_of, fast_two_sum, scale
from mixprec.fp64.engines import Engine

MOST_PARTS_BITS = 600
"""Bits of all slices together, at most: so that no unit of theirs comes near the end of float64."""
PLAIN_BITS = 44
"""Terms up to this, less the width, above the least significant may round when they are added.

Their roundings, at most five of 2^-53 of a sum below 2 s k, are within 2^-5 s of what is dropped.
"""
# just below 1/2: numbers just below a half would round up to the next integer with 1/2 itself, and
# what is left of them would not fit float64
_HALF = math.nextafter(0.5, 0.0)
# sums of blocks along the contraction are kept in two parts, each exact for 2^25 blocks
_LOW_BITS = 27


@dataclass(frozen=True, slots=True)
class Slices:
    """An operand in slices.

    Attributes:
        digits: [batch, rows, parts * k], integers.
        parts: How many slices.
    """

    digits: Tensor
    parts: int

    @property
    def length(self) -> int:
        """k, the contraction's length."""
        return self.digits.shape[-1] // self.parts


@dataclass(frozen=True, slots=True)
class Term:
    """An exact part of a product: integer * 2^exponent."""

    integer: Tensor
    exponent: int


def parts_for(bits: int, width: int) -> int:
    """Slices that keep so many bits besides the sign: ceil((bits + 1) / width)."""
    return -(-(bits + 1) // width)


def most_parts(width: int) -> int:
    """The most slices of a width."""
    return MOST_PARTS_BITS // width


def dropped(width: int, parts: int) -> float:
    """Bound on what one product of elements below 1 loses to the slices left out.

    2^(-w s) * (2 + (s - 1) (1 + 2^(2 - w))), the rest of each element times the other and the
    pairs beyond the last anti-diagonal, and a twentieth more for additions that round.
    """
    return 1.05 * 2.0 ** (-width * parts) * (2.1 + (parts - 1) * (1 + 2.0 ** (2 - width)))


def row_exponents(amax: Tensor, width: int) -> Tensor:
    """e with amax < 2^e, one more where the leading slice could reach 2^(w - 1).

    Args:
        amax: [batch, rows], the largest |x| of each row, finite.
        width: Bits of a slice.
    """
    exponent = exponent_of(amax)
    leading = scale(amax, width - 1 - exponent)
    return exponent + (leading >= (1 << width - 1) - 1)


def cut(
    x: Tensor,
    exponent: Tensor,
    width: int,
    parts: int,
    *,
    dtype: torch.dtype = torch.float64,
    is_reversed: bool = False,
) -> Slices:
    """An operand in slices.

    Args:
        x: float64 [batch, rows, k], finite; of either order in memory, which the slices keep.
        exponent: [batch, rows] from ``row_exponents``.
        width: Bits of a slice.
        parts: How many.
        dtype: The type in which an engine takes them.
        is_reversed: Whether the last slice comes first.
    """
    length = x.shape[-1]
    digits = _side_by_side(x, parts)
    slots = [digits[..., p * length : (p + 1) * length] for p in range(parts)]
    fill(slots[::-1] if is_reversed else slots, x, exponent, width)
    return Slices(digits.to(dtype), parts)


def fill(slots: list[Tensor], x: Tensor, exponent: Tensor, width: int) -> None:
    """Writes the slices of x into tensors of its shape, the most significant first."""
    rest = scale(x, (width - 1 - exponent).unsqueeze(-1))
    # halves go upward: what is left of them, -1/2, needs no carry, and last bits often are halves
    half = torch.full((), _HALF, dtype=x.dtype, device=x.device)
    largest = []
    for index, slot in enumerate(slots):
        unit = 2.0 ** (-width * index)
        torch.add(half, rest, alpha=1 / unit, out=slot).floor_()
        # now, while the slice is in the cache: what a carry would look for
        largest.append(slot.amax() if slot.numel() else half)
        if index < len(slots) - 1:
            rest.sub_(slot, alpha=unit)
    _carry(slots, torch.stack(largest).tolist(), width)


def _side_by_side(x: Tensor, parts: int) -> Tensor:
    """An empty tensor for so many of x along the last axis, in x's order in memory."""
    batch, rows, length = x.shape
    if x.stride(-2) >= x.stride(-1):
        return x.new_empty((batch, rows, parts * length))
    return x.new_empty((batch, parts * length, rows)).mT


def _carry(slots: list[Tensor], largest: list[float], width: int) -> None:
    """Moves 2^(w - 1), which the width does not hold, to the slice above, as 1 there."""
    over = 1 << width - 1
    for index in range(len(slots) - 1, 0, -1):
        if largest[index] < over:
            continue
        # few rows: one in 2^width of random digits
        rows = (slots[index].amax(-1) >= over).nonzero(as_tuple=True)
        lower, above = slots[index][rows], slots[index - 1][rows]
        carry = (lower >= over).to(lower.dtype)
        slots[index][rows] = lower.sub_(carry, alpha=1 << width)
        slots[index - 1][rows] = above.add_(carry)
        largest[index - 1] = max(largest[index - 1], float(above.amax()))


def multiply(a: Slices, b: Slices, engine: Engine) -> list[Term]:
    """The product of a with b, whose slices are reversed, in units of the leading slices' grids.

    Returns:
        Exact terms, the least significant first.
    """
    parts, length, width = a.parts, a.length, engine.width
    terms = []
    for q in range(parts, 0, -1):
        left = a.digits[..., : q * length]
        right = b.digits[..., (parts - q) * length :]
        sums = exact_sum(_blocks(left, right, engine), q * length <= engine.capacity)
        terms += [Term(integer, -width * (q - 1)) for integer in sums]
    return terms


def multiply_by_own(a: Slices, b: Slices, engine: Engine) -> list[Term]:
    """``multiply`` for b the same operand as a (its slices reversed): pairs p <= p' alone."""
    parts, length, width = a.parts, a.length, engine.width
    terms = []
    for q in range(parts, 0, -1):
        # the slices 1, 2, .. of a meet q, q - 1, .. of b, up to the middle
        pairs, start = q // 2, (parts - q) * length
        middle = pairs * length
        left, right = a.digits[..., :middle], b.digits[..., start : start + middle]
        halves = _blocks(left, right, engine)
        blocks = [x for half in halves for x in (half, half.mT)]
        if q % 2:
            own = a.digits[..., middle : middle + length]
            mirrored = b.digits[..., start + middle : start + middle + length]
            blocks += _blocks(own, mirrored, engine)
        sums = exact_sum(blocks, q * length <= engine.capacity)
        terms += [Term(integer, -width * (q - 1)) for integer in sums]
    return terms


def _blocks(a: Tensor, b: Tensor, engine: Engine) -> Iterator[Tensor]:
    """The products of blocks along the contraction, as long as the engine takes."""
    for start in range(0, a.shape[-1], engine.capacity):
        block = slice(start, start + engine.capacity)
        yield engine.dot(a[..., block], b[..., block])


def exact_sum(blocks: Iterable[Tensor], fits: bool) -> list[Tensor]:
    """The sum of integers as one exact float64, or as the rounded sum and what that leaves.

    Args:
        blocks: Integers, all of one shape.
        fits: Whether every sum of them is within 2^53.

    Returns:
        [sum], or [rest, sum rounded to float64]: what the exact sum decides, not the blocks.
    """
    if fits:
        return [functools.reduce(torch.add, blocks)]
    unit = 1 << _LOW_BITS
    low, high = torch.zeros(2, dtype=torch.float64).unbind()
    for block in blocks:
        upper = torch.floor(block * (1 / unit))
        low = low.to(block.device) + torch.sub(block, upper, alpha=unit)
        high = high.to(block.device) + upper
    # the low part below one unit, so that both are what the whole sum decides
    carry = torch.floor(low * (1 / unit))
    low.sub_(carry, alpha=unit)
    rounded, rest = fast_two_sum(high.add_(carry).mul_(unit), low)
    return [rest, rounded]
