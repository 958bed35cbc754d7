"""`mixprec compare`: the table, the JSON document and the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train.conftest import write_idx_folder

from mixprec.cli import compare as command
from mixprec.train.trainer import NonFiniteError, Trainer


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    file = folder / "small.toml"
    path = write_idx_folder(folder)
    file.write_text(f'[data]\npath = "{path}"\nbatch_size = 8\n[optimizer]\nlr = 0.1\n')
    return file


def test_the_table(cli: Callable, config: Path) -> None:
    words = ["--recipes", "fp32, rowwise", "--steps", "3", "--seeds", "2"]
    code, out, err = cli("compare", str(config), *words)
    assert (code, err) == (0, "")
    assert "mnist_cnn on mnist, 3 steps, seed 1, 2" in out
    flat = "".join(out.split())
    for text in ("fp32", "fp8_rowwise", "native", "±", "+0.00", "-/-/-"):
        assert text in flat
    assert ("timing is not hardware speed" in out) == ("emulated" in flat)


def test_json_and_the_folder(cli: Callable, config: Path, tmp_path: Path) -> None:
    words = ["--recipes", "fp32,fp8_delayed", "--steps", "3", "--out", str(tmp_path), "--json"]
    code, out, err = cli("compare", str(config), *words)
    assert code == 0
    result = json.loads(out)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert [run["recipe"] for run in result["runs"]] == ["fp32", "fp8_delayed"]
    expected = {"recipe", "loss", "accuracy", "step_ms", "step_ratio", "saved_bytes", "param_bytes"}
    assert expected | {"impl"} <= result["runs"][0].keys()
    assert (tmp_path / "losses.csv").read_text().startswith("seed,step,fp32,fp8_delayed\n1,1,")
    page = (tmp_path / "compare.html").read_text()
    assert "fp8_delayed" in page
    assert page.lower().startswith("<!doctype html>")
    assert "step 3 of 3" in err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--recipes", "fp32,fp9"], "recipe: got 'fp9'; unknown"),
        (["--recipes", "fp32,fp32"], "recipes: got fp32 twice"),
        (["--steps", "0"], "train.steps: got 0"),
        (["--seeds", "0"], "seeds: got 0"),
        (["--device", "tpu"], "train.device: got 'tpu'"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    cli: Callable, config: Path, words: list[str], line: str
) -> None:
    code, out, err = cli("compare", str(config), *words)
    assert (code, out) == (2, "")
    assert line in err
    assert len(err.strip().splitlines()) == 1


def test_cells() -> None:
    assert command._cell(None, ".2f") == "-"
    assert command._cell(0.9612, ".2f", None, 100) == "96.12"
    assert command._cell(-0.004, "+.2f", 0.001, 100) == "-0.40 ±0.10"


def test_no_finite_run_is_code_3(
    cli: Callable, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(trainer: Trainer) -> Any:
        raise NonFiniteError(1, "the loss", "the loss itself")

    monkeypatch.setattr(Trainer, "step", failing)
    code, out, err = cli("compare", str(config), "--recipes", "fp32,tf32", "--steps", "5")
    assert (code, err) == (3, "")
    assert "mnist_cnn on mnist, 5 steps, seed 1" in out
    assert "fp32: step 1: the loss is not finite" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--out", ""], "out: got ''; a folder has a name"),
        (["--out", __file__], f"out: got {__file__!r}; it is a file; name a folder"),
        (["--device", ""], "train.device: got ''"),
    ],
)
def test_places_and_devices_that_cannot_be_used(
    cli: Callable, config: Path, words: list[str], line: str
) -> None:
    code, out, err = cli("compare", str(config), "--recipes", "fp32", "--steps", "1", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"mixprec: {line}")
    assert len(err.splitlines()) == 1
