"""The windows of a convolution as rows of a matrix, and back.

    matrix[(n, p), (k, c)] = x[n, c, p * stride + k * dilation]

Legend: N batch, C channels; S, P, K spatial axes of x, of the windows' positions and of the kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """How the windows lie, one entry a spatial axis; padding: zeros before and after it."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    def view(self, x: Tensor) -> Tensor:
        """[N, C, *P, *K], a view of x [N, C, *S], padded."""
        x = pad(x, self.padding)
        for axis, (size, stride, dilation) in enumerate(
            zip(self.kernel, self.stride, self.dilation, strict=True)
        ):
            x = x.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
        return x

    def positions(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """P, of an input of spatial sizes S."""
        return tuple(
            (before + size + after - dilation * (width - 1) - 1) // stride + 1
            for size, width, stride, dilation, (before, after) in zip(
                sizes, self.kernel, self.stride, self.dilation, self.padding, strict=True
            )
        )

    def matrix(self, x: Tensor) -> Tensor:
        """[N P, K C]: a row a window, the channels of an offset side by side."""
        axes = len(self.kernel)
        windows = self.view(x)
        order = (0, *range(2, 2 + 2 * axes), 1)
        return windows.permute(order).reshape(
            math.prod((x.shape[0], *windows.shape[2 : 2 + axes])),
            math.prod((*self.kernel, x.shape[1])),
        )

    def weight_matrix(self, weight: Tensor) -> Tensor:
        """[O, K C] of weight [O, C, *K]."""
        return weight.movedim(1, -1).reshape(weight.shape[0], weight[0].numel())

    def adjoint(self, rows: Tensor, shape: Sequence[int]) -> Tensor:
        """x's shape: each element the sum over the windows that hold it, in rows' type."""
        positions = self.positions(shape[2:])
        parts = rows.reshape(shape[0], *positions, math.prod(self.kernel), shape[1]).movedim(-1, 1)
        sizes = [
            before + size + after
            for size, (before, after) in zip(shape[2:], self.padding, strict=True)
        ]
        x = rows.new_zeros(*shape[:2], *sizes)
        offsets = itertools.product(*map(range, self.kernel))
        for place, offset in enumerate(offsets):
            spans = [
                slice(k * dilation, k * dilation + (count - 1) * stride + 1, stride)
                for k, count, stride, dilation in zip(
                    offset, positions, self.stride, self.dilation, strict=True
                )
            ]
            x[:, :, *spans] += parts[..., place]
        return pad(x, [(-before, -after) for before, after in self.padding])


def pad(x: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    """Zeros around the spatial axes; a negative size takes elements away."""
    sizes = [size for pair in reversed(padding) for size in pair]
    return torch.nn.functional.pad(x, sizes) if any(sizes) else x


def spread(x: Tensor, stride: Sequence[int]) -> Tensor:
    """x with stride - 1 zeros between neighbours."""
    if math.prod(stride) == 1:
        return x
    sizes = [(size - 1) * step + 1 for size, step in zip(x.shape[2:], stride, strict=True)]
    out = x.new_zeros(*x.shape[:2], *sizes)
    places = out
    for axis, step in enumerate(stride, start=2):
        places = places.unfold(axis, 1, step).squeeze(-1)
    places.copy_(x)
    return out


def transposed_padding(
    kernel: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> list[tuple[int, int]]:
    """What a transposed convolution, seen as a plain one over ``spread`` x, is padded by."""
    reaches = [
        step * (size - 1) - less for size, less, step in zip(kernel, padding, dilation, strict=True)
    ]
    return [(reach, reach + more) for reach, more in zip(reaches, output_padding, strict=True)]


def mirrored(weight: Tensor, groups: int) -> Tensor:
    """weight [C, O / G, *K] of a transposed convolution as the plain one's, [O, C / G, *K]."""
    by_group = weight.unflatten(0, (groups, weight.shape[0] // groups))
    return by_group.transpose(1, 2).flatten(0, 1).flip(tuple(range(2, weight.dim())))
