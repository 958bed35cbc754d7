"""Correctly rounded sums of products over segments of rows: the arithmetic of the sparse product.

    out[s, c] = RN(sum over p in segment s of x[p] * y[p, c])

Each product is two float64, exactly: x y = p + e (Dekker). Relative to the largest product of its
own sum, p and e are cut along fixed grids,

    p = q_1 + q_2 + q_3 + rest,   q_l a multiple of 2^(-w l),   w = 51 - ceil(log2(2 n + 2))

for sums of at most n products, so that the sums of all q_l are exact in float64 in any order. Their
total is rounded once, and taken where neither the rests nor the rounding can have moved it; the few
other sums (cancellation by more than about 80 bits, ties, subnormal results) are made again in
integers.

Exactness: correctly rounded, subnormal results included, whatever the order of rows and threads.

Sources: Dekker 1971 (exact products); Rump, Ogita and Oishi 2008 (cutting along a common grid);
Demmel and Nguyen 2013 (reproducible sums); Ziv 1991 (the rounding test).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from mixprec.fp64.arithmetic import (
    UNIT,
    exponent_of,
    power_of_two,
    rounded_ratio,
    scale,
    two_sum,
)
from mixprec.fp64.special_values import signs

_LEVELS = 3
_SPLITTER = float((1 << 27) + 1)
# exponents of products stay within +-2150; this one is below all of them
_NO_EXPONENT = -10000
# a product this far below the largest of its sum enters the bound alone
_FARTHEST = -800
# products of a block, so that its temporaries stay in a cache; measured: twice as fast as 1 << 19
_BLOCK_PRODUCTS = 1 << 16
_BLOCK_COLUMNS = 64
_SMALLEST_NORMAL = -1021


@dataclass(frozen=True, slots=True)
class _Digits:
    """Finite values as (high + low) * 2^exponent, high of 26 bits; other values as zeros.

    0.5 <= |high + low| < 1, or zeros with the exponent ``_NO_EXPONENT``.
    """

    high: Tensor
    low: Tensor
    exponent: Tensor

    def rows(self, index: Tensor) -> _Digits:
        return _Digits(self.high[index], self.low[index], self.exponent[index])


def _digits(x: Tensor) -> _Digits:
    x = torch.where(torch.isfinite(x), x, 0.0)
    exponent = exponent_of(x)
    mantissa = scale(x, -exponent)
    spread = mantissa * _SPLITTER
    high = spread - (spread - mantissa)
    return _Digits(high, mantissa - high, torch.where(x != 0, exponent, _NO_EXPONENT))


def sums_of_products(x: Tensor, y: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """RN(sum of x[p, c] y[rows[p], c]) for p from offsets[s] to offsets[s + 1].

    Args:
        x: float64 [P, 1] or [P, C].
        y: float64 [K, C].
        rows: int64 [P], indices of rows of y.
        offsets: int64 [S + 1], from 0 to P, not decreasing.

    Returns: float64 [S, C]. A sum of nothing, or exactly zero, is +0. inf and NaN as IEEE 754 sums
    them, the NaN always the same one; a finite sum beyond the largest float64 is inf.
    """
    segments, columns = offsets.numel() - 1, y.shape[-1]
    out = torch.zeros(segments, columns, dtype=torch.float64, device=y.device)
    if rows.numel() == 0 or out.numel() == 0:
        return out
    step = max(_BLOCK_COLUMNS, _BLOCK_PRODUCTS // rows.numel())
    for start in range(0, columns, step):
        part = slice(start, min(start + step, columns))
        right = y[:, part].contiguous()
        digits = _digits(right)
        for first, last in _segment_blocks(offsets, _BLOCK_PRODUCTS // right.shape[-1]):
            entries = slice(int(offsets[first]), int(offsets[last]))
            left = x[entries] if x.shape[-1] == 1 else x[entries, part]
            ends = offsets[first : last + 1] - offsets[first]
            if left.shape[0]:
                out[first:last, part] = _block(left, right, digits, rows[entries], ends)
    return out


def _segment_blocks(offsets: Tensor, limit: int) -> Iterator[tuple[int, int]]:
    """First and last-but-one segment of blocks of at most ``limit`` entries, or one segment."""
    first, segments = 0, offsets.numel() - 1
    while first < segments:
        last = int(torch.searchsorted(offsets, offsets[first] + limit, right=True)) - 1
        last = min(max(last, first + 1), segments)
        yield first, last
        first = last


def _block(x: Tensor, y: Tensor, digits: _Digits, rows: Tensor, offsets: Tensor) -> Tensor:
    first, second = _digits(x), digits.rows(rows)
    exponent = first.exponent + second.exponent
    largest = _reduced(exponent.to(torch.float64), offsets, "max", 2.0 * _NO_EXPONENT).long()
    lengths = offsets.diff()
    distance = exponent - largest.repeat_interleave(lengths, 0)
    is_near = distance >= _FARTHEST
    factor = power_of_two(distance.clamp(min=_FARTHEST))
    product, error = _exact_product(first, second)
    far = torch.zeros_like(product).masked_fill_(~is_near & (product != 0), 2.0**_FARTHEST)
    parts = [torch.where(is_near, part * factor, 0.0) for part in (product, error)]
    sums, rest = _cut(parts, offsets, int(lengths.max()))
    bound = _reduced(rest + far, offsets, "sum", 0.0) * (1 + 2.0**-20)
    out, is_sure = _rounded(sums, bound, largest)
    _redo(out, ~is_sure, x, y, rows, offsets)
    return _with_special(out, x, y, rows, offsets)


def _exact_product(x: _Digits, y: _Digits) -> tuple[Tensor, Tensor]:
    product = (x.high + x.low) * (y.high + y.low)
    error = (x.high * y.high).sub_(product).add_(x.high * y.low).add_(x.low * y.high)
    return product, error.add_(x.low * y.low)


def _reduced(x: Tensor, offsets: Tensor, how: str, initial: float) -> Tensor:
    return torch.segment_reduce(x, how, offsets=offsets, axis=0, unsafe=True, initial=initial)


def _cut(parts: list[Tensor], offsets: Tensor, longest: int) -> tuple[list[Tensor], Tensor]:
    """The exact sums of each level, and the absolute values of what no level holds."""
    # two parts a product, each at most one above the grid
    width = 51 - math.ceil(math.log2(2 * longest + 2))
    sums = []
    for level in range(1, _LEVELS + 1):
        grid = 1.5 * 2.0 ** (52 - width * level)
        cut = [(part + grid) - grid for part in parts]
        sums.append(_reduced(cut[0], offsets, "sum", 0.0) + _reduced(cut[1], offsets, "sum", 0.0))
        parts = [part - piece for part, piece in zip(parts, cut, strict=True)]
    return sums, parts[0].abs() + parts[1].abs()


def _rounded(sums: list[Tensor], bound: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded total times 2^exponent, and whether it is the correctly rounded one."""
    high, middle, low = sums
    # from the end, so that a cancelled high part does not leave the others unsorted
    middle, low = two_sum(middle, low)
    high, middle = two_sum(high, middle)
    middle, low = two_sum(middle, low)
    high, middle = two_sum(high, middle)
    doubt = low.abs() + bound
    is_exact = doubt == 0
    # more than these operations round, or a doubt far below half a unit would not move the test
    doubt = doubt + (middle.abs() + doubt) * (4 * UNIT)
    is_sure = (high + (middle + doubt) == high) & (high + (middle - doubt) == high)
    out = scale(high, exponent.clamp(-2200, 2200))
    is_normal = (high == 0) | (exponent_of(high) + exponent >= _SMALLEST_NORMAL)
    return out, (is_exact | is_sure) & is_normal


def _redo(
    out: Tensor, is_open: Tensor, x: Tensor, y: Tensor, rows: Tensor, offsets: Tensor
) -> None:
    """The marked sums again, in integers, in place."""
    for segment, column in is_open.nonzero().tolist():
        part = slice(int(offsets[segment]), int(offsets[segment + 1]))
        first = x[part, column if x.shape[-1] > 1 else 0].tolist()
        second = y[rows[part], column].tolist()
        pairs = zip(first, second, strict=True)
        finite = (
            Fraction(a) * Fraction(b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)
        )
        total = sum(finite, Fraction(0))
        out[segment, column] = rounded_ratio(total.numerator, total.denominator)


def _with_special(out: Tensor, x: Tensor, y: Tensor, rows: Tensor, offsets: Tensor) -> Tensor:
    """Sums that hold inf or NaN: of those products alone, finite factors by their signs."""
    if bool(torch.isfinite(x).all()) and bool(torch.isfinite(y).all()):
        return out
    second = y[rows]
    is_special = ~(torch.isfinite(x) & torch.isfinite(second))
    product = torch.where(is_special, signs(x) * signs(second), 0.0)
    total = _reduced(product, offsets, "sum", 0.0)
    total = torch.where(torch.isnan(total), math.nan, total)
    return torch.where(torch.isfinite(total), out, total)
