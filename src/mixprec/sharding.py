"""Axes of a product that the ranks of a process group share out, and what they agree on.

    amax of a block = max over ranks of its parts' amaxes
    place of a part = sum of the lengths of the parts before it

A product has rows (M), outputs (N) and inputs (K); each of its operands has two of them as its free
and its contraction axis. numerics.md says what follows from each being spread.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mixprec.noise import Noise
from mixprec.rounding import can_look_at


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """An axis of which each rank of a group holds a part, one after the other in their order.

    group: The process group's name, as torch registers it: a value that can be compared, copied
        and compiled.
    """

    group: str
    rank: int
    size: int

    def _reduced(self, x: Tensor, operation: str) -> Tensor:
        # an operator, since Dynamo does not trace the calls of torch.distributed that write in
        # place
        reduced = torch.ops._c10d_functional.all_reduce(x.contiguous(), operation, self.group)
        whole: Tensor = torch.ops._c10d_functional.wait_tensor(reduced)
        return whole

    def largest(self, magnitudes: Tensor) -> Tensor:
        """The largest of all ranks' magnitudes, elementwise, in float32; NaN is above all."""
        # magnitudes have the order of their bits, NaN above inf; as numbers, a maximum may lose NaN
        # (the mask takes the sign; Inductor, torch 2.13, does not send what is a mere view)
        bits = magnitudes.to(torch.float32).view(torch.int32) & 0x7FFFFFFF
        return self._reduced(bits, "max").view(torch.float32)

    def total(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, in x's type."""
        return self._reduced(x, "sum")

    def place(self, length: int, device: torch.device) -> tuple[int | Tensor, int | Tensor]:
        """Where this rank's part begins, and the length of the whole axis; on a GPU 0-d tensors."""
        is_own = torch.arange(self.size, device=device) == self.rank
        lengths = self._reduced(is_own.to(torch.int64) * length, "sum")
        start, whole = lengths[: self.rank].sum(), lengths.sum()
        return (int(start), int(whole)) if can_look_at(whole) else (start, whole)


def spread_over(group: dist.ProcessGroup | None = None) -> Spread | None:
    """An axis shared out over a group, by default all ranks; None if it has one rank alone."""
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError(
            "group: got None; torch.distributed has no process group yet; call "
            "torch.distributed.init_process_group first"
        )
    if group.size() == 1:
        return None
    return Spread(group=group.group_name, rank=group.rank(), size=group.size())


def is_distributed(x: Tensor) -> bool:
    """Whether a tensor is a ``DTensor``; asked without importing the module that has it."""
    return hasattr(x, "device_mesh")


def local_part(x: Tensor) -> Tensor:
    """What this rank holds of a tensor that is no part of a graph: of a DTensor, in its memory."""
    if not is_distributed(x):
        return x
    with torch.no_grad():
        part: Tensor = x.to_local()  # type: ignore[attr-defined]
    return part


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's part of an operand: over whom its axes are spread; None: all of one is here."""

    free: Spread | None = None
    contraction: Spread | None = None

    def largest(self, amax: Tensor, axes: tuple[bool, bool]) -> Tensor:
        """The largest magnitudes over all parts along these of the (free, contraction) axes."""
        for spread, is_asked in zip((self.free, self.contraction), axes, strict=True):
            if spread is not None and is_asked:
                amax = spread.largest(amax)
        return amax

    def noise(self, noise: Noise, shape: tuple[int, int], device: torch.device) -> Noise:
        """Noise for this part, its elements counted in the whole operand."""
        if self.free is not None:
            noise = replace(noise, row=self.free.place(shape[0], device)[0])
        if self.contraction is not None:
            column, columns = self.contraction.place(shape[1], device)
            noise = replace(noise, column=column, columns=columns)
        return noise


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Over whom the axes of a layer's products are spread; None: all of an axis is here.

    rows: M. Each rank has rows of a batch: data parallelism.
    outputs: N. Each rank has rows of the weight: column parallelism, as torch calls it.
    inputs: K. Each rank has columns of the weight: row parallelism.
    """

    rows: Spread | None = None
    outputs: Spread | None = None
    inputs: Spread | None = None


WHOLE = Sharding()
