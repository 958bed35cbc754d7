"""Rounding to a format, codes and back, and the noise of stochastic rounding. Tensor in, tensor out.

With e = max(exponent(x), min_exponent) and step = 2^(e - mantissa), the rounded value is

    round(|x| / step) * step * sign(x)

Division and multiplication are by powers of two, so each result is rounded exactly once, whatever the
source type, and does not depend on whether a compiler contracts products and sums. torch's own narrow
casts are not used: they round float64 twice and their overflow differs between versions.

Sources: OCP OFP8 v1.0 and MX v1.0 (formats, saturation), IEEE 754-2019 (rounding).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from mixprec.formats import FloatFormat, get_format

Rounding = Literal["nearest_even", "toward_zero", "nearest_away", "stochastic"]


class _Layout(NamedTuple):
    """How a torch type lays out its bits."""

    integer: torch.dtype
    mantissa: int
    bias: int

    @property
    def magnitude_mask(self) -> int:
        return (1 << (self.mantissa + (self.bias + 1).bit_length())) - 1

    def bits_of_power(self, exponent: int) -> int:
        return (exponent + self.bias) << self.mantissa


_LAYOUTS = {
    torch.float32: _Layout(torch.int32, 23, 127),
    torch.float64: _Layout(torch.int64, 52, 1023),
}
_SOURCE_FORMATS = {
    torch.float16: get_format("fp16"),
    torch.bfloat16: get_format("bf16"),
    torch.float32: get_format("fp32"),
    torch.float64: get_format("fp64"),
}


def code_dtype(fmt: FloatFormat) -> torch.dtype:
    """The integer type that holds the codes of a format as bit patterns (two's complement)."""
    widths = ((8, torch.uint8), (16, torch.int16), (32, torch.int32), (64, torch.int64))
    return next(dtype for width, dtype in widths if fmt.bits <= width)


def holds(container: FloatFormat, fmt: FloatFormat) -> bool:
    """Whether every finite value of ``fmt`` is a value of ``container``."""
    return (
        fmt.max <= container.max
        and fmt.mantissa <= container.mantissa
        and fmt.min_exponent - fmt.mantissa >= container.min_exponent - container.mantissa
    )


# Noise -----------------------------------------------------------------------------------------------


def _signed(value: int, bits: int) -> int:
    """The two's complement reading of an unsigned constant."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _shift(x: Tensor, count: int) -> Tensor:
    """Logical right shift: torch shifts signed integers arithmetically."""
    width = 8 * x.element_size()
    return (x >> count) & ((1 << (width - count)) - 1)


def _splitmix(z: Tensor) -> Tensor:
    z = z + _signed(0x9E3779B97F4A7C15, 64)
    z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB, 64)
    return z ^ _shift(z, 31)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 16)) * _signed(0x7FEB352D, 32)
    x = (x ^ _shift(x, 15)) * _signed(0x846CA68B, 32)
    return x ^ _shift(x, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """Counter-based noise: the same bits on any device, for any tiling, sharding or resume.

    With all arithmetic modulo 2^64 (splitmix) and 2^32 (mix), and index = row * columns + column:

        k = splitmix(splitmix(splitmix(seed) ^ step) ^ stream),  k0, k1 = low and high half of k
        draw(index) = mix(mix(low(index) ^ k0) + k1 + high(index) * 0x9e3779b9) >> 8

    Args:
        seed: The run's seed, 0 to 2^64 - 1.
        step: Counts the uses in time (a layer's backward passes): an int, or a 0-d int64 tensor.
        stream: Tells operands apart.
        row: Row of the tensor's first element in the whole operand, for shards.
        column: Its column there.
        columns: Columns of the whole operand; None when the tensor has them all.

    Sources: the 32-bit mixer "lowbias32" and SplitMix64, both in the public domain.
    """

    seed: int
    step: int | Tensor = 0
    stream: int = 0
    row: int = 0
    column: int = 0
    columns: int | None = None

    def draws(self, shape: tuple[int, int], device: torch.device | str | None = None) -> Tensor:
        """24-bit draws for an operand of (free, contraction) elements.

        Args:
            shape: Rows and columns of the tensor.
            device: Where the draws go; the default device when None.

        Returns:
            int32 tensor of that shape, each element in [0, 2^24); u = draw / 2^24.
        """
        rows, width = shape
        columns = self.columns if self.columns is not None else self.column + width
        k0, k1 = self._keys(device)
        row = torch.arange(self.row, self.row + rows, dtype=torch.int64, device=device)[:, None]
        column = torch.arange(self.column, self.column + width, dtype=torch.int64, device=device)
        base = row * columns
        low = base.to(torch.int32) + column.to(torch.int32)
        mixed = _mix(low ^ k0) + k1
        if (self.row + rows) * columns > 1 << 32:
            high = ((base + column) >> 32).to(torch.int32)
            mixed = mixed + high * _signed(0x9E3779B9, 32)
        return _shift(_mix(mixed), 8)

    def _keys(self, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        key = torch.full((), _signed(self.seed, 64), dtype=torch.int64, device=device)
        for part in (self.step, self.stream):
            key = _splitmix(key) ^ (part if isinstance(part, Tensor) else _signed(part, 64))
        key = _splitmix(key)
        return key.to(torch.int32), _shift(key, 32).to(torch.int32)


# Rounding --------------------------------------------------------------------------------------------


def _nearest_away(t: Tensor) -> Tensor:
    # floor(t + 0.5) is wrong where the sum itself rounds; the comparison is exact
    whole = t.floor()
    return whole + (t - whole >= 0.5)


def _round_stochastic(t: Tensor, draws: Tensor) -> Tensor:
    whole = t.floor()
    return whole + (draws.to(t.dtype) * 2.0**-24 < t - whole)


_ROUND_WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "nearest_even": torch.round,
    "toward_zero": torch.floor,
    "nearest_away": _nearest_away,
}


def _round_by_scaling(
    x: Tensor, fmt: FloatFormat, rounding: Rounding, draws: Tensor | None
) -> Tensor:
    """|x| rounded as if the exponent had no upper end (beyond 2^(max_exponent + 1) all overflows)."""
    layout = _LAYOUTS[x.dtype]
    magnitude = x.abs().clamp_(max=math.ldexp(1.0, fmt.max_exponent + 1))
    exponent_mask = layout.magnitude_mask ^ ((1 << layout.mantissa) - 1)
    power = magnitude.view(layout.integer) & exponent_mask
    power.clamp_(min=layout.bits_of_power(fmt.min_exponent))
    per_step = (2 * layout.bias + fmt.mantissa << layout.mantissa) - power
    step = power - (fmt.mantissa << layout.mantissa)
    t = magnitude * per_step.view(x.dtype)
    if draws is not None:
        whole = _round_stochastic(t, draws)
    else:
        whole = _ROUND_WHOLE[rounding](t)
    if fmt.mantissa == 0 and rounding == "nearest_even":
        # without mantissa bits the neighbours differ in the exponent field: ties go to the even code
        field = (power >> layout.mantissa) - layout.bias + fmt.bias
        whole = torch.where((t == 1.5) & (field & 1 == 0), 1.0, whole)
    return whole * step.view(x.dtype)


def _round_by_bits(x: Tensor, fmt: FloatFormat, rounding: Rounding, draws: Tensor | None) -> Tensor:
    """|x| for formats with the source's own exponent range, subnormals included: drop low bits."""
    layout = _LAYOUTS[x.dtype]
    dropped = layout.mantissa - fmt.mantissa
    magnitude = x.view(layout.integer) & layout.magnitude_mask
    low = (1 << dropped) - 1
    half = 1 << (dropped - 1)
    if draws is not None:
        rest, draw = magnitude & low, draws.to(layout.integer)
        if dropped <= 24:
            up = draw < rest << (24 - dropped)
        else:
            up = draw << (dropped - 24) < rest
        carry = up.to(layout.integer) << dropped
    elif rounding == "nearest_even":
        carry = (magnitude >> dropped & 1) + (half - 1)
    else:
        carry = torch.full_like(magnitude, half if rounding == "nearest_away" else 0)
    # NaN is put back by the caller; here it must only not wrap into the sign
    carry = torch.where(x.isnan(), 0, carry)
    return ((magnitude + carry) & ~low).view(x.dtype)


def _same_exponent_range(fmt: FloatFormat, source: FloatFormat) -> bool:
    return fmt.exponent == source.exponent and fmt.specials == "ieee"


def _working_dtype(x: Tensor, fmt: FloatFormat) -> torch.dtype:
    """float32 where all powers of two that rounding needs are normal there, else float64."""
    if x.dtype == torch.float64:
        return torch.float64
    smallest_power = fmt.min_exponent - fmt.mantissa
    is_narrow = smallest_power >= -126 and fmt.max_exponent < 126
    if is_narrow or _same_exponent_range(fmt, _SOURCE_FORMATS[torch.float32]):
        return torch.float32
    return torch.float64


def _finish(rounded: Tensor, x: Tensor, fmt: FloatFormat, saturate: bool) -> Tensor:
    """Overflow, infinities, NaN and the sign, for magnitudes rounded without an upper end."""
    if saturate:
        rounded = rounded.clamp(max=fmt.max)
    else:
        rounded = torch.where(rounded > fmt.max, math.inf if fmt.has_inf else math.nan, rounded)
    special = torch.where(x.isinf(), math.inf if fmt.has_inf else math.nan, math.nan).to(x.dtype)
    rounded = torch.where(x.isfinite(), rounded, special)
    if not fmt.signed:
        return torch.where(x > 0, rounded.clamp(min=fmt.smallest_normal), math.nan)
    rounded = rounded.copysign(x)
    # fnuz has no -0: adding +0 turns it into +0 and changes nothing else
    return rounded + 0.0 if fmt.specials == "fnuz" else rounded


def _round(
    x: Tensor, fmt: FloatFormat, rounding: Rounding, saturate: bool, noise: Noise | None
) -> Tensor:
    """Rounded values in the working type; x is float32 or float64 already."""
    if holds(fmt, _SOURCE_FORMATS[x.dtype]):
        return x
    draws = None
    if rounding == "stochastic":
        assert noise is not None
        width = x.shape[-1] if x.ndim else 1
        rows = x.numel() // width if width else 0
        draws = noise.draws((rows, width), x.device).reshape(x.shape)
    by_bits = _same_exponent_range(fmt, _SOURCE_FORMATS[x.dtype])
    rounded = (_round_by_bits if by_bits else _round_by_scaling)(x, fmt, rounding, draws)
    saturate = saturate or rounding in ("stochastic", "toward_zero")
    return _finish(rounded, x, fmt, saturate)


def _check_source(
    x: Tensor, fmt: FloatFormat, rounding: Rounding, saturate: bool, noise: Noise | None
) -> None:
    if not isinstance(x, Tensor) or x.dtype not in _SOURCE_FORMATS:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"x: got {got}; must be a float16, bfloat16, float32 or float64 tensor; convert it first"
        )
    if rounding not in get_args(Rounding):
        raise ValueError(
            f"rounding: got {rounding!r}; must be one of {', '.join(get_args(Rounding))}"
        )
    if not saturate and not (fmt.has_inf or fmt.has_nan):
        raise ValueError(
            f"saturate: got False; {fmt} has neither inf nor NaN to overflow to; use saturate=True"
        )
    if rounding == "stochastic" and noise is None:
        raise ValueError(
            "noise: got None; stochastic rounding needs it; pass noise=Noise(seed=..., step=...)"
        )


def round_to_format(
    x: Tensor,
    fmt: str | FloatFormat,
    *,
    rounding: Rounding = "nearest_even",
    saturate: bool = True,
    noise: Noise | None = None,
) -> Tensor:
    """x rounded once to the values of a format.

    values = round(|x| / step) * step * sign(x),  step = 2^(max(exponent(x), min_exponent) - mantissa)

    Args:
        x: Any shape and strides; float16, bfloat16, float32 or float64.
        fmt: Target format, by name or value.
        rounding: nearest_even (ties to the even code), toward_zero, nearest_away (ties away from
            zero) or stochastic (up when u < the fraction of a step, u from ``noise``).
        saturate: A finite value beyond the range becomes the largest finite value; with False it
            becomes inf where the format has it, else NaN (e4m3: above 464; e5m2: from 61440).
            toward_zero and stochastic always saturate finite values.
        noise: The noise of stochastic rounding; rows are the product of the leading axes, columns the
            last axis.

    Returns:
        A tensor of x's shape and dtype on the format's grid.

    Raises:
        TypeError: x is no floating-point tensor of these types.
        ValueError: Unknown format or rounding; saturate=False for a format without inf and NaN;
            stochastic without noise; a format with values that x's type cannot hold.

    Edge cases: NaN stays NaN; inf stays inf where the format has it, else NaN, in both modes; -0 keeps
    its sign (fnuz: +0); subnormals of the format are kept, under flush-to-zero too; a source that
    is itself an FP32 subnormal needs flush-to-zero off. e8m0: zero, negative, NaN and inf give NaN,
    anything below 2^-127 gives 2^-127.

    Exactness: equal to the exact rational rounding, in one rounding (tests/test_rounding.py).
    """
    fmt = get_format(fmt)
    _check_source(x, fmt, rounding, saturate, noise)
    source = _SOURCE_FORMATS[x.dtype]
    if not holds(source, fmt) and not holds(fmt, source):
        raise ValueError(
            f"x: got {x.dtype}; it cannot hold the values of {fmt}; pass x.float() or x.double()"
        )
    return _round(x.to(_working_dtype(x, fmt)), fmt, rounding, saturate, noise).to(x.dtype)


# Codes -----------------------------------------------------------------------------------------------


def codes_of(values: Tensor, fmt: FloatFormat) -> Tensor:
    """Codes of float32 or float64 values that lie on the format's grid already.

    NaN and inf in a format without codes for them give code 0: their block's scale is NaN then.
    """
    layout = _LAYOUTS[values.dtype]
    magnitude = values.view(layout.integer) & layout.magnitude_mask
    codes = magnitude >> (layout.mantissa - fmt.mantissa)
    if not _same_exponent_range(fmt, _SOURCE_FORMATS[values.dtype]):
        codes = codes - ((layout.bias - fmt.bias) << fmt.mantissa)
        steps = values.abs() * math.ldexp(1.0, fmt.mantissa - fmt.min_exponent)
        is_subnormal = values.abs() < fmt.smallest_normal
        codes = torch.where(is_subnormal, steps.to(layout.integer), codes)
    if fmt.has_inf:
        inf_code = ((1 << fmt.exponent) - 1) << fmt.mantissa
        codes = torch.where(values.isinf(), inf_code, codes)
    if fmt.signed:
        sign = values.view(layout.integer) < 0
        codes = torch.where(sign, codes | _signed(fmt.sign_mask, 8 * codes.element_size()), codes)
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
        x, fmt, rounding, saturate, noise: As for ``round_to_format``; x may be of any floating-point
            type, whether or not it can hold the format's values.
        packed: Two 4-bit codes a byte along the last axis, the even index in the low nibble.

    Returns:
        Bit patterns of x's shape: uint8 for formats of up to 8 bits, int16 up to 16, int32 up to 32,
        int64 beyond. Packed: uint8 with half the last axis.

    Raises:
        TypeError, ValueError: As ``round_to_format``; NaN or inf for a format without a NaN code;
            packed for a format that is not 4 bits wide, or with an odd last axis.

    Exactness: decode(encode(x)) == round_to_format(x), bit for bit except the payload of NaN.
    """
    fmt = get_format(fmt)
    _check_source(x, fmt, rounding, saturate, noise)
    if not fmt.has_nan and not bool(x.isfinite().all()):
        raise ValueError(
            f"x: got NaN or inf; {fmt} has no code for them; remove them, or use a format with NaN"
        )
    working = _working_dtype(x, fmt)
    if fmt.bits > 32 or (fmt.exponent > 8):
        working = torch.float64
    codes = codes_of(_round(x.to(working), fmt, rounding, saturate, noise), fmt)
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

    Edge cases: NaN codes give NaN; subnormals are kept under flush-to-zero unless they are subnormal in
    dtype too.
    """
    fmt = get_format(fmt)
    if dtype not in _SOURCE_FORMATS or not holds(_SOURCE_FORMATS[dtype], fmt):
        raise ValueError(
            f"dtype: got {dtype}; it cannot hold the values of {fmt}; use a wider type"
        )
    if codes.is_floating_point() and codes.element_size() == 1:
        codes = codes.view(torch.uint8)
    if codes.dtype != code_dtype(fmt):
        raise TypeError(
            f"codes: got {codes.dtype}; codes of {fmt} are {code_dtype(fmt)}; convert them"
        )
    if packed:
        codes = unpack_nibbles(codes, fmt)
    working = torch.float64 if dtype == torch.float64 else torch.float32
    return _values_of(codes, fmt, working).to(dtype)


def _values_of(codes: Tensor, fmt: FloatFormat, working: torch.dtype) -> Tensor:
    layout = _LAYOUTS[working]
    wide = codes.to(layout.integer)
    magnitude = wide & ~_signed(fmt.sign_mask, 64) & ((1 << fmt.bits) - 1)
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
        values = torch.where(wide & fmt.sign_mask != 0, -values, values)
    if fmt.has_nan and not fmt.has_inf:
        pattern = wide if fmt.specials == "fnuz" else magnitude
        values = torch.where(pattern == fmt.nan_code, math.nan, values)
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
            f"x: got {length} elements along axis {axis}; packing needs an even number; pad it by one"
        )
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_nibbles(packed: Tensor, fmt: FloatFormat) -> Tensor:
    """The codes of ``pack_nibbles``, one a byte."""
    if fmt.bits != 4:
        raise ValueError(
            f"packed: got True; {fmt} has {fmt.bits} bits, only 4-bit codes are packed"
        )
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
