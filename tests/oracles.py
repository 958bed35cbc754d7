"""Slow, exact models of formats, rounding and noise that the tests compare the package with.

Of the package only the stored fields of formats are read: exponent, mantissa, specials, signed.
Everything else is worked out here again: once in integers and fractions, one number at a time, and
once in float64 arrays for the tests of many numbers. All results are values in Python floats or
float64, exact because no format is wider than float64; NaN is one value, whichever its code.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise, product

import numpy as np

from mixprec.formats import FORMATS, FloatFormat

MODES = ("nearest_even", "toward_zero", "nearest_away", "stochastic")
DRAWS = 2**24
WORD, DOUBLE_WORD = 2**32, 2**64


def exponent_bias(fmt: FloatFormat) -> int:
    """The power of two that field 0 of the exponent stands for, negated."""
    return (1 << fmt.exponent >> 1) - (fmt.specials != "fnuz")


def code_bits(fmt: FloatFormat) -> int:
    """Width of a code: sign, exponent, mantissa."""
    return (1 if fmt.signed else 0) + fmt.exponent + fmt.mantissa


@lru_cache
def unit(fmt: FloatFormat) -> Fraction:
    """The smallest positive number, of which all others are multiples."""
    return Fraction(2) ** ((1 if fmt.signed else 0) - exponent_bias(fmt) - fmt.mantissa)


def top_code(fmt: FloatFormat) -> int:
    """The code of the largest finite number."""
    every = (1 << (fmt.exponent + fmt.mantissa)) - 1
    removed = {"ieee": 1 << fmt.mantissa, "nan": 1, "fnuz": 0, "none": 0}
    return every - removed[fmt.specials]


def magnitude(fmt: FloatFormat, code: int) -> int:
    """The number of a code without its sign bit, in units; goes on above the largest number."""
    field, fraction = divmod(code, 1 << fmt.mantissa)
    if not fmt.signed:
        return 1 << field
    return fraction if field == 0 else (fraction + (1 << fmt.mantissa)) << (field - 1)


@lru_cache(maxsize=1 << 16)
def code_value(fmt: FloatFormat, code: int) -> float:
    """What a code stands for."""
    half = 1 << (fmt.exponent + fmt.mantissa)
    if not 0 <= code < (2 * half if fmt.signed else half):
        raise ValueError(f"{code} is no code of {fmt}")
    negative, below = divmod(code, half)
    if fmt.specials == "fnuz" and code == half:
        return math.nan
    if below > top_code(fmt):
        infinite = fmt.specials == "ieee" and below == top_code(fmt) + 1
        return (-math.inf if negative else math.inf) if infinite else math.nan
    number = float(magnitude(fmt, below) * unit(fmt))
    return -number if negative else number


@lru_cache(maxsize=1 << 16)
def code_below(fmt: FloatFormat, size: float) -> tuple[int, Fraction]:
    """The last code not above a positive number, and how far the number lies towards the next."""
    exact = Fraction(size) / unit(fmt)
    # Without the cap the codes of a 64-bit format would be searched up to 2^64 units and more.
    codes = range(top_code(fmt) + 2)
    # magnitudes are integers, and integers are compared faster than fractions
    code = bisect_right(codes, math.floor(exact), key=lambda code: magnitude(fmt, code)) - 1
    if code < 0:
        return 0, Fraction(0)
    low, high = magnitude(fmt, code), magnitude(fmt, code + 1)
    return code, (exact - low) / (high - low)


def goes_up(mode: str, code: int, part: Fraction, draw: int) -> bool:
    """Whether a number that lies ``part`` of the way above ``code`` becomes the next code."""
    # by integers: fractions are reduced each time
    if mode == "stochastic":
        return draw * part.denominator < DRAWS * part.numerator
    twice = 2 * part.numerator
    if mode == "toward_zero" or twice < part.denominator:
        return False
    return twice > part.denominator or mode == "nearest_away" or code % 2 == 1


def round_fraction(
    x: float, fmt: FloatFormat, mode: str, saturate: bool = True, draw: int = 0
) -> float:
    """One number rounded to a format, in exact arithmetic."""
    overflow = math.inf if fmt.specials == "ieee" else math.nan
    if math.isnan(x) or (not fmt.signed and x <= 0):
        return math.nan
    if math.isinf(x):
        return math.copysign(overflow, x)
    code, part = code_below(fmt, abs(x))
    code += goes_up(mode, code, part, draw)
    if code > top_code(fmt):
        stays = saturate or mode in ("toward_zero", "stochastic")
        return math.copysign(code_value(fmt, top_code(fmt)) if stays else overflow, x)
    value = code_value(fmt, code)
    return value if value == 0 and fmt.specials == "fnuz" else math.copysign(value, x)


def decode_array(codes: np.ndarray, fmt: FloatFormat) -> np.ndarray:
    """What codes stand for; codes are integers of any width, read as bit patterns."""
    width, bits = 8 * codes.dtype.itemsize, code_bits(fmt)
    pattern = codes.view(f"u{codes.dtype.itemsize}").astype(np.uint64)
    assert width >= bits
    assert bits == 64 or not (pattern >> np.uint64(bits)).any(), "bits above the code are set"
    below = (pattern & np.uint64((1 << (fmt.exponent + fmt.mantissa)) - 1)).astype(np.int64)
    negative = fmt.signed & (pattern >> np.uint64(bits - 1) == 1)
    field, fraction = below >> fmt.mantissa, below & ((1 << fmt.mantissa) - 1)
    smallest = 1 if fmt.signed else 0
    significand = fraction + (field >= smallest).astype(np.int64) * (1 << fmt.mantissa)
    places = np.maximum(field, smallest) - exponent_bias(fmt) - fmt.mantissa
    with np.errstate(over="ignore"):
        value = np.ldexp(significand.astype(np.float64), places)
    special = np.where((fmt.specials == "ieee") & (fraction == 0), np.inf, np.nan)
    value = np.where(below > top_code(fmt), special, value)
    if fmt.specials == "fnuz":
        value = np.where(negative & (below == 0), np.nan, value)
    return np.where(negative, -value, value)


def round_array(
    x: np.ndarray,
    fmt: FloatFormat,
    mode: str,
    saturate: bool = True,
    draws: np.ndarray | None = None,
) -> np.ndarray:
    """Numbers rounded to a format, by exact float64 operations on distances to codes below."""
    with np.errstate(invalid="ignore"):
        x = x.astype(np.float64)
    finite = np.isfinite(x) & (x != 0)
    smallest = (1 if fmt.signed else 0) - exponent_bias(fmt)
    floor = 0.0 if fmt.signed else 2.0**smallest
    size = np.where(finite, np.maximum(np.abs(x), floor), 1.0)
    place = np.maximum(np.frexp(size)[1].astype(np.int64) - 1, smallest)
    steps = np.ldexp(size, fmt.mantissa - place)
    whole = np.floor(steps)
    part = steps - whole
    hidden = 0 if fmt.signed else 1
    below = whole.astype(np.int64) - hidden + ((place - smallest) << fmt.mantissa)
    threshold = {
        "toward_zero": 2.0,
        "nearest_away": 0.5,
        "nearest_even": np.where(below % 2 == 1, 0.5, np.nextafter(0.5, 1)),
        "stochastic": None if draws is None else np.nextafter(draws / DRAWS, 1),
    }[mode]
    code = below + (part >= threshold)
    top = top_code(fmt)
    infinite = np.inf if fmt.specials == "ieee" else np.nan
    stays = saturate or mode in ("toward_zero", "stochastic")
    beyond = code_value(fmt, top) if stays else infinite
    kept = decode_array(np.minimum(code, top), fmt)
    value = np.where(finite, np.where(code > top, beyond, kept), 0.0)
    value = np.where(np.isinf(x), infinite, value)
    value = np.where(np.isnan(x), np.nan, np.copysign(value, x))
    if fmt.specials == "fnuz":
        value = value + 0.0
    return value if fmt.signed else np.where(x > 0, value, np.nan)


def assert_same(got: np.ndarray, want: np.ndarray, inputs: np.ndarray | None = None) -> None:
    """Equal to the bit, signs of zeros included; NaN equals NaN."""
    with np.errstate(invalid="ignore"):  # numpy warns of signalling NaN
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    same = (got.view(np.int64) == want.view(np.int64)) | (np.isnan(got) & np.isnan(want))
    if same.all():
        return
    first = np.argwhere(~same)[:5]
    inputs = got if inputs is None else np.broadcast_to(inputs, got.shape)
    lines = [
        f"at {tuple(place)}: input {float(inputs[tuple(place)])!r} "
        f"gave {float(got[tuple(place)])!r}, not {float(want[tuple(place)])!r}"
        for place in first.tolist()
    ]
    raise AssertionError("\n".join([f"{(~same).sum()} of {same.size} differ", *lines]))


def mix(x: int) -> int:
    """The 32-bit mixing function of the noise generator."""
    x ^= x >> 16
    x = x * 0x7FEB352D % WORD
    x ^= x >> 15
    x = x * 0x846CA68B % WORD
    return x ^ x >> 16


def unmix(x: int) -> int:
    """The inverse of ``mix``, to find the counter that gives a wanted draw."""
    x ^= x >> 16
    x = x * pow(0x846CA68B, -1, WORD) % WORD
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x7FEB352D, -1, WORD) % WORD
    return x ^ x >> 16


def splitmix(z: int) -> int:
    """One step of the 64-bit generator that makes the key."""
    z = (z + 0x9E3779B97F4A7C15) % DOUBLE_WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % DOUBLE_WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % DOUBLE_WORD
    return z ^ z >> 31


def noise_key(seed: int, step: int, stream: int) -> tuple[int, int]:
    """The two halves of the key, low one first."""
    mixed = splitmix(seed % DOUBLE_WORD)
    mixed = splitmix(mixed ^ step % DOUBLE_WORD)
    high, low = divmod(splitmix(mixed ^ stream % DOUBLE_WORD), WORD)
    return low, high


def draw(seed: int, step: int, stream: int, index: int) -> int:
    """The 24-bit draw of one element."""
    low, high = noise_key(seed, step, stream)
    upper, lower = divmod(index, WORD)
    return mix((mix(lower ^ low) + high + upper * 0x9E3779B9) % WORD) >> 8


def index_of_draw(wanted: int, seed: int, step: int, stream: int) -> int:
    """An index below 2^32 whose draw is the wanted one."""
    low, high = noise_key(seed, step, stream)
    return unmix((unmix(wanted << 8) - high) % WORD) ^ low


def draw_array(seed: int, step: int, stream: int, rows: int, columns: int) -> np.ndarray:
    """The draws of an unsharded operand of fewer than 2^32 elements."""
    low, high = (np.uint32(half) for half in noise_key(seed, step, stream))
    x = np.arange(rows * columns, dtype=np.uint32) ^ low
    for add in (high, np.uint32(0)):
        x = x ^ x >> 16
        x = x * np.uint32(0x7FEB352D)
        x = x ^ x >> 15
        x = x * np.uint32(0x846CA68B)
        x = (x ^ x >> 16) + add
    return (x >> 8).astype(np.int64).reshape(rows, columns)


def neighbours(values: Iterator[float] | list[float], dtype: type) -> np.ndarray:
    """The values rounded to a numpy type, each with the numbers next to it, sorted."""
    with np.errstate(over="ignore", under="ignore"):
        here = np.array(list(values), np.float64).astype(dtype)
        around = [here, np.nextafter(here, dtype(np.inf)), np.nextafter(here, dtype(-np.inf))]
    every = np.concatenate(around)
    return np.unique(np.concatenate([every, -every]).view(f"i{every.itemsize}")).view(dtype)


def critical(fmt: FloatFormat, dtype: type) -> np.ndarray:
    """Inputs where rounding goes wrong: all numbers (to 8 bits), midpoints, powers of two.

    Each comes with both signs and with its two neighbours in the source type; powers of two go from
    below half the smallest number to above the largest, and zeros, inf and NaN are among them.
    """
    top = top_code(fmt)
    codes = range(top + 2) if code_bits(fmt) <= 8 else range(top - 2, top + 2)
    sizes = [magnitude(fmt, code) * unit(fmt) for code in codes]
    middles = [(low + high) / 2 for low, high in pairwise(sizes)]
    lowest = math.frexp(float(unit(fmt)))[1] - 4
    highest = math.frexp(code_value(fmt, top))[1] + 2
    powers = [math.ldexp(1.0, power) for power in range(lowest, min(highest, 1023) + 1)]
    ends = [0.0, math.inf, math.nan, float(np.finfo(dtype).max)]
    numbers = [float(size) for size in sizes + middles if size <= sys.float_info.max]
    return neighbours([*numbers, *powers, *ends], dtype)


def custom(exponent: int, mantissa: int, specials: str, signed: bool = True) -> FloatFormat:
    return FloatFormat(exponent=exponent, mantissa=mantissa, specials=specials, signed=signed)


CUSTOM = [
    custom(4, 2, "none"),
    custom(3, 4, "ieee"),
    custom(4, 3, "ieee"),
    custom(4, 1, "none"),
    custom(2, 2, "nan"),
    custom(3, 3, "fnuz"),
    custom(5, 4, "none"),
    custom(5, 4, "ieee"),
    custom(8, 3, "ieee"),
    custom(8, 7, "none"),
    custom(8, 2, "fnuz"),
    custom(3, 0, "none"),
    custom(5, 0, "nan"),
    custom(4, 0, "nan", signed=False),
    custom(1, 2, "none"),
    custom(6, 12, "ieee"),
    custom(5, 25, "ieee"),
    custom(11, 4, "ieee"),
]
EVERY_FORMAT = [*FORMATS.values(), *CUSTOM]


def modes(fmt: FloatFormat) -> list[tuple[str, bool]]:
    """The modes that a format has: rounding and saturate."""
    return list(product(MODES, (True,) if fmt.specials == "none" else (True, False)))


def holds(container: FloatFormat, fmt: FloatFormat) -> bool:
    """Whether the container has the largest and the smallest number of a format, and its steps."""
    ends = (code_value(fmt, top_code(fmt)), code_value(fmt, 1 if fmt.signed else 0))
    return container.mantissa >= fmt.mantissa and all(
        round_fraction(end, container, "toward_zero") == end for end in ends
    )


def patterns(fmt: FloatFormat, dtype: type, count: int) -> np.ndarray:
    """Random bit patterns, and a quarter as many with exponents near the format's range."""
    rng = np.random.default_rng(count)
    unsigned = f"u{np.dtype(dtype).itemsize}"
    bits = rng.integers(0, np.iinfo(unsigned).max, count, unsigned, endpoint=True)
    lowest, highest = -exponent_bias(fmt) - fmt.mantissa - 2, exponent_bias(fmt) + 4
    places = rng.integers(lowest, highest, count // 4)
    with np.errstate(over="ignore", under="ignore"):
        near = np.ldexp(rng.uniform(-2, 2, count // 4), places).astype(dtype)
    return np.concatenate([bits.view(dtype), near])
