"""What is said of one operation that ran in a region, or of a product by a recipe."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mixprec.gemm.api import GemmSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A product by a recipe: its quantisations, the implementation asked for, and where it runs."""

    gemm: GemmSpec
    impl: str
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What one operation did in a region: types of inputs, arithmetic and results, and why."""

    name: str
    inputs: tuple[torch.dtype, ...]
    compute: tuple[torch.dtype, ...]
    outputs: tuple[torch.dtype, ...]
    rule: str
    product: Product | None = None
