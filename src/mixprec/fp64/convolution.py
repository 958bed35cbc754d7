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

from torch import Tensor

from mixprec.windows import Windows, mirrored, spread, transposed_padding

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

    def windows(self, kernel: Sequence[int], padding: Sequence[tuple[int, int]]) -> Windows:
        """The windows of a kernel; padding in place of the geometry's own."""
        return Windows(
            kernel=tuple(kernel),
            stride=self.stride,
            dilation=self.dilation,
            padding=tuple(padding),
        )


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
    kernel = weight.shape[2:]
    padding = transposed_padding(kernel, geometry.padding, geometry.dilation, output_padding)
    ones = (1,) * len(kernel)
    plain = Geometry(stride=ones, padding=ones, dilation=geometry.dilation, groups=geometry.groups)
    by_output = mirrored(weight, geometry.groups)
    return _convolve(spread(x, geometry.stride), by_output, padding, plain, multiply)


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
    rows = geometry.windows(sizes, padding).view(x)
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
    windows = geometry.windows(sizes, padding).view(x)
    counts = windows.shape[2 : 2 + len(sizes)]
    rows = _rows_by_group(windows, len(sizes), groups)
    by_group = weight.reshape(groups, outputs // groups, rows.shape[-1])
    product = multiply(rows, by_group.mT)
    # [G, N, *P, O / G] to [N, G, O / G, *P]
    product = product.reshape(groups, x.shape[0], *counts, outputs // groups)
    return product.movedim(-1, 2).movedim(0, 1).reshape(x.shape[0], outputs, *counts)


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
