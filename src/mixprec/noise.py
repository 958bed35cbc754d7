"""Counter-based noise for stochastic rounding: a draw is a function of where and when it is used.

With all arithmetic modulo 2^64 (splitmix) and 2^32 (mix), and index = row * columns + column:

    k = splitmix(splitmix(splitmix(seed) ^ step) ^ stream),  k0, k1 = low and high half of k
    draw(index) = mix(mix(low(index) ^ k0) + k1 + high(index) * 0x9e3779b9) >> 8

The global generator is never touched.
Sources: the 32-bit mixer "lowbias32" and SplitMix64, both in the public domain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mixprec.modes import is_fake, is_watched


def signed(value: int, bits: int) -> int:
    """The two's complement reading of an unsigned constant."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_CACHED_BY_A_CORE = 1 << 17
_ALL_64 = (1 << 64) - 1


def cached_elements() -> int:
    """Elements that stay in the caches of the cores at work through several passes over them."""
    return _CACHED_BY_A_CORE * torch.get_num_threads()


def piece_starts(x: Tensor, axis: int, step: int) -> range:
    """Where the pieces of an axis start, each so many elements long.

    Of a tensor without numbers the first stands for all, which need as much memory.
    """
    starts = range(0, x.shape[axis], step)
    return starts[:1] if is_fake(x) and not is_watched() else starts


def _splitmix(z: int | Tensor) -> Any:
    """Of a number from 0 to 2^64 - 1, or of an int64 tensor, which wraps by itself."""
    mask = -1 if isinstance(z, Tensor) else _ALL_64
    z = z + signed(0x9E3779B97F4A7C15, 64) & mask
    z = (z ^ z >> 30 & (1 << 34) - 1) * signed(0xBF58476D1CE4E5B9, 64) & mask
    z = (z ^ z >> 27 & (1 << 37) - 1) * signed(0x94D049BB133111EB, 64) & mask
    return z ^ z >> 31 & (1 << 33) - 1


def _mix(x: Tensor, spare: Tensor, dropped: int = 0) -> Tensor:
    """In the memory of x, int32, with a buffer of its size; the result shifted right."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        torch.bitwise_right_shift(x, shift, out=spare)
        x.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))
        x.mul_(signed(factor, 32))
    torch.bitwise_right_shift(x, 16 + dropped, out=spare)
    spare.bitwise_and_((1 << (16 - dropped)) - 1)
    if dropped:
        x.bitwise_right_shift_(dropped).bitwise_and_((1 << (32 - dropped)) - 1)
    return x.bitwise_xor_(spare)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Counter-based noise: the same bits on any device, for any tiling, sharding or resume.

    Args:
        seed: The run's seed, 0 to 2^64 - 1.
        step: Counts the uses in time (a layer's backward passes): an int, or a 0-d int64 tensor.
        stream: Tells operands apart.
        row: Row of the tensor's first element in the whole operand, for shards. This and the next
            two may be 0-d int64 tensors.
        column: Its column there.
        columns: Columns of the whole operand; None when the tensor has them all.
    """

    seed: int
    step: int | Tensor = 0
    stream: int = 0
    row: int | Tensor = 0
    column: int | Tensor = 0
    columns: int | Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise ValueError(
                f"seed: got {self.seed!r}; must be a whole number from 0 to 2^64 - 1; change it"
            )

    def draws(
        self,
        shape: tuple[int, int],
        device: torch.device | str | None = None,
        *,
        column_major: bool = False,
    ) -> Tensor:
        """24-bit draws for an operand of (free, contraction) elements.

        Args:
            shape: Rows and columns of the tensor.
            device: Where the draws go; the default device when None.
            column_major: The memory layout of the result, for an operand that is a transpose.

        Returns:
            int32 tensor of that shape, each element in [0, 2^24); u = draw / 2^24.
        """
        rows, width = shape
        columns = self.columns_of(width)
        k0, k1 = self.keys(device)
        row = (torch.arange(rows, dtype=torch.int64, device=device) + self.row) * columns
        column = torch.arange(width, dtype=torch.int64, device=device) + self.column
        outer, inner = (column, row) if column_major else (row, column)
        end = (self.row + rows) * columns
        has_high = isinstance(end, Tensor) or end > 1 << 32
        draws = torch.empty((len(outer), len(inner)), dtype=torch.int32, device=device)
        length, starts = len(outer), range(min(1, len(outer)))
        if draws.device.type == "cpu" and not torch.compiler.is_compiling():
            length = max(1, cached_elements() // max(1, len(inner)))
            starts = piece_starts(draws, 0, length)
        spare = torch.empty_like(draws[:length])
        for start in starts:
            part, first = draws[start : start + length], outer[start : start + length, None]
            torch.add(first.to(torch.int32), inner.to(torch.int32), out=part)
            _mix(part.bitwise_xor_(k0), spare[: len(part)]).add_(k1)
            if has_high:
                high = ((first + inner) >> 32).to(torch.int32)
                part.add_(high * signed(0x9E3779B9, 32))
            _mix(part, spare[: len(part)], dropped=8)
        return draws.t() if column_major else draws

    def columns_of(self, width: int) -> int | Tensor:
        """Columns of the whole operand, of which a tensor has so many."""
        columns = self.columns if self.columns is not None else self.column + width
        if isinstance(columns, int) and columns < width:
            raise ValueError(
                f"columns: got {columns}; the tensor alone has {width}; pass the whole operand's "
                "number of columns"
            )
        return columns

    def at(self, start: int, axis: int, width: int) -> Noise:
        """That of a part of a tensor of so many columns, from a row (axis 0) or column on."""
        if axis == 0:
            return replace(self, row=self.row + start)
        return replace(self, column=self.column + start, columns=self.columns_of(width))

    def keys(self, device: torch.device | str | None) -> tuple[Any, Any]:
        """The two halves of the key; numbers where the step can be read without waiting."""
        step = self.step
        if isinstance(step, Tensor):
            if step.device.type == "cpu" and not torch.compiler.is_compiling():
                step = int(step) & _ALL_64
            else:
                seed = torch.full((), signed(self.seed, 64), dtype=torch.int64, device=device)
                key = _splitmix(_splitmix(_splitmix(seed) ^ step) ^ self.stream)
                return key.to(torch.int32), (key >> 32).to(torch.int32)
        key = _splitmix(_splitmix(_splitmix(self.seed) ^ step & _ALL_64) ^ self.stream)
        return signed(key, 32), signed(key >> 32, 32)
