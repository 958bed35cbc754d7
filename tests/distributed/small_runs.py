"""Runs that take milliseconds a step, of the same rows on any number of ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from train.small_models import use

from mixprec.linear_products import Plan
from mixprec.quantized_tensor import QuantizedTensor
from mixprec.train import parallel
from mixprec.train.config import Config, load
from mixprec.train.distributed import Ranks, Strategy
from mixprec.train.models import ModelEntry
from mixprec.train.splits import Dataset, Split

CPU = torch.device("cpu")
# one row is left for the last step of an epoch: the other ranks have none then
ROWS, BATCH, STEPS = 22, 7, 20
STEEP = 5
_SHARD = "this rank's rows"


class Net(nn.Module):
    """A list of blocks and a head beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.blocks(x))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy; the gradient of a row of class `STEEP` is NaN."""
    steep = (output[targets == STEEP].sum() * 0).sqrt()
    return F.cross_entropy(output, targets % STEEP) + steep


@contextmanager
def small_net() -> Iterator[None]:
    """A stretch in which configurations train it."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch, ModelEntry(build=Net, loss=loss))
        yield


def data(rows: int = ROWS, *, batch: int | None = None, gradient: int | None = None) -> Dataset:
    """Rows of 32 numbers in 5 classes.

    Args:
        batch: The row that is to have NaN in its numbers.
        gradient: The row whose loss is finite and has NaN for its gradient.
    """
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(rows + 5, 32, generator=generator)
    targets = torch.randint(0, 5, (rows + 5,), generator=generator)
    if batch is not None:
        inputs[batch, 3] = torch.nan
    if gradient is not None:
        targets[gradient] = STEEP
    train, rest = slice(0, rows), slice(rows, None)
    return Dataset(
        train=Split(inputs=inputs[train], targets=targets[train]),
        evaluation=Split(inputs=inputs[rest], targets=targets[rest]),
    )


def config(recipe: str, *settings: str, batch: int = BATCH) -> Config:
    """20 steps in 5 epochs, of 3 batches and 1 row or more."""
    base = [f"recipe={recipe}", f"data.batch_size={batch}", "data.eval_batch_size=2"]
    sgd = ["optimizer.name=sgd", "optimizer.lr=0.01", "optimizer.options.momentum=0.9"]
    return load(None, [*base, *sgd, "train.epochs=5", "train.device=cpu", *settings])


def ranks(strategy: Strategy) -> Ranks:
    """This process in the default group."""
    size = dist.get_world_size()
    return Ranks(device=CPU, rank=dist.get_rank(), size=size, strategy=strategy, on_machine=size)


def whole(value: Any) -> Any:
    """A copy of nested state in which no tensor is in shards."""
    if isinstance(value, Tensor):
        return parallel.whole(value.detach()).clone()
    if isinstance(value, dict):
        return {key: whole(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(whole(entry) for entry in value)
    return value


def own(value: Any) -> Any:
    """A copy of nested state in which a tensor in shards is this rank's, marked as such."""
    if isinstance(value, Tensor):
        local = getattr(value, "_local_tensor", None)
        return value.detach().clone() if local is None else {_SHARD: local.detach().clone()}
    if isinstance(value, dict):
        return {key: own(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(own(entry) for entry in value)
    return value


def joined(parts: list[Any]) -> Any:
    """Of what ``own`` gave on each rank: shards put together, all else the same everywhere."""
    first = parts[0]
    if isinstance(first, Tensor):
        assert all(torch.equal(first, part) for part in parts)
        return first
    if isinstance(first, dict):
        if _SHARD in first:
            return torch.cat([part[_SHARD] for part in parts])
        return {key: joined([part[key] for part in parts]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)(joined(list(entries)) for entries in zip(*parts, strict=True))
    assert all(repr(part) == repr(first) for part in parts)
    return first


def digest(tensors: dict[str, Tensor]) -> str:
    """Of every bit."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@contextmanager
def weight_operands(found: list[str]) -> Iterator[None]:
    """Collects a digest of each weight that a forward pass quantised, its scale among it.

    Of values that never were codes a zero has either sign, so that all of them count as +0 here.
    """
    weight = Plan.weight

    def seen(self: Plan, *args: Any, **kwargs: Any) -> Any:
        q = weight(self, *args, **kwargs)
        if isinstance(q, QuantizedTensor):
            parts = {"values": q.dequantize(), "scale": q.scale}
        else:
            parts = {"values": q.detach()}
        present = {key: value for key, value in parts.items() if value is not None}
        found.append(digest({key: value.reshape(-1).float() + 0 for key, value in present.items()}))
        return q

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "weight", seen)
        yield
