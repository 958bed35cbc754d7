"""The Cholesky factorisation: native diagonal blocks, symmetric emulated updates.

    L_jj = chol(A_jj),   L_ij = A_ij L_jj^-H (corrected once),   A_ik <- A_ik - L_ij L_kj^H

The update is a product of a panel with its own adjoint, of which the emulation of a real one
computes about half the pairs of slices.

Sources: Golub and Van Loan, Matrix Computations, section 4.2 (blocked); Murray, Differentiation of
the Cholesky decomposition, 2016 (gradient).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mixprec.fp64.blocked import BLOCK_SIZE, Options, batch_rule, check_matrices, checked_options
from mixprec.fp64.operator import define
from mixprec.fp64.triangular import solve_triangular


def cholesky(
    A: Tensor,
    *,
    upper: bool = False,
    bits: int | str = "auto",
    engine: str = "auto",
    block_size: int = BLOCK_SIZE,
) -> Tensor:
    """L of A = L L^H, lower triangular with a positive diagonal; L^H where ``upper``.

    ``torch.linalg.cholesky`` with its products emulated: diagonal blocks of ``block_size`` columns
    are factored natively, the panel below each is solved with one correction in twice the
    precision, and the update of what remains is a symmetric emulated product.

    Args:
        A: [..., n, n], float64 or complex128, Hermitian positive definite. Only the lower triangle
            is read; where upper only the upper.
        upper: Return L^H.
        bits: Mantissa bits of every product, as ``fp64.matmul`` takes them.
        engine: Engine of the products, as ``fp64.matmul`` takes it.
        block_size: Columns of a panel.

    Returns: L or L^H, zero in the other triangle.

    Raises:
        TypeError: A is not float64 or complex128.
        ValueError: A is not square, or an option out of range.
        torch.linalg.LinAlgError: A is not positive definite; NaN counts as that.

    Edge cases: n = 0 and empty batches give empty factors.

    Exactness: not exact; |A - L L^H| is at most that of the native panels and one rounding an
    update. Gradients (Hermitian) to any order.
    """
    options = checked_options(bits, engine, block_size)
    check_matrices("A", A, square=True)
    arguments = options.arguments
    return _cholesky(A.mH, *arguments).mH if upper else _cholesky(A, *arguments)


def _factor(a: Tensor, options: Options) -> Tensor:
    factor = a.tril().contiguous()
    n = a.shape[-1]
    for start, stop in options.blocks(n):
        block, info = torch.linalg.cholesky_ex(factor[..., start:stop, start:stop])
        _check_definite(info, start)
        factor[..., start:stop, start:stop] = block
        if stop < n:
            below = factor[..., stop:, start:stop].mH
            panel = options.solve_block(block, below, upper=False).mH
            factor[..., stop:, start:stop] = panel
            factor[..., stop:, stop:] -= options.product(panel, panel.mH)
    return factor.tril()


def _check_definite(info: Tensor, start: int) -> None:
    if not bool(info.any()):
        return
    where = info.reshape(-1).nonzero()[0, 0]
    order = start + int(info.reshape(-1)[where])
    batch = f" of batch element {int(where)}" if info.ndim else ""
    raise torch.linalg.LinAlgError(
        f"A: got a matrix whose leading minor of order {order}{batch} is not positive definite; a "
        "Cholesky factorisation needs a Hermitian positive definite matrix; add to its diagonal or "
        "use lu"
    )


def _run_cholesky(a: Tensor, bits: int | None, engine: str, block_size: int) -> Tensor:
    return _factor(a, Options(bits, engine, block_size))


def _fake_cholesky(a: Tensor, *_: Any) -> Tensor:
    return a.new_empty(a.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.arguments = inputs
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    # with S = lower triangle of L^H G, its diagonal halved: grad = L^-H (S + S^H) / 2 L^-1
    (factor,) = ctx.saved_tensors
    options = Options(*ctx.arguments)
    keywords = options.as_keywords()
    lower = options.product(factor.mH, grad).tril()
    lower = lower - torch.diag_embed(lower.diagonal(dim1=-2, dim2=-1) / 2)
    inner = (lower + lower.mH) / 2
    inner = solve_triangular(factor.mH, inner, upper=True, **keywords)
    return solve_triangular(factor, inner, upper=False, left=False, **keywords), None, None, None


_cholesky = define(
    "fp64_cholesky", _run_cholesky, fake=_fake_cholesky, backward=_backward, setup_context=_save
)
torch.library.register_vmap(_cholesky, batch_rule(_cholesky, 1))
