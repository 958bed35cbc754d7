"""Rows of data, in memory or made one by one, and the order in which training sees them.

Order is a pure function of (seed, epoch): nothing about earlier batches is needed to know the next
one, which is what lets a run resume at any step.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import data as torch_data

Batch = tuple[Tensor, Tensor]


class Rows(Protocol):
    """Rows in memory; `batch` takes int64 indices [n] or a slice, and gives inputs and targets."""

    def __len__(self) -> int: ...

    def batch(self, rows: Tensor | slice) -> Batch: ...

    def to(self, device: torch.device) -> "Rows": ...

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that is held of them."""


class Items(torch_data.Dataset[Batch]):
    """Rows that are not held in memory: item i is a pure function of i, made where it is asked for.

    Worker processes make them, so an instance can be pickled.
    """

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def item_bytes(self) -> int:
        """Of one item's inputs and target."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """inputs [N, ...] float32, targets [N] int64; row i of one belongs to row i of the other."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, rows: Tensor | slice) -> Batch:
        return self.inputs[rows], self.targets[rows]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inputs, self.targets

    def to(self, device: torch.device) -> "Split":
        return Split(inputs=self.inputs.to(device), targets=self.targets.to(device))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """What is trained on, and what the evaluation runs over.

    loaders: worker processes that trainers with the same batches share, by what decides these.
    """

    train: Rows | Items
    evaluation: Rows | Items
    loaders: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)


def stream_seed(*parts: str | int) -> int:
    """A 63-bit seed for one use, from its name and numbers; equal parts give equal seeds."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def epoch_order(num_rows: int, seed: int, epoch: int) -> Tensor:
    """The row indices [num_rows] of one epoch, shuffled by (seed, epoch) alone."""
    generator = torch.Generator().manual_seed(stream_seed("order", seed, epoch))
    return torch.randperm(num_rows, generator=generator)
