"""From the largest magnitude of a block to its scale: the rules, as a table.

    values = round(x * encode);   x ~= values * scale

Divisions are done in float64 and rounded once to float32, which gives the bits of a float32
division and does not depend on approximate division in a compiler.

Sources: OCP MX v1.0 (e8m0 scales); torchao and NVIDIA Transformer Engine (rounding of scales,
nvfp4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from mixprec.codes import codes_of, decode, looked_up
from mixprec.formats import FloatFormat, get_format
from mixprec.rounding import can_look_at, round_float

_FLT_MAX = torch.finfo(torch.float32).max
_NAN_BITS = 0x7FC00000


Reduce = Callable[[Tensor, tuple[bool, bool]], Tensor]
"""The largest of all parts' magnitudes along the (free, contraction) axes that are asked for."""


class Scales(NamedTuple):
    """What a rule makes of the amaxes of an operand's blocks.

    encode: float32 factor that quantises, for each block.
    scale: What is kept for each block: a float32 factor, or the code of a narrow format (uint8).
    tensor_amax: float32 [1, 1], where a second factor belongs to the whole tensor; else None.
    """

    encode: Tensor
    scale: Tensor
    tensor_amax: Tensor | None = None


class Reciprocal(NamedTuple):
    """encode = min(largest / amax, FLT_MAX), scale = 1 / encode; as a power of two, that below.

    1 of an amax of 0; NaN of one that is not finite.
    """

    largest: float
    is_power: bool = False

    def scales(self, amax: Tensor) -> Scales:
        """Of float32 or float64 amaxes."""
        wide = amax.to(torch.float64)
        # wide - wide is 0, or NaN where amax is not finite
        encode = ((wide - wide + self.largest) / wide).clamp_(max=_FLT_MAX).to(torch.float32)
        if self.is_power:
            bits = encode.to(torch.float64).view(torch.int64)
            power = (bits & ~((1 << 52) - 1)).view(torch.float64).to(torch.float32)
            # clearing the mantissa of NaN gives inf, so NaN is added again
            encode = power + (encode - encode)
        encode = encode.masked_fill_(amax == 0, 1.0)
        return Scales(encode, encode.to(torch.float64).reciprocal_().to(torch.float32))


_E4M3, _E8M0 = get_format("e4m3"), get_format("e8m0")
_ALL_CODES = torch.arange(256, dtype=torch.uint8, device="cpu")
_E4M3_VALUES = decode(_ALL_CODES, _E4M3)
_E8M0_VALUES = decode(_ALL_CODES, _E8M0)
# 2^(127 - code); the last code is NaN
_E8M0_ENCODE = torch.cat((_E8M0_VALUES[:-1].flip(0), _E8M0_VALUES[-1:]))
_E8M0_NAN, _E8M0_LAST = 255, 254


def _is_nonfinite(amax: Tensor) -> Tensor:
    return ~(amax < math.inf)


def _e8m0_scale(codes: Tensor) -> Tensor:
    return looked_up(_E8M0_VALUES, codes)


def _e8m0_encode(code: Tensor) -> Tensor:
    """2^(127 - code) by its bits, since a table is read one element after another; NaN for NaN."""
    bits = (_E8M0_LAST - code << 23).masked_fill(code == _E8M0_LAST, 1 << 22)
    return bits.masked_fill(code == _E8M0_NAN, _NAN_BITS).view(torch.float32)


class PowerOfTwo(NamedTuple):
    """An e8m0 code from the bits of a float32: (bits(amax * factor) + addend >> 23) - shift.

    Clamped to its range, and 0 where the bits are at most ``lowest``; that of NaN for an amax that
    is not finite.
    """

    factor: float = 1.0
    addend: int = 0
    shift: int = 0
    lowest: int = -1

    def scales(self, amax: Tensor) -> Scales:
        """Of float32 or float64 amaxes."""
        # the product of two float32 is exact in float64, so that it is rounded once
        bits = (amax.to(torch.float64) * self.factor).to(torch.float32).view(torch.int32)
        code = (bits + self.addend >> 23) - self.shift
        if self.lowest >= 0:
            code = code.masked_fill_(bits <= self.lowest, 0)
        code = code.clamp_(0, _E8M0_LAST).masked_fill_(_is_nonfinite(amax), _E8M0_NAN)
        if torch.compiler.is_compiling():
            return Scales(_e8m0_encode(code), code.to(torch.uint8))
        return Scales(looked_up(_E8M0_ENCODE, code), code.to(torch.uint8))


Formula = Reciprocal | PowerOfTwo
"""What makes a block's scale of its own amax alone."""


# ones under the exponent: added, they carry where a mantissa bit is set
_ONES = (1 << 23) - 1


def _rceil(fmt: FloatFormat) -> PowerOfTwo:
    # a subnormal is at most 2^-127, the smallest scale, or above it
    return PowerOfTwo(factor=_as_float32(1 / fmt.max), addend=_ONES, lowest=1 << 22)


def _floor(fmt: FloatFormat) -> PowerOfTwo:
    return PowerOfTwo(shift=fmt.max_exponent)


def _even(fmt: FloatFormat) -> PowerOfTwo:
    return PowerOfTwo(addend=1 << (22 - fmt.mantissa), shift=fmt.max_exponent)


def _ceil(fmt: FloatFormat) -> PowerOfTwo:
    return PowerOfTwo(addend=_ONES, shift=fmt.max_exponent)


def _as_float32(value: float) -> float:
    """The nearest float32 of a number in its normal range, in arithmetic that compilers trace."""
    fraction, exponent = math.frexp(value)
    return math.ldexp(round(fraction * (1 << 24)), exponent - 24)


_SIXTH, _RANGE = _as_float32(1 / 6), _as_float32(1 / 2688)


def _reciprocal(x: Tensor) -> Tensor:
    return x.to(torch.float64).reciprocal_().clamp_(max=_FLT_MAX).to(torch.float32)


def _nvfp4(amax: Tensor, fmt: FloatFormat, reduce: Reduce | None = None) -> Scales:
    # two looks spare most tensors four passes
    is_looked_at = can_look_at(amax) and amax.numel() > 0
    is_finite = is_looked_at and math.isfinite(amax.amax())
    is_positive = is_looked_at and float(amax.amin()) > 0
    finite = amax if is_finite else amax.nan_to_num(nan=0.0, posinf=0.0)
    largest = finite.amax() if amax.numel() else finite.new_zeros(())
    if reduce is not None:
        largest = reduce(largest, (True, True))
    # a number over a tensor would be its reciprocal, rounded, times the number
    whole = torch.full_like(largest, 2688, dtype=torch.float64) / largest.to(torch.float64)
    whole = whole.clamp_(max=_FLT_MAX).to(torch.float32)
    whole = torch.where(largest == 0, 1.0, whole)
    block = (finite * (whole * _SIXTH)).clamp_(max=_E4M3.max)
    if torch.compiler.is_compiling():
        codes = codes_of(round_float(block, _E4M3, "nearest_even", None), _E4M3)
    else:
        # in range, torch's cast is this rounding in every version
        codes = block.to(torch.float8_e4m3fn).view(torch.uint8)
    if not is_finite:
        codes = codes.masked_fill_(_is_nonfinite(amax), _E4M3.nan_code)
    # of every block scale that there can be, so that a division is made 256 times
    encode = looked_up(_reciprocal(_E4M3_VALUES.to(amax.device) * _reciprocal(whole)), codes)
    if not is_positive:
        encode = encode.masked_fill_(amax == 0, 1.0)
    return Scales(encode, codes, largest.reshape(1, 1))


def _nvfp4_scale(codes: Tensor) -> Tensor:
    return looked_up(_E4M3_VALUES, codes)


def tensor_scale(tensor_amax: Tensor) -> Tensor:
    """The factor of a whole tensor beside the scales of its blocks: A * (1/2688), float32."""
    return tensor_amax * _RANGE


class ScaleRule(NamedTuple):
    """From the amaxes of blocks to their scales, NaN where amax is not finite.

    block_scale: The float32 factors of what is kept.
    is_exact: Whether multiplying values by their block's scale is exact in FP32, so that it may be
        done before a product is summed.
    formula: Of the elements' format; None where a second factor belongs to the whole tensor.
    make: Of amax, the format and what brings the amaxes of an operand's parts together, or None,
        where there is no formula.
    exceeds: Whether x * encode can lie beyond the format's range.
    mantissa: Mantissa bits of a scale: 0 for powers of two.
    amax_dtype: The type in which it takes amax; None is any.
    """

    block_scale: Callable[[Tensor], Tensor]
    is_exact: bool
    formula: Callable[[FloatFormat], Formula] | None = None
    make: Callable[[Tensor, FloatFormat, Reduce | None], Scales] | None = None
    exceeds: bool = False
    mantissa: int = 0
    amax_dtype: torch.dtype | None = None

    @property
    def has_tensor_scale(self) -> bool:
        """Whether a second factor belongs to the whole tensor, so that there is no formula."""
        return self.formula is None


def _as_kept(scale: Tensor) -> Tensor:
    return scale


SCALE_RULES: Mapping[str, ScaleRule] = MappingProxyType(
    {
        "real": ScaleRule(
            _as_kept, is_exact=False, formula=lambda fmt: Reciprocal(fmt.max), mantissa=23
        ),
        "pow2": ScaleRule(
            _as_kept, is_exact=True, formula=lambda fmt: Reciprocal(fmt.max, is_power=True)
        ),
        "e8m0_rceil": ScaleRule(_e8m0_scale, is_exact=True, formula=_rceil),
        "e8m0_floor": ScaleRule(_e8m0_scale, is_exact=True, formula=_floor, exceeds=True),
        "e8m0_even": ScaleRule(_e8m0_scale, is_exact=True, formula=_even, exceeds=True),
        "e8m0_ceil": ScaleRule(_e8m0_scale, is_exact=True, formula=_ceil),
        "nvfp4": ScaleRule(
            _nvfp4_scale,
            is_exact=True,
            make=_nvfp4,
            exceeds=True,
            mantissa=3,
            amax_dtype=torch.float32,
        ),
    }
)
"""Rules by name (numerics.md, section 3).

``real``: encode = min(max / amax, FLT_MAX), scale = 1 / encode. ``pow2``: that encode with its
mantissa bits cleared. ``e8m0_*``: a power of two kept as its exponent code; ``rceil`` rounds
amax / max up, ``floor``, ``even`` and ``ceil`` the exponent of amax. ``nvfp4``: e4m3 block scales
under a float32 scale of the tensor.
"""


RULE_FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType({"nvfp4": ("e2m1",)})
"""Rules that are made for some formats only: nvfp4's constants are those of e2m1."""


def make_scales(
    amax: Tensor,
    rule: str,
    fmt: FloatFormat,
    min_amax: float = 0.0,
    reduce: Reduce | None = None,
) -> Scales:
    """The factor that quantises each block, and what brings its values back.

    Args:
        amax: Largest magnitudes of the blocks, [free blocks, contraction blocks], any
            floating-point type.
        rule: A name in ``SCALE_RULES``.
        fmt: The elements' format.
        min_amax: Floor under amax, applied before the test for zero.
        reduce: For a part of an operand: what the whole tensor's amax is taken with.

    Returns:
        Scales of amax's shape.

    Edge cases: amax = 0 gives encode 1 (e8m0: code 0; nvfp4: a block scale of 0); a non-finite amax
    gives NaN in all of them; an amax so small that max / amax overflows gives encode = FLT_MAX
    (pow2: 2^127).

    Exactness: bit for bit (tests/test_scaling.py).
    """
    made = SCALE_RULES[rule]
    if min_amax:
        amax = amax.to(torch.float64).clamp(min=min_amax)
    if made.amax_dtype is not None:
        amax = amax.to(made.amax_dtype)
    if made.formula is not None:
        return made.formula(fmt).scales(amax)
    assert made.make is not None
    return made.make(amax, fmt, reduce)
