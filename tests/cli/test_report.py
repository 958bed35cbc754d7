"""`mixprec report`: a real run, its page, and the refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pages.reading import Page, traces
from train.conftest import write_idx_folder

from mixprec.train.config import load
from mixprec.train.loop import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on a stand-in for MNIST."""
    digits = write_idx_folder(tmp_path_factory.mktemp("digits"))
    settings = [f"data.path={digits}", "data.batch_size=8", "train.steps=3", "train.log_every=1"]
    settings += ["inspect.every=2"]
    out = tmp_path_factory.mktemp("runs") / "digits"
    run(load(None, ["recipe=fp16", "optimizer.lr=0.1", *settings]), out=out)
    return out


def test_page_of_a_real_run(cli: Callable, folder: Path) -> None:
    code, out, err = cli("report", str(folder))
    assert (code, out, err) == (0, f"run: {folder / 'report.html'}\n", "")
    text = (folder / "report.html").read_text()
    result = json.loads((folder / "result.json").read_text())
    training, evaluation = traces(text, "curves")
    assert training["x"] == [1, 2, 3]
    assert training["y"][-1] == result["train_loss"]
    assert (evaluation["x"], evaluation["y"]) == ([3], [result["loss"]])
    (line,) = traces(text, "scales")
    assert line["y"] == [65536.0] * 3
    maps = traces(text, "statistics-0")
    assert {tuple(trace["x"]) for trace in maps} == {(2,)}
    assert {"fc1", "fc2"} <= set(maps[0]["y"])
    settings = {row["setting"]: row["digits"] for row in Page(text).table("Every setting")}
    assert settings["recipe"] == "fp16"


def test_json_against_and_out(cli: Callable, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = ["--against", str(folder), "--out", str(page), "--json"]
    code, out, _ = cli("report", str(folder), *words)
    assert code == 0
    written = json.loads(out)
    assert (written["page"], written["kind"]) == (str(page), "run")
    assert written["records"]["loss"] == 3
    assert page.exists()


def test_what_is_missing_is_said(cli: Callable, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    code, out, _ = cli("report", str(tmp_path))
    assert code == 0
    assert f"{tmp_path}: no config.toml: the configuration is not known" in out.splitlines()
    assert f"{tmp_path}: metrics.jsonl: left out what cannot be read, line 2" in out.splitlines()


def test_folder_that_is_no_run_is_one_line_and_code_2(cli: Callable, tmp_path: Path) -> None:
    code, out, err = cli("report", str(tmp_path))
    assert (code, out) == (2, "")
    assert err.startswith(f"mixprec: run_dir: got '{tmp_path}'; it holds none of metrics.jsonl")
    assert len(err.splitlines()) == 1
