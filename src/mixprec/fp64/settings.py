"""cuBLAS's environment variables for emulated FP64, as defaults of this library.

The same names and values as cuBLAS reads (``variables``); a value that cuBLAS would ignore is an
error here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from mixprec import cublas
from mixprec.variables import check_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment asks of emulated FP64; ``bits`` and ``strategy`` are arguments as named.

    Attributes:
        enabled: Whether CUBLAS_EMULATE_DOUBLE_PRECISION is 1; without it cuBLAS emulates nothing.
        strategy: "performant" emulates where that is faster, "eager" wherever it is possible.
        bits: Mantissa bits, a fixed number, or "auto" for as many as the operands need.
        special_values: Which of "inf" and "nan" cuBLAS has to keep; None is its own default. The
            products of this library keep both whatever stands here.
    """

    enabled: bool = False
    strategy: Literal["performant", "eager"] = "performant"
    bits: int | Literal["auto"] = "auto"
    special_values: tuple[str, ...] | None = None


def settings_from_environment() -> Settings:
    """The settings that the environment has now, where a variable is not set cuBLAS's default.

    Reads ``os.environ`` when called. CUBLAS_EMULATE_DOUBLE_PRECISION is ``enabled``,
    CUBLAS_EMULATION_STRATEGY ``strategy``, CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT ``bits``,
    CUBLAS_EMULATION_SPECIAL_VALUES_SUPPORT_MASK ``special_values``.

    Raises:
        ValueError: A value that cuBLAS would ignore, an empty one included.

    Edge cases: settings of emulation that is not enabled are read and checked all the same.
    """
    strategy, bits = _value(cublas.STRATEGY), _value(cublas.BITS)
    mask = _value(cublas.SPECIAL_VALUES)
    return Settings(
        enabled=_value(cublas.DOUBLE) == "1",
        strategy="eager" if strategy == "eager" else "performant",
        bits="auto" if bits is None else int(bits),
        special_values=None if mask is None else cublas.special_values(mask),
    )


def _value(name: str) -> str | None:
    """A variable's value, checked; None where it is not set."""
    value = os.environ.get(name)
    return None if value is None else check_value(name, value)
