"""The batches of a run, step by step: from memory, or from worker processes that make them."""

import math
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import data as torch_data

from mixprec.train.config import Config
from mixprec.train.data import open_dataset
from mixprec.train.distributed import Ranks
from mixprec.train.faults import STOP_SIGNALS
from mixprec.train.models import model_arguments
from mixprec.train.splits import Batch, Dataset, Items, Rows, epoch_order

_AHEAD = 2
_SHARED_MEMORY = Path("/dev/shm")


def dataset_of(config: Config) -> Dataset:
    """The data of a configuration, shaped by its model's options.

    Raises: ImportError, ValueError: It cannot be read, or not with these options.
    """
    arguments = model_arguments(config.model, config.model_options)
    return open_dataset(config.data.name, config.data.path, config.data.options, arguments)


class Feed:
    """The batches of each optimizer step: a pure function of (seed, step), wherever they are made.

    Rows in memory are moved to the device once and indexed there. `Items` are made by worker
    processes as long as steps follow one another (the first step, and one out of turn, in this
    process), and copied from pinned memory where the device is a GPU. Of each batch a rank has its
    slice, which may be empty.

    Args:
        dataset: Its training rows are fed; feeds of it with equal batches share their workers.
        config: Seed, batch size, batches a step, and workers.
        ranks: Whose slices, on whose device.

    Raises: ValueError: The batches of so many workers do not fit into shared memory.
    """

    def __init__(self, dataset: Dataset, config: Config, ranks: Ranks) -> None:
        train, device = dataset.train, ranks.device
        self._order = _Order(
            len(train), config.train.seed, config.data.batch_size, config.train.accumulate, ranks
        )
        self._device = device
        self._rows: Rows | None = None
        self._loader: _Loader | None = None
        if isinstance(train, Items):
            workers = num_workers(config, ranks)
            size = math.ceil(config.data.batch_size / ranks.size)
            _require_shared_memory(train, size, workers)
            order = self._order
            key = (config.train.seed, order.size, order.span, workers, device.type, ranks)
            loader = _Loader(train, self._order, workers, pin=device.type == "cuda")
            self._loader = dataset.loaders.setdefault(key, loader)
        else:
            self._rows = train.to(device)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps an epoch; the last one may have fewer rows."""
        return self._order.steps_per_epoch

    def num_rows(self, step: int) -> int:
        """Rows of a step on all ranks."""
        return len(self._order.rows(step))

    def batches(self, step: int, total: int) -> list[Batch]:
        """The (inputs, targets), on the device, of optimizer step `step` of `total`, from 0.

        After the last one the workers have nothing more to make.
        """
        if self._rows is not None:
            parts = self._order.parts(step)
            return [self._rows.batch(part.to(self._device)) for part in parts]
        assert self._loader is not None
        made = self._loader.step(step, total)
        # a copy even on a CPU: trainers that share a loader may change what they get
        return [
            (
                inputs.to(self._device, non_blocking=True, copy=True),
                targets.to(self._device, non_blocking=True, copy=True),
            )
            for inputs, targets in made
        ]

    @property
    def held(self) -> tuple[Tensor, ...]:
        """The data that lie on the device throughout."""
        return () if self._rows is None else self._rows.tensors

    def close(self) -> None:
        """End the worker processes; a later step starts them again."""
        if self._loader is not None:
            self._loader.close()


class _Order:
    """Which rows each step has, and which of each of its batches are a rank's."""

    def __init__(self, num_rows: int, seed: int, size: int, accumulate: int, ranks: Ranks) -> None:
        self._ranks = ranks
        self.size = size
        self.span = size * accumulate
        self.steps_per_epoch = math.ceil(num_rows / self.span)
        self._num_rows = num_rows
        self._seed = seed
        self._epoch = (-1, torch.empty(0))

    def rows(self, step: int) -> Tensor:
        epoch, place = divmod(step, self.steps_per_epoch)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, epoch_order(self._num_rows, self._seed, epoch))
        return self._epoch[1][place * self.span : (place + 1) * self.span]

    def parts(self, step: int) -> list[Tensor]:
        return [self._ranks.part(batch) for batch in self.rows(step).split(self.size)]


class _Loader:
    """Steps of batches made from items; remembers the last one, for whoever shares it."""

    def __init__(self, items: Items, order: _Order, workers: int, *, pin: bool) -> None:
        self._items = items
        self._order = order
        self._workers = workers
        self._pin = pin
        self._last: tuple[int, list[Batch]] = (-1, [])
        self._ahead: Iterator[Batch] | None = None

    def step(self, step: int, total: int) -> list[Batch]:
        """The batches of a step; the same ones when asked again."""
        if step == self._last[0]:
            return self._last[1]
        if step != self._last[0] + 1 or not self._last[1]:
            self._ahead = None
        elif self._ahead is None and self._workers:
            order = self._order
            later = (part for number in range(step, total) for part in order.parts(number))
            # of an empty batch the shapes are asked of the first item
            rest = (part.tolist() or [0] for part in later)
            self._ahead = iter(_loader(self._items, rest, self._workers, pin=self._pin))
        ahead = self._ahead
        made = []
        for part in self._order.parts(step):
            index = part.tolist() or [0]
            batch = _collated(self._items, index) if ahead is None else next(ahead)
            inputs, targets = (side[: len(part)] for side in batch)
            made.append((inputs, targets))
        self._last = (step, made)
        if step + 1 >= total:
            self.close()
        return made

    def close(self) -> None:
        # Dropped while all else is whole: workers of a loader that the garbage collector finds in
        # a cycle wait out a timeout of five seconds each.
        self._ahead = None


def in_order(
    rows: Rows | Items,
    count: int,
    size: int,
    device: torch.device,
    workers: int,
    places: Iterable[int] | None = None,
) -> Iterator[Batch]:
    """The first `count` rows in their order, `size` at once; those in memory where they are.

    places: Which of the batches, from 0; all of them by default.
    """
    starts: Iterable[int] = range(0, count, size)
    if places is not None:
        starts = [size * place for place in places]
    if not isinstance(rows, Items):
        yield from (rows.batch(slice(start, min(start + size, count))) for start in starts)
        return
    parts = [list(range(start, min(start + size, count))) for start in starts]
    if workers and len(parts) > 1:
        made: Iterable[Batch] = _loader(rows, parts, workers, pin=device.type == "cuda")
    else:
        made = (_collated(rows, part) for part in parts)
    for inputs, targets in made:
        yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def num_workers(config: Config, ranks: Ranks | None = None) -> int:
    """Worker processes of a rank's data: those of the configuration, else one a core of its own."""
    if config.data.workers is not None:
        return config.data.workers
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return cores if ranks is None else max(1, cores // ranks.on_machine)


def _loader(
    items: Items, parts: Iterable[list[int]], workers: int, *, pin: bool
) -> torch_data.DataLoader[Batch]:
    return torch_data.DataLoader(
        items,
        batch_sampler=parts,
        num_workers=workers,
        prefetch_factor=_AHEAD,
        pin_memory=pin,
        worker_init_fn=_leave_signals,
        # one of its own: a loader draws a number, which would be missing from the global one
        generator=torch.Generator(),
    )


def _leave_signals(_: int) -> None:
    """A signal for all processes of a run is its main one's, which needs data until it has saved.

    Workers end when it tells them to, or is gone.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _collated(items: Items, part: list[int]) -> Batch:
    inputs, targets = torch_data.default_collate([items[index] for index in part])
    return inputs, targets


def _require_shared_memory(items: Items, size: int, workers: int) -> None:
    """Workers hand batches over in shared memory; running out of it ends in a bus error."""
    if not _SHARED_MEMORY.is_dir():
        return
    needed = workers * _AHEAD * min(size, len(items)) * items.item_bytes
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if needed > free:
        raise ValueError(
            f"data.workers: got {workers}; their batches of {size} take {needed >> 20} MiB of "
            f"shared memory, {_SHARED_MEMORY} has {free >> 20} free; use fewer workers or 0, a "
            "smaller batch, or more of it (--shm-size of a container)"
        )
