"""Exact float64 arithmetic: powers of two, exponents, scaling by them, and sums with their error.

    two_sum(a, b) = (s, t):  s = RN(a + b),  s + t = a + b

Exactness: as each function says, wherever the device follows IEEE 754 without flushing subnormals.

Sources: Knuth, The Art of Computer Programming 2, section 4.2.2 (two_sum); Dekker 1971
(fast_two_sum).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

UNIT = 2.0**-53
"""The unit roundoff of float64: half the distance from 1 to the next number."""
SMALLEST = 2.0**-1074
"""The smallest positive float64."""

_MANTISSA_BITS = 52
_BIAS = 1023
# 2^e and a product with it are exact or round once; beyond, the factor is split in two
_ONE_FACTOR = 1000


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as float64, from its bits.

    Args:
        exponent: int64, any shape. Below -1074 the result is 0, above 1023 inf.
    """
    # torch.ldexp forms powers of integer exponents in float32, which overflows at 2^128
    exponent = exponent.clamp(-2 * _BIAS, 2 * _BIAS)
    half = exponent >> 1
    parts = (
        ((part + _BIAS) << _MANTISSA_BITS).view(torch.float64) for part in _both(exponent, half)
    )
    first, second = parts
    return first * second


def _both(exponent: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    # two normal powers: -1023 has the bits of 0
    limit = _BIAS - 1
    return half.clamp(-limit, limit), (exponent - half).clamp(-limit, limit)


def scale(x: Tensor, exponent: Tensor) -> Tensor:
    """x * 2^exponent, rounded once.

    Args:
        x: float64.
        exponent: int64 that broadcasts with x, from -2200 to 2046.

    Exactness: one rounding, and none where the result is normal; for exponents below -1000 this
    needs |x| >= 2^-400 or x = 0, and smaller x give a result within 2^-1073 of the right one.
    """
    if exponent.numel() == 0 or int(exponent.abs().max()) <= _ONE_FACTOR:
        return x * power_of_two(exponent)
    half = exponent >> 1
    return (x * power_of_two(half)).mul_(power_of_two(exponent - half))


def exponent_of(x: Tensor) -> Tensor:
    """The int64 e with 2^(e - 1) <= |x| < 2^e; 0 for 0, inf and NaN."""
    exponent = torch.frexp(x).exponent.to(torch.int64)
    return torch.where(torch.isfinite(x), exponent, 0)


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum of two float64 tensors and its error, exactly."""
    total = a + b
    b_part = total - a
    a_part = total - b_part
    error = torch.sub(a, a_part, out=a_part).add_(torch.sub(b, b_part, out=b_part))
    return total, error


def fast_two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """``two_sum`` where |a| >= |b| or a = 0, in half the operations."""
    total = a + b
    return total, (a - total).add_(b)


def rounded_ratio(numerator: int, denominator: int) -> float:
    """The quotient correctly rounded, subnormals included, as Python divides integers; or inf."""
    try:
        return numerator / denominator
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf
