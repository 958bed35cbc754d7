"""Exact terms added up to an unevaluated sum of two float64; the exponents of rows and columns.

    hi + lo = sum of the terms,   hi = RN(hi + lo)

Exactness: without its last bits, about 2^-106 of the sum; ``ADDED_UP`` of it and ``roundings``
bound that. The order is fixed, the least significant term first, so that equal terms give equal
bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mixprec.fp64.arithmetic import UNIT, power_of_two, scale
from mixprec.fp64.slices import Term

ADDED_UP = 2.0**-103
"""The share of its result that ``add_up`` may lose."""
_FEW_TERMS = 5
# rows and columns of exponents within this, applied one after the other, leave hi normal
_SAFE_EXPONENT = 400
# half a MiB a tensor: a few of them stay in a processor's cache, and two threads share the work
_BLOCK_ELEMENTS = 1 << 16


def add_up(terms: Sequence[Term], plain: int | None = None) -> tuple[Tensor, Tensor, float]:
    """(hi, lo) of the terms, given the least significant first, and ``roundings``.

    Args:
        terms: What to add; they are used up.
        plain: Terms of exponents up to this are added with a rounding each, the others exactly.
    """
    first, *others = terms
    high = first.integer.mul_(2.0**first.exponent)
    low = torch.zeros_like(high)
    count = sum(plain is None or term.exponent > plain for term in others)
    step = max(1, _BLOCK_ELEMENTS // max(high[..., :1, :].numel(), 1))
    for start in range(0, high.shape[-2], step):
        rows = slice(start, start + step)
        blocks = [Term(term.integer[..., rows, :], term.exponent) for term in others]
        _add_block(high[..., rows, :], low[..., rows, :], blocks, count)
    return high, low, roundings(count)


def _add_block(high: Tensor, low: Tensor, terms: Sequence[Term], count: int) -> None:
    """Adds terms, the last ``count`` exactly, to high + low in place; leaves high = RN(sum)."""
    for term in terms[: len(terms) - count]:
        high.add_(term.integer, alpha=2.0**term.exponent)
    total, spare, sums = high, torch.empty_like(high), torch.empty_like(high)
    last = torch.zeros_like(low) if count > _FEW_TERMS else None
    for term in terms[len(terms) - count :]:
        scaled = term.integer.mul_(2.0**term.exponent)
        total, spare = _two_sum_into(total, scaled, spare, sums)
        if last is not None:
            low.copy_(_two_sum_into(low, scaled, torch.empty_like(low), sums)[0])
            last.add_(scaled)
        else:
            low.add_(scaled)
    if count > 1:
        total, spare = _two_sum_into(total, low, spare, sums)
    if last is not None:
        total, spare = _two_sum_into(total, low.add_(last), spare, sums)
    if total is not high:
        high.copy_(total)


def _two_sum_into(a: Tensor, b: Tensor, total: Tensor, part: Tensor) -> tuple[Tensor, Tensor]:
    """two_sum without new memory: b becomes the error, and total the sum; a is used up.

    Returns:
        (total, a): the sum, and what is free again.
    """
    torch.add(a, b, out=total)
    torch.sub(total, a, out=part)
    b.sub_(part)
    torch.sub(total, part, out=part)
    b.add_(a.sub_(part))
    return total, a


def roundings(count: int) -> float:
    """What ``add_up`` loses besides, in units of the sum of absolute terms.

    Args:
        count: Additions that keep their errors. Up to five, low is rounded at each: the i-th term
            from the last is in at most i sums, and their errors in i roundings of low. Of more a
            third part keeps what low drops.
    """
    if count > _FEW_TERMS:
        return 2 * (count * UNIT) ** 3
    return 1.01 * count * (count + 1) / 2 * UNIT**2


def apply_exponents(x: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """x[batch, m, n] * 2^(rows[batch, m] + columns[batch, n]), rounded once; may use x up."""
    if max(_largest(rows), _largest(columns)) <= _SAFE_EXPONENT:
        x *= power_of_two(rows).unsqueeze(-1)
        return x.mul_(power_of_two(columns).unsqueeze(-2))
    return scale(x, rows.unsqueeze(-1) + columns.unsqueeze(-2))


def _largest(exponent: Tensor) -> int:
    return int(exponent.abs().max()) if exponent.numel() else 0
