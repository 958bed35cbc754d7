"""Converted convolutions: the windows of x are the rows of a product, the taps its contraction.

    output      = gemm(windows(x)[N P, K C],   w[O, K C])        contraction: offsets and channels
    grad_input  = sum over windows of gemm(g[N P, O], w.T[K C, O])       contraction: outputs
    grad_weight = gemm(g.T[O, N P], windows(x).T[K C, N P])      contraction: batch and positions

Legend: N batch, C channels of x in a group, O outputs of a group, P positions, K offsets of the
kernel; the channels of one offset lie side by side, so that blocks run along channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from mixprec.nn.layer import QuantizedLayer
from mixprec.recipes import Recipe
from mixprec.rounding import check_floating
from mixprec.windows import Windows, mirrored, spread, transposed_padding


class QuantizedConv(QuantizedLayer, _ConvNd):
    """A convolution whose products follow a recipe; made by ``mixprec.convert``.

    Padding of every mode is part of x before it is quantised. Each group is a product of its own,
    with scales of its own; delayed scaling has one history for all groups.

    Edge cases: a batch of none; inputs without a batch axis.

    Exactness: as ``mixprec.linear`` over the windows; grad_input is summed over windows in FP32
    (FP64 for float64) and rounded once.
    """

    @staticmethod
    def sizes(layer: Any) -> tuple[int, ...]:
        contraction = layer.in_channels // layer.groups * math.prod(layer.kernel_size)
        return contraction, layer.out_channels // layer.groups

    @staticmethod
    def why_not(layer: Any, recipe: Recipe) -> str | None:
        if layer.groups > 1 and layer.in_channels == layer.groups:
            return "depthwise: each product would contract the taps of one channel alone"
        return None

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of input [N, C, *S] or [C, *S] by the recipe."""
        x, padding = self._with_batch(input), self._zeros_around()
        if self.padding_mode != "zeros":
            mode, padding = self.padding_mode, ((0, 0),) * len(padding)
            x = nn.functional.pad(x, self._reversed_padding_repeated_twice, mode=mode)
        out = self._convolve(x, self.weight, self.stride, padding)
        return out if input.dim() == out.dim() else out.squeeze(0)

    def _zeros_around(self) -> tuple[tuple[int, int], ...]:
        # torch holds them for the last axis first, an axis' start before its end
        sizes = self._reversed_padding_repeated_twice
        return tuple(zip(sizes[::2], sizes[1::2], strict=True))[::-1]

    def _with_batch(self, x: Tensor) -> Tensor:
        check_floating("input", x)
        axes = len(self.kernel_size)
        if x.dim() not in (axes + 1, axes + 2):
            raise ValueError(
                f"input: got shape {tuple(x.shape)}; must have {axes + 1} or {axes + 2} axes, the "
                "batch first; reshape it"
            )
        return x if x.dim() == axes + 2 else x.unsqueeze(0)

    def _convolve(
        self,
        x: Tensor,
        weight: Tensor,
        stride: tuple[int, ...],
        padding: Sequence[tuple[int, int]],
    ) -> Tensor:
        """x by weight [O, C / groups, *K], plus the bias."""
        windows = Windows(
            kernel=self.kernel_size,
            stride=stride,
            dilation=self.dilation,
            padding=tuple(padding),
        )
        channels = weight.shape[1] * self.groups
        positions = windows.positions(x.shape[2:])
        if x.shape[1] != channels or min(positions) < 1:
            raise ValueError(
                f"input: got {x.shape[1]} channels and sizes {tuple(x.shape[2:])}; must be "
                f"{channels} channels and, padded, at least the kernel's {self.kernel_size} with "
                f"dilation {self.dilation}; reshape or pad it"
            )
        groups = self.groups
        biases = [None] * groups if self.bias is None else self.bias.chunk(groups)
        parts = [
            self.multiply(
                x_group,
                windows.weight_matrix(w_group),
                bias,
                owner=self.weight,
                entry=group,
                windows=windows,
            )
            for group, (x_group, w_group, bias) in enumerate(
                zip(x.chunk(groups, 1), weight.chunk(groups), biases, strict=True)
            )
        ]
        out = parts[0] if groups == 1 else torch.cat(parts, 1)
        out = out.reshape(x.shape[0], *positions, weight.shape[0]).movedim(-1, 1)
        # in x's memory format, as torch's: views of it are common behind a convolution
        return out.contiguous() if x.is_contiguous() else out


class QuantizedConvTranspose(QuantizedConv, _ConvTransposeNd):
    """A transposed convolution: the plain one of x with zeros between its elements.

    Each output element is one sum, by the mirrored weight, so that it is rounded once.
    """

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The transposed convolution of input [N, C, *S] or [C, *S] by the recipe."""
        x, axes = self._with_batch(input), len(self.kernel_size)
        # no words ("same") here, which torch refuses for these
        padding = [int(size) for size in self.padding]
        more = self._output_padding(
            x,
            output_size,
            list(self.stride),
            padding,
            list(self.kernel_size),
            axes,
            list(self.dilation),
        )
        around = transposed_padding(self.kernel_size, padding, self.dilation, more)
        weight = mirrored(self.weight, self.groups)
        out = self._convolve(spread(x, self.stride), weight, (1,) * axes, around)
        return out if input.dim() == out.dim() else out.squeeze(0)


class QuantizedConv1d(QuantizedConv, nn.Conv1d):
    """``nn.Conv1d`` by a recipe."""


class QuantizedConv2d(QuantizedConv, nn.Conv2d):
    """``nn.Conv2d`` by a recipe."""


class QuantizedConv3d(QuantizedConv, nn.Conv3d):
    """``nn.Conv3d`` by a recipe."""


class QuantizedConvTranspose1d(QuantizedConvTranspose, nn.ConvTranspose1d):
    """``nn.ConvTranspose1d`` by a recipe."""


class QuantizedConvTranspose2d(QuantizedConvTranspose, nn.ConvTranspose2d):
    """``nn.ConvTranspose2d`` by a recipe."""


class QuantizedConvTranspose3d(QuantizedConvTranspose, nn.ConvTranspose3d):
    """``nn.ConvTranspose3d`` by a recipe."""
