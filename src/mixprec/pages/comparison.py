"""The page of a comparison: the loss curves of its runs, and a table of all their figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from mixprec.pages.page import COLORS, INTERACTION, PAGE, graph_objects, table

CURVE = "curve"
SCALE_CURVE = "scale_curve"
SKIPPED = "skipped"
_LONGEST_POWER = 32
HEADINGS = {
    "train_loss": "training loss",
    "loss": "evaluation loss",
    "sqnr": "SQNR (dB)",
    "step_ms": "step (ms)",
    "step_ratio": "step ratio",
    "saved_bytes": "saved for backward (bytes)",
    "grad_bytes": "gradients (bytes)",
    "peak_bytes": "peak of live tensors (bytes)",
    "param_bytes": "parameters (bytes)",
    "optimizer_bytes": "optimiser state (bytes)",
    "impl": "implementation",
    "loss_scale": "last loss scale",
    "skipped": "skipped steps",
}


def render(result: Mapping[str, Any]) -> str:
    """One HTML page of a comparison's result, plotting library included, so it needs no network.

    Args:
        result: What ``result.json`` of a comparison holds: ``model``, ``data``, ``notes`` and
            ``runs``, a list of mappings, one a recipe. ``curve`` in a run is ``{"step": [...],
            "loss": [...]}``, drawn as a line, and ``scale_curve``, where there is loss scaling,
            ``{"step": [...], "loss_scale": [...], "skipped": [steps]}``, as another with a mark on
            each skipped step; every other entry becomes a cell, a mapping (SQNR by operand) one for
            each of its own entries. None, which stands for a number that is not
            known or not finite, leaves the cell empty, and a column with nothing else is left out.

    Returns:
        The text of the page.

    Raises:
        ValueError: No runs.
        ImportError: plotly is missing (extra ``report``).
    """
    runs = result.get("runs")
    if not runs:
        raise ValueError("result: got no runs; a page needs at least one; pass a result.json")
    title = f"{result['model']} on {result['data']}"
    return PAGE.format(
        title=escape(title),
        curves=_curves(runs),
        table=table([_cells(run) for run in runs]),
        notes="\n".join(f"<p>{escape(note)}</p>" for note in result["notes"]),
    )


def _curves(runs: Sequence[Mapping[str, Any]]) -> str:
    """The training loss over the steps, and the loss scale of runs that have one; zoomable."""
    plotly = graph_objects()
    colors = [COLORS[place % len(COLORS)] for place in range(len(runs))]
    lines = [
        plotly.Scatter(
            x=run[CURVE]["step"],
            y=run[CURVE]["loss"],
            name=str(run["recipe"]),
            mode="lines",
            line={"color": color},
        )
        for run, color in zip(runs, colors, strict=True)
        if CURVE in run
    ]
    # the same in both figures, so that a skipped step is found below its loss
    last = max((run[CURVE]["step"][-1] for run in runs if _has_steps(run, CURVE)), default=1)
    steps = [1 - (last - 1) / 50, last] if last > 1 else None
    losses = _figure(plotly.Figure(lines), "curves", "training loss", steps=steps, is_first=True)
    scaled = [pair for pair in zip(runs, colors, strict=True) if _has_steps(pair[0], SCALE_CURVE)]
    if not scaled:
        return losses
    figure = plotly.Figure([trace for run, color in scaled for trace in _scale(run, color)])
    values = [value for run, _ in scaled for value in run[SCALE_CURVE]["loss_scale"]]
    figure.update_yaxes(type="log", **_powers_of_two(values))
    figure.update_layout(height=320)
    return losses + _figure(figure, "scales", "loss scale", steps=steps, is_first=False)


def _has_steps(run: Mapping[str, Any], curve: str) -> bool:
    return bool(run.get(curve) and run[curve]["step"])


def _scale(run: Mapping[str, Any], color: str) -> list[dict[str, Any]]:
    """The loss scale by step as a line of stairs, and the skipped steps on it as marks."""
    curve = run[SCALE_CURVE]
    by_step = dict(zip(curve["step"], curve["loss_scale"], strict=True))
    line = {
        "type": "scatter",
        "name": str(run["recipe"]),
        "x": curve["step"],
        "y": curve["loss_scale"],
        "mode": "lines",
        "line": {"color": color, "shape": "hv"},
    }
    if not curve["skipped"]:
        return [line]
    marks = {
        "type": "scatter",
        "name": f"{run['recipe']}: skipped",
        "x": curve["skipped"],
        "y": [by_step[step] for step in curve["skipped"]],
        "mode": "markers",
        "cliponaxis": False,
        "marker": {"color": color, "symbol": "x", "size": 9},
    }
    return [line, marks]


def _powers_of_two(values: Sequence[float]) -> dict[str, Any]:
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


def _figure(
    figure: Any, name: str, quantity: str, *, steps: list[float] | None, is_first: bool
) -> str:
    """A figure over a range of steps as HTML; the first one brings the plotting library."""
    figure.update_layout(
        xaxis={"title": "step", "range": steps},
        yaxis_title=quantity,
        template="plotly_white",
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
        margin={"l": 85, "r": 10, "t": 20, "b": 50},
    )
    text: str = figure.to_html(
        full_html=False, include_plotlyjs=is_first, div_id=name, config=INTERACTION
    )
    return text


def _cells(run: Mapping[str, Any]) -> dict[str, Any]:
    """Heading to value, nested entries side by side."""
    cells: dict[str, Any] = {}
    for key, value in run.items():
        heading = HEADINGS.get(key, key.replace("_", " "))
        if key in (CURVE, SCALE_CURVE):
            continue
        if key == SKIPPED and run.get("loss_scale") is None:
            # nothing could be skipped, which is no news of this run
            value = None
        if isinstance(value, Mapping):
            cells |= {f"{heading} {name}": inner for name, inner in value.items()}
        else:
            cells[heading] = value
    return cells
