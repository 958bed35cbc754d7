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
from mixprec.modes import on_numbers
from mixprec.noise import Noise, signed
from mixprec.rounding import (
    LAYOUTS,
    SOURCE_FORMATS,
    Rounding,
    bits_of_exponents,
    check_source,
    half_dtype,
    holds,
    in_negative_units,
    round_float,
    same_exponent_range,
    steps_without_digits,
)

_FLOAT8_DTYPES = {
    (4, 3, "nan"): torch.float8_e4m3fn,
    (5, 2, "ieee"): torch.float8_e5m2,
}
_LAST_NUMBER = {torch.float8_e4m3fn: 126, torch.float8_e5m2: 123}
"""The largest code of each that stands for a finite number."""


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
    if values.dtype == torch.float32 and not torch.compiler.is_compiling():
        like = _float8_like(fmt)
        if like is not None:
            return _codes_by_cast(values, fmt, *like)
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


@lru_cache(maxsize=64)
def _float8_like(fmt: FloatFormat) -> tuple[torch.dtype, float, int] | None:
    """torch's 8-bit type that lays out a format without NaN: type, factor, bits to drop; or None.

    Times the factor, a power of two, the smallest steps of the two fall together.
    """
    if fmt.specials != "none" or not fmt.signed or not 1 <= fmt.mantissa <= 3:
        return None
    name = "e4m3" if fmt.mantissa == 3 else "e5m2"
    wide = get_format(name)
    factor = math.ldexp(1.0, wide.min_exponent - fmt.min_exponent)
    # one exponent more, since the top codes of the wide format are not numbers
    if fmt.exponent >= wide.exponent or fmt.max * factor > wide.max:
        return None
    dtype = _FLOAT8_DTYPES[wide.exponent, wide.mantissa, wide.specials]
    return dtype, factor, wide.mantissa - fmt.mantissa


def _codes_by_cast(
    values: Tensor, fmt: FloatFormat, dtype: torch.dtype, factor: float, dropped: int
) -> Tensor:
    """Codes of values on the format's grid by a cast that is exact for them, in every version."""
    wide = (values * factor).to(dtype).view(torch.uint8)
    codes = wide.bitwise_and(127) >> dropped
    codes |= (wide >> 7) << (fmt.bits - 1)
    # NaN in a format without a code for it
    return torch.where(wide.bitwise_and(127) > _LAST_NUMBER[dtype], 0, codes)


def round_to_codes(x: Tensor, fmt: FloatFormat, draws: Tensor | None) -> Tensor:
    """Codes of float32 values that are in a format's range or NaN.

    With step = 2^(max(exponent(x), min_exponent) - mantissa) and whole = round(|x| / step), the
    code of the magnitude is whole + (exponent - min_exponent) * 2^mantissa, from which a carry into
    the next binade comes out right by itself.

    Args:
        x: float32, the caller's own, which is overwritten; |x| at most half a step above the
            format's largest value; NaN only where the format has it, and in compiled code, where it
            has code 0 in other formats.
        fmt: A signed format of at most 8 bits, with mantissa bits.
        draws: Of the noise, for stochastic rounding; None rounds to nearest, ties to even.

    Returns:
        uint8 codes of x's shape and memory layout.

    Exactness: every step is exact in FP32 but the one rounding.
    """
    layout = LAYOUTS[torch.float32]
    dropped = layout.mantissa - fmt.mantissa
    magnitude = x.abs().clamp_(max=fmt.max)
    if draws is None:
        # whole is in the last digits of the sum
        large = steps_without_digits(magnitude, fmt).view(layout.integer)
        total = magnitude.add_(large.view(torch.float32)).view(layout.integer)
        codes = total.sub_(large).add_(large.bitwise_right_shift_(dropped))
        first = (2 * (layout.bias + dropped + fmt.min_exponent) + 1) << (fmt.mantissa - 1)
    else:
        power = bits_of_exponents(magnitude, fmt)
        units = in_negative_units(magnitude, power, fmt).to(layout.integer)
        whole = units.add_(draws).bitwise_right_shift_(24)
        codes = power.bitwise_right_shift_(dropped).sub_(whole)
        first = (layout.bias + fmt.min_exponent) << fmt.mantissa
    # x != x rather than isnan, which Inductor does not vectorise
    is_nan = x != x if fmt.has_nan or torch.compiler.is_compiling() else None
    # all ones under a sign, or none
    sign = x.view(layout.integer).bitwise_right_shift_(31)
    # modulo 256, in bytes
    codes = codes.sub_(sign, alpha=fmt.sign_mask).to(torch.uint8).sub_(first % 256)
    if is_nan is not None:
        codes = torch.where(is_nan, fmt.nan_code if fmt.has_nan else 0, codes)
    return codes


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
    # not of a tensor that stands for others, as in tracing; on a CPU a twentieth of the time
    is_plain = type(codes) is Tensor and codes.device.type == "cpu"
    if is_plain and fmt.bits <= 8 and not torch.compiler.is_compiling():
        return looked_up(table_of(fmt, working), codes).to(dtype)
    return _values_of(codes, fmt, working).to(dtype)


def looked_up(table: Tensor, codes: Tensor) -> Tensor:
    """An entry for each code, in the codes' memory layout."""
    if codes.ndim == 2 and codes.stride(0) == 1 and codes.stride(1) > 1:
        return looked_up(table, codes.t()).t()
    index = codes.reshape(-1).to(torch.int32)
    return table.to(codes.device).index_select(0, index).view(codes.shape)


@lru_cache(maxsize=64)
def table_of(fmt: FloatFormat, working: torch.dtype = torch.float32) -> Tensor:
    """The value of each byte, in a type that holds it."""
    with on_numbers():
        return _values_of(torch.arange(256, dtype=torch.uint8, device="cpu"), fmt, working)


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
    if torch.compiler.is_compiling() and codes.shape[-1] % 8 == 0:
        return _packed_by_eights(codes)
    # one operation: beside a shift and an or, each over every second byte, a third of the time
    return torch.add(codes[..., 0::2], codes[..., 1::2], alpha=16)


def _packed_by_eights(codes: Tensor) -> Tensor:
    """As ``pack_nibbles``, without steps of two bytes, which Inductor does not vectorise."""
    words = codes.contiguous().view(torch.int64)
    words = (words | words >> 4) & 0x00FF00FF00FF00FF
    words = (words | words >> 8) & 0x0000FFFF0000FFFF
    return (words | words >> 16).to(torch.int32).view(torch.uint8)


def unpack_nibbles(packed: Tensor, fmt: FloatFormat) -> Tensor:
    """The codes of ``pack_nibbles``, one a byte."""
    if fmt.bits != 4:
        raise ValueError(
            f"packed: got True; {fmt} has {fmt.bits} bits, only 4-bit codes are packed"
        )
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_unscaled(codes: Tensor, fmt: FloatFormat) -> tuple[Tensor, float]:
    """Values up to a power of two, by the cheapest exact way: values = result * factor.

    Codes that float16 can lay out are moved into its fields; the factor is the ratio of the two
    biases. Widening float16 to float32 is one instruction that keeps subnormals, and 10 times
    faster on a CPU than torch's own cast from float8.

    Args:
        codes: Codes without NaN: a NaN code of a format without inf comes out as a finite number.
        fmt: Their format; codes of 4 bits one a byte.

    Returns:
        float32 tensor and the factor, which callers fold into a scale. Where folding could
        overflow, the factor is 1 and the values are exact as they are.
    """
    layout = None if torch.compiler.is_compiling() else _half_layout(fmt)
    if layout is None:
        return decode(codes, fmt), 1.0
    multiplier, mask, factor = layout
    # on AVX2 a 16-bit multiplication takes a quarter of the time of a shift; the shift up and back
    # spreads the sign of codes of fewer bits over the bits above, as widening does for 8
    signed = codes.view(torch.int8)
    if fmt.bits < 8:
        signed = (signed * (1 << (8 - fmt.bits))) >> (8 - fmt.bits)
    half = signed.to(torch.int16).mul_(multiplier)
    if mask != -1:
        half.bitwise_and_(mask)
    values = half.view(torch.float16).to(torch.float32)
    # a scale times this factor could overflow
    return (values.mul_(factor), 1.0) if factor > fmt.max else (values, factor)


@lru_cache(maxsize=64)
def _half_layout(fmt: FloatFormat) -> tuple[int, int, float] | None:
    """Multiplier, mask and factor that turn codes into float16; None where that does not serve."""
    is_half_with_fewer_bits = fmt.exponent == 5 and fmt.specials == "ieee"
    is_finite = fmt.exponent < 5 and fmt.specials in ("none", "nan")
    factor = math.ldexp(1.0, 15 - fmt.bias)
    if fmt.bits > 8 or not fmt.signed or not (is_finite or is_half_with_fewer_bits):
        return None
    # the sign is repeated above the code: the copies between sign and exponent are cleared
    mask = ~(((1 << 15) - 1) ^ ((1 << (fmt.exponent + 10)) - 1))
    return 1 << (10 - fmt.mantissa), mask, factor


def decode_pairs(packed: Tensor, fmt: FloatFormat) -> Tensor:
    """float32 values of packed 4-bit codes, twice the last axis, in the codes' memory layout.

    A table of all bytes gives the two values of each at once, as one element of 64 bits.
    """
    if torch.compiler.is_compiling() or fmt.mantissa + fmt.exponent != 3:
        return decode(packed, fmt, packed=True)
    if packed.ndim == 2 and packed.stride(0) == 1 and packed.stride(1) > 1:
        rows = packed.t()
        codes = rows.new_empty((2 * rows.shape[0], rows.shape[1]))
        torch.bitwise_and(rows, 15, out=codes[0::2])
        torch.bitwise_right_shift(rows, 4, out=codes[1::2])
        values, factor = decode_unscaled(codes, fmt)
        return (values if factor == 1.0 else values.mul_(factor)).t()
    table = _pair_table(fmt).to(packed.device)
    pairs = table.view(torch.float64).reshape(-1)
    found = pairs.index_select(0, packed.reshape(-1).to(torch.int32)).view(torch.float32)
    return found.view(*packed.shape[:-1], 2 * packed.shape[-1])


@lru_cache(maxsize=8)
def _pair_table(fmt: FloatFormat) -> Tensor:
    """[256, 2]: the values of the low and the high nibble of each byte."""
    with on_numbers():
        both = torch.arange(256, dtype=torch.uint8, device="cpu")[:, None]
        return decode(both, fmt, packed=True).contiguous()
