"""Counter-based noise for stochastic rounding: a draw is a function of where and when it is used.

With all arithmetic modulo 2^64 (splitmix) and 2^32 (mix), and index = row * columns + column:

    k = splitmix(splitmix(splitmix(seed) ^ step) ^ stream),  k0, k1 = low and high half of k
    draw(index) = mix(mix(low(index) ^ k0) + k1 + high(index) * 0x9e3779b9) >> 8

The global generator is never touched.
Sources: the 32-bit mixer "lowbias32" and SplitMix64, both in the public domain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def signed(value: int, bits: int) -> int:
    """The two's complement reading of an unsigned constant."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical right shift: torch shifts signed integers arithmetically."""
    width = 8 * x.element_size()
    return (x >> count) & ((1 << (width - count)) - 1)


def _splitmix(z: Tensor) -> Tensor:
    z = z + signed(0x9E3779B97F4A7C15, 64)
    z = (z ^ _shift(z, 30)) * signed(0xBF58476D1CE4E5B9, 64)
    z = (z ^ _shift(z, 27)) * signed(0x94D049BB133111EB, 64)
    return z ^ _shift(z, 31)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 16)) * signed(0x7FEB352D, 32)
    x = (x ^ _shift(x, 15)) * signed(0x846CA68B, 32)
    return x ^ _shift(x, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Counter-based noise: the same bits on any device, for any tiling, sharding or resume.

    Args:
        seed: The run's seed, 0 to 2^64 - 1.
        step: Counts the uses in time (a layer's backward passes): an int, or a 0-d int64 tensor.
        stream: Tells operands apart.
        row: Row of the tensor's first element in the whole operand, for shards.
        column: Its column there.
        columns: Columns of the whole operand; None when the tensor has them all.
    """

    seed: int
    step: int | Tensor = 0
    stream: int = 0
    row: int = 0
    column: int = 0
    columns: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 64:
            raise ValueError(
                f"seed: got {self.seed!r}; must be a whole number from 0 to 2^64 - 1; change it"
            )

    def draws(self, shape: tuple[int, int], device: torch.device | str | None = None) -> Tensor:
        """24-bit draws for an operand of (free, contraction) elements.

        Args:
            shape: Rows and columns of the tensor.
            device: Where the draws go; the default device when None.

        Returns:
            int32 tensor of that shape, each element in [0, 2^24); u = draw / 2^24.
        """
        rows, width = shape
        columns = self.columns if self.columns is not None else self.column + width
        if columns < width:
            raise ValueError(
                f"columns: got {columns}; the tensor alone has {width}; pass the whole operand's "
                "number of columns"
            )
        k0, k1 = self._keys(device)
        row = torch.arange(self.row, self.row + rows, dtype=torch.int64, device=device)[:, None]
        column = torch.arange(self.column, self.column + width, dtype=torch.int64, device=device)
        base = row * columns
        low = base.to(torch.int32) + column.to(torch.int32)
        mixed = _mix(low ^ k0) + k1
        if (self.row + rows) * columns > 1 << 32:
            high = ((base + column) >> 32).to(torch.int32)
            mixed = mixed + high * signed(0x9E3779B9, 32)
        return _shift(_mix(mixed), 8)

    def _keys(self, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        key = torch.full((), signed(self.seed, 64), dtype=torch.int64, device=device)
        for part in (self.step, self.stream):
            key = _splitmix(key) ^ (part if isinstance(part, Tensor) else signed(part, 64))
        key = _splitmix(key)
        return key.to(torch.int32), _shift(key, 32).to(torch.int32)
