"""A small model in training, watched or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import mixprec
from mixprec.inspection.statistics import OperandStatistics, StepStatistics
from mixprec.inspection.watch import Watcher
from mixprec.recipes import RECIPES, Recipe

QUANTISING = [
    name for name, recipe in RECIPES.items() if any(spec is not None for spec in recipe.specs)
]


def small_model() -> nn.Module:
    """A convolution, linear layers, dropout, and activations in place."""
    return nn.Sequential(
        nn.Conv2d(4, 4, 3, groups=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(4 * 16, 40),
        nn.Dropout(0.2),
        nn.ReLU(inplace=True),
        nn.Linear(40, 8),
    )


@dataclass
class Run:
    """A model with its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, *inputs: Tensor, forward: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """One optimizer step over micro-batches; the last one's loss."""
        self.optimizer.zero_grad()
        for x in inputs:
            loss = (forward or self.model)(x).square().mean()
            loss.backward()
        self.optimizer.step()
        return loss.detach()

    def state(self) -> list[Tensor]:
        """Everything that the next step depends on."""
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        tensors = [*self.model.parameters(), *grads, *mixprec.state_dict(self.model).values()]
        return [torch.get_rng_state(), *(tensor.detach().clone() for tensor in tensors)]

    def watch(self, every: int = 1) -> Watcher:
        return mixprec.watch(self.model, every, optimizer=self.optimizer)


def run_of(model: nn.Module, recipe: str | Recipe) -> Run:
    mixprec.convert(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    mixprec.attach(model, optimizer)
    return Run(model, optimizer)


def small_run(recipe: str) -> Run:
    torch.manual_seed(0)
    return run_of(small_model(), recipe)


def images(seed: int = 0, rows: int = 6) -> Tensor:
    return torch.randn(rows, 4, 6, 6, generator=torch.Generator().manual_seed(seed))


def operands(step: StepStatistics) -> dict[tuple[str, str, str], OperandStatistics]:
    """Rows by (layer, name, path of the operand)."""
    return {
        (row.layer, row.name, f"{row.product}.{row.operand}"): row
        for row in step.rows
        if isinstance(row, OperandStatistics)
    }
