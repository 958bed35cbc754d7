"""Linear systems: one emulated LU factorisation, and one step of iterative refinement.

    X = U^-1 L^-1 B[order],   X <- X + A^-1 (B - A X)

with the residual from a product in twice the precision. Gradients solve with the adjoint of A and
the same factors: no order of differentiation factors A again.

Sources: Higham, Accuracy and Stability of Numerical Algorithms, chapter 12; Skeel 1980 (one step
makes the backward error small component by component).
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
    corrected,
    permuted,
    same_batch,
)
from mixprec.fp64.lu import factor
from mixprec.fp64.operator import define
from mixprec.fp64.triangular import solve_in_blocks


def solve(
    A: Tensor,
    B: Tensor,
    *,
    left: bool = True,
    bits: int | str = "auto",
    engine: str = "auto",
    block_size: int = BLOCK_SIZE,
) -> Tensor:
    """X of A X = B, or of X A = B where not ``left``.

    ``torch.linalg.solve`` with its products emulated: ``fp64.lu`` with partial pivoting, two
    triangular solves, and one step of iterative refinement, its residual in twice the precision.

    Args:
        A: [..., n, n], float64 or complex128.
        B: [..., n, k], or [..., k, n] where not left, with leading axes that broadcast; or, on the
            left, vectors: [n], or [..., n] with exactly A's leading axes. A's dtype.
        left: A stands on the left of X.
        bits: Mantissa bits of every product of the factorisation, as ``fp64.matmul`` takes them.
        engine: Engine of the products, as ``fp64.matmul`` takes it.
        block_size: Columns of a panel.

    Returns: X, of B's shape with A's leading axes.

    Raises:
        TypeError: A or B is not float64 or complex128, or the dtypes differ.
        ValueError: Shapes that do not fit, an option out of range.
        torch.linalg.LinAlgError: A is singular: a pivot is zero.

    Edge cases: inf and NaN in A or B reach the X that depends on them. n = 0 gives an empty X.

    Exactness: not exact; after refinement |B - A X| is about one rounding of |A| |X| + |B| unless A
    is singular to working precision. Gradients of both operands, to any order.
    """
    options = checked_options(bits, engine, block_size)
    check_matrices("A", A, square=True)
    is_vector = left and (B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1]))
    if is_vector:
        B = B.unsqueeze(-1)
    check_matrices("B", B)
    check_pair(A, B, left=left)
    A, B = same_batch(A, B)
    if not left:
        return _with_gradients(A.mT, B.mT, options).mT
    x = _with_gradients(A, B, options)
    return x.squeeze(-1) if is_vector else x


def _with_gradients(a: Tensor, b: Tensor, options: Options) -> Tensor:
    arguments = options.arguments
    order, lower, upper = _factors(a.detach(), *arguments)
    return _apply(a, b, order, lower, upper, False, *arguments)


def _run_factors(
    a: Tensor, bits: int | None, engine: str, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    order, lower, upper = factor(a, pivot=True, options=Options(bits, engine, block_size))
    is_singular = (upper.diagonal(dim1=-2, dim2=-1) == 0).any(-1)
    if bool(is_singular.any()):
        where = int(is_singular.reshape(-1).nonzero()[0, 0])
        batch = f" in batch element {where}" if is_singular.ndim else ""
        raise torch.linalg.LinAlgError(
            f"A: got a singular matrix{batch}; a pivot is zero and A X = B has no single solution; "
            "use torch.linalg.lstsq"
        )
    return order, lower, upper


def _fake_factors(a: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    order = a.new_empty(a.shape[:-1], dtype=torch.int64)
    return order, a.new_empty(a.shape), a.new_empty(a.shape)


def _run_apply(
    a: Tensor,
    b: Tensor,
    order: Tensor,
    lower: Tensor,
    upper: Tensor,
    adjoint: bool,
    bits: int | None,
    engine: str,
    block_size: int,
) -> Tensor:
    options = Options(bits, engine, block_size)
    x = _substitute(b, order, lower, upper, adjoint, options)
    rest = options.residual(a.mH if adjoint else a, x, b)
    return corrected(x, _substitute(rest, order, lower, upper, adjoint, options)).contiguous()


def _substitute(
    b: Tensor, order: Tensor, lower: Tensor, upper: Tensor, adjoint: bool, options: Options
) -> Tensor:
    if not adjoint:
        y = solve_in_blocks(
            lower, permuted(b, order), upper=False, unitriangular=True, options=options
        )
        return solve_in_blocks(upper, y, upper=True, unitriangular=False, options=options)
    y = solve_in_blocks(upper.mH, b, upper=False, unitriangular=False, options=options)
    x = solve_in_blocks(lower.mH, y, upper=True, unitriangular=True, options=options)
    return permuted(x, order.argsort(-1))


def _fake_apply(a: Tensor, b: Tensor, *_: Any) -> Tensor:
    return b.new_empty(b.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, _, order, lower, upper, *ctx.arguments = inputs
    ctx.save_for_backward(a, order, lower, upper, output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    a, order, lower, upper, x = ctx.saved_tensors
    adjoint, *options = ctx.arguments
    grad_b = _apply(a, grad, order, lower, upper, not adjoint, *options)
    grad_a = None
    if ctx.needs_input_grad[0]:
        left, right = (x, grad_b.mH) if adjoint else (grad_b, x.mH)
        grad_a = -Options(*options).product(left, right)
    # the factors are functions of A whose part of the gradient is in grad_a
    return grad_a, grad_b, *(None for _ in range(3 + len(ctx.arguments)))


_factors = define("fp64_solve_factors", _run_factors, fake=_fake_factors)
_apply = define("fp64_solve", _run_apply, fake=_fake_apply, backward=_backward, setup_context=_save)
torch.library.register_vmap(_factors, batch_rule(_factors, 1))
torch.library.register_vmap(_apply, batch_rule(_apply, 5))
