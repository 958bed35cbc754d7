"""The page of a run: everything that its folder holds, and what is missing, in words."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from mixprec.pages.run import render
from mixprec.pages.run_folder import read
from pages.reading import Page, traces
from pages.runs import ALARM, lines, write_run

SECTIONS = (
    "Result",
    "Alarms",
    "Loss",
    "Step time and memory",
    "Loss scale",
    "Statistics",
    "Configuration",
    "Environment",
)


def test_structure(text: str) -> None:
    page = Page(text)
    assert page.open == []
    sections = [(2, heading) for heading in SECTIONS]
    assert page.headings == [(1, "first"), *sections[:2], (3, "saturation"), *sections[2:]]
    assert [a for a in page.addresses if not a.startswith("#")] == []
    assert len(set(page.ids)) == len(page.ids)
    assert set(filter(None, page.references)) <= set(page.ids)
    assert text.count("plotly.js v") == 1
    assert "head <b>" not in text


def test_curves_hold_the_records(text: str) -> None:
    training, evaluation, alarms = traces(text, "curves")
    steps = list(range(4, 41, 4))
    assert (training["x"], training["y"]) == (steps, [2.0 - step / 40 for step in steps])
    assert (evaluation["x"], evaluation["y"]) == ([20, 40], [1.25, 1.0])
    assert (alarms["x"], alarms["y"]) == ([20, 40], [1.5, 1.0])
    assert alarms["text"] == ["saturation blocks.0.mlp.2"] * 2
    (times,) = traces(text, "times")
    assert times["y"] == [10.0 + step for step in steps]


def test_loss_scale_marks_skipped_steps(text: str) -> None:
    line, skipped = traces(text, "scales")
    assert line["y"] == [65536.0] * 2 + [32768.0] * 8
    assert (skipped["x"], skipped["y"]) == ([8, 20], [65536.0, 32768.0])


def test_tables(text: str) -> None:
    page = Page(text)
    result = {row["figure"]: row["first"] for row in page.table("The result of the run")}
    assert (result["evaluation loss"], result["recipe"]) == ("0.9877", "fp16")
    (alarm,) = page.table("saturation, by place")
    assert alarm == {
        "layer": "blocks.0.mlp.2",
        "operand": "output.a",
        "what": ALARM["text"],
        "step": "20",
        "times": "2",
        "share": "0.0123",
        "limit": "0.01",
    }
    assert ALARM["suggestion"] in page.paragraphs
    settings = {row["setting"]: row["first"] for row in page.table("Every setting")}
    assert (settings["optimizer.lr"], settings["optimizer.options.betas"]) == (
        "0.00012345",
        "[0.9, 0.95]",
    )
    assert page.table("What it ran on")[0] == {"setting": "python", "first": "3.11"}
    assert page.table("Evaluations")[0]["accuracy"] == "0.4"


def test_against_another_run(folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "second", recipe="mxfp8", records=lines()[:2])
    text = render(read(folder), read(other))
    page = Page(text)
    assert page.headings[0] == (1, "first against second")
    difference = {"setting": "recipe", "first": "fp16", "second": "mxfp8"}
    assert page.table("Every setting, defaults too: differences") == [difference]
    assert "No difference." in page.paragraphs, "of the environment"
    names = [trace["name"] for trace in traces(text, "curves")]
    assert names == ["first, training", "first, evaluation", "first: alarm", "second, training"]
    assert page.table("saturation, by place")[0]["run"] == "first"
    absent = "second: no statistics were recorded; inspect.every=100 asks for them."
    assert absent in page.paragraphs


def test_runs_of_one_name_are_told_apart(folder: Path, tmp_path: Path) -> None:
    same = write_run(tmp_path / folder.name)
    assert Page(render(read(folder), read(same))).headings[0] == (1, f"{folder} against {same}")
    own = f"{folder} (1) against {folder} (2)"
    assert Page(render(read(folder), read(folder))).headings[0] == (1, own)


def test_failed_run(folder: Path, tmp_path: Path) -> None:
    error = "step 24: the loss is not finite; the first tensor at fault is output of <head>"
    records = [*(r for r in lines() if r["step"] < 24), {"step": 24, "error": error}]
    write_run(tmp_path / "failed", records=records)
    (tmp_path / "failed" / "result.json").unlink()
    text = render(read(tmp_path / "failed"))
    page = Page(text)
    assert page.paragraphs[:2] == [
        f"Failed: {error}.",
        "no result.json: the run failed, was stopped, or is not over.",
    ]
    assert '<p class="alarm">Failed' in text
    low, high = json.loads(re.search(r'"xaxis":\{[^}]*"range":(\[[^]]*\])', text)[1])
    assert low < 1
    assert high > 24, "the axis reaches to the last record of any kind"
    assert "No result." in page.paragraphs


def test_run_that_goes_on(tmp_path: Path) -> None:
    write_run(tmp_path, records=[{"step": 1, "loss": None, "loss_scale": None}])
    (tmp_path / "result.json").unlink()
    page = Page(render(read(tmp_path)))
    assert page.paragraphs[0] == "Not over: the last record is of step 1."
    assert "No loss scale: the base needs none, or no step was recorded." in page.paragraphs


@pytest.mark.parametrize("kept", ["result.json", "environment.json", "metrics.jsonl"])
def test_whatever_is_missing_there_is_a_page(folder: Path, tmp_path: Path, kept: str) -> None:
    shutil.copy(folder / kept, tmp_path)
    page = Page(render(read(tmp_path)))
    assert [heading for level, heading in page.headings if level == 2] == list(SECTIONS)
    assert sum(line.startswith("no ") for line in page.paragraphs) == 3


@pytest.mark.parametrize(
    "record",
    [
        {"loss": "high", "step_ms": [], "loss_scale": "x", "skipped": None},
        {"loss": 1, "loss_scale": 0.0, "skipped": {}},
        {"loss": 1, "loss_scale": -2.0, "step_ms": True},
        {"eval_loss": {}, "accuracy": "x"},
        {"alarm": "text"},
        {"alarm": {"figures": 3, "text": None}},
        {"statistics": {"a": 1}},
        {"error": None},
    ],
)
def test_foreign_records_do_no_harm(tmp_path: Path, record: dict) -> None:
    write_run(tmp_path, records=[{"step": 1, **record}], result={"steps": None, "odd": [{}]})
    assert Page(render(read(tmp_path))).open == []


def test_many_alarms_of_a_kind_are_folded(tmp_path: Path) -> None:
    records = [{"step": 5, "alarm": ALARM | {"layer": f"layer{place}"}} for place in range(11)] + [
        {"step": 6, "alarm": {"kind": "dead_gradient"}}
    ]
    text = render(read(write_run(tmp_path, records=[{"step": 5, "loss": 1.0}, *records])))
    page = Page(text)
    assert len(page.table("saturation, by place")) == 8
    assert [row["layer"] for row in page.table("saturation, further places")] == [
        "layer8",
        "layer9",
        "layer10",
    ]
    assert page.table("dead gradient, by place") == [{"layer": "(model)", "step": "6"}]
    marks = traces(text, "curves")[-1]
    assert marks["x"] == [5, 6]
    assert marks["text"][0].endswith("saturation layer7<br>and 3 more")


def test_memory_and_plan_are_shown_where_they_are(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 1.0, "peak_bytes": 100 * step} for step in (1, 2)]
    write_run(tmp_path, records=records, result={"steps": 2, "peak_bytes": 200})
    text = render(read(tmp_path))
    (peak,) = traces(text, "peak_bytes")
    assert peak["y"] == [100, 200]
    assert "Memory was not recorded" not in text
