"""The pages of a benchmark: bars of step time and memory, or the ratio of products by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mixprec.pages.figure import color, figure, line
from mixprec.pages.page import (
    HEADINGS,
    Section,
    cells,
    document,
    paragraph,
    settings_tables,
    table,
)

_LISTS = ("times_ms", "losses")
_HEADINGS = HEADINGS | {
    "step_ms_mean": "step (ms), mean",
    "speedup": "speed-up",
    "mfu": "MFU",
    "flops": "operations a step",
    "tflops": "TFLOP/s",
    "seconds_to_loss": "seconds to the baseline's loss",
}


def render(result: Mapping[str, Any]) -> str:
    """One HTML page of what ``mixprec.bench.run`` returns, plotting library included.

    Raises:
        ValueError: No rows.
        ImportError: plotly is missing (extra ``report``).
    """
    rows = _rows(result)
    speed = f"{result['unit']} a second"
    skipped = [
        f"skipped: {skip['recipe']}, {skip['mode']}, batch {skip['batch']}: {skip['reason']}"
        for skip in result["skipped"]
    ]
    order = f"contenders {result['order']}, {result['warmup']} of {result['steps']} steps discarded"
    figures = [
        Section(
            "Speed", [_bars("speed", "Throughput of each contender.", speed, "throughput", rows)]
        ),
        Section(
            "Memory",
            [_bars("memory", "The most bytes alive in a step.", "peak bytes", "peak_bytes", rows)],
        ),
    ]
    notes = [order, *result["notes"], *skipped]
    title = f"{result['model']}: training steps"
    return _document(title, figures, result, notes, _HEADINGS | {"throughput": speed})


def render_products(result: Mapping[str, Any]) -> str:
    """One HTML page of what ``mixprec.bench.gemm.run`` returns.

    Raises: As ``render``.
    """
    rows = _rows(result)
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    lines = []
    for place, recipe in enumerate(recipes):
        own = [row for row in rows if row["recipe"] == recipe]
        shapes, ratios = [row["shape"] for row in own], [row["ratio"] for row in own]
        lines.append(line(recipe, shapes, ratios, place, mode="lines+markers"))
    ratio = f"time / {recipes[0]}"
    drawn = figure(
        "ratios",
        f"Time of a linear layer, forward and backward, by its sizes: the ratio to {recipes[0]}.",
        lines,
        x={"title": "shape"},
        across="shape",
        y={"title": ratio, "rangemode": "tozero"},
    )
    pays = [f"{recipe}: pays {where}" for recipe, where in result["pays"].items()]
    title = "linear layers: forward and backward"
    notes = [*pays, *result["notes"]]
    return _document(title, [Section("Ratio", [drawn])], result, notes, _HEADINGS)


def _rows(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = result["rows"]
    if not rows:
        raise ValueError("result: got no rows; a page needs at least one; see the reasons")
    return rows


def _bars(
    name: str, caption: str, quantity: str, key: str, rows: Sequence[Mapping[str, Any]]
) -> str:
    """Bars in the colours of the recipes; nothing where no row knows the figure."""
    if all(row[key] is None for row in rows):
        return ""
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    bars = {
        "type": "bar",
        "x": [f"{row['recipe']}<br>{row['mode']}, batch {row['batch']}" for row in rows],
        "y": [row[key] for row in rows],
        "marker": {"color": [color(recipes.index(row["recipe"])) for row in rows]},
    }
    axis = {"title": quantity, "rangemode": "tozero"}
    return figure(name, caption, [bars], x={"automargin": True}, y=axis, across="contender")


def _document(
    title: str,
    figures: Sequence[Section],
    result: Mapping[str, Any],
    notes: Sequence[str],
    headings: Mapping[str, str],
) -> str:
    rows = [cells(row, headings, _LISTS) for row in result["rows"]]
    environment = settings_tables("What it ran on", {"value": result.get("environment", {})})
    sections = [
        *figures,
        Section("Figures", [table(rows, "Each contender's figures")]),
        Section("Environment", [environment]),
    ]
    return document(title, [paragraph(note) for note in notes], sections)
