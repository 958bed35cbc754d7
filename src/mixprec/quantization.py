"""Quantising: from a tensor and a specification to codes with their scales.

    values = round(x * encode)

The layer between scales (``scaling``) and products (``gemm``). An operand is [free, contraction]:
rows are the product of the leading axes, the contraction axis is last.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mixprec import loops
from mixprec.codes import code_dtype, codes_of, float8_dtype, round_to_codes
from mixprec.formats import FloatFormat
from mixprec.hadamard import hadamard
from mixprec.noise import Noise, piece_starts
from mixprec.quant_spec import UNSCALED, QuantSpec, as_spec
from mixprec.quantized_tensor import QuantizedTensor, is_scaled_before_sum, matrix_shape
from mixprec.rounding import (
    SOURCE_FORMATS,
    can_look_at,
    check_floating,
    half_dtype,
    round_float,
    round_in_range,
)
from mixprec.scale_rules import SCALE_RULES, Reduce, Scales, make_scales
from mixprec.scaling import (
    DelayedState,
    block_amax,
    delayed_amax,
    has_history,
    is_column_major,
    num_blocks,
    pieces,
    times_blocks,
)

Operand = Tensor | QuantizedTensor
"""What a product takes: a high-precision tensor, or a quantised one."""


def quantize(
    x: Tensor,
    spec: QuantSpec | FloatFormat | str,
    *,
    noise: Noise | None = None,
    state: DelayedState | None = None,
    reduce: Reduce | None = None,
    packed: bool = True,
    decoded: bool = False,
    held: bool = False,
) -> QuantizedTensor:
    """x in codes and scales.

    amax over each block, in x's own type; encode and scale by the rule; codes of round(x * encode)
    in FP32 (a float64 x is rounded to float32 first). Finite values saturate. With
    ``spec.hadamard`` all of this happens to the transformed x, its contraction padded to 16s.

    Args:
        x: [..., contraction], float16, bfloat16, float32 or float64, any strides.
        spec: How; a format stands for one ``real`` scale a tensor (16 bits or more: no scale).
        noise: For stochastic rounding; rows and columns as the operand sees them.
        state: For delayed scaling: the scale comes from its history (from x while that is empty).
            It is not changed: pass the result's amax to ``scaling.record_amax``.
        reduce: Where x is one rank's part of an operand: its amaxes and the axes along which a
            block has other parts (all, for a tensor's amax) -> the largest of all parts, also NaN
            or inf. Called at least once where a block spans an axis, by all ranks alike.
        packed: 4-bit codes two a byte; False spares packing on the way to one product.
        decoded: Values in place of codes where ``can_be_decoded``, for one product that would
            decode them at once, and may overwrite them.
        held: Values beside the codes, for a product at once, where both come in one pass.

    Returns:
        Codes, scale, amax.

    Raises:
        TypeError: x is of another type.
        ValueError: Stochastic rounding without noise, delayed scaling without state.

    Edge cases: a block with a NaN or inf gets a NaN scale and so decodes to NaN throughout, other
    blocks are untouched; with a scale from a history only the element itself is NaN (inf stays inf
    where the format has it). A block of zeros gets scale 1. Empty tensors are allowed.

    Exactness: codes equal the scalar definition bit for bit (tests/test_quantization.py).
    """
    spec = as_spec(spec)
    _check_arguments(x, spec, noise, state)
    noise = noise if spec.is_stochastic else None
    matrix = as_matrix(x, spec)
    if spec.scale_rule == UNSCALED:
        codes = _codes(matrix, spec, noise)
        result = QuantizedTensor(codes=codes, scale=None, amax=None, spec=spec, shape=matrix.shape)
    else:
        result = _scaled_by_amax(matrix, spec, noise, state, reduce, decoded=decoded, held=held)
    if x.ndim != 2:
        is_scalar = x.ndim == 0 and not spec.hadamard
        shape = x.shape if is_scalar else torch.Size((*x.shape[:-1], matrix.shape[1]))
        result = replace(result, codes=result.codes.reshape(shape), shape=shape)
    return result.packed() if packed and not result.is_decoded else result


def _scaled_by_amax(
    x: Tensor,
    spec: QuantSpec,
    noise: Noise | None,
    state: DelayedState | None,
    reduce: Reduce | None,
    *,
    decoded: bool,
    held: bool,
) -> QuantizedTensor:
    """Amaxes of the blocks of a matrix, their scales, and codes or values by these."""
    rule = SCALE_RULES[spec.scale_rule]
    if reduce is None and rule.formula is not None and _is_in_loops(x, spec):
        is_scaled = decoded and is_scaled_before_sum(spec, num_blocks(x.shape[1], spec.block[1]))
        made = loops.quantized(
            x,
            spec.block,
            rule.formula(spec.format),
            spec.format,
            noise,
            min_amax=spec.min_amax,
            decoded=decoded,
            held=held,
            is_scaled=is_scaled,
        )
        return QuantizedTensor(
            codes=made.codes,
            scale=made.scale,
            amax=made.amax,
            encode=made.encode,
            is_scaled=is_scaled,
            held=None if made.held is None else (made.held, 1.0),
            spec=spec,
            shape=x.shape,
        )
    amax = block_amax(x, spec.block)
    if reduce is not None and (state is None or not has_history(state)):
        amax = reduce(amax, (spec.block[0] == -1, spec.block[1] == -1))
    used = amax if state is None else delayed_amax(state, spec.amax_compute_algo, amax)
    scales = make_scales(used, spec.scale_rule, spec.format, spec.min_amax, reduce)
    return _by_scales(x, spec, scales, amax.to(torch.float32), noise, decoded=decoded)


def _is_in_loops(x: Tensor, spec: QuantSpec) -> bool:
    return can_be_decoded(spec) and loops.serves(x)


def _check_arguments(
    x: Tensor, spec: QuantSpec, noise: Noise | None, state: DelayedState | None
) -> None:
    check_floating("x", x)
    if spec.is_stochastic and noise is None:
        raise ValueError(
            "noise: got None; stochastic rounding needs it; pass noise=Noise(seed=..., step=...)"
        )
    if state is not None and not spec.is_delayed:
        raise ValueError(
            "state: got one for a spec with amax_history_len=0; its scale comes from x; leave the "
            "state out"
        )
    if spec.is_delayed and state is None:
        raise ValueError(
            "state: got None; delayed scaling needs it; pass mixprec.scaling.delayed_state(), or a "
            "spec with amax_history_len=0"
        )


def requantize(
    x: Tensor,
    spec: QuantSpec,
    *,
    scale: Tensor,
    encode: Tensor,
    amax: Tensor | None,
    tensor_amax: Tensor | None,
    decoded: bool = False,
) -> QuantizedTensor:
    """``quantize(x, spec)`` again by what it gave, for a matrix that has not changed since.

    Spares the pass for amax, and is right under a history that has rolled meanwhile. Only delayed
    scaling needs amax.
    """
    scales = Scales(encode, scale, tensor_amax)
    return _by_scales(_source(x, spec), spec, scales, amax, None, decoded=decoded)


def can_be_decoded(spec: QuantSpec) -> bool:
    """Whether values can be had without codes: scaled by the data at hand, on an ordinary grid."""
    is_narrow = _is_narrow(spec) and spec.scale_rule != UNSCALED and not spec.is_delayed
    return is_narrow or (_is_in_range(spec) and spec.format.mantissa > 0)


def as_matrix(x: Tensor, spec: QuantSpec) -> Tensor:
    """What is scaled and rounded, [free, contraction]: x, transformed where the spec says so."""
    matrix = _source(x, spec)
    if x.ndim != 2:
        matrix = matrix.reshape(matrix_shape(x.shape))
    if not spec.hadamard:
        return matrix
    transformed = hadamard(matrix)
    is_wide = transformed.dtype != x.dtype and x.element_size() == 2
    return _rounded_to(transformed, x.dtype) if is_wide else transformed


def _rounded_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 numbers rounded to a 16-bit type, in float32."""
    return round_float(x, SOURCE_FORMATS[dtype], "nearest_even", None, saturate=False)


def _source(x: Tensor, spec: QuantSpec) -> Tensor:
    """What is quantised: x, in float32 where it is float64 and gets a scale."""
    x = x.detach()
    if torch.compiler.is_compiling() and x.element_size() == 2:
        # Inductor carries a 16-bit tensor that the same graph made in FP32, unrounded: rounding
        # again changes nothing but that
        return _rounded_to(x.float(), x.dtype)
    is_wide = x.dtype == torch.float64 and spec.scale_rule != UNSCALED
    return x.float() if is_wide else x


def _by_scales(
    x: Tensor,
    spec: QuantSpec,
    scales: Scales,
    amax: Tensor | None,
    noise: Noise | None,
    *,
    decoded: bool,
) -> QuantizedTensor:
    """Codes of x * encode, or their values, for a matrix."""
    decoded = decoded and can_be_decoded(spec)
    encode, scale, tensor_amax = scales
    is_scaled = False
    if _is_in_loops(x, spec):
        is_scaled = decoded and is_scaled_before_sum(spec, scale.shape[1])
        codes = loops.rounded(
            x,
            encode,
            spec.block,
            spec.format,
            noise,
            decoded=decoded,
            scale=SCALE_RULES[spec.scale_rule].block_scale(scale) if is_scaled else None,
        )
    else:
        codes = _scaled_codes(x, spec, encode, amax, noise, decoded=decoded)
    return QuantizedTensor(
        codes=codes,
        scale=scale,
        amax=amax,
        encode=encode,
        tensor_amax=tensor_amax,
        is_scaled=is_scaled,
        spec=spec,
        shape=x.shape,
    )


def _scaled_codes(
    x: Tensor,
    spec: QuantSpec,
    encode: Tensor,
    amax: Tensor | None,
    noise: Noise | None,
    *,
    decoded: bool,
) -> Tensor:
    """Codes of x * encode, in the memory layout of x; piece by piece, each while it is cached.

    With ``decoded`` their values.
    """
    is_narrow = _is_narrow(spec)
    # such a format has no code for NaN; the block's scale is NaN
    is_compiled = torch.compiler.is_compiling()
    is_clean = decoded or not is_narrow or is_compiled or _is_known_finite(encode)
    axis = 0 if is_compiled else int(is_column_major(x))
    size = spec.block[axis]
    step = pieces(x.t() if axis else x, max(size, 1))
    if step is None:
        if decoded:
            return _values_of_piece(x, spec, encode, noise, None)
        return _codes_of_piece(x, spec, encode, amax, noise, is_clean=is_clean)
    codes = torch.empty_like(x, dtype=torch.float32 if decoded else code_dtype(spec.format))
    for start in piece_starts(x, axis, step):
        length = min(step, x.shape[axis] - start)
        factors = encode if size == -1 else encode.narrow(axis, start // size, -(-length // size))
        own = noise and noise.at(start, axis, x.shape[1])
        part, place = x.narrow(axis, start, length), codes.narrow(axis, start, length)
        if decoded:
            _values_of_piece(part, spec, factors, own, place)
        else:
            place.copy_(_codes_of_piece(part, spec, factors, amax, own, is_clean=is_clean))
    return codes


def _values_of_piece(
    x: Tensor, spec: QuantSpec, encode: Tensor, noise: Noise | None, out: Tensor | None
) -> Tensor:
    """round(x * encode) in float32; where the block's scale is NaN, anything."""
    scaled = times_blocks(x, encode, spec.block)
    if spec.is_stochastic or SCALE_RULES[spec.scale_rule].exceeds:
        scaled = scaled.clamp_(-spec.format.max, spec.format.max)
    return round_in_range(scaled, spec.format, _draws(scaled, noise), out)


def _codes_of_piece(
    x: Tensor,
    spec: QuantSpec,
    encode: Tensor,
    amax: Tensor | None,
    noise: Noise | None,
    *,
    is_clean: bool,
) -> Tensor:
    # both are 2-D, so that a bfloat16 x is promoted: times a 0-d float32 it would stay bfloat16
    scaled = times_blocks(x, encode, spec.block)
    if SCALE_RULES[spec.scale_rule].exceeds and not _is_narrow(spec):
        scaled = scaled.clamp_(-spec.format.max, spec.format.max)
    if not is_clean:
        scaled = scaled.nan_to_num_(nan=0.0)
    if spec.is_delayed:
        assert amax is not None
        scaled = _saturate(scaled, x, amax, encode, spec.format)
    return _codes(scaled, spec, noise)


def _is_known_finite(encode: Tensor) -> bool:
    return can_look_at(encode) and (not encode.numel() or math.isfinite(encode.amax()))


def _is_in_range(spec: QuantSpec) -> bool:
    """Whether scaled values are in the range of a format with NaN, or NaN, in ordinary layout."""
    is_dynamic = spec.scale_rule != UNSCALED and not spec.is_delayed
    return is_dynamic and float8_dtype(spec.format) is not None and spec.rounding == "nearest_even"


def _is_narrow(spec: QuantSpec) -> bool:
    """Whether ``round_to_codes`` serves the spec."""
    fmt = spec.format
    is_rounding_known = spec.rounding in ("nearest_even", "stochastic")
    return fmt.specials == "none" and fmt.mantissa > 0 and fmt.bits <= 8 and is_rounding_known


def _saturate(scaled: Tensor, x: Tensor, amax: Tensor, encode: Tensor, fmt: FloatFormat) -> Tensor:
    """Finite x clamped to the format's range; NaN and inf stay (inf: NaN if the format has none).

    A scale from the data itself never needs it: x * encode stays below the first value that
    overflows.
    """
    # this much beyond the largest value still rounds to it: less than half a step
    limit = fmt.max * (1 + 2.0 ** -(fmt.mantissa + 2))
    if can_look_at(amax) and float(amax) * float(encode) <= limit:
        return scaled
    clamped = scaled.clamp_(-fmt.max, fmt.max)
    if not fmt.has_inf:
        return clamped.masked_fill_(x.isfinite().logical_not_(), torch.nan)
    # times a positive factor, inf and NaN are themselves
    return torch.where(x.isfinite(), clamped, x)


def _codes(scaled: Tensor, spec: QuantSpec, noise: Noise | None) -> Tensor:
    """Codes of values: in range or not finite where there is a scale.

    torch's casts are right there in every version, and the fastest; compiled code uses our own
    arithmetic, since Inductor on some CPUs casts through float16 and rounds twice.
    """
    fmt = spec.format
    if _is_narrow(spec) or (torch.compiler.is_compiling() and _is_in_range(spec)):
        return round_to_codes(scaled, fmt, _draws(scaled, noise))
    native = _cast_dtype(spec) if scaled.dtype != torch.float64 else None
    if native is not None and not torch.compiler.is_compiling():
        return scaled.to(native).view(code_dtype(fmt))
    return codes_of(round_float(scaled, fmt, spec.rounding, noise, spec.saturate), fmt)


def _draws(scaled: Tensor, noise: Noise | None) -> Tensor | None:
    if noise is None:
        return None
    shape = (scaled.shape[0], scaled.shape[1])
    return noise.draws(shape, scaled.device, column_major=is_column_major(scaled))


def _cast_dtype(spec: QuantSpec) -> torch.dtype | None:
    """torch's type whose cast from float32 is what the spec says, or None.

    Casts to 16 bits overflow to infinity; those to 8 bits differ between versions beyond the range,
    which a scale keeps away.
    """
    if spec.rounding != "nearest_even":
        return None
    if spec.scale_rule != UNSCALED:
        return float8_dtype(spec.format)
    return None if spec.saturate else half_dtype(spec.format)
