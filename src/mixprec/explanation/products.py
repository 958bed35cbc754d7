"""Products by a recipe in the rows: their operands, and what runs them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch

from mixprec.explanation.operations import OperationRow, type_names
from mixprec.gemm.api import GemmSpec, resolve_spec
from mixprec.modes import without_modes
from mixprec.operation import Product


class Products:
    """Completes rows; which implementation runs a kind of product is asked once."""

    def __init__(self) -> None:
        self._impls: dict[Hashable, str] = {}

    def completed(
        self,
        row: OperationRow,
        product: Product,
        gemm: GemmSpec,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
    ) -> OperationRow:
        """The row of a product, its operands of a type before they are quantised, completed."""
        (high,) = type_names([torch.float64 if gemm.is_exact else dtype])
        return replace(
            row,
            compute=tuple(str(spec.format if spec else high) for spec in (gemm.a, gemm.b)),
            impl=self._impl(product, gemm, dtype if None in (gemm.a, gemm.b) else out_dtype),
            operands=(gemm.a, gemm.b),
        )

    def _impl(self, product: Product, gemm: GemmSpec, dtype: torch.dtype) -> str:
        key = gemm, dtype, product.device, product.impl
        if key not in self._impls:
            with without_modes(), torch.no_grad():
                self._impls[key], _ = resolve_spec(gemm, product.device, dtype, product.impl)
        return self._impls[key]
