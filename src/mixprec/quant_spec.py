"""How one operand is quantised: format, block, scale rule, rounding, history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from mixprec.formats import FloatFormat, get_format
from mixprec.rounding import Rounding
from mixprec.scale_rules import RULE_FORMATS, SCALE_RULES
from mixprec.scaling import AmaxComputeAlgo, Block

UNSCALED = "none"
# sums of 2^20 products of values below 2^54 stay below FP32's 2^128
_LARGEST_SCALED_EXPONENT = 53


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantSpec:
    """How one operand of a product is quantised.

    Args:
        format: Format of the values.
        block: (free, contraction) elements that share a scale; -1 is the whole axis: tensor (-1,
            -1), row (1, -1), MX (1, 32), tile (128, 128).
        scale_rule: From amax to scale, a name in ``scale_rules.SCALE_RULES``; or ``none``: values
            are rounded as they are, without a scale.
        rounding: Rounding of x * encode to the format.
        hadamard: Whether each 16 elements along the contraction are transformed first; both
            operands of a product are or neither, which leaves it unchanged.
        min_amax: Floor under amax before the scale is made.
        amax_history_len: 0 for a scale from the data at hand; above 0 for delayed scaling, a scale
            from the last so many amaxes.
        amax_compute_algo: ``max`` of the history, or its ``most_recent`` entry.
        saturate: Finite values beyond the range become the largest finite value; with False, for
            values without a scale in a format with infinities, they become infinite.

    Raises:
        ValueError: A value out of range, or fields that do not go together.
    """

    format: FloatFormat
    block: Block = (-1, -1)
    scale_rule: str = "real"
    rounding: Rounding = "nearest_even"
    hadamard: bool = False
    min_amax: float = 0.0
    amax_history_len: int = 0
    amax_compute_algo: AmaxComputeAlgo = "max"
    saturate: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.format, FloatFormat) or not self.format.signed:
            raise ValueError(
                f"format: got {self.format!r}; must be a signed FloatFormat; use FORMATS['e4m3']"
            )
        is_pair = isinstance(self.block, tuple) and len(self.block) == 2
        if not is_pair or not all(_is_count(size) or size == -1 for size in self.block):
            raise ValueError(
                f"block: got {self.block!r}; must be two sizes of at least 1, or -1 for the whole "
                "axis; use (-1, -1) for one scale a tensor"
            )
        for name, known in (
            ("scale_rule", (UNSCALED, *SCALE_RULES)),
            ("rounding", get_args(Rounding)),
            ("amax_compute_algo", get_args(AmaxComputeAlgo)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name}: got {getattr(self, name)!r}; must be one of {', '.join(known)}"
                )
        if not isinstance(self.min_amax, float | int) or not 0 <= self.min_amax < float("inf"):
            raise ValueError(
                f"min_amax: got {self.min_amax!r}; must be finite and at least 0; use 0"
            )
        if not (_is_count(self.amax_history_len) or self.amax_history_len == 0):
            raise ValueError(
                f"amax_history_len: got {self.amax_history_len!r}; must be at least 0, a whole "
                "number; use 0 for a scale from the data at hand"
            )
        if not isinstance(self.saturate, bool):
            raise ValueError(f"saturate: got {self.saturate!r}; must be True or False; choose one")
        self._check_scale()

    def _check_scale(self) -> None:
        is_scaled = self.scale_rule != UNSCALED
        if is_scaled and self.format.max_exponent > _LARGEST_SCALED_EXPONENT:
            raise ValueError(
                f"scale_rule: got {self.scale_rule!r} with format {self.format}; products of "
                "values scaled to its range would overflow FP32; use scale_rule='none'"
            )
        if not self.format.has_nan and (not is_scaled or self.is_delayed):
            raise ValueError(
                f"format: got {self.format} with scale_rule {self.scale_rule!r} and "
                f"amax_history_len {self.amax_history_len}; it has no NaN, so NaN and inf would "
                "become numbers; use a format with NaN, or a scale from the data at hand"
            )
        if self.is_delayed and (self.block != (-1, -1) or not is_scaled):
            raise ValueError(
                f"amax_history_len: got {self.amax_history_len} with block {self.block} and "
                f"scale_rule {self.scale_rule!r}; delayed scaling keeps one scale a tensor; use "
                "block=(-1, -1) and a scale rule, or amax_history_len=0"
            )
        if not is_scaled and (self.block != (-1, -1) or self.min_amax or self.hadamard):
            raise ValueError(
                f"scale_rule: got 'none' with block {self.block}, min_amax {self.min_amax} and "
                f"hadamard {self.hadamard}; without a scale they have no meaning; leave them at "
                "their defaults"
            )
        formats = RULE_FORMATS.get(self.scale_rule, (self.format.name,))
        if self.format.name not in formats:
            raise ValueError(
                f"format: got {self.format} with scale_rule {self.scale_rule!r}; the rule is made "
                f"for {', '.join(formats)}; use e8m0_rceil for other formats"
            )
        if not self.saturate and (is_scaled or not self.format.has_inf or self.is_stochastic):
            raise ValueError(
                f"saturate: got False with format {self.format}, scale_rule {self.scale_rule!r} "
                f"and rounding {self.rounding!r}; only unscaled values in a format with "
                "infinities overflow to them, and stochastic rounding saturates; use saturate=True"
            )

    @property
    def is_delayed(self) -> bool:
        """Whether the scale comes from a history of amaxes."""
        return self.amax_history_len > 0

    @property
    def is_stochastic(self) -> bool:
        """Whether quantising draws noise."""
        return self.rounding == "stochastic"

    @property
    def is_symmetric(self) -> bool:
        """Whether quantising commutes with transposing: the same values serve both contractions."""
        is_square = self.block[0] == self.block[1]
        return is_square and not self.is_stochastic and not self.hadamard


def as_spec(spec: QuantSpec | FloatFormat | str) -> QuantSpec:
    """A spec by value; for a format one scale a tensor, or none where it has 16 bits or more."""
    if isinstance(spec, QuantSpec):
        return spec
    fmt = get_format(spec)
    return QuantSpec(format=fmt, scale_rule="real" if fmt.bits < 16 else UNSCALED)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
