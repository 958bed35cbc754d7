"""The product of a sparse matrix in CSR with a dense one, correctly rounded.

    out[i, c] = RN(sum over p in row i of values[p] * dense[col[p], c])

The order of the entries of a row, the number of threads and the device do not matter. Gradients are
of the same kind: for the dense operand a product with the transposed matrix, for the values a sum
over the columns at each entry of the pattern.

Sources: the sparse formats of ``torch.sparse``; ``segments`` for the arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mixprec.fp64.operator import define
from mixprec.fp64.segments import sums_of_products

# an entry's sum over the columns is made for this many products at once
_BLOCK_PRODUCTS = 1 << 19


def spmm(a: Tensor, dense: Tensor) -> Tensor:
    """a @ dense for a sparse a in CSR, each element rounded once from its exact value.

    ``torch.sparse.mm`` of a CSR matrix, reproducible: the result does not depend on the order of
    the entries, on threads or on the device. It is not made of products of small integers, and has
    no options.

    Args:
        a: [m, k] in ``torch.sparse_csr``, float64 or complex128, int32 or int64 indices. Entries
            may repeat and need not be sorted within a row.
        dense: [k, n], strided, a's dtype and device.

    Returns: [m, n], contiguous.

    Raises:
        TypeError: a is not CSR or dense not strided, or the dtypes differ or are others.
        ValueError: Shapes that do not fit.

    Edge cases: only entries that are stored multiply: an absent one times inf is 0, a stored 0
    times inf NaN. inf and NaN reach their rows and columns alone. Empty rows, k = 0 and exact zeros
    give +0. Complex parts are sums of real products, so that inf times a complex number has NaN
    parts where the naive formula has them.

    Exactness: correctly rounded, real and imaginary parts each, subnormal results included; a sum
    beyond the largest float64 is inf. Gradients of both operands, to any order, the sparse one's
    with its pattern.
    """
    _check(a, dense)
    rows, columns = a.shape
    # a copy: torch refuses conjugate and real views of the values inside a CSR tensor
    values = a.values().clone()
    return _spmm(a.crow_indices().long(), a.col_indices().long(), values, dense, rows, columns)


def _check(a: Tensor, dense: Tensor) -> None:
    if a.layout != torch.sparse_csr:
        raise TypeError(f"a: got layout {a.layout}; spmm takes CSR; use a.to_sparse_csr()")
    if dense.layout != torch.strided:
        raise TypeError(f"dense: got layout {dense.layout}; it must be strided; use to_dense()")
    if a.dtype not in (torch.float64, torch.complex128):
        raise TypeError(f"a: got {a.dtype}; spmm takes float64 or complex128; convert it")
    if dense.dtype != a.dtype:
        raise TypeError(
            f"dense: got {dense.dtype}; a is {a.dtype} and both must agree; convert one"
        )
    if a.ndim != 2 or a.values().ndim != 1:
        raise ValueError(f"a: got shape {tuple(a.shape)}; it must be one matrix; loop over batches")
    if dense.ndim != 2 or dense.shape[0] != a.shape[1]:
        raise ValueError(
            f"dense: got shape {tuple(dense.shape)}; a of {a.shape[0]} x {a.shape[1]} needs "
            f"[{a.shape[1]}, n]; transpose or unsqueeze it"
        )


def _run_spmm(
    offsets: Tensor, index: Tensor, values: Tensor, dense: Tensor, rows: int, columns: int
) -> Tensor:
    if not values.is_complex():
        return sums_of_products(values.unsqueeze(-1), dense, index, offsets)
    # (ar + i ai)(br + i bi): a part is one sum of twice the length over the rows [br; bi]
    real, imaginary = torch.view_as_real(values.resolve_conj()).unbind(-1)
    both = torch.cat(torch.view_as_real(dense.resolve_conj()).unbind(-1))
    twice = torch.stack([index, index + columns], -1).flatten()
    parts = (torch.stack(pair, -1).flatten() for pair in ((real, -imaginary), (imaginary, real)))
    sums = (sums_of_products(part.unsqueeze(-1), both, twice, 2 * offsets) for part in parts)
    return torch.complex(*sums)


def _fake_spmm(
    offsets: Tensor, index: Tensor, values: Tensor, dense: Tensor, rows: int, columns: int
) -> Tensor:
    return dense.new_empty((rows, dense.shape[1]))


def _run_sampled(offsets: Tensor, index: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """out[p] = sum over c of left[row of p, c] * right[index[p], c], correctly rounded."""
    if not left.is_complex():
        return _row_sums(left, right, offsets, index)
    first, second = (torch.view_as_real(x.resolve_conj()).unbind(-1) for x in (left, right))
    real = _row_sums(torch.cat([first[0], -first[1]], -1), torch.cat(second, -1), offsets, index)
    imaginary = _row_sums(
        torch.cat(first, -1), torch.cat([second[1], second[0]], -1), offsets, index
    )
    return torch.complex(real, imaginary)


def _row_sums(left: Tensor, right: Tensor, offsets: Tensor, index: Tensor) -> Tensor:
    rows = _row_of_entries(offsets)
    length = left.shape[-1]
    out = left.new_zeros(index.numel())
    whole = torch.arange(length, device=left.device)
    ends = torch.tensor([0, length], device=left.device)
    step = max(1, _BLOCK_PRODUCTS // max(length, 1))
    for start in range(0, index.numel(), step):
        part = slice(start, start + step)
        x, y = left[rows[part]].mT, right[index[part]].mT
        out[part] = sums_of_products(x, y, whole, ends).squeeze(0)
    return out


def _row_of_entries(offsets: Tensor) -> Tensor:
    rows = torch.arange(offsets.numel() - 1, device=offsets.device)
    return rows.repeat_interleave(offsets.diff())


def _fake_sampled(offsets: Tensor, index: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(index.shape)


def _run_transposed(offsets: Tensor, index: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(offsets, index, order) of the transposed CSR matrix, whose values are values[order]."""
    order = index.argsort(stable=True)
    counts = torch.bincount(index, minlength=columns)
    ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return ends, _row_of_entries(offsets)[order], order


def _fake_transposed(offsets: Tensor, index: Tensor, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    return offsets.new_empty(columns + 1), torch.empty_like(index), torch.empty_like(index)


def _transposed_product(
    offsets: Tensor, index: Tensor, values: Tensor, dense: Tensor, rows: int, columns: int
) -> Tensor:
    """values^H @ dense, for values of a CSR matrix [rows, columns]."""
    ends, row_index, order = _transposed(offsets, index, columns)
    return _spmm(ends, row_index, values.conj()[order], dense, columns, rows)


def _save_spmm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.rows, ctx.columns = inputs
    ctx.save_for_backward(*tensors)


def _backward_spmm(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    offsets, index, values, dense = ctx.saved_tensors
    grad_values = grad_dense = None
    if ctx.needs_input_grad[2]:
        grad_values = _sampled(offsets, index, grad, dense.conj())
    if ctx.needs_input_grad[3]:
        grad_dense = _transposed_product(offsets, index, values, grad, ctx.rows, ctx.columns)
    return None, None, grad_values, grad_dense, None, None


def _save_sampled(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_sampled(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    offsets, index, left, right = ctx.saved_tensors
    rows, columns = left.shape[0], right.shape[0]
    grad_left = grad_right = None
    if ctx.needs_input_grad[2]:
        grad_left = _spmm(offsets, index, grad, right.conj(), rows, columns)
    if ctx.needs_input_grad[3]:
        # the adjoint of conj(grad) is its transpose
        grad_right = _transposed_product(offsets, index, grad.conj(), left.conj(), rows, columns)
    return None, None, grad_left, grad_right


_spmm = define(
    "fp64_spmm", _run_spmm, fake=_fake_spmm, backward=_backward_spmm, setup_context=_save_spmm
)
_sampled = define(
    "fp64_sampled_products",
    _run_sampled,
    fake=_fake_sampled,
    backward=_backward_sampled,
    setup_context=_save_sampled,
)
_transposed = define("fp64_transposed_pattern", _run_transposed, fake=_fake_transposed)
