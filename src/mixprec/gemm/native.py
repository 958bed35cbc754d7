"""What the implementations on matrix units share: what a device is, and scales after the sums.

    result = round((sum * scale_a) * scale_b + bias)        all but the rounding in float32

A scale can follow the finished sum where it does not change along the contraction: one scale a
tensor, or one a row of the operand; and so can the factor of a tensor beside the scales of its
blocks.

Legend: M rows of a, N rows of b, K contraction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixprec.quantization import Operand, QuantizedTensor

_OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def stored(operand: Operand) -> Tensor:
    """What an operand is in memory."""
    return operand.codes if isinstance(operand, QuantizedTensor) else operand


def device_facts(x: Tensor) -> tuple[str, tuple[int, int] | None]:
    """Device type ("rocm" for AMD's GPUs) and, for "cuda", the compute capability."""
    if x.device.type != "cuda":
        return x.device.type, None
    if torch.version.hip is not None:
        return "rocm", None
    # not get_device_capability: Dynamo folds only this one into a constant
    properties = torch.cuda.get_device_properties(x.device)
    return "cuda", (properties.major, properties.minor)


def first_reason(*reasons: str | None) -> str | None:
    """The first that is not None; Dynamo of torch 2.11 cannot ask a formatted text for truth."""
    for reason in reasons:
        if reason is not None:
            return reason
    return None


def why_not_out_dtype(out_dtype: torch.dtype) -> str | None:
    """Why a float32 sum cannot be returned in a type, or None."""
    if out_dtype in _OUT_DTYPES:
        return None
    return f"out_dtype: got {out_dtype}; the sums are float32; use float32, bfloat16 or float16"


def follows_sums(q: QuantizedTensor) -> bool:
    """Whether the scales of an operand can follow the finished sums."""
    if q.scale is None:
        return True
    is_plain = q.scale.dtype == torch.float32
    return is_plain and tuple(q.scale.shape) in ((1, 1), (q.codes.shape[0], 1))


def factor_of_sums(operand: Operand) -> Tensor | None:
    """What the finished sums are times for an operand: [1, 1] or [rows, 1], or None for nothing.

    Scales that do not follow the sums were applied to the values, all but the tensor's own factor.
    """
    if not isinstance(operand, QuantizedTensor):
        return None
    return operand.scale if follows_sums(operand) else operand.tensor_scale


def apply_scales(sums_MN: Tensor, a: Operand, b: Operand) -> Tensor:
    """(sums * factor_a) * factor_b, in the place of the sums."""
    factor_a, factor_b = factor_of_sums(a), factor_of_sums(b)
    if factor_a is not None:
        sums_MN = sums_MN.mul_(factor_a)
    if factor_b is not None:
        sums_MN = sums_MN.mul_(factor_b.t())
    return sums_MN


def add_bias_and_round(sums_MN: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """round(sums + bias), the addition in the type of the sums, which are overwritten."""
    # neither in place nor an idle cast: through those the Dynamo of torch 2.11 loses the gradient
    if bias is not None and torch.compiler.is_compiling():
        sums_MN = sums_MN + bias.to(sums_MN.dtype)
    elif bias is not None:
        sums_MN.add_(bias.to(sums_MN.dtype))
    return sums_MN if sums_MN.dtype == out_dtype else sums_MN.to(out_dtype)
