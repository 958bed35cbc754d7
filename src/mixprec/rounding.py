"""Rounding to a format. Tensor in, tensor out.

With e = max(exponent(x), min_exponent) and step = 2^(e - mantissa), the rounded value is

    round(|x| / step) * step * sign(x)

Division and multiplication are by powers of two, so each result is rounded exactly once, whatever
the source type, and does not depend on whether a compiler contracts products and sums. torch's own
narrow casts are not used: they round float64 twice and their overflow differs between versions.

Sources: OCP OFP8 v1.0 and MX v1.0 (formats, saturation), IEEE 754-2019 (rounding).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from mixprec.formats import FloatFormat, get_format
from mixprec.noise import Noise

Rounding = Literal["nearest_even", "toward_zero", "nearest_away", "stochastic"]


class Layout(NamedTuple):
    """How a torch type lays out its bits."""

    integer: torch.dtype
    mantissa: int
    bias: int

    @property
    def magnitude_mask(self) -> int:
        return (1 << (self.mantissa + (self.bias + 1).bit_length())) - 1

    def bits_of_power(self, exponent: int) -> int:
        return (exponent + self.bias) << self.mantissa


LAYOUTS = {
    torch.float32: Layout(torch.int32, 23, 127),
    torch.float64: Layout(torch.int64, 52, 1023),
}
_HALF_DTYPES = {
    (5, 10, "ieee"): torch.float16,
    (8, 7, "ieee"): torch.bfloat16,
}
SOURCE_FORMATS = {
    torch.float16: get_format("fp16"),
    torch.bfloat16: get_format("bf16"),
    torch.float32: get_format("fp32"),
    torch.float64: get_format("fp64"),
}


def half_dtype(fmt: FloatFormat) -> torch.dtype | None:
    """torch's 16-bit type of the same values, whatever the format is called; None without one."""
    return _HALF_DTYPES.get((fmt.exponent, fmt.mantissa, fmt.specials))


def holds(container: FloatFormat, fmt: FloatFormat) -> bool:
    """Whether every finite value of ``fmt`` is a value of ``container``."""
    return (
        fmt.max <= container.max
        and fmt.mantissa <= container.mantissa
        and fmt.min_exponent - fmt.mantissa >= container.min_exponent - container.mantissa
    )


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


def bits_of_exponents(x: Tensor, fmt: FloatFormat) -> Tensor:
    """2^max(exponent(x), min_exponent) by its bits, whatever the sign of x."""
    layout = LAYOUTS[x.dtype]
    exponent_mask = layout.magnitude_mask ^ ((1 << layout.mantissa) - 1)
    power = x.view(layout.integer) & exponent_mask
    return power.clamp_(min=layout.bits_of_power(fmt.min_exponent))


def steps_without_digits(x: Tensor, fmt: FloatFormat) -> Tensor:
    """1.5 * 2^23 steps at each x: beside them a float32 has no digits below a step.

    The sum with x is exact but for that rounding, ties to even, however a compiler contracts it:
    the factor is a power of two.
    """
    layout = LAYOUTS[x.dtype]
    large = bits_of_exponents(x, fmt).view(x.dtype)
    return large.mul_(math.ldexp(1.5, layout.mantissa - fmt.mantissa))


def in_negative_units(magnitude: Tensor, power: Tensor, fmt: FloatFormat) -> Tensor:
    """-|x| in units of 2^-24 steps, whole ones, in its memory: draws compare alike within a unit.

    Args:
        magnitude: |x|, float32.
        power: Its ``bits_of_exponents``.
    """
    layout = LAYOUTS[torch.float32]
    per_unit = (2 * layout.bias + fmt.mantissa + 24 << layout.mantissa) - (1 << 31) - power
    return magnitude.mul_(per_unit.view(torch.float32)).floor_()


def round_in_range(
    x: Tensor, fmt: FloatFormat, draws: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Values of float32 numbers that round to no more than a format's largest value, or are NaN.

    Args:
        x: float32, the caller's own, which is overwritten.
        fmt: A signed format with mantissa bits and far fewer exponents than float32.
        draws: Of the noise, for stochastic rounding; None rounds to nearest, ties to even.
        out: Where the values go; by default they get memory of their own, or that of x.

    Returns:
        float32 on the format's grid; a zero may have either sign.

    Exactness: equal to ``decode(round_to_codes(x))`` (tests/test_decoded.py).
    """
    if draws is None:
        large = steps_without_digits(x, fmt)
        return torch.sub(x.add_(large), large, out=x if out is None else out)
    layout = LAYOUTS[torch.float32]
    magnitude = x.abs()
    power = bits_of_exponents(magnitude, fmt)
    units = in_negative_units(magnitude, power, fmt).to(layout.integer).add_(draws)
    # whole steps, of 2^24 units
    whole = units.bitwise_and_(-1 << 24).to(torch.float32)
    step = power.view(torch.float32).mul_(-math.ldexp(1.0, -24 - fmt.mantissa))
    values = torch.mul(whole, step, out=out)
    sign = x.view(layout.integer).bitwise_and_(-1 << 31)
    values.view(layout.integer).bitwise_or_(sign)
    return values


def _round_by_scaling(
    x: Tensor, fmt: FloatFormat, rounding: Rounding, draws: Tensor | None
) -> Tensor:
    """|x| rounded as if the exponent had no end (above 2^(max_exponent + 1) all overflows)."""
    layout = LAYOUTS[x.dtype]
    magnitude = x.abs().clamp_(max=math.ldexp(1.0, fmt.max_exponent + 1))
    power = bits_of_exponents(magnitude, fmt)
    per_step = (2 * layout.bias + fmt.mantissa << layout.mantissa) - power
    step = power - (fmt.mantissa << layout.mantissa)
    t = magnitude * per_step.view(x.dtype)
    if draws is not None:
        whole = _round_stochastic(t, draws)
    else:
        whole = _ROUND_WHOLE[rounding](t)
    if fmt.mantissa == 0 and rounding == "nearest_even":
        # without mantissa bits neighbours differ in the exponent field: ties go to the even code
        field = (power >> layout.mantissa) - layout.bias + fmt.bias
        whole = torch.where((t == 1.5) & (field & 1 == 0), 1.0, whole)
    return whole * step.view(x.dtype)


def _round_by_adding(x: Tensor, fmt: FloatFormat) -> Tensor:
    """|x| rounded to nearest even, twice as fast as by scaling; mantissa bits only."""
    magnitude = x.abs().clamp_(max=math.ldexp(1.0, fmt.max_exponent + 1))
    large = steps_without_digits(magnitude, fmt)
    return magnitude.add_(large).sub_(large)


def _round_by_bits(x: Tensor, fmt: FloatFormat, rounding: Rounding, draws: Tensor | None) -> Tensor:
    """|x| for formats with the source's own exponent range, subnormals included: drop low bits."""
    layout = LAYOUTS[x.dtype]
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


def _has_room_to_add(fmt: FloatFormat, dtype: torch.dtype) -> bool:
    """Whether 1.5 * 2^mantissa steps of the format's largest binade are finite in a type."""
    layout = LAYOUTS[dtype]
    return fmt.max_exponent + 2 + layout.mantissa - fmt.mantissa < layout.bias


def same_exponent_range(fmt: FloatFormat, source: FloatFormat) -> bool:
    return fmt.exponent == source.exponent and fmt.specials == "ieee"


def _working_dtype(x: Tensor, fmt: FloatFormat) -> torch.dtype:
    """float32 where all powers of two that rounding needs are normal there, else float64."""
    if x.dtype == torch.float64 or not holds(get_format("fp32"), fmt):
        return torch.float64
    smallest_power = fmt.min_exponent - fmt.mantissa
    is_narrow = smallest_power >= -126 and fmt.max_exponent < 126
    if is_narrow or same_exponent_range(fmt, SOURCE_FORMATS[torch.float32]):
        return torch.float32
    return torch.float64


def can_look_at(x: Tensor) -> bool:
    """Whether reading a value of x costs nothing: not while tracing, and not on an accelerator."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu"


def _finish(rounded: Tensor, x: Tensor, fmt: FloatFormat, saturate: bool) -> Tensor:
    """Overflow, infinities, NaN and the sign, for magnitudes rounded without an upper end."""
    if can_look_at(rounded) and rounded.numel() and fmt.specials != "fnuz" and fmt.signed:
        # one look spares most tensors five passes; it is false for NaN
        if bool(rounded.amax() <= fmt.max):
            return rounded.copysign_(x)
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


def round_float(
    x: Tensor,
    fmt: FloatFormat,
    rounding: Rounding,
    noise: Noise | None,
    saturate: bool = True,
) -> Tensor:
    """``round_to_format`` without checks; values in float32 or float64, as exactness asks."""
    half = half_dtype(fmt)
    is_cast = half is not None and rounding == "nearest_even" and not saturate
    if is_cast and x.dtype != torch.float64 and not torch.compiler.is_compiling():
        # torch's cast is this rounding, from float32 on; float64 it would round twice
        return x.to(half).to(torch.float32)
    x = x.to(_working_dtype(x, fmt))
    if holds(fmt, SOURCE_FORMATS[x.dtype]):
        return x
    draws = None
    if rounding == "stochastic":
        assert noise is not None
        width = x.shape[-1] if x.ndim else 1
        rows = x.numel() // width if width else 0
        draws = noise.draws((rows, width), x.device).reshape(x.shape)
    if same_exponent_range(fmt, SOURCE_FORMATS[x.dtype]):
        rounded = _round_by_bits(x, fmt, rounding, draws)
    elif rounding == "nearest_even" and fmt.mantissa and _has_room_to_add(fmt, x.dtype):
        rounded = _round_by_adding(x, fmt)
    else:
        rounded = _round_by_scaling(x, fmt, rounding, draws)
    saturate = saturate or rounding in ("stochastic", "toward_zero")
    return _finish(rounded, x, fmt, saturate)


def check_floating(name: str, x: object) -> None:
    """Raise TypeError unless x is a tensor of one of the types that can be rounded."""
    if not isinstance(x, Tensor) or x.dtype not in SOURCE_FORMATS:
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(
            f"{name}: got {got}; must be a float16, bfloat16, float32 or float64 tensor; convert it"
        )


def check_source(
    x: Tensor, fmt: FloatFormat, rounding: Rounding, saturate: bool, noise: Noise | None
) -> None:
    check_floating("x", x)
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

    values = round(|x| / step) * step * sign(x)
    step = 2^(max(exponent(x), min_exponent) - mantissa)

    Args:
        x: Any shape and strides; float16, bfloat16, float32 or float64.
        fmt: Target format, by name or value.
        rounding: nearest_even (ties to the even code), toward_zero, nearest_away (ties away from
            zero) or stochastic (up when u < the fraction of a step, u from ``noise``).
        saturate: A finite value beyond the range becomes the largest finite value; with False it
            becomes inf where the format has it, else NaN (e4m3: above 464; e5m2: from 61440).
            toward_zero and stochastic always saturate finite values.
        noise: The noise of stochastic rounding; rows are the product of the leading axes, columns
            the last axis.

    Returns:
        A tensor of x's shape and dtype on the format's grid.

    Raises:
        TypeError: x is no floating-point tensor of these types.
        ValueError: Unknown format or rounding; saturate=False for a format without inf and NaN;
            stochastic without noise; a format with values that x's type cannot hold.

    Edge cases: NaN stays NaN; inf stays inf where the format has it, else NaN, in both modes; -0
    keeps its sign (fnuz: +0); subnormals of the format are kept, under flush-to-zero too; a source
    that is itself an FP32 subnormal needs flush-to-zero off. e8m0: zero, negative, NaN and inf give
    NaN, anything below 2^-127 gives 2^-127.

    Exactness: equal to the exact rational rounding, in one rounding (tests/test_rounding.py).
    """
    fmt = get_format(fmt)
    check_source(x, fmt, rounding, saturate, noise)
    source = SOURCE_FORMATS[x.dtype]
    if not holds(source, fmt) and not holds(fmt, source):
        raise ValueError(
            f"x: got {x.dtype}; it cannot hold the values of {fmt}; pass x.float() or x.double()"
        )
    return round_float(x, fmt, rounding, noise, saturate).to(x.dtype)
