"""Alarms: what a run's figures say has gone wrong, with what to do about it.

Each rule is a function of figures: those of one sample, and what earlier samples left behind. The
rules and their limits, with reasons and sources, are those of docs/alarms.md. `AlarmWatch` keeps
what they need from step to step, and tells each thing once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from mixprec.formats import FORMATS
from mixprec.inspection.nonfinite import NonFinite
from mixprec.inspection.statistics import OperandStatistics, Statistics
from mixprec.inspection.updates import UpdateStatistics
from mixprec.nn import Report

Kind = Literal[
    "stale_scale",
    "dead_gradient",
    "saturation",
    "loss_scale_collapse",
    "lost_updates",
    "nothing_quantised",
    "nonfinite",
]

STALE_FACTOR = 4.0
"""How far amax may move under a resting scale. A power of two follows within a factor of 2; twice
that is no rounding of a scale any more."""
SATURATION_SHARE = 0.01
"""Share of an operand's elements that may saturate."""
LOST_SHARE = 0.5
"""Share of a parameter's moving elements whose updates may be lost: beyond it most of them rest."""
LOWEST_LOSS_SCALE = 8.0
"""Micikevicius et al. 2018, section 3.2, trained with factors from 8 to 32K."""
SAMPLES_IN_A_ROW = 2
"""For which a gradient is dead, or an operand saturates: a batch may leave a layer out once, and a
jump saturates a delayed scale once, until it has entered the history."""
_GRADIENTS = frozenset({("grad_input", "a"), ("grad_weight", "a")})
_SCALED_BITS = 8
"""Formats of more bits are used without a scale, whose 1 never moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One thing that went wrong.

    Attributes:
        kind: Which rule says so.
        layer: The module's name in the model; "" for the model or the run as a whole.
        operand: The operand's path, "grad_input.a", after the product's name in a layer with
            several; "" where it is about no operand.
        figures: What the rule compared, by name.
        text: What happened, one line.
        suggestion: What to do, one line.
    """

    kind: Kind
    layer: str
    operand: str = ""
    figures: Mapping[str, float]
    text: str
    suggestion: str

    def to_record(self, step: int) -> dict[str, Any]:
        """As a line of ``metrics.jsonl`` has it, but for floats that are not finite."""
        names = ("kind", "layer", "operand", "figures", "text", "suggestion")
        return {"step": step, "alarm": {name: getattr(self, name) for name in names}}

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.layer, self.operand)))
        return f"{self.kind.replace('_', ' ')}{f' in {where}' if where else ''}: {self.text}"


@dataclass(frozen=True, slots=True)
class Rest:
    """A scale that has not moved since a step, and the amaxes seen meanwhile."""

    scale: float
    since: int
    smallest: float
    largest: float


def rest_of(rest: Rest | None, row: OperandStatistics, step: int) -> Rest | None:
    """The rest after one more sample; an amax that is 0 or not finite tells nothing."""
    if not 0 < row.amax < math.inf or not math.isfinite(row.scale):
        return rest
    if rest is None or row.scale != rest.scale:
        return Rest(row.scale, step, row.amax, row.amax)
    return replace(rest, smallest=min(rest.smallest, row.amax), largest=max(rest.largest, row.amax))


def stale_scale(rest: Rest, row: OperandStatistics, step: int, history: int) -> Alarm | None:
    """A scale that rested while amax moved.

        step - since > history   and   largest amax / smallest amax >= STALE_FACTOR

    Args:
        history: Steps of which a delayed scale takes the largest amax, 0 for a scale of the data at
            hand. The first step's amax is its own scale and that of as many steps after it.
    """
    steps = step - rest.since
    is_scaled = row.format not in FORMATS or FORMATS[row.format].bits <= _SCALED_BITS
    moved = rest.largest / rest.smallest
    if not is_scaled or steps <= history or moved < STALE_FACTOR:
        return None
    return Alarm(
        kind="stale_scale",
        layer=row.layer,
        operand=_operand(row),
        figures={
            "scale": rest.scale,
            "steps": steps,
            "smallest_amax": rest.smallest,
            "largest_amax": rest.largest,
        },
        text=f"the scale stayed {rest.scale:.4g} for {steps} steps while amax moved between "
        f"{rest.smallest:.4g} and {rest.largest:.4g}",
        suggestion="let the histories roll: mixprec.attach(model, optimizer) once, or "
        "mixprec.sync_scales(model) after each optimizer step; or take a scale of the data at hand",
    )


def saturation(row: OperandStatistics, share: float = SATURATION_SHARE) -> Alarm | None:
    """More than a share of an operand's elements beyond the format's largest number."""
    if not row.saturation > share:
        return None
    return Alarm(
        kind="saturation",
        layer=row.layer,
        operand=_operand(row),
        figures={
            "saturation": row.saturation,
            "limit": share,
            "range_use": row.range_use,
            "amax": row.amax,
            "scale": row.scale,
        },
        text=f"{100 * row.saturation:.3g} % of the elements saturate in {row.format}; amax "
        f"{row.amax:.4g} is {row.range_use:.3g} of its range",
        suggestion="take scales of the data at hand (amax_history_len = 0) or of smaller blocks, a "
        "format of more range, or a lower learning rate",
    )


def is_dead(row: OperandStatistics) -> bool:
    """Whether a gradient is all zero, or all of it was rounded to zero: the error is the signal."""
    return row.amax == 0 or (row.underflow > 0 and row.sqnr_db == 0)


def dead_gradient(place: str, operand: str, figures: Mapping[str, float]) -> Alarm:
    """A layer's gradient that was there before, and is zero in all elements now."""
    return Alarm(
        kind="dead_gradient",
        layer=place,
        operand=operand,
        figures=figures,
        text=f"the gradient became zero in all elements, in {SAMPLES_IN_A_ROW} samples in a row",
        suggestion="look for units that never fire or a detached branch; where rounding did it "
        "(underflow above 0), raise the loss scale or take a format of more range",
    )


def lost_updates(update: UpdateStatistics, share: float = LOST_SHARE) -> Alarm | None:
    """More than a share of a parameter's updates smaller than half an ulp of the weight."""
    if not update.lost_share > share:
        return None
    return Alarm(
        kind="lost_updates",
        layer=update.parameter.rpartition(".")[0],
        operand=update.parameter.rpartition(".")[2],
        figures={
            "lost": update.lost_share,
            "limit": share,
            "moving": update.moving,
            "elements": update.elements,
        },
        text=f"{100 * update.lost_share:.3g} % of the updates of {update.parameter} are below half "
        f"an ulp of its {update.format} weights and change nothing",
        suggestion="hold float32 masters, or update stochastically or compensated (the recipe's "
        "update); or raise the learning rate",
    )


def loss_scale_collapse(highest: float, scale: float, floor: float) -> Alarm | None:
    """A loss scale that was higher and fell below LOWEST_LOSS_SCALE or onto its floor.

        scale < highest   and   (scale < LOWEST_LOSS_SCALE  or  scale <= floor)

    Overflow on the floor ends a run. Sources: LOWEST_LOSS_SCALE; fairseq issue 282 (a scale that
    keeps falling is a learning rate that is too high).
    """
    if not (scale < highest and (scale < LOWEST_LOSS_SCALE or scale <= floor)):
        return None
    return Alarm(
        kind="loss_scale_collapse",
        layer="",
        figures={"loss_scale": scale, "highest": highest, "floor": floor},
        text=f"the loss scale fell from {highest:g} to {scale:g}: gradients overflow without it",
        suggestion="lower the learning rate, clip the gradient, or train in bf16, which has FP32's "
        "range; scaler.min_scale is where the run ends",
    )


def nothing_converted(report: Report) -> Alarm | None:
    """A conversion by a recipe that quantises, which found no layer to convert."""
    if report.converted or not report.asked:
        return None
    reasons = list(dict.fromkeys(row.reason for row in report.left if row.reason))
    because = f": {'; '.join(reasons[:3])}" if reasons else ""
    return _nothing(
        f"none of {len(report.rows)} modules was converted{because}", {"modules": len(report.rows)}
    )


def nothing_multiplied(report: Report) -> Alarm | None:
    """Converted layers of which no product was quantised in a whole step."""
    names = [row.name for row in report.converted]
    if not names:
        return None
    return _nothing(
        f"none of {len(names)} converted layers made a product in a step: {', '.join(names[:3])}",
        {"layers": len(names)},
    )


def nothing_in_region(dtype: str, operations: int, narrow: int) -> Alarm | None:
    """A region of 16 bits in which operations ran, and none of them in 16 bits."""
    if narrow or not operations:
        return None
    return _nothing(
        f"none of the {operations} operations in the region ran in {dtype}",
        {"operations": operations},
    )


def nonfinite(fault: NonFinite) -> Alarm:
    """The first tensor of a step that was not finite, with the ranges of what it was made of."""
    ranges = {
        f"{name}_{end}": value
        for name, each in (
            *((f"input{i}", each) for i, each in enumerate(fault.inputs)),
            ("output", fault.output),
        )
        for end, value in (
            ("smallest", each.smallest),
            ("largest", each.largest),
            ("nan", each.nan),
            ("inf", each.inf),
        )
        if value is not None
    }
    return Alarm(
        kind="nonfinite",
        layer=fault.module or fault.output.name.rpartition(".")[0],
        operand="",
        figures=ranges,
        text=f"first in {fault.phase}: {fault}",
        suggestion="where the inputs are large, lower the learning rate, clip the gradient or take "
        "a type of more range; else keep the operation's inputs where it is defined (an epsilon)",
    )


def _nothing(text: str, figures: Mapping[str, float]) -> Alarm:
    return Alarm(
        kind="nothing_quantised",
        layer="",
        figures=figures,
        text=text,
        suggestion="mixprec explain shows what runs in which type and why; look at convert.skip, "
        "convert.include and multiple_of, and at products that bypass the layers",
    )


def _operand(row: OperandStatistics) -> str:
    return ".".join(filter(None, (row.name, row.product, row.operand)))


class AlarmWatch:
    """Applies the rules to a run's samples, and tells each kind of a layer once.

    Args:
        history: The longest amax history of the recipe, 0 where no scale is delayed.
        saturation_share: In place of SATURATION_SHARE.
        lost_share: In place of LOST_SHARE.
        min_scale: The floor of the loss scale.
    """

    def __init__(
        self,
        *,
        history: int = 0,
        saturation_share: float = SATURATION_SHARE,
        lost_share: float = LOST_SHARE,
        min_scale: float = 1.0,
    ) -> None:
        self._history = history
        self._saturation_share, self._lost_share = saturation_share, lost_share
        self._min_scale = min_scale
        self._told: set[tuple[str, str]] = set()
        self._rests: dict[str, Rest | None] = {}
        self._in_a_row: dict[tuple[Kind, str], int] = {}
        self._highest = 0.0

    def observe(
        self,
        step: int,
        *,
        rows: Sequence[Statistics] = (),
        updates: Sequence[UpdateStatistics] = (),
        loss_scale: float | None = None,
    ) -> list[Alarm]:
        """What a step gives reason for and was not told before.

        Args:
            step: The optimizer step, from 1.
            rows: The statistics, where the step was sampled and not skipped by an overflow.
            updates: What became of its updates, where they were looked at.
            loss_scale: The step's, where there is one.
        """
        operands = [row for row in rows if isinstance(row, OperandStatistics)]
        found = [self._saturated(row) for row in operands]
        found.sort(key=lambda alarm: -alarm.figures["saturation"] if alarm else 0.0)
        found += [self._stale(row, step) for row in operands]
        found += [self._dead_operand(row) for row in operands]
        for update in updates:
            found += [lost_updates(update, self._lost_share), self._dead_parameter(update)]
        if loss_scale is not None:
            found.append(loss_scale_collapse(self._highest, loss_scale, self._min_scale))
            self._highest = max(self._highest, loss_scale)
        return self.new(found)

    def new(self, alarms: Iterable[Alarm | None]) -> list[Alarm]:
        """Those of a kind and layer that were not told before; they are now."""
        found = []
        for alarm in alarms:
            if alarm is not None and (alarm.kind, alarm.layer) not in self._told:
                self._told.add((alarm.kind, alarm.layer))
                found.append(alarm)
        return found

    def _stale(self, row: OperandStatistics, step: int) -> Alarm | None:
        key = f"{row.layer} {_operand(row)}"
        rest = self._rests[key] = rest_of(self._rests.get(key), row, step)
        return None if rest is None else stale_scale(rest, row, step, self._history)

    def _saturated(self, row: OperandStatistics) -> Alarm | None:
        alarm = saturation(row, self._saturation_share)
        lasts = self._lasts("saturation", f"{row.layer} {_operand(row)}", alarm is not None)
        return alarm if lasts else None

    def _dead_operand(self, row: OperandStatistics) -> Alarm | None:
        if (row.product, row.operand) not in _GRADIENTS or row.elements == 0:
            return None
        operand, figures = _operand(row), {"amax": row.amax, "underflow": row.underflow}
        is_over = self._died(f"{row.layer} {operand}", is_dead(row))
        return dead_gradient(row.layer, operand, figures) if is_over else None

    def _dead_parameter(self, update: UpdateStatistics) -> Alarm | None:
        layer, _, name = update.parameter.rpartition(".")
        is_over = self._died(update.parameter, update.moving == 0)
        figures = {"elements": update.elements, "moving": 0}
        return dead_gradient(layer, name, figures) if is_over and update.elements else None

    def _died(self, key: str, is_dead: bool) -> bool:
        """Whether what lived once is dead, and not for the first time."""
        has_lived = ("dead_gradient", key) in self._in_a_row
        return (has_lived or not is_dead) and self._lasts("dead_gradient", key, is_dead)

    def _lasts(self, kind: Kind, key: str, holds: bool) -> bool:
        count = self._in_a_row.get((kind, key), 0) + 1 if holds else 0
        self._in_a_row[kind, key] = count
        return count >= SAMPLES_IN_A_ROW
