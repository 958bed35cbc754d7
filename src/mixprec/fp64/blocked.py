"""Blocked algorithms: native panels, emulated updates, residuals in twice the precision.

    R = B - A X        from A X as a pair of float64, so that R keeps its leading bits
    X <- X + D^-1 R    one correction, wherever it is finite

What the factorisations and solves have alike: their options, blocks, checks, and the solve with one
triangular block.

Sources: Higham, Accuracy and Stability of Numerical Algorithms, chapters 8 (triangular solves) and
12 (refinement).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixprec.fp64.arithmetic import two_sum
from mixprec.fp64.engines import check_engine
from mixprec.fp64.matmul import matmul
from mixprec.fp64.request import Request

BLOCK_SIZE = 128
"""Default width of a panel: what is native of a factorisation of n columns is about 128 / n."""


@dataclass(frozen=True, slots=True)
class Options:
    """How the products of a blocked algorithm are made.

    Attributes:
        bits: Mantissa bits of each product; None lets each product choose by its operands.
        engine: Engine of the products, or "auto".
        block_size: Columns of a native panel.
    """

    bits: int | None
    engine: str
    block_size: int

    @property
    def arguments(self) -> tuple[int | None, str, int]:
        """The options as the operators take them."""
        return self.bits, self.engine, self.block_size

    def as_keywords(self) -> dict[str, Any]:
        """The options as the public functions take them."""
        bits = "auto" if self.bits is None else self.bits
        return {"bits": bits, "engine": self.engine, "block_size": self.block_size}

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """The emulated a @ b, with gradients."""
        return matmul(a, b, bits="auto" if self.bits is None else self.bits, engine=self.engine)

    def residual(self, a: Tensor, x: Tensor, b: Tensor) -> Tensor:
        """B - A X, the product kept as two float64: |error| is about 2^-100 |A| |X| + 2^-53 |R|."""
        high, low = matmul(a, x, engine=self.engine, output="double_double")
        if not b.is_complex():
            return _less(b, high, low)
        parts = zip(
            *(torch.view_as_real(part.resolve_conj()).unbind(-1) for part in (b, high, low)),
            strict=True,
        )
        return torch.complex(*(_less(*part) for part in parts))

    def blocks(self, length: int) -> list[tuple[int, int]]:
        """First and last-but-one index of each block of ``length`` rows or columns."""
        return [
            (start, min(start + self.block_size, length))
            for start in range(0, length, self.block_size)
        ]

    def solve_block(
        self, block: Tensor, right: Tensor, *, upper: bool, unitriangular: bool = False
    ) -> Tensor:
        """X of D X = R for one triangular block: a native solve and one correction of its residual.

        Entries of D outside its triangle, and its diagonal where unitriangular, are not read.
        """
        block = triangle(block, upper=upper, unitriangular=unitriangular)
        x = torch.linalg.solve_triangular(block, right, upper=upper)
        rest = self.residual(block, x, right)
        return corrected(x, torch.linalg.solve_triangular(block, rest, upper=upper))


def _less(b: Tensor, high: Tensor, low: Tensor) -> Tensor:
    total, error = two_sum(b, -high)
    return total + (error - low)


def checked_options(bits: Any, engine: str, block_size: int) -> Options:
    """The checked options of a public function.

    Raises:
        TypeError: bits is neither "auto" nor a whole number.
        ValueError: bits out of range, an unknown engine, block_size not positive.
    """
    chosen = Request(bits=None if bits == "auto" else bits, engine=check_engine(engine))
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(
            f"block_size: got {block_size!r}; panels have at least one column; "
            f"use block_size={BLOCK_SIZE}"
        )
    return Options(chosen.bits, engine, block_size)


def check_matrices(name: str, x: Tensor, *, square: bool = False) -> None:
    """Refuse what is no batch of float64 or complex128 matrices.

    Raises:
        TypeError: The dtype is another.
        ValueError: x has fewer than two axes, or must be square and is not.
    """
    if x.dtype not in (torch.float64, torch.complex128):
        raise TypeError(
            f"{name}: got {x.dtype}; emulated solves take float64 or complex128; convert it"
        )
    if x.ndim < 2:
        raise ValueError(
            f"{name}: got shape {tuple(x.shape)}; matrices have at least 2 axes; unsqueeze it"
        )
    if square and x.shape[-1] != x.shape[-2]:
        raise ValueError(
            f"{name}: got matrices of {x.shape[-2]} x {x.shape[-1]}; they must be square; slice"
        )


def check_pair(a: Tensor, b: Tensor, *, left: bool) -> None:
    """Refuse a right-hand side that does not fit the square matrices A.

    Raises:
        TypeError: The dtypes differ.
        ValueError: The shapes do not fit A X = B (left) or X A = B.
    """
    if a.dtype != b.dtype:
        raise TypeError(f"B: got {b.dtype}; A is {a.dtype} and both must agree; convert one")
    if a.shape[-1] != b.shape[-2 if left else -1]:
        equation = "A X = B" if left else "X A = B"
        raise ValueError(
            f"B: got {b.shape[-2]} x {b.shape[-1]} matrices; {equation} with A of {a.shape[-1]} x "
            f"{a.shape[-1]} needs {a.shape[-1]} {'rows' if left else 'columns'}; transpose or slice"
        )


def same_batch(*matrices: Tensor) -> list[Tensor]:
    """The matrices with their leading axes broadcast against each other."""
    batch = torch.broadcast_shapes(*(x.shape[:-2] for x in matrices))
    return [x.expand(*batch, *x.shape[-2:]) for x in matrices]


def triangle(x: Tensor, *, upper: bool, unitriangular: bool = False) -> Tensor:
    """The triangle of x with zeros beside it, and ones on its diagonal where unitriangular."""
    if not unitriangular:
        return x.triu() if upper else x.tril()
    ones = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
    return (x.triu(1) if upper else x.tril(-1)) + torch.diag(ones)


def corrected(x: Tensor, correction: Tensor) -> Tensor:
    """x + correction where that is finite: inf and NaN of x stay what they are."""
    total = x + correction
    return torch.where(torch.isfinite(total), total, x)


def permuted(x: Tensor, order: Tensor) -> Tensor:
    """Rows of x [..., m, n] in the order [..., m]."""
    return x.gather(-2, order.unsqueeze(-1).expand(*order.shape, x.shape[-1]))


def batch_rule(operator: Callable[..., Any], tensors: int) -> Callable[..., Any]:
    """The rule of ``torch.vmap``: the new axis becomes the first of ``tensors`` operands."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        moved = list(_in_front(info.batch_size, in_dims[:tensors], args[:tensors]))
        result = operator(*moved, *args[tensors:])
        return result, tuple(0 for _ in result) if isinstance(result, tuple) else 0

    return rule


def _in_front(
    size: int, in_dims: tuple[int | None, ...], tensors: tuple[Tensor, ...]
) -> Iterator[Tensor]:
    for dim, x in zip(in_dims, tensors, strict=True):
        yield x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
