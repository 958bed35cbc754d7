"""The page of a comparison: the loss curves of its runs, and a table of all their figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mixprec.pages.curves import loss_scales, losses
from mixprec.pages.page import (
    HEADINGS,
    Section,
    cells,
    document,
    paragraph,
    settings_tables,
    table,
)
from mixprec.pages.planned import plan_table

CURVE = "curve"
SCALE_CURVE = "scale_curve"
SKIPPED = "skipped"
_HEADINGS = HEADINGS | {
    "loss": "evaluation loss",
    "step_ratio": "step ratio",
    "loss_scale": "last loss scale",
}


def render(result: Mapping[str, Any], plan: Mapping[str, Any] | None = None) -> str:
    """One HTML page of a comparison's result, plotting library included, so it needs no network.

    Args:
        result: What ``result.json`` of a comparison holds: ``model``, ``data``, ``notes`` and
            ``runs``, a list of mappings, one a recipe. ``curve`` in a run is ``{"step": [...],
            "loss": [...]}``, drawn as a line, and ``scale_curve``, where there is loss scaling,
            ``{"step": [...], "loss_scale": [...], "skipped": [steps]}``, as another with a mark on
            each skipped step; every other entry becomes a cell, a mapping (SQNR by operand) one for
            each of its own entries. None, which stands for a number that is not
            known or not finite, leaves the cell empty, and a column with nothing else is left out.
        plan: What ``mixprec plan --json`` prints, set beside the figures.

    Returns:
        The text of the page.

    Raises:
        ValueError: No runs.
        ImportError: plotly is missing (extra ``report``).
    """
    runs = result.get("runs")
    if not runs:
        raise ValueError("result: got no runs; a page needs at least one; pass a result.json")
    training = {str(run["recipe"]): run.get(CURVE) for run in runs}
    device = {"device": result.get("environment", {}).get("device")}
    measured = {str(run["recipe"]): device | run for run in runs}
    last = max(
        (curve["step"][-1] for curve in training.values() if curve and curve["step"]), default=1
    )
    scales = {str(run["recipe"]): run.get(SCALE_CURVE) for run in runs}
    sections = [
        Section("Figures", [table([_cells(run) for run in runs], "Each recipe's figures")]),
        Section("Loss", [losses(training, last)]),
        Section("Loss scale", [loss_scales(scales, last)]),
        Section("Plan", [plan_table(plan, measured) if plan else ""]),
        Section(
            "Environment",
            [settings_tables("What it ran on", {"value": result.get("environment", {})})],
        ),
    ]
    notes = [paragraph(note) for note in result["notes"]]
    return document(f"{result['model']} on {result['data']}", notes, sections)


def _cells(run: Mapping[str, Any]) -> dict[str, Any]:
    if run.get("loss_scale") is None:
        # nothing could be skipped, which is no news of this run
        run = {**run, SKIPPED: None}
    curves = (CURVE, SCALE_CURVE)
    return cells({key: value for key, value in run.items() if key not in curves}, _HEADINGS)
