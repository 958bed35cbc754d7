"""Number formats as data: one frozen record a format, everything else derived.

The bottom layer: standard library only. A finite code with sign bit s, exponent field E and
mantissa field T stands for

    (-1)^s * 2^(E - bias) * (1 + T / 2^mantissa)        E > 0   (normal)
    (-1)^s * 2^(1 - bias) * (T / 2^mantissa)            E = 0   (subnormal)

Sources: IEEE 754-2019; OCP 8-bit Floating Point (OFP8) v1.0; OCP Microscaling Formats (MX) v1.0.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, TypeVar, get_args

Specials = Literal["ieee", "nan", "fnuz", "none"]
Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """A binary floating-point format of at most 64 bits.

    Args:
        exponent: Width of the exponent field in bits, 1 to 11.
        mantissa: Width of the mantissa field in bits, 0 to 52.
        specials: What the top codes mean. ``ieee``: the top exponent holds inf and NaN. ``nan``:
            no inf, only the topmost code of each sign is NaN. ``fnuz``: no inf, no -0, the code of
            -0 is NaN and the bias is one larger. ``none``: every code is a finite number.
        signed: False for scale formats (e8m0): no sign bit, no zero and no subnormals, so that
            code 0 is the smallest power of two.
        name: The name in ``FORMATS``; empty for a custom format. Formats with the same fields are
            equal, whatever their names.

    Raises:
        ValueError: A width out of range, or specials that leave no finite number.
    """

    exponent: int
    mantissa: int
    specials: Specials = "none"
    signed: bool = True
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name, width, least, most in (
            ("exponent", self.exponent, 1, 11),
            ("mantissa", self.mantissa, 0, 52),
        ):
            if type(width) is not int or not least <= width <= most:
                raise ValueError(
                    f"{name}: got {width!r}; must lie in {least}..{most}; choose a width there"
                )
        if not isinstance(self.signed, bool):
            raise ValueError(f"signed: got {self.signed!r}; must be True or False; choose one")
        if self.specials not in get_args(Specials):
            raise ValueError(
                f"specials: got {self.specials!r}; must be one of {', '.join(get_args(Specials))}"
            )
        if self.specials == "ieee" and (self.exponent < 2 or self.mantissa < 1):
            raise ValueError(
                f"specials: got 'ieee' with exponent={self.exponent}, mantissa={self.mantissa}; "
                "inf and NaN need 2 exponent bits and 1 mantissa bit; use specials='none'"
            )
        if self.specials == "nan" and self.exponent == 1 and self.mantissa == 0:
            raise ValueError(
                "specials: got 'nan' with exponent=1, mantissa=0; the only number would be 0; use "
                "specials='none'"
            )
        if self.exponent == 11 and self.specials != "ieee":
            raise ValueError(
                f"specials: got {self.specials!r} with exponent=11; the top exponent would exceed "
                "float64; use specials='ieee'"
            )
        if not self.signed and (self.mantissa != 0 or self.specials != "nan"):
            raise ValueError(
                "signed: got False; only power-of-two scale formats (mantissa=0, specials='nan') "
                "are unsigned; use signed=True"
            )

    def __str__(self) -> str:
        if self.name:
            return self.name
        fields = f"{'' if self.signed else 'u'}e{self.exponent}m{self.mantissa}"
        is_taken = fields in FORMATS and FORMATS[fields] != self
        return f"{fields}_{self.specials}" if is_taken or self.specials != "none" else fields

    @property
    def bits(self) -> int:
        """Width of a code in bits."""
        return int(self.signed) + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """Exponent bias: 2^(exponent - 1) - 1, one more for fnuz."""
        return 2 ** (self.exponent - 1) - (0 if self.specials == "fnuz" else 1)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return (1 if self.signed else 0) - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        top_is_special = self.specials == "ieee" or (self.specials == "nan" and self.mantissa == 0)
        return 2**self.exponent - (2 if top_is_special else 1) - self.bias

    @property
    def max(self) -> float:
        """Largest finite number."""
        dropped = 2 if self.specials == "nan" and self.mantissa > 0 else 1
        significand = 2 ** (self.mantissa + 1) - dropped
        return math.ldexp(significand, self.max_exponent - self.mantissa)

    @property
    def min(self) -> float:
        """Most negative finite number; for an unsigned format the smallest one."""
        return -self.max if self.signed else self.smallest_normal

    @property
    def smallest_normal(self) -> float:
        """Smallest positive normal number."""
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive number; the smallest normal where the format has no subnormals."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa)

    @property
    def eps(self) -> float:
        """Distance from 1 to the next larger number: 2^-mantissa where 1 is a normal number."""
        return math.ldexp(1.0, max(self.min_exponent, 0) - self.mantissa)

    @property
    def has_inf(self) -> bool:
        """Whether some code is an infinity."""
        return self.specials == "ieee"

    @property
    def has_nan(self) -> bool:
        """Whether some code is NaN."""
        return self.specials != "none"

    @property
    def sign_mask(self) -> int:
        """The sign bit of a code; 0 for an unsigned format."""
        return 1 << (self.bits - 1) if self.signed else 0

    @property
    def nan_code(self) -> int:
        """A NaN code (the quiet one of IEEE 754); formats without NaN have none.

        Raises:
            ValueError: The format has no NaN.
        """
        if not self.has_nan:
            raise ValueError(f"format: got {self}; it has no NaN code; use a format with one")
        if self.specials == "fnuz":
            return self.sign_mask
        magnitude = (1 << (self.exponent + self.mantissa)) - 1
        return magnitude if self.specials == "nan" else magnitude ^ ((1 << (self.mantissa - 1)) - 1)

    def value(self, code: int) -> float:
        """The number that a code stands for, exact in a Python float.

        Args:
            code: 0 to 2^bits - 1.

        Returns:
            The value; NaN and inf for the special codes.
        """
        if not 0 <= code < 2**self.bits:
            raise ValueError(f"code: got {code}; {self} has codes 0 to {2**self.bits - 1}")
        magnitude = code & ~self.sign_mask
        sign = -1.0 if code & self.sign_mask else 1.0
        field, fraction = magnitude >> self.mantissa, magnitude & ((1 << self.mantissa) - 1)
        if not self.signed:
            return math.nan if code == self.nan_code else math.ldexp(1.0, field - self.bias)
        if self.specials == "fnuz" and code == self.sign_mask:
            return math.nan
        if self.specials == "nan" and magnitude == self.nan_code:
            return math.nan
        if self.specials == "ieee" and field == 2**self.exponent - 1:
            return math.nan if fraction else sign * math.inf
        significand = fraction + ((1 << self.mantissa) if field else 0)
        return sign * math.ldexp(significand, max(field, 1) - self.bias - self.mantissa)


def _table(*formats: FloatFormat) -> Mapping[str, FloatFormat]:
    return MappingProxyType({entry.name: entry for entry in formats})


FORMATS: Mapping[str, FloatFormat] = _table(
    FloatFormat(name="fp64", exponent=11, mantissa=52, specials="ieee"),
    FloatFormat(name="fp32", exponent=8, mantissa=23, specials="ieee"),
    FloatFormat(name="tf32", exponent=8, mantissa=10, specials="ieee"),
    FloatFormat(name="bf16", exponent=8, mantissa=7, specials="ieee"),
    FloatFormat(name="fp16", exponent=5, mantissa=10, specials="ieee"),
    FloatFormat(name="e5m2", exponent=5, mantissa=2, specials="ieee"),
    FloatFormat(name="e4m3", exponent=4, mantissa=3, specials="nan"),
    FloatFormat(name="e5m2fnuz", exponent=5, mantissa=2, specials="fnuz"),
    FloatFormat(name="e4m3fnuz", exponent=4, mantissa=3, specials="fnuz"),
    FloatFormat(name="e3m2", exponent=3, mantissa=2),
    FloatFormat(name="e2m3", exponent=2, mantissa=3),
    FloatFormat(name="e2m1", exponent=2, mantissa=1),
    FloatFormat(name="e8m0", exponent=8, mantissa=0, specials="nan", signed=False),
)

FORMAT_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "float64": "fp64",
        "double": "fp64",
        "float32": "fp32",
        "float": "fp32",
        "tfloat32": "tf32",
        "bfloat16": "bf16",
        "float16": "fp16",
        "half": "fp16",
        "float8_e5m2": "e5m2",
        "e4m3fn": "e4m3",
        "float8_e4m3fn": "e4m3",
        "float8_e5m2fnuz": "e5m2fnuz",
        "float8_e4m3fnuz": "e4m3fnuz",
        "float6_e3m2fn": "e3m2",
        "e3m2fn": "e3m2",
        "float6_e2m3fn": "e2m3",
        "e2m3fn": "e2m3",
        "float4_e2m1fn": "e2m1",
        "e2m1fn": "e2m1",
        "float8_e8m0fnu": "e8m0",
        "e8m0fnu": "e8m0",
    }
)


def lookup(what: str, name: str, table: Mapping[str, Entry], aliases: Mapping[str, str]) -> Entry:
    """The entry of a table by its name or an alias; upper and lower case are the same.

    Args:
        what: The argument's name, for the message ("format", "recipe").

    Raises:
        ValueError: An unknown name; the message lists the nearest ones, or all.
    """
    key = name.removeprefix("torch.").lower()
    key = aliases.get(key, key)
    if key in table:
        return table[key]
    near = difflib.get_close_matches(key, [*table, *aliases], n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else "no name is near it;"
    raise ValueError(f"{what}: got {name!r}; unknown, {hint} choose from {', '.join(table)}")


def get_format(fmt: str | FloatFormat) -> FloatFormat:
    """A format by name, alias or value.

    Raises:
        ValueError: An unknown name; the message lists near ones.
        TypeError: Neither a name nor a ``FloatFormat``.
    """
    if isinstance(fmt, FloatFormat):
        return fmt
    if not isinstance(fmt, str):
        raise TypeError(
            f"format: got {type(fmt).__name__}; must be a name or a FloatFormat; "
            "pass for example 'e4m3'"
        )
    return lookup("format", fmt, FORMATS, FORMAT_ALIASES)


@lru_cache(maxsize=64)
def code_values(fmt: FloatFormat) -> tuple[float, ...]:
    """The values of all codes of a format of at most 16 bits, in the order of the codes."""
    if fmt.bits > 16:
        raise ValueError(
            f"format: got {fmt} of {fmt.bits} bits; tables stop at 16; call value(code)"
        )
    return tuple(fmt.value(code) for code in range(2**fmt.bits))


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatInfo:
    """What ``torch.finfo`` says of a type, for any format; all values exact."""

    name: str
    bits: int
    max: float
    min: float
    smallest_normal: float
    smallest_subnormal: float
    eps: float


def finfo(name: str | FloatFormat) -> FormatInfo:
    """Limits of a format: the counterpart of ``torch.finfo``, right for every format of the table.

    Args:
        name: A format's name, alias, or value.

    Returns:
        bits, max, min, smallest_normal, smallest_subnormal, eps.

    Raises:
        ValueError: An unknown name.
    """
    fmt = get_format(name)
    return FormatInfo(
        name=str(fmt),
        bits=fmt.bits,
        max=fmt.max,
        min=fmt.min,
        smallest_normal=fmt.smallest_normal,
        smallest_subnormal=fmt.smallest_subnormal,
        eps=fmt.eps,
    )
