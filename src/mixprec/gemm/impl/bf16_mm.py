"""Products on BF16 units: values that bfloat16 holds exactly, float32 sums, then scales.

    result[m, n] = (sum_k a[m, k] * b[n, k]) * scale_a[m] * scale_b[n] + bias[n]

The fast path of CUDA GPUs without FP8 units (Ampere), and of every format whose values are bfloat16
numbers: FP8, FP6, FP4 and bfloat16 itself. An operand in high precision joins in if it is bfloat16.

``torch.mm(..., out_dtype=torch.float32)`` keeps the float32 sums; in torch 2.11 to 2.13 it exists
on CUDA and not on the CPU. Autocast does not touch it.

Exactness: operands bit for bit; sums within (K + 3) * 2^-24 * scale * sum|a||b|, plus half an ulp
of the result's type. M, N, K as in ``native``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixprec.formats import get_format
from mixprec.gemm import native
from mixprec.hardware import generation
from mixprec.quantization import Operand, QuantizedTensor
from mixprec.rounding import holds

_BF16 = get_format("bf16")


def why_not(a: Operand, b: Operand, out_dtype: torch.dtype) -> str | None:
    """Why these operands cannot be multiplied here, or None.

    Args:
        a: [M, K].
        b: [N, K].
        out_dtype: Type of the result.

    Returns:
        One line that names the argument and the rule.
    """
    # asked first and alone: on a CPU it spares every product the rest
    reason = _why_not_device(native.stored(a))
    if reason is not None:
        return reason
    return native.first_reason(
        _why_not_operand("a", a),
        _why_not_operand("b", b),
        native.why_not_out_dtype(out_dtype),
    )


def _why_not_operand(name: str, operand: Operand) -> str | None:
    if isinstance(operand, QuantizedTensor):
        if not holds(_BF16, operand.spec.format):
            return f"{name}: got {operand.spec.format}; its values are no bfloat16 numbers"
        return native.why_not_scales(name, operand)
    if operand.dtype != torch.bfloat16:
        return f"{name}: got {operand.dtype} in high precision; BF16 units take bfloat16 alone"
    return None


def _why_not_device(x: Tensor) -> str | None:
    kind, capability = native.device_facts(x)
    if capability is None:
        return f"device: got {kind}; torch.mm with float32 sums of bfloat16 is there on cuda only"
    unit = generation(capability)
    if unit.multiplies(_BF16):
        return None
    major, minor = capability
    return f"device: compute capability {major}.{minor} ({unit.name}) has no BF16 units; 8.0 has"


def why_slow(a: Operand, b: Operand) -> str | None:
    """None: where the units exist they are faster than the emulation."""
    return None


def note(a: Operand, b: Operand) -> str | None:
    """None: the units add in FP32."""
    return None


def matmul(a: Operand, b: Operand, *, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a @ b.T with scales, plus bias, in out_dtype.

    Args:
        a: [M, K], codes whose values are bfloat16 numbers, or bfloat16 (``why_not`` gives None).
        b: [N, K] alike.
        bias: [N], any floating-point type; added in float32.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        [M, N], contiguous.

    Edge cases: M, N or K may be 0 (K = 0 gives the bias); a NaN scale makes its row or column, or
    the whole result, NaN.
    """
    sums_MN = torch.mm(_values(a), _values(b).t(), out_dtype=torch.float32)
    return native.add_bias_and_round(native.apply_scales(sums_MN, a, b), bias, out_dtype)


def _values(operand: Operand) -> Tensor:
    return operand if isinstance(operand, Tensor) else operand.values.to(torch.bfloat16)


def prepare(x: Operand) -> Operand:
    """The operand itself: decoding costs little beside a product on a GPU."""
    return x
