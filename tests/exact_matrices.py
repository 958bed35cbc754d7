"""Matrix products in Python integers, and how far a factorisation is from its matrix, exactly."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from exact_products import exact
from torch import Tensor

UNIT = 2.0**-53


def matrix(rows: int, columns: int, kind: str, dtype: torch.dtype) -> Tensor:
    """Random; graded by rows and columns; or of condition 1e12."""
    x = torch.randn(rows, columns, dtype=dtype)
    if kind == "graded":
        across = torch.logspace(6, -6, columns, dtype=torch.float64)
        return x * torch.logspace(0, 10, rows, dtype=torch.float64).unsqueeze(-1) * across
    if kind == "ill":
        u, s, v = torch.linalg.svd(x, full_matrices=False)
        return (u * torch.logspace(0, -12, s.numel(), dtype=torch.float64)) @ v
    return x


def integers(x: Tensor) -> tuple[np.ndarray, int]:
    """(n, e) with x = n * 2^e for one exponent e, n an array of Python integers."""
    found = exact(x)
    return found.integers, found.exponent


def as_real(x: Tensor) -> Tensor:
    """A complex matrix as the real one of twice the size that multiplies alike."""
    if not x.is_complex():
        return x.detach()
    x = x.detach().resolve_conj()
    return torch.cat([torch.cat([x.real, -x.imag], -1), torch.cat([x.imag, x.real], -1)], -2)


def difference(c: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """C - A B, each element rounded once from its exact value."""
    whole, product, exponent = _differences(as_real(c), as_real(a), as_real(b))
    rounded = [float(Fraction(x) * Fraction(2) ** exponent) for x in (whole - product).flat]
    out = torch.tensor(rounded, dtype=torch.float64).reshape(whole.shape)
    if not c.is_complex():
        return out
    rows, columns = c.shape
    return torch.complex(out[:rows, :columns], out[rows:, :columns])


def _differences(c: Tensor, a: Tensor, b: Tensor) -> tuple[np.ndarray, np.ndarray, int]:
    (left, e), (right, f), (whole, g) = integers(a), integers(b), integers(c)
    exponent = min(e + f, g)
    product = left.dot(right) if a.shape[1] else np.zeros(c.shape, dtype=object)
    return whole * (1 << (g - exponent)), product * (1 << (e + f - exponent)), exponent


def backward_error(c: Tensor, a: Tensor, b: Tensor) -> float:
    """|C - A B| / |C| in Frobenius norms, in units of 2^-53; C - A B without rounding."""
    norm = torch.linalg.norm(c).item()
    return torch.linalg.norm(difference(c, a, b)).item() / (UNIT * norm)


def residual_grade(a: Tensor, x: Tensor, b: Tensor) -> float:
    """The largest |B - A X| / (|A| |X| + |B|), in units of 2^-53; B - A X without rounding."""
    scale = a.abs() @ x.abs() + b.abs()
    share = difference(b, a, x).abs() / torch.where(scale > 0, scale, 1.0)
    return (share.max() / UNIT).item()
