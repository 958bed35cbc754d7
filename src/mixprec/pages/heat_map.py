"""The statistics of a run: layers by time, one map for each statistic of each operand."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mixprec.pages.figure import figure
from mixprec.pages.page import cells, folded, table

MOST_CELLS = 400_000
FEWEST_STEPS = 20
_SHORT = 22
_HEADINGS = {"sqnr_db": "SQNR (dB)"}
_FIRST = ("sqnr_db", "output", "a")


def _log2(value: float) -> float | None:
    return math.log2(value) if value > 0 else None


def _percent(value: float) -> float | None:
    return 100 * value


def _itself(value: float) -> float | None:
    return value


@dataclass(frozen=True, slots=True)
class _Statistic:
    """A field of a row, its name in words, and what of it is drawn."""

    field: str
    words: str
    drawn: Callable[[float], float | None]
    quantity: str
    limits: tuple[float, float] | None = None


STATISTICS = (
    _Statistic("sqnr_db", "SQNR", _itself, "SQNR (dB)"),
    _Statistic("amax", "amax", _log2, "log2 of amax"),
    _Statistic("range_use", "use of the range", _itself, "amax x encode / max", (0, 1)),
    _Statistic("saturation", "saturation", _percent, "saturated (%)", (0, 1)),
    _Statistic("underflow", "underflow", _percent, "underflown (%)", (0, 1)),
    _Statistic("scale", "scale", _log2, "log2 of the scale"),
)

Rows = Mapping[tuple[Any, ...], Mapping[str, Any]]


def heat_map(samples: Sequence[Mapping[str, Any]], name: str, run: str) -> str:
    """Every statistic of every operand and product by layer and step, one chosen at a time.

    Args:
        samples: ``{"step": ..., "statistics": [rows]}`` in the order of the steps. What a row lacks
            or has as None is a gap. Where there are too many cells, steps between are left out.
        name: The id of the figure.
        run: What the run is called.

    Returns: The figure, and the last step's rows as a table; "" without any row.
    """
    by_step = [(sample["step"], _by_key(sample["statistics"])) for sample in samples]
    by_step = [(step, rows) for step, rows in by_step if rows]
    if not by_step:
        return ""
    operands = list(dict.fromkeys(key[2:] for _, rows in by_step for key in rows))
    layers = list(dict.fromkeys(key[:2] for _, rows in by_step for key in rows))
    most = max(FEWEST_STEPS, MOST_CELLS // (len(layers) * len(operands) * len(STATISTICS)))
    # counted from the end, so that the newest is among them
    shown = by_step[::-1][:: -(-len(by_step) // most)][::-1]
    chosen = _maps(shown, layers, operands)
    left_out = "" if len(shown) == len(by_step) else f", {len(shown)} of {len(by_step)} samples"
    labels = [_label(layer) for layer in layers]
    drawn = figure(
        name,
        f"{run}: a statistic by layer and step{left_out}. In a linear layer, output multiplies a = "
        "activations and b = weights, grad_input a = gradients and b = weights, grad_weight a = "
        "gradients and b = activations. Empty cells are exact, or not known.",
        [trace for _, trace in chosen],
        x={"title": "step"},
        y={
            "autorange": "reversed",
            "tickvals": labels if len(labels) <= 60 else None,
            "ticktext": [_shortened(label) for label in labels] if len(labels) <= 60 else None,
            "type": "category",
        },
        height=min(1200, 200 + 24 * len(layers)),
        choices=[words for words, _ in chosen],
    )
    last, rows = by_step[-1]
    listed = table(
        [
            {"layer": _label(key[:2]), **cells(row, _HEADINGS, ("layer", "name"))}
            for key, row in rows.items()
        ],
        f"{run}: statistics of step {last}",
    )
    return drawn + folded(f"All statistics of step {last}", listed)


def _maps(
    by_step: Sequence[tuple[Any, Rows]],
    layers: Sequence[tuple[Any, ...]],
    operands: Sequence[tuple[Any, ...]],
) -> list[tuple[tuple[str, str], dict[str, Any]]]:
    """Each statistic of each operand that has any: its group and name, and its trace."""
    found: list[tuple[tuple[str, str], dict[str, Any]]] = []
    first = 0
    for statistic in STATISTICS:
        for operand in operands:
            values = _cells(by_step, layers, operand, statistic)
            if all(value is None for row in values for value in row):
                continue
            if (statistic.field, *operand) == _FIRST:
                first = len(found)
            words = (statistic.words, f"{statistic.words}: {_words(*operand)}")
            found.append((words, _trace(values, by_step, layers, statistic)))
    for place, (_, trace) in enumerate(found):
        trace["visible"] = place == first
    return found


def _by_key(rows: Any) -> Rows:
    """Rows by layer, name, product and operand, in their order."""
    if not isinstance(rows, list):
        return {}
    keys = ("layer", "name", "product", "operand")
    return {
        tuple(str(row.get(key) or "") for key in keys): row
        for row in rows
        if isinstance(row, Mapping)
    }


def _cells(
    by_step: Sequence[tuple[Any, Rows]],
    layers: Sequence[tuple[Any, ...]],
    operand: tuple[Any, ...],
    statistic: _Statistic,
) -> list[list[float | None]]:
    def drawn(value: Any) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        found = statistic.drawn(value)
        return None if found is None else float(f"{found:.5g}")

    return [
        [drawn(rows.get((*layer, *operand), {}).get(statistic.field)) for _, rows in by_step]
        for layer in layers
    ]


def _trace(
    values: Sequence[Sequence[float | None]],
    by_step: Sequence[tuple[Any, Rows]],
    layers: Sequence[tuple[Any, ...]],
    statistic: _Statistic,
) -> dict[str, Any]:
    limits = {}
    if statistic.limits:
        low, high = statistic.limits
        most = max(value for row in values for value in row if value is not None)
        limits = {"zmin": low, "zmax": max(high, most)}
    return {
        "type": "heatmap",
        "x": [step for step, _ in by_step],
        "y": [_label(layer) for layer in layers],
        "z": values,
        "colorscale": "Viridis",
        "colorbar": {
            "title": {"text": statistic.quantity, "side": "top"},
            "orientation": "h",
            "yref": "container",
            "y": 1.0,
            "yanchor": "top",
            "thickness": 12,
            "len": 0.9,
        },
        "hovertemplate": f"%{{y}}<br>step %{{x}}<br>{statistic.quantity} %{{z}}<extra></extra>",
        **limits,
    }


def _words(product: str, operand: str) -> str:
    return f"{product}, operand {operand}" if operand else f"{product}, the product"


def _label(layer: tuple[Any, ...]) -> str:
    path, name = layer
    return f"{path} {name}".strip() or "(model)"


def _shortened(label: str) -> str:
    return label if len(label) <= _SHORT else f"…{label[1 - _SHORT :]}"
