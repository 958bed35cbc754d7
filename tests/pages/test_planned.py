"""A plan beside a result: figures that both have, with their ratio."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mixprec.pages.planned import plan_table
from mixprec.pages.report import report
from pages.reading import Page
from pages.runs import write_run
from pages.test_comparison import RESULT as COMPARISON

MEMORY = {
    "parameters": 4_000_000,
    "gradients": 4_000_000,
    "masters": 1_000_000,
    "optimizer": 8_000_000,
    "activations": 1_000_000,
    "peak": 20_000_000,
}
PLAN: dict[str, Any] = {
    "model": "mnist_cnn",
    "target": "h100",
    "gpus": 2,
    "batch": 64,
    "recipes": [
        {
            "recipe": "fp32",
            "memory": MEMORY,
            "largest_batch": 512,
            "roofline": {"seconds": 0.002, "speedup": 1.5},
        },
        {"recipe": "mxfp8", "memory": MEMORY, "roofline": None},
    ],
    "notes": ["a note <here>"],
}


def test_figures_and_ratios() -> None:
    measured = {run["recipe"]: run | {"device": "cuda:0"} for run in COMPARISON["runs"]}
    measured["fp32"]["optimizer_bytes"] = 18_000_000
    text = plan_table(PLAN, measured)
    page = Page(text)
    rows = page.table("Plan beside measurement: model mnist_cnn, target h100, gpus 2, batch 64")
    by_figure = {row["figure"]: row for row in rows if row["recipe"] == "fp32"}
    assert by_figure["parameters (bytes)"]["measured / planned"] == "1.2"
    assert by_figure["activations (bytes)"]["measured"] == "1,234,567"
    assert by_figure["step (ms): the least that peak rates allow"]["measured / planned"] == "6.25"
    assert by_figure["optimiser state (bytes)"]["planned"] == "9,000,000", "masters are in it"
    assert by_figure["optimiser state (bytes)"]["measured / planned"] == "2"
    assert by_figure["largest batch that fits"]["planned"] == "512"
    assert {row["measured"] for row in rows if row["recipe"] == "mxfp8"} == {""}
    assert page.paragraphs == ["a note <here>"]


def test_pages_of_run_and_comparison_have_the_plan_in_their_folder(tmp_path: Path) -> None:
    result = {"recipe": "fp32", "param_bytes": 4_000_000}
    run = write_run(tmp_path / "run", result=result)
    other = tmp_path / "comparison"
    other.mkdir()
    (other / "result.json").write_text(json.dumps(COMPARISON))
    for folder in (run, other):
        (folder / "plan.json").write_text(json.dumps(PLAN))
        page = Page(Path(report(folder)["page"]).read_text())
        assert (2, "Plan") in page.headings
        ratios = [row["measured / planned"] for row in page.table("Plan beside measurement")]
        assert any(ratios)


def test_step_on_a_cpu_is_not_set_beside_peak_rates_of_a_gpu() -> None:
    measured = {run["recipe"]: run | {"device": "cpu"} for run in COMPARISON["runs"]}
    rows = Page(plan_table(PLAN, measured)).table("Plan beside measurement")
    (step,) = (row for row in rows if row["figure"].startswith("step (ms)"))
    assert (step["planned"], step["measured"]) == ("2", "")


@pytest.mark.parametrize(
    "plan",
    [
        {},
        {"recipes": 3, "notes": 4},
        {"recipes": [None, {"memory": [], "roofline": 2}]},
        {"recipes": [{"memory": {"peak": "large"}, "roofline": {"seconds": "?"}}]},
    ],
)
def test_what_is_no_plan_is_said(plan: dict[str, Any]) -> None:
    assert "plan.json holds no plan" in plan_table(plan, {})
