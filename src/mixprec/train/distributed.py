"""The processes that train one model together: who they are, what they share, what they agree on.

A step of a run has the same rows on any number of ranks. Of each batch, rank r of R takes slice r
of R (``torch.tensor_split``: even to one row, and empty where there are fewer rows than ranks); its
loss is the sum over its rows divided by the rows of the whole step, so that sums over ranks are one
process's losses and gradients. The first rank alone writes and prints.

Processes are found by the environment that torchrun sets. One process is a rank of one, with the
same methods.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mixprec.train.splits import stream_seed

Strategy = Literal["none", "ddp", "fsdp"]
T = TypeVar("T")


def pick_device(name: str) -> torch.device:
    """The device of a name; `auto` is CUDA where there is one, else the CPU.

    Raises: ValueError: This machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    available = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }[device.type]
    if (device.index or 0) >= available:
        raise ValueError(
            f"train.device: got {name!r}; this machine, with torch {torch.__version__}, has "
            f"{available} {device.type} devices; use auto or cpu"
        )
    return device


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among those that train one model, all of which call each method that speaks.

    Attributes:
        device: This rank's.
        rank: From 0, of `size`.
        strategy: How the model is held: `ddp` whole on each rank, `fsdp` in shards.
        on_machine: Ranks on this machine.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    strategy: Strategy = "none"
    on_machine: int = 1

    def __str__(self) -> str:
        if self.strategy == "none":
            return str(self.device)
        return f"{self.size} x {self.device.type} ({self.strategy})"

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes and prints."""
        return self.rank == 0

    def part(self, rows: Tensor) -> Tensor:
        """This rank's slice of the rows of a batch; it may be empty."""
        return rows.tensor_split(self.size)[self.rank]

    def turns(self, count: int) -> list[tuple[int, bool]]:
        """Which of so many batches this rank evaluates, and whether the batch counts.

        Each batch counts on one rank. All ranks have as many turns, since a sharded model's forward
        pass takes all of them; where none is left, the last batch is taken again.
        """
        rounds = -(-count // self.size)
        mine = (self.rank + turn * self.size for turn in range(rounds))
        return [(min(index, count - 1), index < count) for index in mine]

    def seed(self, *parts: str | int) -> int:
        """A seed of this rank's own; the first one's is that of a run of one process."""
        return stream_seed(*parts, *([self.rank] if self.rank else []))

    def sums(self, *values: float) -> list[float]:
        """Each value's sum over ranks, in float64, the same on all; NaN and infinities survive."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def any(self, flag: bool) -> bool:
        """Whether it is true on any rank."""
        return self.sums(float(flag))[0] > 0

    def gathered(self, value: T) -> list[T]:
        """The value of each rank: plain data or tensors."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def first_of(self, value: T | None) -> T | None:
        """The value of the lowest rank that has one; None where none has."""
        return next((each for each in self.gathered(value) if each is not None), None)

    def at_first(self, do: Callable[[], T]) -> T:
        """What a function returns on the first rank, or raises there, on every rank."""
        if self.size == 1:
            return do()
        outcome: list[Any] = [None, None]
        if self.is_first:
            try:
                outcome[0] = do()
            except (ValueError, OSError) as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome)
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def take_from_first(self, tensors: Sequence[Tensor]) -> None:
        """Copy the first rank's values into each tensor."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)


@contextmanager
def started(strategy: Strategy | None, device: str, timeout: float = 1800.0) -> Iterator[Ranks]:
    """The ranks of this process's environment, with a process group for as long as they live.

    Args:
        strategy: None is `ddp` where there are several ranks, else `none`.
        device: The configuration's; several ranks of a machine take one of its GPUs each.
        timeout: Seconds that a rank waits for the others.

    A group that exists already is used and left as it is.

    Raises:
        ValueError: Several ranks with the strategy `none`, with a device that they cannot share, or
            with fewer GPUs than ranks.
    """
    size, rank, local, on_machine = _environment()
    if strategy is None:
        strategy = "ddp" if size > 1 else "none"
    if size > 1 and strategy == "none":
        raise ValueError(
            f"distributed.strategy: got none with {size} ranks; each would train the same run; use "
            "ddp or fsdp, or start one process"
        )
    own = pick_device(device) if size == 1 else _device_of_rank(device, local, on_machine)
    owns_group = not dist.is_initialized() and (size > 1 or strategy == "fsdp")
    if own.type == "cuda" and own.index is not None:
        torch.cuda.set_device(own)
    if owns_group:
        backend = "cpu:gloo,cuda:nccl" if own.type == "cuda" else "gloo"
        # a rank of its own needs nobody's address
        store = dist.HashStore() if size == 1 else None
        wait = timedelta(seconds=timeout)
        dist.init_process_group(backend, timeout=wait, store=store, rank=rank, world_size=size)
    try:
        yield Ranks(device=own, rank=rank, size=size, strategy=strategy, on_machine=on_machine)
    except BaseException:
        # nccl's end waits for ranks that wait in a collective; gloo's tells them at once
        if owns_group and own.type == "cpu":
            dist.destroy_process_group()
        raise
    if owns_group:
        dist.destroy_process_group()


def is_first_process() -> bool:
    """Whether this process is the one that writes and prints, in a group or by its environment."""
    return _environment()[1] == 0


def has_other_ranks() -> bool:
    """Whether this process is one of several ranks, in a group or by its environment."""
    return _environment()[0] > 1


def _environment() -> tuple[int, int, int, int]:
    """Ranks in all, this one, its place on its machine, and ranks there."""
    if dist.is_available() and dist.is_initialized():
        size, rank = dist.get_world_size(), dist.get_rank()
    else:
        size, rank = (int(os.environ.get(name, default)) for name, default in _VARIABLES[:2])
    local, on_machine = (int(os.environ.get(name, default)) for name, default in _VARIABLES[2:])
    return size, rank, local, on_machine


_VARIABLES = (("WORLD_SIZE", 1), ("RANK", 0), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))


def _device_of_rank(name: str, local: int, on_machine: int) -> torch.device:
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(
            f"train.device: got {name!r} with several ranks; each has one of its own; use auto, "
            "cpu or cuda"
        )
    device = pick_device(name)
    if device.type == "cpu":
        return device
    available = torch.cuda.device_count()
    if local >= available:
        raise ValueError(
            f"train.device: got {name!r} with {on_machine} ranks on this machine; it has "
            f"{available} GPUs; start one rank a GPU (--nproc-per-node {available}), or use cpu"
        )
    return torch.device("cuda", local)
