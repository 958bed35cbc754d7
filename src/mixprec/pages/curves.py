"""Curves over the steps of runs: losses and what happened on them, loss scale, other records."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from mixprec.pages.figure import ALARM_COLOR, color, figure, line, marks

_LONGEST_POWER = 32

Curve = Mapping[str, Sequence[Any]]
Runs = Mapping[str, Curve | None]


def losses(
    training: Runs, last: int, evaluations: Runs | None = None, alarms: Runs | None = None
) -> str:
    """The training loss of each run, with its evaluation losses and its alarms; zoomable.

    Args:
        training, evaluations: ``{"step": [...], "loss": [...]}`` by the run's name, in the same
            order everywhere; None for a run without them. A loss that is not known is a gap.
        last: The last step of the page: all its figures reach to it, so that they compare.
        alarms: ``{"step": [...], "text": [...]}``, marked at the loss that was known by then.
    """
    traces = []
    for place, (name, curve) in enumerate(training.items()):
        own = name if evaluations is None else f"{name}, training"
        if curve and curve["step"]:
            traces.append(line(own, curve["step"], curve["loss"], place))
        scores = (evaluations or {}).get(name)
        if scores and scores["step"]:
            traces.append(
                line(
                    f"{name}, evaluation",
                    scores["step"],
                    scores["loss"],
                    place,
                    mode="lines+markers",
                    marker={"symbol": "diamond", "size": 8, "color": color(place)},
                )
            )
        found = (alarms or {}).get(name)
        if found and found["step"]:
            traces.append(_alarm_marks(name, found, curve or scores, place))
    with_evaluations = " and evaluation" if evaluations else ""
    with_alarms = "; triangles are alarms" if any((alarms or {}).values()) else ""
    return figure(
        "curves",
        f"Training{with_evaluations} loss by step{with_alarms}. A drag zooms, a double click shows "
        "all again.",
        traces,
        x=_steps_axis(last),
        y={"title": "loss"},
    )


def loss_scales(scales: Runs, last: int) -> str:
    """The loss scale of each run that has one, a line of stairs, with its skipped steps; else "".

    Args:
        scales: ``{"step": [...], "loss_scale": [...], "skipped": [steps]}`` by the run's name.
        last: The last step of the page; a skipped step is found below its loss.
    """
    traces: list[dict[str, Any]] = []
    values: list[float] = []
    for place, (name, curve) in enumerate(scales.items()):
        if not curve or not curve["step"]:
            continue
        values += curve["loss_scale"]
        stairs = {"shape": "hv"}
        traces.append(line(name, curve["step"], curve["loss_scale"], place, line=stairs))
        if curve["skipped"]:
            by_step = dict(zip(curve["step"], curve["loss_scale"], strict=True))
            at = [by_step[step] for step in curve["skipped"]]
            traces.append(marks(f"{name}: skipped", curve["skipped"], at, place, "x"))
    if not traces:
        return ""
    return figure(
        "scales",
        "Loss scale by step; crosses are steps that were skipped because a gradient overflowed.",
        traces,
        x=_steps_axis(last),
        y={"title": "loss scale", "type": "log", **powers_of_two(values)},
        height=320,
    )


def records(name: str, caption: str, quantity: str, runs: Runs, last: int) -> str:
    """Another figure of each step, ``{"step": [...], "value": [...]}`` by the run's name."""
    traces = [
        line(run, curve["step"], curve["value"], place)
        for place, (run, curve) in enumerate(runs.items())
        if curve and curve["step"]
    ]
    if not traces:
        return ""
    axis = {"title": quantity, "rangemode": "tozero"}
    return figure(name, caption, traces, x=_steps_axis(last), y=axis, height=320)


def _steps_axis(last: int) -> dict[str, Any]:
    margin = (last - 1) / 50
    return {"title": "step", "range": [1 - margin, last + margin] if last > 1 else None}


def powers_of_two(values: Sequence[float]) -> dict[str, Any]:
    """Ticks at powers of two around the values, about eight at most."""
    low, high = math.floor(math.log2(min(values))), math.ceil(math.log2(max(values)))
    ticks = range(low - 1, high + 2, 1 + (high - low) // 8)
    margin = math.log10(2) / 2
    is_long = not -_LONGEST_POWER <= low <= high <= _LONGEST_POWER
    return {
        "tickvals": [2.0**power for power in ticks],
        "ticktext": [
            f"2^{power}" if is_long else f"{2**power:,}" if power >= 0 else f"{2.0**power:g}"
            for power in ticks
        ],
        "range": [low * math.log10(2) - margin, high * math.log10(2) + margin],
    }


def _alarm_marks(name: str, alarms: Curve, curve: Curve | None, place: int) -> dict[str, Any]:
    pairs = zip(curve["step"], curve["loss"], strict=True) if curve else ()
    known = [(step, loss) for step, loss in pairs if loss is not None]
    steps = [step for step, _ in known]
    heights = [
        known[max(0, bisect_right(steps, step) - 1)][1] if known else 0 for step in alarms["step"]
    ]
    return marks(
        f"{name}: alarm",
        alarms["step"],
        heights,
        place,
        "triangle-down",
        marker={"color": ALARM_COLOR, "symbol": "triangle-down", "size": 12},
        text=list(alarms["text"]),
        hovertemplate="step %{x}<br>%{text}<extra></extra>",
    )
