"""Products in float64 from exact products of small integers, in place of native FP64 units.

    out = a @ b.T + bias,   |a @ b.T - exact| <= 2^-53 |exact| + 2^-54 |a| @ |b.T|

``fp64.matmul`` with as many bits as the operands need, so that no element is further off than a
native product of the same operands may be (rows and columns beyond its limit are native); then
bias, which rounds once more. Operands of other types are widened to float64, which loses nothing,
and the result is rounded to the type asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixprec import fp64
from mixprec.gemm.native import first_reason
from mixprec.modes import without_modes
from mixprec.quantization import Operand, QuantizedTensor


def why_not(a: Operand, b: Operand, out_dtype: torch.dtype) -> str | None:
    """Why these operands cannot be multiplied exactly, or None."""
    return first_reason(_why_not_operand("a", a), _why_not_operand("b", b))


def _why_not_operand(name: str, operand: Operand) -> str | None:
    if isinstance(operand, QuantizedTensor):
        return f"{name}: got {operand.spec.format}; exact sums are of operands in high precision"
    return None


def why_slow(a: Operand, b: Operand) -> str | None:
    """None: it runs where it is asked for."""
    return None


def note(a: Operand, b: Operand) -> str | None:
    """None: its sums are those that were asked for."""
    return None


def prepare(x: Operand) -> Operand:
    """The operand itself."""
    return x


def matmul(a: Operand, b: Operand, *, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a @ b.T plus bias, in out_dtype.

    Args:
        a: [M, K], any floating-point type.
        b: [N, K].
        bias: [N], any floating-point type.
        out_dtype: Of the result, which is rounded to it once more where it is narrower.

    Returns:
        [M, N].

    Edge cases: M, N or K may be 0 (K = 0 gives the bias); inf and NaN as IEEE 754 has them.
    """
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    with without_modes():
        product: Tensor = fp64.matmul(a.double(), b.t().double())
        if bias is not None:
            product = product + bias.to(product.dtype)
        return product.to(out_dtype)
