"""Convolutions as products of matrices, of any number of axes, and their gradients.

    output[n, o, position] = sum over c, offset of x[n, c, position * stride + offset * dilation]
                                                   * weight[o, c, offset]

The windows of x become the rows of one matrix a group, so that every output element is one element
of a product. A transposed convolution is a plain one over x with zeros between its elements, by the
mirrored weight: its elements too are single sums, not sums of rounded parts.

Legend: N batch, C channels of x, O channels of the output, G groups; S, P, K spatial axes of x, of
the output and of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Multiply = Callable[[Tensor, Tensor], Tensor]
"""[G, m, k] and [G, k, n] to [G, m, n]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """How the windows of a convolution lie; one number a spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @staticmethod
    def of(
        axes: int,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Geometry:
        """From lists of one number an axis, or of one for all."""
        lists = (tuple(x) * axes if len(x) == 1 else tuple(x) for x in (stride, padding, dilation))
        first, second, third = lists
        return Geometry(stride=first, padding=second, dilation=third, groups=groups)


def convolve(x: Tensor, weight: Tensor, geometry: Geometry, multiply: Multiply) -> Tensor:
    """x[N, C, *S] by weight[O, C / G, *K], to [N, O, *P]."""
    padding = [(size, size) for size in geometry.padding]
    return _convolve(x, weight, padding, geometry, multiply)


def convolve_transposed(
    x: Tensor,
    weight: Tensor,
    geometry: Geometry,
    output_padding: Sequence[int],
    multiply: Multiply,
) -> Tensor:
    """x[N, C, *S] by weight[C, O / G, *K], to [N, O, *P]: the gradient of ``convolve`` by x."""
    axes = tuple(range(2, weight.dim()))
    mirrored = weight.unflatten(0, (geometry.groups, weight.shape[0] // geometry.groups))
    mirrored = mirrored.transpose(1, 2).flatten(0, 1).flip(axes)
    reach = [
        dilation * (size - 1) - padding
        for dilation, size, padding in zip(
            geometry.dilation, weight.shape[2:], geometry.padding, strict=True
        )
    ]
    padding = [(size, size + more) for size, more in zip(reach, output_padding, strict=True)]
    ones = (1,) * len(axes)
    plain = Geometry(stride=ones, padding=ones, dilation=geometry.dilation, groups=geometry.groups)
    return _convolve(_spread(x, geometry.stride), mirrored, padding, plain, multiply)


def input_gradient(
    gradient: Tensor, weight: Tensor, sizes: Sequence[int], geometry: Geometry, multiply: Multiply
) -> Tensor:
    """The gradient of ``convolve`` by x, whose spatial sizes are given."""
    least = (
        (count - 1) * stride - 2 * padding + dilation * (size - 1) + 1
        for count, stride, padding, dilation, size in zip(
            gradient.shape[2:],
            geometry.stride,
            geometry.padding,
            geometry.dilation,
            weight.shape[2:],
            strict=True,
        )
    )
    beyond = [size - reached for size, reached in zip(sizes, least, strict=True)]
    return convolve_transposed(gradient, weight.conj(), geometry, beyond, multiply)


def weight_gradient(
    gradient: Tensor, x: Tensor, sizes: Sequence[int], geometry: Geometry, multiply: Multiply
) -> Tensor:
    """[O, C / G, *K]: gradient[N, O, *P] times the windows of x[N, C, *S]; K is given."""
    padding = [(size, size) for size in geometry.padding]
    rows = _windows(_pad(x, padding), sizes, geometry)
    rows = _first(rows, gradient.shape[2:])
    columns = _rows_by_group(rows, len(sizes), geometry.groups)
    groups, outputs = geometry.groups, gradient.shape[1]
    by_channel = gradient.movedim(1, 0).reshape(groups, outputs // groups, columns.shape[1])
    return multiply(by_channel, columns).reshape(outputs, x.shape[1] // groups, *sizes)


def transposed_input_gradient(
    gradient: Tensor, weight: Tensor, sizes: Sequence[int], geometry: Geometry, multiply: Multiply
) -> Tensor:
    """The gradient of ``convolve_transposed`` by x, whose spatial sizes are given."""
    return _first(convolve(gradient, weight.conj(), geometry, multiply), sizes)


def _convolve(
    x: Tensor,
    weight: Tensor,
    padding: Sequence[tuple[int, int]],
    geometry: Geometry,
    multiply: Multiply,
) -> Tensor:
    groups, outputs, sizes = geometry.groups, weight.shape[0], weight.shape[2:]
    windows = _windows(_pad(x, padding), sizes, geometry)
    counts = windows.shape[2 : 2 + len(sizes)]
    rows = _rows_by_group(windows, len(sizes), groups)
    by_group = weight.reshape(groups, outputs // groups, rows.shape[-1])
    product = multiply(rows, by_group.mT)
    # [G, N, *P, O / G] to [N, G, O / G, *P]
    product = product.reshape(groups, x.shape[0], *counts, outputs // groups)
    return product.movedim(-1, 2).movedim(0, 1).reshape(x.shape[0], outputs, *counts)


def _pad(x: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    """Zeros around the spatial axes; a negative size takes elements away."""
    sizes = [size for pair in reversed(padding) for size in pair]
    return torch.nn.functional.pad(x, sizes) if any(sizes) else x


def _spread(x: Tensor, stride: Sequence[int]) -> Tensor:
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


def _windows(x: Tensor, sizes: Sequence[int], geometry: Geometry) -> Tensor:
    """[N, C, *P, *K], a view of x."""
    for axis, (size, stride, dilation) in enumerate(
        zip(sizes, geometry.stride, geometry.dilation, strict=True)
    ):
        x = x.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return x


def _rows_by_group(windows: Tensor, axes: int, groups: int) -> Tensor:
    """[N, C, *P, *K] to [G, N P, C / G K]."""
    batch, channels = windows.shape[:2]
    counts, sizes = windows.shape[2 : 2 + axes], windows.shape[2 + axes :]
    by_group = windows.unflatten(1, (groups, channels // groups)).movedim(1, 0)
    by_group = by_group.movedim(2, 2 + axes)
    return by_group.reshape(
        groups, batch * math.prod(counts), channels // groups * math.prod(sizes)
    )


def _first(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """The first so many positions along the spatial axes; kernel axes may follow them."""
    for axis, size in enumerate(sizes, start=2):
        x = x.narrow(axis, 0, size)
    return x
