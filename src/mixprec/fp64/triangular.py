"""Triangular solves: native blocks on the diagonal, emulated products beside it.

    X_i = D_i^-1 (B_i - A[i, known] X[known]),   then X_i <- X_i + D_i^-1 (R_i - D_i X_i)

with R_i the right-hand side in brackets. Each block row is one product of all the rows known so
far, so that a row is rounded once however many blocks there are.

Sources: Higham, Accuracy and Stability of Numerical Algorithms, chapter 8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mixprec.fp64.blocked import (
    BLOCK_SIZE,
    Options,
    batch_rule,
    check_matrices,
    check_pair,
    checked_options,
    same_batch,
)
from mixprec.fp64.operator import define


def solve_triangular(
    A: Tensor,
    B: Tensor,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
    bits: int | str = "auto",
    engine: str = "auto",
    block_size: int = BLOCK_SIZE,
) -> Tensor:
    """X of A X = B, or of X A = B where not ``left``, with A triangular.

    ``torch.linalg.solve_triangular`` with its products emulated. The solves with diagonal blocks of
    ``block_size`` rows are native, each followed by one correction whose residual is formed from
    a product in twice the precision.

    Args:
        A: [..., n, n], float64 or complex128. The other triangle is not read, nor is the diagonal
            where unitriangular.
        B: [..., n, k], or [..., k, n] where not left; A's dtype. Leading axes broadcast.
        upper: A is upper triangular; otherwise lower.
        left: A stands on the left of X.
        unitriangular: The diagonal of A counts as ones.
        bits: Mantissa bits of every product, as ``fp64.matmul`` takes them.
        engine: Engine of the products, as ``fp64.matmul`` takes it.
        block_size: Rows of a diagonal block.

    Returns: X, contiguous, of B's shape with A's leading axes.

    Raises:
        TypeError: A or B is not float64 or complex128, or the dtypes differ.
        ValueError: Shapes that do not fit, an option out of range.

    Edge cases: a zero on the diagonal gives inf or NaN, as natively; inf and NaN in A or B reach
    what depends on them. Empty A or B give an empty X.

    Exactness: not exact; the backward error is that of one product and one corrected block a row.
    Gradients of both operands, to any order.
    """
    options = checked_options(bits, engine, block_size)
    check_matrices("A", A, square=True)
    check_matrices("B", B)
    check_pair(A, B, left=left)
    A, B = same_batch(A, B)
    arguments = (unitriangular, *options.arguments)
    if left:
        return _solve_triangular(A, B, upper, *arguments)
    return _solve_triangular(A.mT, B.mT, not upper, *arguments).mT


def solve_in_blocks(
    a: Tensor, b: Tensor, *, upper: bool, unitriangular: bool, options: Options
) -> Tensor:
    """X of A X = B without gradients: a [..., n, n], b [..., n, k], equal leading axes."""
    x = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    n = a.shape[-1]
    blocks = options.blocks(n) if x.numel() else []
    for start, stop in reversed(blocks) if upper else blocks:
        first, last = (stop, n) if upper else (0, start)
        right = b[..., start:stop, :]
        if first < last:
            beside = a[..., start:stop, first:last]
            right = right - options.product(beside, x[..., first:last, :])
        block = a[..., start:stop, start:stop]
        x[..., start:stop, :] = options.solve_block(
            block, right, upper=upper, unitriangular=unitriangular
        )
    return x


def _run_solve_triangular(
    a: Tensor,
    b: Tensor,
    upper: bool,
    unitriangular: bool,
    bits: int | None,
    engine: str,
    block_size: int,
) -> Tensor:
    options = Options(bits, engine, block_size)
    return solve_in_blocks(a, b, upper=upper, unitriangular=unitriangular, options=options)


def _fake_solve_triangular(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return b.new_empty(b.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, *ctx.arguments = inputs
    ctx.save_for_backward(a, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, x = ctx.saved_tensors
    upper, unitriangular, *options = ctx.arguments
    grad_b = _solve_triangular(a.mH, grad, not upper, unitriangular, *options)
    grad_a = None
    if ctx.needs_input_grad[0]:
        product = -Options(*options).product(grad_b, x.mH)
        diagonal = 1 if unitriangular else 0
        grad_a = product.triu(diagonal) if upper else product.tril(-diagonal)
    return grad_a, grad_b, *(None for _ in ctx.arguments)


_solve_triangular = define(
    "fp64_solve_triangular",
    _run_solve_triangular,
    fake=_fake_solve_triangular,
    backward=_backward,
    setup_context=_save,
)
torch.library.register_vmap(_solve_triangular, batch_rule(_solve_triangular, 2))
