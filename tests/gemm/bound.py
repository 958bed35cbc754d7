"""The error that a product may have, and how it is measured."""

from __future__ import annotations

import torch
from torch import Tensor

from mixprec.quantization import QuantizedTensor

HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
HALF_SMALLEST = {torch.float32: 2.0**-150, torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}


def values_and_scale(operand: QuantizedTensor | Tensor) -> tuple[Tensor, Tensor]:
    """Values [rows, K], times the scales of their blocks, and scale [rows or 1, 1], in float64."""
    one = torch.ones(1, 1, dtype=torch.float64)
    if isinstance(operand, Tensor):
        return operand.double(), one
    values = operand.values.double()
    if operand.scale is None:
        return values, one
    is_plain = tuple(operand.scale.shape) in ((1, 1), (values.shape[0], 1))
    if operand.scale.dtype == torch.float32 and is_plain:
        return values, operand.scale.double()
    sizes = (
        length if size == -1 else size
        for size, length in zip(operand.spec.block, values.shape, strict=True)
    )
    scale = operand.block_scale.double()
    for axis, size in enumerate(sizes):
        index = torch.arange(values.shape[axis]) // size
        scale = scale.index_select(axis, index)
    whole = operand.tensor_scale
    return values * scale, one if whole is None else whole.double()


def assert_within_bound(
    result: Tensor,
    a: QuantizedTensor | Tensor,
    b: QuantizedTensor | Tensor,
    bias: Tensor | None = None,
    cut: float = 0.0,
) -> None:
    """|result - exact| <= (K + 3) * 2^-24 * scale * sum|a||b|, plus half an ulp of its type.

    ``cut`` adds its part of scale * sum|a||b|, for units that add in fewer bits than float32.
    """
    (a_MK, scale_a), (b_NK, scale_b) = values_and_scale(a), values_and_scale(b)
    exact = (a_MK @ b_NK.t()) * scale_a * scale_b.t()
    magnitude = (a_MK.abs() @ b_NK.abs().t()) * scale_a * scale_b.t()
    allowed = ((a_MK.shape[1] + 3) * 2.0**-24 + cut) * magnitude
    if bias is not None:
        exact = exact + bias.double()
        allowed = allowed + 2.0**-24 * (exact.abs() + allowed)
    allowed = allowed + HALF_ULP[result.dtype] * (exact.abs() + allowed)
    allowed = allowed + HALF_SMALLEST[result.dtype]
    assert result.shape == exact.shape
    assert ((result.double() - exact).abs() <= allowed).all()
