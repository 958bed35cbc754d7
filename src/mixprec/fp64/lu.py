"""The LU factorisation with partial pivoting: native panels, emulated updates.

    A[perm] = L U,   U_1k = L_11^-1 A_1k (corrected once),   A_ik <- A_ik - L_i1 U_1k

A row exchange found in a panel is done in the whole matrix at once, so that pivots are those of the
unblocked algorithm wherever rounding does not decide between two of them.

Sources: Golub and Van Loan, Matrix Computations, section 3.4 (blocked, pivoted). The gradient
splits the square part from what lies below or beside it: L_2 = A_2 U^-1, U_2 = L^-1 A_2.
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
    checked_options,
    permuted,
)
from mixprec.fp64.operator import define
from mixprec.fp64.triangular import solve_triangular


def lu(
    A: Tensor,
    *,
    pivot: bool = True,
    bits: int | str = "auto",
    engine: str = "auto",
    block_size: int = BLOCK_SIZE,
) -> tuple[Tensor, Tensor, Tensor]:
    """(P, L, U) with A = P L U: P a permutation, L unit lower and U upper triangular.

    ``torch.linalg.lu`` with its products emulated: panels of ``block_size`` columns are factored
    natively with partial pivoting, the rows of U beside each are solved with one correction in
    twice the precision, and the update of what remains is an emulated product.

    Args:
        A: [..., m, n], float64 or complex128.
        pivot: Exchange rows; without, P is empty as torch returns it, and on every device.
        bits: Mantissa bits of every product, as ``fp64.matmul`` takes them.
        engine: Engine of the products, as ``fp64.matmul`` takes it.
        block_size: Columns of a panel.

    Returns: P [..., m, m] in A's dtype, L [..., m, k], U [..., k, n]; k = min(m, n).

    Raises:
        TypeError: A is not float64 or complex128.
        ValueError: A has fewer than two axes, or an option is out of range.

    Edge cases: a singular A is factored, with zeros on U's diagonal; without pivots a zero there
    gives inf and NaN. inf and NaN in A reach L and U.

    Exactness: P is exact; |P L U - A| is at most that of the native panels and one rounding an
    update. Gradients of L and U to any order; they need the leading k x k part of U to be regular.
    """
    options = checked_options(bits, engine, block_size)
    check_matrices("A", A)
    order, lower, upper = _lu(A, pivot, *options.arguments)
    if not pivot:
        return A.new_empty(0), lower, upper
    return permutation_matrix(order, A.dtype), lower, upper


def permutation_matrix(order: Tensor, dtype: torch.dtype) -> Tensor:
    """P [..., m, m] with (P X)[order] = X, for order [..., m]."""
    size = order.shape[-1]
    identity = torch.eye(size, dtype=dtype, device=order.device)
    return permuted(identity.expand(*order.shape, size), order).mT


def factor(a: Tensor, *, pivot: bool, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """(order, L, U) with A[order] = L U, without gradients: a [..., m, n], order [..., m] int64."""
    work = a.clone(memory_format=torch.contiguous_format)
    m, n = a.shape[-2:]
    k = min(m, n)
    order = torch.arange(m, device=a.device).expand(*a.shape[:-1]).contiguous()
    for start, stop in options.blocks(k):
        panel = work[..., start:, start:stop]
        if pivot:
            factors, exchanges = _panel(panel)
            work[..., start:, :] = permuted(work[..., start:, :], exchanges)
            order[..., start:] = order[..., start:].gather(-1, exchanges)
        else:
            factors = _panel_in_order(panel)
        work[..., start:, start:stop] = factors
        if stop < n:
            width = stop - start
            top = options.solve_block(
                factors[..., :width, :],
                work[..., start:stop, stop:],
                upper=False,
                unitriangular=True,
            )
            work[..., start:stop, stop:] = top
            if stop < m:
                work[..., stop:, stop:] -= options.product(factors[..., width:, :], top)
    lower = work[..., :k].tril(-1) + torch.eye(m, k, dtype=a.dtype, device=a.device)
    return order, lower, work[..., :k, :].triu()


def _panel(panel: Tensor) -> tuple[Tensor, Tensor]:
    factors, pivots, _ = torch.linalg.lu_factor_ex(panel)
    order = torch.arange(panel.shape[-2], device=panel.device).expand(panel.shape[:-1]).contiguous()
    for row in range(pivots.shape[-1]):
        other = pivots[..., row : row + 1].long() - 1
        moved = order.gather(-1, other)
        order.scatter_(-1, other, order[..., row : row + 1].clone())
        order[..., row : row + 1] = moved
    return factors, order


def _panel_in_order(panel: Tensor) -> Tensor:
    # torch has no unpivoted factorisation on a CPU
    work = panel.clone()
    for column in range(min(panel.shape[-2:])):
        below = work[..., column + 1 :, column : column + 1]
        below /= work[..., column : column + 1, column : column + 1]
        work[..., column + 1 :, column + 1 :] -= (
            below * work[..., column : column + 1, column + 1 :]
        )
    return work


def _run_lu(
    a: Tensor, pivot: bool, bits: int | None, engine: str, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    return factor(a, pivot=pivot, options=Options(bits, engine, block_size))


def _fake_lu(a: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    *batch, m, n = a.shape
    k = min(m, n)
    order = a.new_empty((*batch, m), dtype=torch.int64)
    return order, a.new_empty((*batch, m, k)), a.new_empty((*batch, k, n))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, *ctx.arguments = inputs
    ctx.save_for_backward(*output)
    ctx.mark_non_differentiable(output[0])


def _backward(ctx: Any, _: Any, grad_lower: Tensor, grad_upper: Tensor) -> tuple[Any, ...]:
    order, lower, upper = ctx.saved_tensors
    options = Options(*ctx.arguments)
    grad = _gradient(grad_lower, grad_upper, lower, upper, options)
    return permuted(grad, order.argsort(-1)), None, None, None, None


def _gradient(
    grad_lower: Tensor, grad_upper: Tensor, lower: Tensor, upper: Tensor, options: Options
) -> Tensor:
    """The gradient of A[order] from those of L and U, in terms that have gradients themselves."""
    product = options.product
    k = lower.shape[-1]
    square_lower, square_upper = lower[..., :k, :], upper[..., :k]
    beside = below = None
    if upper.shape[-1] > k:
        # U_2 = L^-1 A_2 depends on A_2 and on L
        beside = _solve(square_lower.mH, grad_upper[..., k:], options, upper=True, unit=True)
        grad_lower = grad_lower - product(beside, upper[..., k:].mH)
    if lower.shape[-2] > k:
        # L_2 = A_2 U^-1 depends on A_2 and on U
        below = _solve(square_upper.mH, grad_lower[..., k:, :], options, upper=False, left=False)
        grad_upper = grad_upper - product(lower[..., k:, :].mH, below)
    inner = product(square_lower.mH, grad_lower[..., :k, :]).tril(-1)
    inner = inner + product(grad_upper[..., :k], square_upper.mH).triu()
    inner = _solve(square_upper.mH, inner, options, upper=False, left=False)
    grad = _solve(square_lower.mH, inner, options, upper=True, unit=True)
    if beside is not None:
        return torch.cat([grad, beside], -1)
    return grad if below is None else torch.cat([grad, below], -2)


def _solve(
    a: Tensor, b: Tensor, options: Options, *, upper: bool, left: bool = True, unit: bool = False
) -> Tensor:
    return solve_triangular(
        a, b, upper=upper, left=left, unitriangular=unit, **options.as_keywords()
    )


_lu = define("fp64_lu", _run_lu, fake=_fake_lu, backward=_backward, setup_context=_save)
torch.library.register_vmap(_lu, batch_rule(_lu, 1))
