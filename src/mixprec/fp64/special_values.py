"""Rows and columns with infinities or NaN: their results as IEEE 754 defines them.

A row of A that holds inf or NaN makes its row of A B non-finite, every element of it, and nothing
else; a column of B the same. Which non-finite value it is depends on the signs of the other factors
alone, so that these rows and columns are the product of A and B with finite elements replaced by
their signs: no finite product overflows on the way, and no order of the sum matters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def without_rows(x: Tensor, is_out: Tensor) -> Tensor:
    """x[batch, rows, k] with the rows that are out replaced by zeros; x itself where none is."""
    return torch.where(is_out.unsqueeze(-1), 0.0, x) if bool(is_out.any()) else x


def signs(x: Tensor) -> Tensor:
    """The signs of finite elements; inf and NaN as they are."""
    return torch.where(torch.isfinite(x), torch.sign(x), x)


def put_special(out: Tensor, a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Writes the non-finite rows and columns of a b^T into out[batch, m, n]."""
    put(out, a, b, rows, columns, lambda x, y: signs(x) @ signs(y).mT)


def put_native(out: Tensor, a: Tensor, b: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Writes rows and columns of the native a b^T into out[batch, m, n]."""
    put(out, a, b, rows, columns, lambda x, y: x @ y.mT)


def put(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    rows: Tensor,
    columns: Tensor,
    product: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """Writes the rows [batch, m] and columns [batch, n] that are marked, by a product of them."""
    for index in rows.any(-1).nonzero().flatten().tolist():
        out[index, rows[index]] = product(a[index, rows[index]], b[index])
    for index in columns.any(-1).nonzero().flatten().tolist():
        out[index, :, columns[index]] = product(a[index], b[index, columns[index]])
