"""How many bits a product needs: certificates that its error is within a share of |A||B|.

With rows and columns scaled to below 1 by their exponents, S = |A'||B'| lies between 0 and k, and
an error of t * k, the same everywhere in these units, is a share t k / S[m, n] of (|A||B|)[m, n].

- ``least_sums``: S from one float32 product of magnitudes, a lower bound after a margin for its
  roundings. Sharp, but products below 2^-126 may be lost.
- ``exponent_span``: S is at least the largest product, which the largest exponents along the
  contraction bound from below; taken where float32 lost everything.

Sources: the exponent span of cuBLAS's dynamic precision (Schwarz et al. 2025), its estimate by
blocks of the contraction (a zero has the exponent -inf there, or the bound fails); a lower bound by
a product of leading digits, here of float32 magnitudes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mixprec.fp64.arithmetic import exponent_of, scale

# TF32 or BF16 may stand in for FP32 products: 2 * 2^-8 for the operands; FP32 sums, k * 2^-23
_OPERAND_MARGIN = 2.0**-6
_SUM_MARGIN = 2.0**-23
_SMALL_PRODUCT = 2.0**-147
_LONGEST = 1 << 21
_SPAN_BLOCK = 64
_NO_EXPONENT = -math.inf
# elements of the largest temporary of a span
_TILE_ELEMENTS = 1 << 22


def least_sums(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """S from below, by one float32 product; 0 or below where it may have lost everything.

    Args:
        a: float64 [batch, m, k], finite.
        b: float64 [batch, n, k], finite.
        rows, columns: int64 [batch, m] and [batch, n], |a| < 2^rows, |b| < 2^columns.

    Returns:
        float32 [batch, m, n].
    """
    # a part of a long contraction has a smaller sum, which bounds the whole from below
    a, b = a[..., :_LONGEST], b[..., :_LONGEST]
    sums = torch.matmul(_magnitudes(a, rows), _magnitudes(b, columns).mT)
    # products in float32's subnormal range may have been rounded up
    sums.mul_(1 - _OPERAND_MARGIN - _SUM_MARGIN * a.shape[-1])
    return sums.sub_(a.shape[-1] * _SMALL_PRODUCT)


def bits_lost(sums: Tensor, a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """log2(k / S): how many bits the largest products may stand above (|A||B|) / k.

    Args:
        sums: From ``least_sums`` of the others.
        a, b, rows, columns: As there.

    Returns:
        float32 [batch, m, n]; -inf where no product is other than 0, so that the result is exact.
    """
    lost = math.log2(max(a.shape[-1], 1)) - torch.log2(sums.clamp(min=0))
    for index in torch.isinf(lost).any(-1).any(-1).nonzero().flatten().tolist():
        _refine(lost[index], a[index], b[index], rows[index], columns[index])
    return lost


def _magnitudes(x: Tensor, exponent: Tensor) -> Tensor:
    return scale(x, -exponent.unsqueeze(-1)).abs_().to(torch.float32)


def _refine(lost: Tensor, a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Replaces what is infinite for a matrix, in place, by the exponent span."""
    missing = torch.isinf(lost)
    row, column = missing.any(-1).nonzero().flatten(), missing.any(-2).nonzero().flatten()
    block = (row.unsqueeze(-1), column.unsqueeze(0))
    span = exponent_span(a[row], b[column], rows[row], columns[column])
    known = math.log2(max(a.shape[-1], 1))
    lost[block] = torch.where(missing[block], span.to(lost.dtype) + known, lost[block])


def exponent_span(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """How far the largest product lies below the product of the largest, in bits, or further up.

    Args:
        a: float64 [m, k]; b: float64 [n, k]; finite.
        rows, columns: As in ``bits_lost``.

    Returns:
        float64 [m, n]: rows + columns minus an exponent that the largest |a b| reaches; at least
        the exact span, by blocks of 64 along the contraction; -inf where every product is 0.
    """
    largest_a, least_a = _extremes(a)
    largest_b, least_b = _extremes(b)
    found = torch.maximum(_max_plus(largest_a, least_b), _max_plus(least_a, largest_b))
    span = rows.unsqueeze(-1) + columns.unsqueeze(0) - found
    is_zero = (a != 0).to(torch.float32) @ (b != 0).to(torch.float32).mT == 0
    return torch.where(is_zero, _NO_EXPONENT, span)


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Largest and least exponents of each block of the contraction; -inf for zeros."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % _SPAN_BLOCK))
    # |x| >= 2^(e - 1)
    exponent = (exponent_of(padded) - 1).to(torch.float64)
    exponent = torch.where(padded != 0, exponent, _NO_EXPONENT)
    blocks = exponent.unflatten(-1, (-1, _SPAN_BLOCK))
    return blocks.amax(-1), blocks.amin(-1)


def _max_plus(x: Tensor, y: Tensor) -> Tensor:
    """max over the last axis of x[m, :] + y[n, :], rows by rows."""
    step = max(1, _TILE_ELEMENTS // max(y.numel(), 1))
    parts = [(x[i : i + step, None] + y).amax(-1) for i in range(0, x.shape[0], step)]
    return torch.cat(parts)
