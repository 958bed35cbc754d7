"""Operands as layers quantise them, recorded in order, and parts of those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from mixprec import linear_products
from mixprec.quantization import QuantizedTensor
from mixprec.scaling import times_blocks

AXES = ("MK", "NK", "MN", "KN", "NM", "KM")
Span = tuple[int, int]


class Used(NamedTuple):
    """One operand: its position in the recipe, shape, codes (or values), scales, tensor's amax."""

    position: int
    shape: torch.Size
    codes: Tensor
    scale: Tensor | None
    tensor_amax: Tensor | None
    block: tuple[int, int]


@contextmanager
def recorded() -> Iterator[list[Used]]:
    """Every operand that is quantised meanwhile, in order."""
    original, used = linear_products.quantize_operand, []

    def recording(x, spec, position, noise, delayed, **more):  # type: ignore[no-untyped-def]
        made = original(x, spec, position, noise, delayed, **more)
        if isinstance(made, QuantizedTensor):
            # a product may overwrite values that were decoded at once
            amax = made.tensor_amax
            codes = made.codes.clone()
            if made.is_decoded and made.scale is not None and not made.is_scaled:
                # large ones are times their blocks' scales at once
                codes = times_blocks(codes, made.block_scale, made.spec.block)
            used.append(Used(position, x.shape, codes, made.scale, amax, made.spec.block))
        return made

    linear_products.quantize_operand = recording
    try:
        yield used
    finally:
        linear_products.quantize_operand = original


def part(whole: Used, axis: str, start: float, end: float) -> Used:
    """What a rank holds of an operand: this share of one of its axes, from 0 to 1."""
    codes, scale = whole.codes, whole.scale
    for dim, name in enumerate(AXES[whole.position]):
        if name != axis:
            continue
        length, size = whole.shape[dim], whole.block[dim]
        first, last = round(start * length), round(end * length)
        if last == length:
            # with what a transform padded it by
            last = codes.shape[dim]
        if first == round(end * length):
            last = first
        codes = codes.narrow(dim, first, last - first)
        if scale is not None and size != -1:
            blocks = -(-last // size) - first // size if last > first else 0
            scale = scale.narrow(dim, first // size, blocks)
    return whole._replace(codes=codes, scale=scale)


def differences(own: list[Used], whole: list[Used]) -> list[str]:
    """What differs between the operands of this rank and its parts of one process's, in words."""
    if [use.position for use in own] != [use.position for use in whole]:
        return [f"{[use.position for use in own]} != {[use.position for use in whole]}"]
    found = []
    for place, pair in enumerate(zip(own, whole, strict=True)):
        for field in ("codes", "scale", "tensor_amax"):
            mine, other = (getattr(use, field) for use in pair)
            if mine is not None and not torch.equal(mine, other):
                found.append(f"{field} of use {place}, operand {pair[0].position}")
    return found
