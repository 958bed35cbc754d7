"""Models at an optimisation level, and one backward pass of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from mixprec.amp import initialize, scale_loss

LEVELS = ["O0", "O1", "O2", "O3"]


def leveled(
    level: str,
    model: nn.Module | None = None,
    make: Callable[..., Optimizer] = SGD,
    lr: float = 0.125,
    **options: Any,
) -> tuple[Any, Any]:
    """A model and its optimizer at a level."""
    model = model if model is not None else nn.Linear(2, 1, bias=False)
    options.setdefault("verbosity", 0)
    return initialize(model, make(model.parameters(), lr=lr), opt_level=level, **options)


def weighted(*weights: float) -> nn.Linear:
    """A linear layer to one output, with these weights."""
    layer = nn.Linear(len(weights), 1, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([weights]))
    return layer


def backward(model: nn.Module, optimizer: Any, *numbers: float, **options: Any) -> Tensor:
    """A backward pass of the model's output on one row of numbers; returns the loss."""
    loss = model(torch.tensor([numbers])).sum()
    with scale_loss(loss, optimizer, **options) as scaled:
        scaled.backward()
    return loss.detach()
