"""The pages of a benchmark: bars of step time and memory, or the ratio of products by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mixprec.pages.page import COLORS, INTERACTION, PAGE, graph_objects, table

_LISTS = ("times_ms", "losses")
_HEADINGS = {
    "step_ms": "step (ms), median",
    "step_ms_mean": "step (ms), mean",
    "throughput": "{unit} a second",
    "speedup": "speed-up",
    "param_bytes": "parameters (bytes)",
    "grad_bytes": "gradients (bytes)",
    "optimizer_bytes": "optimiser state (bytes)",
    "saved_bytes": "activations (bytes)",
    "peak_bytes": "peak (bytes)",
    "process_peak_bytes": "process peak (bytes)",
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
    places = [f"{row['recipe']}<br>{row['mode']}, batch {row['batch']}" for row in rows]
    unit = result["unit"]
    bars = [
        ("speed", f"{unit} a second", [row["throughput"] for row in rows]),
        ("memory", "peak bytes", [row["peak_bytes"] for row in rows]),
    ]
    drawn = [bar for bar in bars if any(value is not None for value in bar[2])]
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    colors = [COLORS[recipes.index(row["recipe"]) % len(COLORS)] for row in rows]
    plotly = graph_objects()
    figures = "".join(
        _figure(
            plotly.Figure(plotly.Bar(x=places, y=values, marker_color=colors)),
            name,
            quantity,
            is_first=place == 0,
        )
        for place, (name, quantity, values) in enumerate(drawn)
    )
    skipped = [
        f"skipped: {skip['recipe']}, {skip['mode']}, batch {skip['batch']}: {skip['reason']}"
        for skip in result["skipped"]
    ]
    order = f"contenders {result['order']}, {result['warmup']} of {result['steps']} steps discarded"
    notes = [order, *result["notes"], *skipped]
    return _page(f"{result['model']}: training steps", figures, rows, notes, unit)


def render_products(result: Mapping[str, Any]) -> str:
    """One HTML page of what ``mixprec.bench.gemm.run`` returns.

    Raises: As ``render``.
    """
    rows = _rows(result)
    plotly = graph_objects()
    recipes = list(dict.fromkeys(row["recipe"] for row in rows))
    lines = [
        plotly.Scatter(
            x=[row["shape"] for row in rows if row["recipe"] == recipe],
            y=[row["ratio"] for row in rows if row["recipe"] == recipe],
            name=recipe,
            mode="lines+markers",
            line={"color": COLORS[place % len(COLORS)]},
        )
        for place, recipe in enumerate(recipes)
    ]
    figure = _figure(
        plotly.Figure(lines), "ratios", f"time / {recipes[0]}", is_first=True, with_legend=True
    )
    pays = [f"{recipe}: pays {where}" for recipe, where in result["pays"].items()]
    return _page("linear layers: forward and backward", figure, rows, [*pays, *result["notes"]], "")


def _rows(result: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = result["rows"]
    if not rows:
        raise ValueError("result: got no rows; a page needs at least one; see the reasons")
    return rows


def _figure(
    figure: Any, name: str, quantity: str, *, is_first: bool, with_legend: bool = False
) -> str:
    figure.update_layout(
        yaxis_title=quantity,
        yaxis_rangemode="tozero",
        template="plotly_white",
        showlegend=with_legend,
        margin={"l": 85, "r": 10, "t": 20, "b": 50},
    )
    text: str = figure.to_html(
        full_html=False, include_plotlyjs=is_first, div_id=name, config=INTERACTION
    )
    return text


def _page(
    title: str, figures: str, rows: Sequence[Mapping[str, Any]], notes: Sequence[str], unit: str
) -> str:
    return PAGE.format(
        title=escape(title),
        curves=figures,
        table=table([_cells(row, unit) for row in rows]),
        notes="\n".join(f"<p>{escape(note)}</p>" for note in notes),
    )


def _cells(row: Mapping[str, Any], unit: str) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for key, value in row.items():
        heading = _HEADINGS.get(key, key.replace("_", " ")).format(unit=unit)
        if isinstance(value, Mapping):
            cells |= {f"{heading} {name}": inner for name, inner in value.items()}
        elif key not in _LISTS:
            cells[heading] = value
    return cells
