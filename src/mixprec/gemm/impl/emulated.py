"""The product in FP32 arithmetic on decoded values: any device, any shape, any format.

    out = ((a_values @ b_values.T) * scale_a) * scale_b + bias

Decoded values of up to 11 mantissa bits multiply exactly in FP32, so only the sums round: at most
(K + 3) * 2^-24 * scale * sum|a||b| from the exact result. Asked to, it adds as units of fewer bits
do instead (``accumulation``), with the same scales.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from mixprec import loops
from mixprec.codes import decode_pairs, decode_unscaled, table_of
from mixprec.gemm.accumulation import FP32, MODELS, Accumulate
from mixprec.gemm.native import add_bias_and_round
from mixprec.modes import is_autocast_on, without_modes
from mixprec.quantization import Operand, QuantizedTensor
from mixprec.quantized_tensor import is_scaled_before_sum
from mixprec.rounding import can_look_at
from mixprec.scaling import expand_blocks, times_blocks

# the product of two float32 scales keeps its digits in float32 above this
_SMALLEST_FACTOR = 2.0**-100
_Model = Callable[[Tensor, Tensor], Tensor]


def why_not(a: Operand, b: Operand, out_dtype: torch.dtype) -> str | None:
    """None: the emulation takes every operand."""
    return None


def why_slow(a: Operand, b: Operand) -> str | None:
    """None: it is what ``auto`` falls back to."""
    return None


def note(a: Operand, b: Operand) -> str | None:
    """None: it adds in FP32."""
    return None


def prepare(x: Operand) -> Operand:
    """The operand with its values decoded, for several products."""
    return (
        replace(x, held=_decoded(x))
        if isinstance(x, QuantizedTensor) and x.scale is not None
        else x
    )


def matmul(
    a: Operand,
    b: Operand,
    *,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    accumulate: Accumulate = FP32,
) -> Tensor:
    """a[M, K] times b[N, K] over the contraction, in out_dtype [M, N]."""
    model = MODELS.get(accumulate)
    a_values, a_scale = _values_and_scale(a)
    b_values, b_scale = _values_and_scale(b)
    if a_values.dtype != b_values.dtype:
        a_values, b_values = a_values.double(), b_values.double()
    with _exact_float32(a_values), without_modes():
        if a_values.shape[1] == 0:
            out = a_values.new_zeros(a_values.shape[0], b_values.shape[0])
        elif _num_slabs(a_scale) > 1 or _num_slabs(b_scale) > 1:
            out = _matmul_by_slabs(a, a_values, a_scale, b, b_values, b_scale, model)
        else:
            out = _matmul_scaled(a_values, a_scale, b_values, b_scale, model)
    return add_bias_and_round(out, bias, out_dtype)


def _matmul_scaled(
    a_values: Tensor,
    a_scale: Tensor | None,
    b_values: Tensor,
    b_scale: Tensor | None,
    model: _Model | None,
) -> Tensor:
    """Scales that do not change along the contraction: after the sum, a tensor's within it."""
    row = None if b_scale is None else b_scale.t()
    scales = [scale for scale in (a_scale, row) if scale is not None]
    factor = 1.0
    for scale in scales:
        factor *= float(scale) if scale.numel() == 1 and can_look_at(scale) else 1.0
    if model is not None:
        out = model(a_values, b_values)
    elif factor != 1.0 and _SMALLEST_FACTOR <= abs(factor) <= 1 / _SMALLEST_FACTOR:
        unused = a_values.new_zeros(1)
        out = torch.addmm(unused, a_values, b_values.t(), beta=0, alpha=factor)
        scales = [scale for scale in scales if scale.numel() > 1]
    else:
        out = a_values @ b_values.t()
    is_of_both = [scale.numel() for scale in scales] == list(out.shape)
    if is_of_both and loops.serves(out) and out.is_contiguous():
        loops.times_rows_and_columns(out, *scales)
        return out
    for scale in scales:
        out.mul_(scale)
    return out


def _num_slabs(scale: Tensor | None) -> int:
    return 1 if scale is None else scale.shape[1]


def _values_and_scale(x: Operand) -> tuple[Tensor, Tensor | None]:
    """Values to multiply, and the scale that is applied after the sum: [rows or 1, slabs]."""
    if isinstance(x, Tensor):
        return x if x.dtype == torch.float64 else x.float(), None
    if x.scale is None:
        return x.values.reshape(x.matrix_shape), None
    if x.is_scaled:
        return x.codes.reshape(x.matrix_shape), x.tensor_scale
    values, factor = x.held or _decoded(x)
    if values.ndim != 2:
        values = values.reshape(x.matrix_shape)
    scale = x.block_scale
    if is_scaled_before_sum(x.spec, scale.shape[1]):
        is_own = x.held is None
        values = times_blocks(values, scale * factor, x.spec.block, in_place=is_own)
        return values, x.tensor_scale
    scale = expand_blocks(scale, (x.spec.block[0], -1), x.matrix_shape)
    return values, scale * factor if factor != 1.0 else scale


def _decoded(x: QuantizedTensor) -> tuple[Tensor, float]:
    if x.is_decoded:
        return x.codes, 1.0
    if x.is_packed:
        return decode_pairs(x.codes, x.spec.format)[..., : x.matrix_shape[1]], 1.0
    if loops.serves(x.codes, torch.uint8):
        return loops.decoded(x.codes, table_of(x.spec.format)), 1.0
    return decode_unscaled(x.codes, x.spec.format) if _has_no_nan_codes(x) else (x.values, 1.0)


def _has_no_nan_codes(x: QuantizedTensor) -> bool:
    """Whether every NaN stands under a NaN scale, so that decoding need not look for NaN codes."""
    if x.codes.dtype != torch.uint8:
        return False
    if not x.spec.format.has_nan or (x.amax is not None and not x.spec.is_delayed):
        return True
    if x.amax is None:
        return False
    return can_look_at(x.amax) and math.isfinite(float(x.amax))


def _matmul_by_slabs(
    a: Operand,
    a_values: Tensor,
    a_scale: Tensor | None,
    b: Operand,
    b_values: Tensor,
    b_scale: Tensor | None,
    model: _Model | None,
) -> Tensor:
    """Each slab between two changes of a scale along the contraction: sum, scale, add."""
    length = a_values.shape[1]
    widths = [
        x.spec.block[1]
        for x, scale in ((a, a_scale), (b, b_scale))
        if isinstance(x, QuantizedTensor) and _num_slabs(scale) > 1
    ]
    starts = sorted({start for width in widths for start in range(0, length, width)})
    out = a_values.new_zeros(a_values.shape[0], b_values.shape[0])
    for start, end in zip(starts, [*starts[1:], length], strict=True):
        a_slab, b_slab = a_values[:, start:end], b_values[:, start:end]
        slab = a_slab @ b_slab.t() if model is None else model(a_slab, b_slab)
        for x, scale, is_a in ((a, a_scale, True), (b, b_scale, False)):
            if scale is not None:
                assert isinstance(x, QuantizedTensor)
                index = start // x.spec.block[1] if scale.shape[1] > 1 else 0
                column = scale[:, index : index + 1]
                slab.mul_(column if is_a else column.t())
        out.add_(slab)
    return out


def _exact_float32(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """Autocast off, and FP32 products in full precision whatever the global setting says."""
    autocast_off = torch.autocast(x.device.type, enabled=False) if is_autocast_on(x) else None
    # Dynamo cannot trace the global setting; Inductor applies it when it compiles
    if torch.compiler.is_compiling() or torch.get_float32_matmul_precision() == "highest":
        return autocast_off or contextlib.nullcontext()
    return _highest_precision(autocast_off or contextlib.nullcontext())


@contextlib.contextmanager
def _highest_precision(inner: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with inner:
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
