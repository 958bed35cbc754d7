"""The correctly rounded product: round where the bound decides, compute the rest exactly.

    decided:  RN(hi + (lo + margin)) = RN(hi + (lo - margin))

Elements that are not decided (a value next to the middle of two float64, a sum that cancels to
almost nothing, operands with exponents far apart) are computed again with twice the slices, rows
and columns of theirs alone, until the slices would hold every bit of the operands: what is left
then (exact ties and zeros) is rounded from its exact integer. So the result does not depend on
scheme, engine, blocks, threads or the order of the contraction.

Source: Ziv 1991 (rounding test).
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor

from mixprec.fp64 import slices
from mixprec.fp64.arithmetic import exponent_of, rounded_ratio, scale
from mixprec.fp64.engines import Engine
from mixprec.fp64.plan import NEAREST_BITS, Operand
from mixprec.fp64.schemes import Raw, by_slices, error_of
from mixprec.fp64.sums import apply_exponents

_LEAST_EXPONENT = -1074
_TOTAL_EXPONENT = 2 * _LEAST_EXPONENT
_BELOW_NORMAL = 2.0**-1021
_MANTISSA_BITS = 53


def settle(a: Operand, b: Operand, raw: Raw, engine: Engine) -> Tensor:
    """The product of a and b correctly rounded to float64, [batch, m, n].

    Args:
        a, b: The operands.
        raw: Their product by either scheme, with its bound.
        engine: For what has to be computed again.
    """
    result, is_open = _round(raw, error_of(raw, a, b))
    settle_open(result, is_open, a, b, engine)
    return result


def settle_open(result: Tensor, is_open: Tensor, a: Operand, b: Operand, engine: Engine) -> None:
    """Puts the correctly rounded products where they are open, in place."""
    for index in is_open.any(-1).any(-1).nonzero().flatten().tolist():
        parts = slices.parts_for(NEAREST_BITS, engine.width)
        _close_zeros(result[index], is_open[index], a.values[index], b.values[index])
        while bool(is_open[index].any()):
            row = is_open[index].any(-1).nonzero().flatten()
            column = is_open[index].any(-2).nonzero().flatten()
            block = row.unsqueeze(-1), column.unsqueeze(0)
            part_a, part_b = _select(a, index, row), _select(b, index, column)
            parts *= 2
            wanted = is_open[index][block]
            if parts >= min(
                _whole_parts(part_a, part_b, engine.width), slices.most_parts(engine.width)
            ):
                settled = result[index][block]
                settled[wanted] = _exactly(part_a, part_b, wanted, engine)
                result[index][block], is_open[index][block] = settled, False
                continue
            raw = by_slices(part_a, part_b, parts, engine)
            again, still_open = _round(raw, error_of(raw, part_a, part_b))
            result[index][block] = torch.where(wanted, again[0], result[index][block])
            is_open[index][block] = wanted & still_open[0]


def _close_zeros(result: Tensor, is_open: Tensor, a: Tensor, b: Tensor) -> None:
    """Settles the elements of a matrix in which no product is other than 0."""
    row = is_open.any(-1).nonzero().flatten()
    pattern = (a[row] != 0).to(torch.float32) @ (b != 0).to(torch.float32).mT
    is_zero = is_open[row] & (pattern == 0)
    result[row] = result[row].masked_fill_(is_zero, 0.0)
    is_open[row] = is_open[row] & ~is_zero


def _select(x: Operand, index: int, rows: Tensor) -> Operand:
    return Operand(
        values=x.values[index, rows].unsqueeze(0), exponent=x.exponent[index, rows].unsqueeze(0)
    )


def _round(raw: Raw, error: Tensor) -> tuple[Tensor, Tensor]:
    """Results, and which of them the bound leaves open."""
    # lo + margin rounds too
    margin = raw.low.abs() * 2.0**-50 + error
    above = raw.high + (raw.low + margin)
    below = raw.high + (raw.low - margin)
    is_open = above != below
    result = apply_exponents(above, raw.rows, raw.columns)
    is_small = result.abs() < _BELOW_NORMAL
    if bool(is_small.any()):
        exponent = (raw.rows.unsqueeze(-1) + raw.columns.unsqueeze(-2))[is_small]
        high, low = raw.high[is_small], raw.low[is_small]
        settled = _round_small(high, low, margin[is_small], exponent)
        result[is_small], is_open[is_small] = settled
    return result, is_open


def _round_small(
    high: Tensor, low: Tensor, margin: Tensor, exponent: Tensor
) -> tuple[Tensor, Tensor]:
    """``_round`` where the result is a multiple of 2^-1074, and its last bit is that one."""
    unit = exponent - _LEAST_EXPONENT
    high, low, margin = (scale(part, unit) for part in (high, low, margin))
    whole = torch.round(high)
    rest = high - whole
    rounded = []
    is_tie = torch.zeros_like(whole, dtype=torch.bool)
    for end in (low + margin, low - margin):
        # the sign of a rounded sum is that of the exact one
        up, down = (rest - 0.5) + end, (rest + 0.5) + end
        is_tie |= ((up == 0) | (down == 0)) & (end != 0)
        rounded.append(whole + (up > 0).to(whole.dtype) - (down < 0).to(whole.dtype))
    half = 2.0 ** (_LEAST_EXPONENT // 2)
    return rounded[0] * half * half, (rounded[0] != rounded[1]) | is_tie


def _whole_parts(a: Operand, b: Operand, width: int) -> int:
    """Slices with which nothing of either operand, nor any pair, is left out."""
    spans = (int((x.exponent.unsqueeze(-1) - _last_bit(x.values)).amax()) for x in (a, b))
    return sum(-(-(max(span, 0) + 1) // width) for span in spans) - 1


def _last_bit(x: Tensor) -> Tensor:
    """The exponent of the last bit that is set; a large one for 0."""
    exponent = exponent_of(x)
    integer = scale(x, _MANTISSA_BITS - exponent).to(torch.int64)
    last = exponent_of((integer & -integer).to(torch.float64)) - 1
    return torch.where(x != 0, exponent - _MANTISSA_BITS + last, -_LEAST_EXPONENT)


def _exactly(a: Operand, b: Operand, wanted: Tensor, engine: Engine) -> Tensor:
    """The wanted elements of one matrix, rounded from their exact values."""
    width, row_column = engine.width, wanted.nonzero()
    parts = _whole_parts(a, b, width)
    if parts > slices.most_parts(engine.width):
        totals = _exact_totals(a.values[0], b.values[0], row_column)
        values = [_to_float(total, _TOTAL_EXPONENT) for total in totals]
        return torch.tensor(values, dtype=torch.float64, device=a.values.device)
    left = slices.cut(a.values, a.exponent, width, parts, dtype=engine.dtype)
    right = slices.cut(b.values, b.exponent, width, parts, dtype=engine.dtype, is_reversed=True)
    terms = slices.multiply(left, right, engine)
    least = min(term.exponent for term in terms)
    columns = [
        [int(value) << term.exponent - least for value in term.integer[0][wanted].tolist()]
        for term in terms
    ]
    exponent = (a.exponent[0].unsqueeze(-1) + b.exponent[0])[wanted] + (least - 2 * (width - 1))
    sums = (sum(parts) for parts in zip(*columns, strict=True))
    values = [_to_float(total, e) for total, e in zip(sums, exponent.tolist(), strict=True)]
    return torch.tensor(values, dtype=torch.float64, device=a.values.device)


def put_pairs(high: Tensor, low: Tensor, wanted: Tensor, a: Operand, b: Operand) -> None:
    """Writes hi = RN(product) and lo = RN(product - hi) where they are wanted."""
    for index in wanted.any(-1).any(-1).nonzero().flatten().tolist():
        row_column = wanted[index].nonzero()
        totals = _exact_totals(a.values[index], b.values[index], row_column)
        pairs = [_pair(total) for total in totals]
        values = torch.tensor(pairs, dtype=torch.float64, device=high.device)
        high[index][wanted[index]], low[index][wanted[index]] = values.unbind(-1)


def _pair(total: int) -> tuple[float, float]:
    high = _to_float(total, _TOTAL_EXPONENT)
    if math.isinf(high):
        return high, 0.0
    numerator, denominator = high.as_integer_ratio()
    rest = total - numerator * (2**-_TOTAL_EXPONENT // denominator)
    return high, _to_float(rest, _TOTAL_EXPONENT)


def _exact_totals(a: Tensor, b: Tensor, row_column: Tensor) -> list[int]:
    """Elements of a b^T in units of 2^-2148, for exponents further apart than slices follow."""
    rows = {row: _integers(a[row]) for row in row_column[:, 0].unique().tolist()}
    columns = {column: _integers(b[column]) for column in row_column[:, 1].unique().tolist()}
    return [sum(map(operator.mul, rows[i], columns[j])) for i, j in row_column.tolist()]


def _integers(x: Tensor) -> list[int]:
    """x in units of 2^-1074."""
    ratios = (value.as_integer_ratio() for value in x.tolist())
    return [numerator * (2**-_LEAST_EXPONENT // denominator) for numerator, denominator in ratios]


def _to_float(integer: int, exponent: int) -> float:
    if exponent >= 0:
        return rounded_ratio(integer << exponent, 1)
    return rounded_ratio(integer, 1 << -exponent)
