"""A model whose step takes a millisecond, as a workload."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixprec.bench.presets import Workload

INNER, OUTER, CLASSES = 32, 64, 16
PARAMETERS = INNER * OUTER + OUTER + OUTER * CLASSES + CLASSES


def build() -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(INNER, OUTER), nn.ReLU(), nn.Linear(OUTER, CLASSES))


def batch(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Noise, and labels in turn."""
    return torch.randn(rows, INNER, generator=generator), torch.arange(rows) % CLASSES


TINY = Workload(name="tiny", build=build, loss=F.cross_entropy, batch=batch)
