"""What a specification does to a tensor, in figures: error, lost elements, bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mixprec.formats import FloatFormat
from mixprec.measure import saturation_share, sqnr_db, underflow_share
from mixprec.noise import Noise
from mixprec.quant_spec import QuantSpec, as_spec
from mixprec.quantization import as_matrix, quantize
from mixprec.quantized_tensor import QuantizedTensor, matrix_shape
from mixprec.rounding import check_floating
from mixprec.scaling import DelayedState, delayed_state, times_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorFigures:
    """How far a quantised tensor is from what was quantised; shares are of all elements.

    Attributes:
        sqnr_db: Signal to quantisation noise, decibels; inf where nothing changed, NaN where an
            element is not finite.
        relative_error: Norm of the error by the norm of the tensor, 10^(-sqnr_db / 20).
        largest_error: Largest error by the largest magnitude; 0 where nothing changed, NaN where an
            element is not finite.
        saturation: Elements that times their block's factor lie beyond the format's range.
        underflow: Elements that were not zero and came out as zero, also because the scale of their
            block rounds to zero.
        nonfinite: Elements that came out as NaN or inf.
        bits_per_element: Of codes and scales, with a code at its format's width (a 6-bit code is
            stored in a byte).
    """

    sqnr_db: float
    relative_error: float
    largest_error: float
    saturation: float
    underflow: float
    nonfinite: float
    bits_per_element: float


def quantize_error(
    x: Tensor,
    spec: QuantSpec | FloatFormat | str,
    *,
    noise: Noise | None = None,
    state: DelayedState | None = None,
) -> ErrorFigures:
    """What ``quantize(x, spec).dequantize()`` is off by.

    With ``spec.hadamard`` the transformed and padded x is the reference: the transform itself loses
    nothing in a product, whose other operand is transformed too.

    Args:
        x: [..., contraction], float16, bfloat16, float32 or float64, any strides.
        spec: How; a format stands for one ``real`` scale a tensor (16 bits or more: no scale).
        noise: For stochastic rounding.
        state: For delayed scaling; None takes the scale from x, as a first use does.

    Returns:
        The figures.

    Raises:
        TypeError, ValueError: As ``quantize``, but that delayed scaling needs no state.

    Edge cases: an empty tensor has no error (sqnr inf) and its format's bits.

    Exactness: sums are float64; of a float64 x the rounding to float32 is part of the error.
    """
    spec = as_spec(spec)
    check_floating("x", x)
    if state is None and spec.is_delayed:
        state = delayed_state(spec.amax_history_len, device=x.device)
    q = quantize(x, spec, noise=noise, state=state, packed=False)
    matrix = as_matrix(x, spec)
    reference = matrix if spec.hadamard else x.detach().reshape(matrix_shape(x.shape))
    decoded = q.dequantize(torch.float64).reshape(q.matrix_shape)
    scaled = matrix if q.encode is None else times_blocks(matrix, q.encode, spec.block)
    error = sqnr_db(reference, decoded)
    return ErrorFigures(
        sqnr_db=error,
        relative_error=10 ** (-error / 20),
        largest_error=_largest_error(reference.double(), decoded),
        saturation=saturation_share(scaled, spec.format),
        underflow=underflow_share(reference, decoded),
        nonfinite=_nonfinite_share(decoded),
        bits_per_element=_bits(q),
    )


def _largest_error(reference: Tensor, decoded: Tensor) -> float:
    if not reference.numel():
        return 0.0
    error = float((decoded - reference).abs().amax())
    return error / float(reference.abs().amax()) if error else 0.0


def _nonfinite_share(decoded: Tensor) -> float:
    return int((~decoded.isfinite()).sum()) / decoded.numel() if decoded.numel() else 0.0


def _bits(q: QuantizedTensor) -> float:
    count, width = q.shape.numel(), q.spec.format.bits
    scales = sum(kept.nbytes for kept in (q.scale, q.tensor_amax) if kept is not None)
    return width + 8 * scales / count if count else float(width)
