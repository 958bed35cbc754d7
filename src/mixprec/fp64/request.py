"""What is asked of a product: scheme, bits or accuracy, engine, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mixprec.fp64.arithmetic import UNIT
from mixprec.fp64.slices import MOST_PARTS_BITS

Scheme = Literal["auto", "slices", "residues"]
Output = Literal["float64", "double_double", "nearest"]
FLOAT64, DOUBLE_DOUBLE, NEAREST = get_args(Output)
AUTO, SLICES, RESIDUES = get_args(Scheme)

# adding up the terms of a pair takes 2^-98 at most: 10 * roundings(5) and ADDED_UP
LEAST_PAIR_RTOL = 2.0**-97
"""The least error that a pair of float64 can be asked for, in units of |A||B|."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for.

    Attributes:
        scheme: ``slices``, ``residues``, or ``auto``: the one of fewer products.
        bits: Mantissa bits as cuBLAS counts them; None chooses them from the data.
        rtol: Error in units of |A||B|, in place of bits; None for what ``output`` asks.
        engine: A name in ``ENGINES`` or ``auto``.
        output: ``float64``, ``double_double`` or ``nearest``.
    """

    scheme: Scheme = "auto"
    bits: int | None = None
    rtol: float | None = None
    engine: str = "auto"
    output: Output = "float64"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("scheme", self.scheme, get_args(Scheme)),
            ("output", self.output, get_args(Output)),
        ):
            if value not in known:
                raise ValueError(f"{name}: got {value!r}; must be one of {', '.join(known)}")
        if self.bits is not None and self.rtol is not None:
            raise ValueError(
                f"rtol: got {self.rtol} beside bits={self.bits}; one decides; leave the other out"
            )
        self._check_bits()
        self._check_rtol()
        if self.output == NEAREST and (self.bits, self.rtol) != (None, None):
            raise ValueError(
                "output: got 'nearest' with bits or rtol; a correctly rounded product takes the "
                "bits that it needs; leave them out"
            )

    @property
    def is_alone(self) -> bool:
        """Whether each matrix of a batch decides for itself: pairs, whose bits the data choose.

        So a pair does not depend on what shares its batch. A float64 result does, in its last
        place, and saves a launch for each matrix.
        """
        return self.output == DOUBLE_DOUBLE and self.bits is None

    def _check_bits(self) -> None:
        if self.bits is None:
            return
        if isinstance(self.bits, bool) or not isinstance(self.bits, int):
            raise TypeError(f"bits: got {self.bits!r}; must be a whole number or 'auto'")
        if not 1 <= self.bits <= MOST_PARTS_BITS // 2:
            raise ValueError(
                f"bits: got {self.bits}; must be from 1 to {MOST_PARTS_BITS // 2}; operands of one "
                "scale take 55 to 63 for double precision"
            )

    def _check_rtol(self) -> None:
        least = UNIT if self.output != DOUBLE_DOUBLE else LEAST_PAIR_RTOL
        if self.rtol is not None and not least < self.rtol < 1:
            raise ValueError(
                f"rtol: got {self.rtol}; must be between {least:.3g}, the rounding of the result, "
                "and 1; for less use output='double_double'"
            )
