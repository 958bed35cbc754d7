"""Quantised operands: a specification, codes with their scales, and the way there and back.

    values = round(x * encode)        x ~= values * scale

The layer between scales (``scaling``) and products (``gemm``). An operand is [free, contraction]:
rows are the product of the leading axes, the contraction axis is last.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mixprec.codes import (
    code_dtype,
    codes_of,
    decode,
    float8_dtype,
    pack_nibbles,
    unpack_nibbles,
)
from mixprec.formats import FloatFormat, get_format
from mixprec.noise import Noise
from mixprec.quant_spec import UNSCALED, QuantSpec, as_spec
from mixprec.rounding import (
    SOURCE_FORMATS,
    can_look_at,
    check_floating,
    half_dtype,
    holds,
    round_float,
)
from mixprec.scaling import (
    DelayedState,
    block_amax,
    delayed_amax,
    encode_and_scale,
    expand_blocks,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedTensor:
    """An operand in codes: x ~= values * scale.

    Args:
        codes: Bit patterns of x's shape (4-bit formats: two a byte along the last axis, the even
            index in the low nibble, a last odd nibble padded with 0).
        scale: float32 [free blocks, contraction blocks]; None without a scale.
        amax: The data's own largest magnitudes, float32, of scale's shape; None when unknown.
        encode: The factors that x was multiplied by, of scale's shape; None when unknown.
        held: Values decoded ahead and their factor (``codes.decode_unscaled``), for an operand of
            several products; else None.
        spec: How it was quantised.
        shape: Logical shape of x.
    """

    codes: Tensor
    scale: Tensor | None
    amax: Tensor | None
    spec: QuantSpec
    shape: torch.Size
    encode: Tensor | None = None
    held: tuple[Tensor, float] | None = None

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """(free, contraction) elements."""
        return _matrix_shape(self.shape)

    @property
    def values(self) -> Tensor:
        """The decoded values without their scales, float32 (float64 for wider formats)."""
        fmt = self.spec.format
        dtype = torch.float32 if holds(get_format("fp32"), fmt) else torch.float64
        return decode(self._unpacked_codes(), fmt, dtype)

    def _unpacked_codes(self) -> Tensor:
        fmt = self.spec.format
        if not _is_packed(fmt):
            return self.codes
        width = self.shape[-1] if self.shape else 1
        return unpack_nibbles(self.codes, fmt)[..., :width].reshape(self.shape)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """values * scale, in float32, then rounded to dtype.

        Returns:
            Tensor of ``shape``. A block with a NaN scale is NaN throughout.
        """
        values = self.values
        if self.scale is not None:
            scale = expand_blocks(self.scale, self.spec.block, self.matrix_shape)
            values = (values.reshape(self.matrix_shape) * scale).reshape(self.shape)
        return values.to(dtype)

    def t(self) -> QuantizedTensor:
        """The same values transposed, as views (packed codes are packed anew); 2-D.

        Raises:
            ValueError: Another number of axes.
        """
        if len(self.shape) != 2:
            raise ValueError(
                f"shape: got {tuple(self.shape)}; only a matrix is transposed; reshape x before it "
                "is quantised"
            )
        free, contraction = self.spec.block
        is_square = free == contraction
        return QuantizedTensor(
            codes=_stored(self._unpacked_codes().t(), self.spec.format),
            scale=_transposed(self.scale),
            amax=_transposed(self.amax),
            encode=_transposed(self.encode),
            held=None if self.held is None else (self.held[0].t(), self.held[1]),
            spec=self.spec if is_square else replace(self.spec, block=(contraction, free)),
            shape=torch.Size(self.shape[::-1]),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + (0 if self.scale is None else self.scale.nbytes)


def _transposed(per_block: Tensor | None) -> Tensor | None:
    return per_block if per_block is None or per_block.numel() == 1 else per_block.t()


def _matrix_shape(shape: torch.Size) -> tuple[int, int]:
    return (shape[:-1].numel(), shape[-1]) if shape else (1, 1)


def _is_packed(fmt: FloatFormat) -> bool:
    return fmt.bits == 4


Operand = Tensor | QuantizedTensor
"""What a product takes: a high-precision tensor, or a quantised one."""


def quantize(
    x: Tensor,
    spec: QuantSpec | FloatFormat | str,
    *,
    noise: Noise | None = None,
    state: DelayedState | None = None,
) -> QuantizedTensor:
    """x in codes and scales.

    amax over each block, in x's own type; encode and scale by the rule; codes of round(x * encode)
    in FP32 (a float64 x is rounded to float32 first). Finite values saturate.

    Args:
        x: [..., contraction], float16, bfloat16, float32 or float64, any strides.
        spec: How; a format stands for one ``real`` scale a tensor (16 bits or more: no scale).
        noise: For stochastic rounding; rows and columns as the operand sees them.
        state: For delayed scaling: the scale comes from its history (from x while that is empty).
            It is not changed: pass the result's amax to ``scaling.record_amax``.

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
    matrix = _source(x, spec)
    if x.ndim != 2:
        matrix = matrix.reshape(_matrix_shape(x.shape))
    amax = scale = encode = None
    if spec.scale_rule == UNSCALED:
        codes = _codes(matrix, spec, noise)
    else:
        amax = block_amax(matrix, spec.block)
        used = amax if state is None else delayed_amax(state, spec.amax_compute_algo, amax)
        encode, scale = encode_and_scale(used, spec.scale_rule, spec.format.max, spec.min_amax)
        amax = amax.to(torch.float32)
        codes = _scaled_codes(matrix, spec, encode, amax, noise)
    if x.ndim != 2:
        codes = codes.reshape(x.shape)
    return QuantizedTensor(
        codes=_stored(codes, spec.format),
        scale=scale,
        amax=amax,
        encode=encode,
        spec=spec,
        shape=x.shape,
    )


def requantize(
    x: Tensor, scale: Tensor, amax: Tensor | None, encode: Tensor, spec: QuantSpec
) -> QuantizedTensor:
    """``quantize(x, spec)`` again by what it gave, for a matrix that has not changed since.

    Spares the pass for amax, and is right under a history that has rolled meanwhile. Only delayed
    scaling needs amax.
    """
    codes = _scaled_codes(_source(x, spec), spec, encode, amax, None)
    return QuantizedTensor(
        codes=_stored(codes, spec.format),
        scale=scale,
        amax=amax,
        encode=encode,
        spec=spec,
        shape=x.shape,
    )


def _source(x: Tensor, spec: QuantSpec) -> Tensor:
    """What is quantised: x, in float32 where it is float64 and gets a scale."""
    x = x.detach()
    if torch.compiler.is_compiling() and x.element_size() == 2:
        # Inductor carries a 16-bit tensor that the same graph made in FP32, unrounded: rounding
        # again changes nothing but that
        fmt = SOURCE_FORMATS[x.dtype]
        return round_float(x.float(), fmt, "nearest_even", None, saturate=False)
    is_wide = x.dtype == torch.float64 and spec.scale_rule != UNSCALED
    return x.float() if is_wide else x


def _scaled_codes(
    x: Tensor, spec: QuantSpec, encode: Tensor, amax: Tensor | None, noise: Noise | None
) -> Tensor:
    # both are 2-D, so that a bfloat16 x is promoted: times a 0-d float32 it would stay bfloat16
    scaled = x * expand_blocks(encode, spec.block, (x.shape[0], x.shape[1]))
    if spec.is_delayed:
        assert amax is not None
        scaled = _saturate(scaled, x, amax, encode, spec.format)
    return _codes(scaled, spec, noise)


def _saturate(scaled: Tensor, x: Tensor, amax: Tensor, encode: Tensor, fmt: FloatFormat) -> Tensor:
    """Finite x clamped to the format's range; NaN and inf stay (inf: NaN if the format has none).

    A scale from the data itself never needs it: x * encode stays below the first value that
    overflows.
    """
    # this much beyond the largest value still rounds to it: less than half a step
    limit = fmt.max * (1 + 2.0 ** -(fmt.mantissa + 2))
    if can_look_at(amax) and float(amax) * float(encode) <= limit:
        return scaled
    clamped = scaled.clamp(-fmt.max, fmt.max)
    return torch.where(x.isfinite(), clamped, scaled if fmt.has_inf else torch.nan)


def _codes(scaled: Tensor, spec: QuantSpec, noise: Noise | None) -> Tensor:
    """Codes of values: in range or not finite where there is a scale.

    torch's casts are right there in every version, and the fastest; compiled code uses our own
    arithmetic, since Inductor on some CPUs casts through float16 and rounds twice.
    """
    fmt = spec.format
    native = _cast_dtype(spec) if scaled.dtype != torch.float64 else None
    if native is not None and not torch.compiler.is_compiling():
        return scaled.to(native).view(code_dtype(fmt))
    return codes_of(round_float(scaled, fmt, spec.rounding, noise, spec.saturate), fmt)


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


def _stored(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Codes as a QuantizedTensor holds them: 4-bit ones two a byte, padded to an even number."""
    if not _is_packed(fmt):
        return codes
    if codes.ndim == 0:
        codes = codes.reshape(1)
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return pack_nibbles(codes, fmt)
