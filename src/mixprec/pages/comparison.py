"""The page of a comparison: the loss curves of its runs, and a table of all their figures."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

CURVE = "curve"
HEADINGS = {
    "train_loss": "training loss",
    "loss": "evaluation loss",
    "sqnr": "SQNR (dB)",
    "step_ms": "step (ms)",
    "step_ratio": "step ratio",
    "saved_bytes": "saved for backward (bytes)",
    "param_bytes": "parameters (bytes)",
    "optimizer_bytes": "optimiser state (bytes)",
    "impl": "implementation",
}

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: 0.3em 0.8em; border-bottom: 1px solid #ccc; text-align: right; }}
th {{ vertical-align: bottom; }}
.text {{ text-align: left; }}
</style>
</head>
<body>
<h1>{title}</h1>
{curves}
<div class="wide">{table}</div>
{notes}
</body>
</html>
"""


def render(result: Mapping[str, Any]) -> str:
    """One HTML page of a comparison's result, plotting library included, so it needs no network.

    Args:
        result: What ``result.json`` of a comparison holds: ``model``, ``data``, ``notes`` and
            ``runs``, a list of mappings, one a recipe. ``curve`` in a run is ``{"step": [...],
            "loss": [...]}``, drawn as a line; every other entry becomes a cell, a mapping (SQNR by
            operand) one for each of its own entries. None, which stands for a number that is not
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
    return _PAGE.format(
        title=escape(title),
        curves=_curves(runs),
        table=_table(runs),
        notes="\n".join(f"<p>{escape(note)}</p>" for note in result["notes"]),
    )


def _curves(runs: Sequence[Mapping[str, Any]]) -> str:
    """The training loss of every run over the steps, as a figure that can be zoomed."""
    try:
        plotly = importlib.import_module("plotly.graph_objects")
    except ImportError as error:
        raise ImportError(
            f"plotly: got {error}; pages need it; run pip install 'mixprec[report]'"
        ) from error
    lines = [
        plotly.Scatter(
            x=run[CURVE]["step"], y=run[CURVE]["loss"], name=str(run["recipe"]), mode="lines"
        )
        for run in runs
        if CURVE in run
    ]
    figure = plotly.Figure(lines)
    figure.update_layout(
        xaxis_title="step", yaxis_title="training loss", template="plotly_white", showlegend=True
    )
    return figure.to_html(full_html=False, include_plotlyjs=True, div_id="curves")


def _table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row a run, a column an entry; columns in the order in which the runs name them."""
    rows = [_cells(run) for run in runs]
    known = (heading for row in rows for heading, value in row.items() if value is not None)
    headings = list(dict.fromkeys(known))
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr>{''.join(_cell(row.get(heading)) for heading in headings)}</tr>\n" for row in rows
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"


def _cells(run: Mapping[str, Any]) -> dict[str, Any]:
    """Heading to value, nested entries side by side."""
    cells: dict[str, Any] = {}
    for key, value in run.items():
        heading = HEADINGS.get(key, key.replace("_", " "))
        if key == CURVE:
            continue
        if isinstance(value, Mapping):
            cells |= {f"{heading} {name}": inner for name, inner in value.items()}
        else:
            cells[heading] = value
    return cells


def _cell(value: Any) -> str:
    """Numbers to four digits, whole numbers in groups of three, lists joined."""
    if value is None:
        return "<td></td>"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        return f'<td class="text">{escape(text)}</td>'
    return f"<td>{f'{value:,}' if isinstance(value, int) else f'{value:.4g}'}</td>"
