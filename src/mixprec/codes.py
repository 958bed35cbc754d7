"""Codes: values of a format as bit patterns, and back. Tensor in, tensor out.

    decode(encode(x)) == round_to_format(x)

A code holds sign, exponent field and mantissa field from the top bit down, as ``FloatFormat`` says.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from mixprec.formats import FloatFormat, get_format
from mixprec.noise import Noise, signed
from mixprec.rounding import (
    LAYOUTS,
    SOURCE_FORMATS,
    Rounding,
    check_source,
    half_dtype,
    holds,
    round_float,
    same_exponent_range,
)

_FLOAT8_DTYPES = {
    (4, 3, "nan"): torch.float8_e4m3fn,
    (5, 2, "ieee"): torch.float8_e5m2,
}


def code_dtype(fmt: FloatFormat) -> torch.dtype:
    """The integer type that holds the codes of a format as bit patterns (two's complement)."""
    widths = ((8, torch.uint8), (16, torch.int16), (32, torch.int32), (64, torch.int64))
    return next(dtype for width, dtype in widths if fmt.bits <= width)


def float8_dtype(fmt: FloatFormat) -> torch.dtype | None:
    """torch's type with the same codes, whatever the format is called; None where it has none."""
    return _FLOAT8_DTYPES.get((fmt.exponent, fmt.mantissa, fmt.specials))


def codes_of(values: Tensor, fmt: FloatFormat) -> Tensor:
    """Codes of float32 or float64 values that lie on the format's grid already.

    NaN and inf in a format without codes for them give code 0: their block's scale is NaN then.
    """
    layout = LAYOUTS[values.dtype]
    if same_exponent_range(fmt, SOURCE_FORMATS[values.dtype]):
        codes = values.view(layout.integer) >> (layout.mantissa - fmt.mantissa)
        codes = codes & signed((1 << fmt.bits) - 1, 8 * codes.element_size())
        return torch.where(values.isnan(), fmt.nan_code, codes).to(code_dtype(fmt))
    magnitude = values.view(layout.integer) & layout.magnitude_mask
    codes = magnitude >> (layout.mantissa - fmt.mantissa)
    codes = codes - ((layout.bias - fmt.bias) << fmt.mantissa)
    steps = values.abs() * math.ldexp(1.0, fmt.mantissa - fmt.min_exponent)
    is_subnormal = values.abs() < fmt.smallest_normal
    codes = torch.where(is_subnormal, steps.to(layout.integer), codes)
    if fmt.has_inf:
        inf_code = ((1 << fmt.exponent) - 1) << fmt.mantissa
        codes = torch.where(values.isinf(), inf_code, codes)
    if fmt.signed:
        sign = values.view(layout.integer) < 0
        codes = torch.where(sign, codes | signed(fmt.sign_mask, 8 * codes.element_size()), codes)
    special = fmt.nan_code if fmt.has_nan else 0
    unmapped = values.isnan() if fmt.has_inf else ~values.isfinite()
    return torch.where(unmapped, special, codes).to(code_dtype(fmt))


def encode(
    x: Tensor,
    fmt: str | FloatFormat,
    *,
    rounding: Rounding = "nearest_even",
    saturate: bool = True,
    noise: Noise | None = None,
    packed: bool = False,
) -> Tensor:
    """x rounded to a format, as codes.

    Args:
        x, fmt, rounding, saturate, noise: As for ``round_to_format``; x may be of any of its types,
            whether or not it can hold the format's values.
        packed: Two 4-bit codes a byte along the last axis, the even index in the low nibble.

    Returns:
        Bit patterns of x's shape: uint8 for formats of up to 8 bits, int16 up to 16, int32 up to
        32, int64 beyond. Packed: uint8 with half the last axis.

    Raises:
        TypeError, ValueError: As ``round_to_format``; NaN or inf for a format without a NaN code;
            packed for a format that is not 4 bits wide, or with an odd last axis.

    Exactness: decode(encode(x)) == round_to_format(x), bit for bit except the payload of NaN.
    """
    fmt = get_format(fmt)
    check_source(x, fmt, rounding, saturate, noise)
    if not fmt.has_nan and not bool(x.isfinite().all()):
        raise ValueError(
            f"x: got NaN or inf; {fmt} has no code for them; remove them, or use a format with NaN"
        )
    codes = codes_of(round_float(x, fmt, rounding, noise, saturate), fmt)
    return pack_nibbles(codes, fmt) if packed else codes


def decode(
    codes: Tensor,
    fmt: str | FloatFormat,
    dtype: torch.dtype = torch.float32,
    *,
    packed: bool = False,
) -> Tensor:
    """The values of codes, exactly.

    Args:
        codes: Bit patterns as ``encode`` gives them (a float8 tensor is accepted by its bytes).
        fmt: Their format.
        dtype: Floating-point type of the result; it must hold every value of the format.
        packed: The codes are two a byte, the even index in the low nibble.

    Returns:
        Values of the codes' shape (packed: twice the last axis).

    Raises:
        TypeError: codes are not of the format's integer type.
        ValueError: dtype cannot hold the format's values.

    Edge cases: NaN codes give NaN; subnormals are kept under flush-to-zero unless they are
    subnormal in dtype too.
    """
    fmt = get_format(fmt)
    if dtype not in SOURCE_FORMATS or not holds(SOURCE_FORMATS[dtype], fmt):
        raise ValueError(
            f"dtype: got {dtype}; it cannot hold the values of {fmt}; use a wider type"
        )
    if not isinstance(codes, Tensor):
        raise TypeError(
            f"codes: got {type(codes).__name__}; must be a tensor; pass encode's result"
        )
    if codes.is_floating_point() and codes.element_size() == 1:
        codes = codes.view(torch.uint8)
    if codes.dtype != code_dtype(fmt):
        raise TypeError(
            f"codes: got {codes.dtype}; codes of {fmt} are {code_dtype(fmt)}; convert them"
        )
    if packed:
        codes = unpack_nibbles(codes, fmt)
    half = half_dtype(fmt)
    if half is not None and not torch.compiler.is_compiling():
        return codes.view(half).to(dtype)
    is_normal = fmt.min_exponent >= SOURCE_FORMATS[torch.float32].min_exponent
    working = torch.float32 if is_normal and dtype != torch.float64 else torch.float64
    return _values_of(codes, fmt, working).to(dtype)


def _values_of(codes: Tensor, fmt: FloatFormat, working: torch.dtype) -> Tensor:
    layout = LAYOUTS[working]
    wide = codes.to(layout.integer)
    if same_exponent_range(fmt, SOURCE_FORMATS[working]):
        return (wide << (layout.mantissa - fmt.mantissa)).view(working)
    magnitude = wide & ((1 << (fmt.bits - int(fmt.signed))) - 1)
    is_negative = (wide >> (fmt.bits - 1)) & 1 != 0
    bits = magnitude << (layout.mantissa - fmt.mantissa)
    normal = (bits + ((layout.bias - fmt.bias) << layout.mantissa)).view(working)
    if fmt.signed:
        subnormal = magnitude.to(working) * fmt.smallest_subnormal
    else:
        subnormal = torch.full_like(normal, fmt.smallest_normal)
    values = torch.where(magnitude >> fmt.mantissa == 0, subnormal, normal)
    if fmt.has_inf:
        inf_code = ((1 << fmt.exponent) - 1) << fmt.mantissa
        top = torch.where(magnitude == inf_code, math.inf, math.nan).to(working)
        values = torch.where(magnitude >= inf_code, top, values)
    if fmt.signed:
        values = torch.where(is_negative, -values, values)
    if fmt.has_nan and not fmt.has_inf:
        is_minus_zero = is_negative & (magnitude == 0)
        is_nan = is_minus_zero if fmt.specials == "fnuz" else magnitude == fmt.nan_code
        values = torch.where(is_nan, math.nan, values)
    return values


def pack_nibbles(codes: Tensor, fmt: FloatFormat) -> Tensor:
    """Two 4-bit codes a byte along the last axis, the even index in the low nibble."""
    if fmt.bits != 4:
        raise ValueError(
            f"packed: got True; {fmt} has {fmt.bits} bits, only 4-bit codes are packed"
        )
    axis = codes.ndim - 1
    if codes.ndim == 0 or codes.shape[-1] % 2:
        length = codes.shape[-1] if codes.ndim else "no axis"
        raise ValueError(
            f"x: got {length} elements along axis {axis}; packing needs an even number; pad by one"
        )
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: Tensor, fmt: FloatFormat) -> Tensor:
    """The codes of ``pack_nibbles``, one a byte."""
    if fmt.bits != 4:
        raise ValueError(
            f"packed: got True; {fmt} has {fmt.bits} bits, only 4-bit codes are packed"
        )
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_unscaled(codes: Tensor, fmt: FloatFormat) -> tuple[Tensor, float]:
    """Values up to a power of two, by the cheapest exact way: values = result * factor.

    8-bit codes that float16 can lay out are shifted into its fields; the factor is the ratio of the
    two biases. Widening float16 to float32 is one instruction that keeps subnormals, and 10 times
    faster on a CPU than torch's own cast from float8.

    Args:
        codes: Codes without NaN: a NaN code of a format without inf comes out as a finite number.
        fmt: Their format.

    Returns:
        float32 tensor and the factor, which callers fold into a scale. Where folding could
        overflow, the factor is 1 and the values are exact as they are.
    """
    layout = None if torch.compiler.is_compiling() else _half_layout(fmt)
    if layout is None:
        return decode(codes, fmt), 1.0
    multiplier, mask, factor = layout
    # on AVX2 a 16-bit multiplication takes a quarter of the time of a shift
    half = codes.view(torch.int8).to(torch.int16).mul_(multiplier)
    if mask != -1:
        half.bitwise_and_(mask)
    return half.view(torch.float16).to(torch.float32), factor


@lru_cache(maxsize=64)
def _half_layout(fmt: FloatFormat) -> tuple[int, int, float] | None:
    """Multiplier, mask and factor that turn codes into float16; None where that does not serve."""
    like_half = fmt.exponent < 5 or (fmt.exponent == 5 and fmt.specials == "ieee")
    factor = math.ldexp(1.0, 15 - fmt.bias)
    if fmt.bits != 8 or not like_half or fmt.specials == "fnuz" or factor > fmt.max:
        return None
    # widening the byte repeats its sign bit above: the copies between sign and exponent are cleared
    mask = ~(((1 << 15) - 1) ^ ((1 << (fmt.exponent + 10)) - 1))
    return 1 << (10 - fmt.mantissa), mask, factor
