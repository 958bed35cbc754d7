"""The QR factorisation: native panels of Householder vectors, emulated block reflectors.

    panel = H_1 ... H_w R,   H_1 ... H_w = I - V T V^H,   T = (I + D striu(V^H V))^-1 D
    A <- A - V (T^H (V^H A)),   Q = (I - V T V^H) ... (I - V T V^H) I

with D the diagonal of the reflectors' factors. V^H V is a symmetric product, of which the emulation
of a real one computes about half the pairs of slices.

Sources: Schreiber and Van Loan 1989 (compact WY); Puglisi 1992 (T from V^H V); Walter and Lehmann,
Algorithmic differentiation of linear algebra functions, 2010 (gradient).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mixprec.fp64.blocked import BLOCK_SIZE, Options, batch_rule, check_matrices, checked_options
from mixprec.fp64.operator import define
from mixprec.fp64.triangular import solve_triangular

MODES = ("reduced", "complete", "r")


def qr(
    A: Tensor,
    mode: str = "reduced",
    *,
    bits: int | str = "auto",
    engine: str = "auto",
    block_size: int = BLOCK_SIZE,
) -> tuple[Tensor, Tensor]:
    """(Q, R) with A = Q R: Q with orthonormal columns, R upper triangular.

    ``torch.linalg.qr`` with its products emulated: panels of ``block_size`` columns are reduced
    natively, and their reflectors are applied to the rest of A and to Q by emulated products.

    Args:
        A: [..., m, n], float64 or complex128.
        mode: "reduced": Q [..., m, k], R [..., k, n], k = min(m, n). "complete": Q [..., m, m],
            R [..., m, n]. "r": an empty Q and the reduced R.
        bits: Mantissa bits of every product, as ``fp64.matmul`` takes them.
        engine: Engine of the products, as ``fp64.matmul`` takes it.
        block_size: Columns of a panel.

    Returns: Q and R, with the signs of LAPACK's Householder vectors: R's diagonal is real, of
    either sign.

    Raises:
        TypeError: A is not float64 or complex128.
        ValueError: A has fewer than two axes, or an option is out of range.
        RuntimeError: In backward, where there is no gradient: mode "r", and "complete" with m > n.

    Edge cases: inf and NaN in A reach Q and R. Empty A give an empty R, "complete" the identity.

    Exactness: not exact; |A - Q R| and |I - Q^H Q| are at most those of the native panels and one
    rounding an update. Gradients to any order; they need the leading k columns of A independent.
    """
    options = checked_options(bits, engine, block_size)
    check_matrices("A", A)
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}; it is one of {', '.join(MODES)}; use 'reduced'")
    q, r = _qr(A, mode, *options.arguments)
    return q, r


def _sizes(a: Tensor, mode: str) -> tuple[int, int]:
    """Columns of Q and rows of R."""
    m, n = a.shape[-2:]
    return (m, m) if mode == "complete" else (min(m, n), min(m, n))


def _factor(a: Tensor, mode: str, options: Options) -> tuple[Tensor, Tensor]:
    work = a.clone(memory_format=torch.contiguous_format)
    m, n = a.shape[-2:]
    reflectors = []
    for start, stop in options.blocks(min(m, n)):
        factors, scales = torch.geqrf(work[..., start:, start:stop])
        ones = torch.eye(m - start, stop - start, dtype=a.dtype, device=a.device)
        vectors = factors.tril(-1) + ones
        inner = _inner_factor(vectors, scales, options)
        work[..., start:, start:stop] = factors.triu()
        if stop < n:
            work[..., start:, stop:] -= _reflected(
                vectors, inner.mH, work[..., start:, stop:], options
            )
        reflectors.append((start, vectors, inner))
    columns, rows = _sizes(a, mode)
    r = work[..., :rows, :].triu()
    if mode == "r":
        return a.new_empty(0), r
    q = torch.eye(m, columns, dtype=a.dtype, device=a.device).repeat(*a.shape[:-2], 1, 1)
    for start, vectors, inner in reversed(reflectors):
        q[..., start:, start:] -= _reflected(vectors, inner, q[..., start:, start:], options)
    return q, r


def _inner_factor(vectors: Tensor, scales: Tensor, options: Options) -> Tensor:
    """T of I - V T V^H, where ``scales`` is the diagonal D; a scale of 0 is the identity."""
    diagonal = torch.diag_embed(scales)
    adjoint = vectors.mH
    system = diagonal @ options.product(adjoint, adjoint.mH).triu(1)
    return torch.linalg.solve_triangular(system, diagonal, upper=True, unitriangular=True)


def _reflected(vectors: Tensor, inner: Tensor, x: Tensor, options: Options) -> Tensor:
    """V (T (V^H X)): what a block reflector takes from X."""
    return options.product(vectors, options.product(inner, options.product(vectors.mH, x)))


def _run_qr(
    a: Tensor, mode: str, bits: int | None, engine: str, block_size: int
) -> tuple[Tensor, Tensor]:
    return _factor(a, mode, Options(bits, engine, block_size))


def _fake_qr(a: Tensor, mode: str, *_: Any) -> tuple[Tensor, Tensor]:
    *batch, m, n = a.shape
    columns, rows = _sizes(a, mode)
    q = a.new_empty(0) if mode == "r" else a.new_empty((*batch, m, columns))
    return q, a.new_empty((*batch, rows, n))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, ctx.mode, *ctx.arguments = inputs
    ctx.tall = a.shape[-2] > a.shape[-1]
    ctx.save_for_backward(*output)


def _backward(ctx: Any, grad_q: Tensor, grad_r: Tensor) -> tuple[Any, ...]:
    if ctx.mode == "r":
        raise RuntimeError(
            "mode: got 'r'; the gradient needs Q, which this mode leaves out; use 'reduced'"
        )
    if ctx.mode == "complete" and ctx.tall:
        raise RuntimeError(
            "mode: got 'complete' for more rows than columns; the added columns of Q have no "
            "gradient; use 'reduced'"
        )
    q, r = ctx.saved_tensors
    return _gradient(grad_q, grad_r, q, r, Options(*ctx.arguments)), None, None, None, None


def _gradient(grad_q: Tensor, grad_r: Tensor, q: Tensor, r: Tensor, options: Options) -> Tensor:
    """The gradient of A from those of Q and R, in terms that have gradients themselves."""
    product = options.product
    k = q.shape[-1]
    beside = None
    if r.shape[-1] > k:
        # R_2 = Q^H A_2 depends on A_2 and on Q
        beside = product(q, grad_r[..., k:])
        grad_q = grad_q + product(product(q, r[..., k:]), grad_r[..., k:].mH)
        r, grad_r = r[..., :k], grad_r[..., :k]
    inner = product(grad_r, r.mH).triu() - product(q.mH, grad_q).triu()
    inner = inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1) / 2)
    grad = grad_q + product(q, inner + inner.mH)
    grad = solve_triangular(r.mH, grad, upper=False, left=False, **options.as_keywords())
    return grad if beside is None else torch.cat([grad, beside], -1)


_qr = define("fp64_qr", _run_qr, fake=_fake_qr, backward=_backward, setup_context=_save)
torch.library.register_vmap(_qr, batch_rule(_qr, 1))
