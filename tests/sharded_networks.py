"""A small network that shards unevenly, its training, and its whole weights."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import mixprec


class Perceptron(nn.Module):
    """x + second(act(first(norm(x)))), recomputed in backward where ``recomputes``."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(width), nn.GELU()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.recomputes = False

    def _sum(self, x: Tensor) -> Tensor:
        return x + self.second(self.act(self.first(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._sum, x, use_reentrant=False) if self.recomputes else self._sum(x)


def network(recipe: str, **settings: Any) -> nn.Sequential:
    """7 and 5 rows divide among neither 2 nor 3 ranks, and some ranks have none of 1 row."""
    torch.manual_seed(0)
    head = nn.Linear(7, 1, bias=False)
    net = nn.Sequential(Perceptron(7, 12), Perceptron(7, 5), nn.LayerNorm(7), head)
    for block in net[:2]:
        block.recomputes = settings.get("recomputes", False)
    net[1].first.weight.requires_grad_(settings.get("trains", True))
    if settings.get("ties", False):
        net[0].second.weight = nn.Parameter(net[0].second.weight[:, :7].clone())
        net[0].first = nn.Linear(7, 7)
        net[0].first.weight = net[0].second.weight
    with warnings.catch_warnings():
        # recipes without a quantised product convert nothing
        warnings.simplefilter("ignore")
        mixprec.convert(net, recipe)
    return net.to(settings.get("dtype", torch.float32))


def sharded(net: nn.Sequential, **arguments: Any) -> nn.Sequential:
    for block in net[:2]:
        fully_shard(block, **arguments)
    arguments.pop("reshard_after_forward", None)
    fully_shard(net, **arguments)
    return net


def full(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.full_tensor() for name, value in net.state_dict().items()}


def batch(rank: int, step: int, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(rows, 7, generator=generator)


def trained(net: nn.Sequential, rank: int, steps: int = 2) -> dict[str, Tensor]:
    """Losses of every micro-batch, and the weights after the last step."""
    # of this one, sharded parameters' versions do not tell
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05, foreach=True)
    mixprec.attach(net, optimizer)
    losses = []
    for step in range(steps):
        for micro in range(2):
            loss = net(batch(rank, 2 * step + micro)).square().mean()
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": torch.stack(losses), **full(net)}
