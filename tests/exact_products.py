"""Exact products of float64 matrices in Python integers, and matrices that break inexact ones.

Nothing of the package is used: an element is an integer times a power of two, and so are products,
errors and bounds, all compared as integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

UNIT = 2.0**-53
LARGEST = torch.finfo(torch.float64).max


@dataclass(frozen=True)
class Exact:
    """integers * 2^exponent, integers an object array of Python integers."""

    integers: np.ndarray
    exponent: int

    def on(self, exponent: int) -> np.ndarray:
        """The integers in units of 2^exponent, which is at most the own one."""
        return self.integers * (1 << self.exponent - exponent)

    def fractions(self) -> list[Fraction]:
        return [Fraction(int(n)) * Fraction(2) ** self.exponent for n in self.integers.flat]


def exact(x: Tensor) -> Exact:
    """A finite float64 tensor as it is."""
    pairs = [math.frexp(value) for value in x.detach().flatten().tolist()]
    least = min((e for value, e in pairs if value), default=0) - 53
    integers = np.empty(len(pairs), dtype=object)
    integers[:] = [int(v * 2.0**53) << e - 53 - least if v else 0 for v, e in pairs]
    return Exact(integers.reshape(tuple(x.shape)), least)


def product(a: Tensor, b: Tensor) -> Exact:
    """A B of real matrices."""
    left, right = exact(a), exact(b)
    shape = (a.shape[0], b.shape[1])
    integers = left.integers.dot(right.integers) if a.shape[1] else np.zeros(shape, dtype=object)
    return Exact(integers, left.exponent + right.exponent)


def magnitudes(a: Tensor, b: Tensor) -> Exact:
    """|A| |B|."""
    return product(a.abs(), b.abs())


def nearest(value: Fraction) -> float:
    """The float64 nearest to a fraction, as Python divides integers."""
    try:
        return value.numerator / value.denominator
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def rounded(a: Tensor, b: Tensor) -> Tensor:
    """A B, each element correctly rounded."""
    values = [nearest(value) for value in product(a, b).fractions()]
    return torch.tensor(values, dtype=torch.float64).reshape(a.shape[0], b.shape[1])


def errors(c: Tensor | tuple[Tensor, Tensor], wanted: Exact) -> Exact:
    """|C - wanted|; c may be a pair that is summed, and is finite."""
    parts = [exact(part) for part in (c if isinstance(c, tuple) else (c,))]
    exponent = min(part.exponent for part in (*parts, wanted))
    total = sum(part.on(exponent) for part in parts) - wanted.on(exponent)
    return Exact(np.abs(total), exponent)


def excess(
    c: Tensor | tuple[Tensor, Tensor], wanted: Exact, bound: Tensor
) -> list[tuple[int, ...]]:
    """Where |C - wanted| is above a bound; an infinite bound allows anything."""
    known = torch.isfinite(bound)
    parts = c if isinstance(c, tuple) else (c,)
    assert all(bool(torch.isfinite(part[known]).all()) for part in parts)
    cleared = tuple(torch.where(known, part, 0.0) for part in parts)
    off = errors(cleared, wanted)
    allowed = exact(torch.where(known, bound, 0.0))
    exponent = min(off.exponent, allowed.exponent)
    over = (off.on(exponent) > allowed.on(exponent)).astype(bool) & known.numpy()
    return [tuple(place) for place in np.argwhere(over)]


def shares(off: Exact, sums: Exact) -> list[float]:
    """off / sums in units of 2^-53; where a sum is 0, so must be what is off."""
    exponent = min(off.exponent, sums.exponent)
    pairs = zip(off.on(exponent).flat, sums.on(exponent).flat, strict=True)
    found = []
    for error, total in pairs:
        assert total or not error, "an error where every product is 0"
        found.append(float(Fraction(int(error), int(total)) * 2**53) if total else 0.0)
    return found


def grade(c: Tensor | tuple[Tensor, Tensor], a: Tensor, b: Tensor) -> float:
    """The largest |C - A B| / (2^-53 |A| |B|)."""
    return max(shares(errors(c, product(a, b)), magnitudes(a, b)), default=0.0)


def as_real(x: Tensor) -> Tensor:
    """A complex matrix as the real one of twice the size that multiplies alike."""
    x = x.detach().resolve_conj().resolve_neg()
    return torch.cat([torch.cat([x.real, -x.imag], -1), torch.cat([x.imag, x.real], -1)], -2)


def complex_excess(c: Tensor, a: Tensor, b: Tensor, bound: Tensor) -> list[tuple[int, ...]]:
    """``excess`` of the absolute values of complex errors."""
    rows, columns = c.shape
    wanted = product(as_real(a), as_real(b))
    half = Exact(wanted.integers[:, :columns], wanted.exponent)
    off = errors(torch.cat([c.real, c.imag]), half)
    allowed = exact(bound)
    exponent = min(off.exponent, allowed.exponent)
    real, imaginary = off.on(exponent)[:rows], off.on(exponent)[rows:]
    over = real * real + imaginary * imaginary > allowed.on(exponent) ** 2
    return [tuple(place) for place in np.argwhere(over.astype(bool))]


def _uniform(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, dtype=torch.float64, generator=generator)


def _normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _spread(phi: float) -> Callable[[int, int, int], tuple[Tensor, Tensor]]:
    """(U - 1/2) exp(phi N): the wider, the larger phi."""

    def make(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
        a, b = (_uniform(*shape, seed=i) - 0.5 for i, shape in enumerate(((m, k), (k, n))))
        return a * torch.exp(phi * _normal(m, k, seed=2)), b * torch.exp(
            phi * _normal(k, n, seed=3)
        )

    return make


def _randn(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    return _normal(m, k, seed=4), _normal(k, n, seed=5)


def _complementary_zeros(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Demmel et al., test 2: products that are exactly 0 beside others that are not."""
    a, b = _randn(m, k, n)
    a[::2, ::2] = 0
    a[1::2, 1::2] = 0
    b[1::2, ::2] = 0
    b[::2, 1::2] = 0
    return a, b


def _circular_shifts(bits: int) -> Callable[[int, int, int], tuple[Tensor, Tensor]]:
    """Demmel et al., test 4: shifts of x D and D^-1 x, D from 2^-bits to 2^bits."""

    def make(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
        x = 1 + _uniform(k, seed=6)
        d = 2.0 ** torch.linspace(-bits, bits, k, dtype=torch.float64).round()
        a = torch.stack([torch.roll(x * d, i) for i in range(m)])
        return a, torch.stack([torch.roll(x / d, i) for i in range(n)], 1)

    return make


def _graded(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Rows of A and columns of B from 2^-300 to 2^300."""
    a, b = _randn(m, k, n)
    rows, columns = (
        2.0 ** torch.linspace(-300, 300, size, dtype=torch.float64).round() for size in (m, n)
    )
    return a * rows.unsqueeze(-1), b * columns.flip(0)


def _graded_inner(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Columns of A and rows of B that both fall, so that a few products decide."""
    a, b = _randn(m, k, n)
    scale = 2.0 ** torch.linspace(0, -60, k, dtype=torch.float64).round()
    return a * scale, b * scale.unsqueeze(-1)


def _cancelling(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Sums that cancel to 2^-50 of their products."""
    half = k // 2
    a, b = _randn(m, half, n)
    return torch.cat([a, -a * (1 + 2.0**-50)], 1), torch.cat([b, b])


def _leading_ones(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Values just below powers of two, of all signs."""
    a, b = _randn(m, k, n)
    return tuple(
        torch.sign(x) * 2.0 ** torch.floor(3 * x) * (1 - 2.0 ** -(4 + 49 * x.abs().frac()).floor())
        for x in (a, b)
    )


GENERATORS: dict[str, Callable[[int, int, int], tuple[Tensor, Tensor]]] = {
    "randn": _randn,
    **{f"phi {phi}": _spread(phi) for phi in (0.5, 1, 2, 4)},
    "complementary zeros": _complementary_zeros,
    **{f"circular shifts {bits}": _circular_shifts(bits) for bits in (4, 30, 250)},
    "graded": _graded,
    "graded inner": _graded_inner,
    "cancelling": _cancelling,
    "leading ones": _leading_ones,
}
"""Pairs of matrices [m, k] and [k, n] by name."""
