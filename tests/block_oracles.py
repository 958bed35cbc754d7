"""Exact models of block scales and of the Hadamard transform, one number at a time.

Integers and fractions, and for the transform single sums of numpy's float32. Of the package only
the stored fields of formats and specs are read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from oracles import code_value, decode_array, round_array, round_fraction, top_code

from mixprec.formats import FORMATS, FloatFormat
from mixprec.quantization import QuantizedTensor, QuantSpec

FLT_MAX = Fraction(2**24 - 1) * Fraction(2) ** 104
E8M0_NAN, E8M0_LAST = 255, 254
E4M3 = FORMATS["e4m3"]
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def floor_log2(x: Fraction) -> int:
    """The exponent of a positive number."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def to_float32(x: Fraction) -> Fraction:
    """Rounded to an IEEE single, ties to even; unbounded above."""
    if x == 0:
        return x
    step = Fraction(2) ** (max(floor_log2(abs(x)), -126) - 23)
    return round(x / step) * step


def float32_fields(x: Fraction) -> tuple[int, int]:
    """Exponent field and mantissa of a finite single that is not negative."""
    return divmod(int.from_bytes(struct.pack(">f", float(x)), "big"), 1 << 23)


def largest(fmt: FloatFormat) -> Fraction:
    """The largest finite number of a format."""
    return Fraction(code_value(fmt, top_code(fmt)))


def encode_factor(rule: str, amax: Fraction, fmt: FloatFormat) -> Fraction:
    """What values are multiplied by under the rules of float32 scales; positive finite amax."""
    encode = min(to_float32(largest(fmt) / amax), FLT_MAX)
    return {"real": encode, "pow2": Fraction(2) ** floor_log2(encode)}[rule]


def _rceil(amax: Fraction, fmt: FloatFormat) -> int:
    field, mantissa = float32_fields(to_float32(amax * to_float32(1 / largest(fmt))))
    return field + (mantissa != 0 if field else mantissa > 0x400000)


def _floor(amax: Fraction, fmt: FloatFormat) -> int:
    return floor_log2(amax) - floor_log2(largest(fmt)) + 127


def _even(amax: Fraction, fmt: FloatFormat) -> int:
    field, mantissa = float32_fields(amax)
    carry = (mantissa + 2 ** (22 - fmt.mantissa)) >> 23
    return field + carry - floor_log2(largest(fmt))


def _ceil(amax: Fraction, fmt: FloatFormat) -> int:
    field, mantissa = float32_fields(amax)
    return field + (mantissa != 0) - floor_log2(largest(fmt))


E8M0_RULES: Mapping[str, Callable[[Fraction, FloatFormat], int]] = {
    "e8m0_rceil": _rceil,
    "e8m0_floor": _floor,
    "e8m0_even": _even,
    "e8m0_ceil": _ceil,
}


@dataclass(frozen=True)
class BlockScale:
    """The scale of one block.

    encode: What its elements are multiplied by; None where it has NaN or inf.
    kept: The number or the code that is kept.
    factor: What its values are multiplied by on the way back; NaN where it has NaN or inf.
    """

    encode: Fraction | None
    kept: float
    factor: float


def _own_scale(amax: float, spec: QuantSpec) -> BlockScale:
    """The scale of a block by its own amax."""
    is_code = spec.scale_rule in E8M0_RULES
    if not math.isfinite(amax):
        return BlockScale(None, E8M0_NAN if is_code else math.nan, math.nan)
    exact = max(Fraction(amax), Fraction(spec.min_amax))
    if is_code:
        rule = E8M0_RULES[spec.scale_rule]
        code = min(max(rule(to_float32(exact), spec.format), 0), E8M0_LAST) if exact else 0
        return BlockScale(Fraction(2) ** (127 - code), code, 2.0 ** (code - 127))
    encode = encode_factor(spec.scale_rule, exact, spec.format) if exact else Fraction(1)
    scale = float(to_float32(1 / encode))
    return BlockScale(encode, scale, scale)


def code_of_e4m3(number: Fraction) -> int:
    """The code of a number that is not negative, rounded."""
    value = round_fraction(float(number), E4M3, "nearest_even")
    return next(code for code in range(127) if code_value(E4M3, code) == value)


def _within_tensor(amaxes: list[float], spec: QuantSpec) -> tuple[list[BlockScale], float]:
    """e4m3 block scales under the scale of the tensor, and A."""
    floor = Fraction(spec.min_amax)
    finite = [max(Fraction(amax), floor) for amax in amaxes if math.isfinite(amax)]
    whole = to_float32(max(finite, default=Fraction(0)))
    big = min(to_float32(2688 / whole), FLT_MAX) if whole else Fraction(1)
    sixth = to_float32(big * to_float32(Fraction(1, 6)))
    found = []
    for amax in amaxes:
        if not math.isfinite(amax):
            found.append(BlockScale(None, 127, math.nan))
            continue
        floored = to_float32(max(Fraction(amax), floor))
        code = code_of_e4m3(min(to_float32(floored * sixth), Fraction(448)))
        b = Fraction(code_value(E4M3, code))
        unscaled = to_float32(b * to_float32(1 / big))
        encode = min(to_float32(1 / unscaled), FLT_MAX) if unscaled else FLT_MAX
        found.append(BlockScale(encode if floored else Fraction(1), code, float(b)))
    return found, float(whole)


def scales_of(amaxes: list[float], spec: QuantSpec) -> tuple[list[BlockScale], float | None]:
    """The scales of all blocks of a tensor by their amaxes, and A where the rule has one."""
    if spec.scale_rule == "nvfp4":
        return _within_tensor(amaxes, spec)
    return [_own_scale(amax, spec) for amax in amaxes], None


def tensor_factor(tensor_amax: float) -> float:
    """What all values of a tensor are multiplied by, from its A."""
    return float(to_float32(Fraction(tensor_amax) * to_float32(Fraction(1, 2688))))


def kept_factors(q: QuantizedTensor) -> np.ndarray:
    """What an operand keeps for each block as float64 factors, the tensor's own left out."""
    assert q.scale is not None
    kept = q.scale.numpy()
    if q.scale.dtype == torch.float32:
        return kept.astype(np.float64)
    if q.spec.scale_rule == "nvfp4":
        return decode_array(np.ascontiguousarray(kept), E4M3)
    return np.where(kept == E8M0_NAN, np.nan, 2.0 ** (kept.astype(np.float64) - 127))


def butterfly(numbers: list[np.float32]) -> list[np.float32]:
    """16 numbers times the Hadamard matrix, a sum of two at a time, then a quarter."""
    numbers = list(numbers)
    for stride in (1, 2, 4, 8):
        for place in range(16):
            if not place & stride:
                first, second = numbers[place], numbers[place + stride]
                numbers[place], numbers[place + stride] = first + second, first - second
    return [number * np.float32(0.25) for number in numbers]


def transform(matrix: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Each 16 columns of float32 numbers transformed, rounded to a type; padded with zeros."""
    rows, columns = matrix.shape
    padded = np.zeros((rows, -(-columns // 16) * 16), np.float32)
    padded[:, :columns] = matrix
    with np.errstate(over="ignore", invalid="ignore"):
        for row in padded:
            for start in range(0, len(row), 16):
                numbers = [np.float32(s) * x for s, x in zip(SIGNS, row[start:], strict=False)]
                row[start : start + 16] = butterfly(numbers)
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    wide = padded.astype(np.float64)
    return wide if name is None else round_array(wide, FORMATS[name], "nearest_even", False)
