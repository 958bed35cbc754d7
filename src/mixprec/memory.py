"""Memory of a training step: bytes of live tensors counted one by one, and of the whole process.

On a CPU nobody keeps the books of tensors, so a dispatch mode does: it sees every operation and
hears of every storage that dies. On CUDA the allocator's own record is read.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mixprec.modes import EagerMode

Result = TypeVar("Result")
GIB = 2**30


class OverLimit(MemoryError):
    """Live tensors went over the limit that was given; the call did not finish."""


class live_bytes:
    """Counts the bytes of the tensors that are alive, and their high-water mark.

    Each storage counts once and whole, from the operation that makes it to the death of the last
    tensor, view or node of the graph that holds it; forward, backward and an optimizer's step are
    all seen. What existed before counts from the start where it is named, else from its first use.

        with live_bytes(model.parameters()) as live:
            model(x).sum().backward()
        live.peak, live.now

    Args:
        tensors: What exists already and counts from the start.
        apart: Tensors whose storages never count, such as a data set that batches are cut from.
        limit: Bytes; more of them raise ``OverLimit`` in the operation that made them.
        meta: Count tensors on ``meta`` as well, as if they had their bytes: a rehearsal.

    Attributes:
        now: Bytes alive; after the block those that were alive at its end.
        peak: The most that were alive after any operation.

    Exactness: exact in what it sees. It does not see what an operation allocates and frees inside
    itself, what a compiled graph or other code outside of torch's dispatcher allocates, tensors
    without a storage (sparse ones), and, unless asked to, those on ``meta``, which have no bytes. A
    limit is noticed after the operation, so leave room for its result.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor] = (),
        *,
        apart: Iterable[Tensor] = (),
        limit: int | None = None,
        meta: bool = False,
    ) -> None:
        self.now = self.peak = 0
        self._limit, self._meta = limit, meta
        self._sizes: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # held, so that no later storage takes one of these addresses
        self._apart = {storage._cdata: storage for storage in _storages(apart)}
        self._mode = _Watch(self._note)
        self._note(list(tensors))

    def __enter__(self) -> live_bytes:
        self._mode.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        for kept in (self._watches, self._sizes, self._apart):
            kept.clear()

    def _note(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages that are new, or have another size than before."""
        for storage in _storages(tensors, meta=self._meta):
            key = storage._cdata
            if key in self._apart:
                continue
            if key not in self._watches:
                self._watches[key] = weakref.ref(storage, partial(self._forget, key))
            size = storage.nbytes()
            # apart from the sum, in which the collector could not be let in
            change = size - self._sizes.get(key, 0)
            self.now += change
            self._sizes[key] = size
        self.peak = max(self.peak, self.now)
        if self._limit is not None and self.now > self._limit:
            raise OverLimit(
                f"memory: got {self.now / GIB:.3g} GiB of live tensors; the limit is "
                f"{self._limit / GIB:.3g} GiB; take a smaller batch or model, or raise the limit"
            )

    def _forget(self, key: int, _: object) -> None:
        del self._watches[key]
        self.now -= self._sizes.pop(key)


class _Watch(EagerMode):
    """Shows what goes into and comes out of every operation."""

    supports_higher_order_operators = True
    # compiled loops may run: what they write to is allocated by torch
    sees_memory_only = True

    def __init__(self, note: Callable[[Iterable[Tensor]], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        tensors = [*tensors_in(args), *tensors_in(kwargs)]
        self._note(tensors)
        result = func(*args, **(kwargs or {}))
        # the arguments again: ``resize_`` and ``out=`` change what is there
        self._note([*tensors, *tensors_in(result)])
        return result


def peak_bytes(
    call: Callable[[], object],
    device: torch.device,
    *,
    tensors: Iterable[Tensor] = (),
    apart: Iterable[Tensor] = (),
    limit: int | None = None,
) -> int | None:
    """The high-water mark of live bytes while something runs once.

    Args:
        call: What runs, for example a training step.
        device: Where it runs. CPU: ``live_bytes``. CUDA: the allocator's largest sum during the
            call, less what it held before, plus the bytes of ``tensors``, so that other models on
            the device do not count.
        tensors, apart, limit: As for ``live_bytes``; the last two hold on a CPU alone.

    Returns:
        Bytes; None on another kind of device, where nothing runs.

    Raises:
        OverLimit: The live tensors of a CPU exceed the limit.
    """
    if device.type == "cpu":
        with live_bytes(tensors, apart=apart, limit=limit) as live:
            call()
        return live.peak
    if device.type != "cuda":
        return None
    existing = storage_bytes(tensors)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before + existing


def process_peak() -> int | None:
    """The largest resident memory this process has had so far, in bytes.

    It counts everything (libraries, the interpreter, allocators' reserves) and never goes down in a
    process: a figure for one piece of work takes a process of its own (``in_fresh_process``).

    Returns:
        ``VmHWM`` where the kernel states it, else ``ru_maxrss``, in which Linux also counts what
        the parent process held when it started this one; None where the system has neither.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        status = ""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    if found:
        return int(found[1]) * 1024
    try:
        import resource
    except ImportError:
        return None
    # kilobytes but on macOS
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def in_fresh_process(
    function: Callable[..., Result], *arguments: object
) -> tuple[Result, int | None]:
    """What a function returns in a new process, and that process's peak in bytes.

    Args:
        function: A function of a module, by its name there.
        arguments: Plain values or what else can be sent to a process.

    Raises:
        BrokenProcessPool: The process died, for example for lack of memory.
        Whatever the function raises.
    """
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_with_peak, function, arguments).result()


def _with_peak(function: Callable[..., Result], arguments: tuple[object, ...]) -> Any:
    return function(*arguments), process_peak()


def storage_bytes(tensors: Iterable[Tensor], *, meta: bool = False) -> int:
    """Bytes of the storages behind some tensors, each once and whole; on ``meta`` if asked to."""
    return sum({s._cdata: s.nbytes() for s in _storages(tensors, meta=meta)}.values())


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of what is held between two steps: parameters, their gradients, optimizer state."""
    parameters = list(model.parameters())
    return {
        "param_bytes": storage_bytes(parameters),
        "grad_bytes": storage_bytes(p.grad for p in parameters if p.grad is not None),
        "optimizer_bytes": storage_bytes(tensors_in(optimizer.state_dict())),
    }


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested mappings, lists and tuples, such as an optimizer's state dict."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from (tensor for entry in value.values() for tensor in tensors_in(entry))
    elif isinstance(value, list | tuple):
        yield from (tensor for entry in value for tensor in tensors_in(entry))


def _storages(values: Iterable[object], *, meta: bool = False) -> Iterator[torch.UntypedStorage]:
    for value in values:
        if isinstance(value, Tensor) and (meta or value.device.type != "meta"):
            if hasattr(value, "to_local"):
                # of a tensor in shards this rank's
                value = value.to_local()
            try:
                yield value.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
