"""`mixprec compare`: the table, the JSON document and the folder."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from train.conftest import write_idx_folder
from train.small_models import SMALL_NET, use

from mixprec.cli import compare as command
from mixprec.train import compared
from mixprec.train.config import load
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
    assert "memory of a step, MB" in out
    assert all(f" {word} " in out for word in ("gradients", "optimiser state", "activations"))
    assert re.search(r"^process peak \d+ MB: all runs", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80
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


def test_without_plotly_there_is_no_page_and_a_line_says_so(
    cli: Callable, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    words = ["--recipes", "fp32", "--steps", "1", "--out", str(tmp_path)]
    code, out, _ = cli("compare", str(config), *words)
    assert code == 0
    assert f"result.json and losses.csv are in {tmp_path}" in out
    assert "no compare.html: plotly: got" in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["losses.csv", "result.json"]


def test_sums_of_fewer_bits_beside_those_of_fp32(
    cli: Callable, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, SMALL_NET)
    words = ["--recipes", "mxfp8", "--accumulate", "fp32, hopper", "--steps", "1", "--json"]
    result = json.loads(cli("compare", str(config), *words).out)
    assert [run["recipe"] for run in result["runs"]] == ["mxfp8", "mxfp8_hopper"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--accumulate", "ada"], "accumulate: got 'ada'; must be one of fp32, hopper"),
        (["--recipes", "fp32,fp9"], "recipe: got 'fp9'; unknown"),
        (["--recipes", "fp32,fp32"], "recipes: got fp32 twice"),
        (["--steps", "0"], "train.steps: got 0"),
        (["--seeds", "0"], "seeds: got 0"),
        (["--device", "tpu"], "train.device: got 'tpu'"),
        (["--base", "int8"], "base: got 'int8'; input should be 'fp32', 'bf16' or 'fp16'"),
        (["--base", ""], "base: got ''; input should be"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    cli: Callable, config: Path, words: list[str], line: str
) -> None:
    code, out, err = cli("compare", str(config), *words)
    assert (code, out) == (2, "")
    assert line in err
    assert len(err.strip().splitlines()) == 1


def test_loss_scale_and_skipped_steps_are_said_below_the_table(
    cli: Callable, config: Path, tmp_path: Path
) -> None:
    hot = tmp_path / "hot.toml"
    # at 2**30 the first gradients overflow FP16
    hot.write_text(config.read_text() + "[scaler]\ninit_scale = 1073741824.0\n")
    words = ["--recipes", "fp32,fp16", "--steps", "2", "--out", str(tmp_path / "out")]
    code, out, _ = cli("compare", str(hot), *words)
    assert code == 0
    said = [line for line in out.splitlines() if "loss scale" in line]
    scale = 2**30 // 4
    assert said == [f"fp16: loss scale {scale:g} after the last step, 2 steps skipped"]
    fp32, fp16 = json.loads((tmp_path / "out" / "result.json").read_text())["runs"]
    assert (fp32["loss_scale"], fp32["skipped"], fp32["scale_curve"]) == (None, 0, None)
    expected = {"step": [1, 2], "loss_scale": [2.0**30, 2.0**29], "skipped": [1, 2]}
    assert fp16["scale_curve"] == expected
    assert "fp16: skipped" in (tmp_path / "out" / "compare.html").read_text()


@pytest.mark.parametrize(
    ("skipped", "seeds", "end"),
    [(1, [1], "1 step skipped"), (0, [1, 2], "0 steps skipped (seed 2)")],
)
def test_line_of_a_loss_scale(skipped: int, seeds: list[int], end: str) -> None:
    run = {"recipe": "fp16", "loss_scale": 65536.0, "skipped": skipped}
    expected = f"fp16: loss scale 65536 after the last step, {end}"
    assert command._scale_line(run, seeds) == expected


def test_base_holds_in_every_recipe(cli: Callable, config: Path) -> None:
    words = ["--recipes", "fp32,fp8_rowwise", "--steps", "1", "--base", "bf16", "--json"]
    code, out, _ = cli("compare", str(config), *words)
    assert code == 0
    runs = json.loads(out)["runs"]
    assert [run["recipe"] for run in runs] == ["fp32 on bf16", "fp8_rowwise on bf16"]


@pytest.mark.parametrize(
    ("recipes", "note"),
    [
        ("fp32,O1", "fp16: named by AMPLITE_LEVEL=O1"),
        ("fp32", "AMPLITE_LEVEL=O1 has no effect: the list of recipes says what to compare"),
    ],
)
def test_level_of_the_environment_is_echoed(
    cli: Callable, config: Path, monkeypatch: pytest.MonkeyPatch, recipes: str, note: str
) -> None:
    monkeypatch.setenv("AMPLITE_LEVEL", "O1")
    code, out, _ = cli("compare", str(config), "--recipes", recipes, "--steps", "1")
    assert code == 0
    assert note in out.splitlines()


def test_level_of_the_environment_joins_the_recipes(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPLITE_LEVEL", "O2")
    assert "O2" in compared.chosen_recipes(load(config), None)
    own = tuple(compared.chosen_recipes(load(config, ["recipe=tf32"]), None))
    assert own == (*compared.DEFAULT_RECIPES, "tf32")
    assert compared.configuration(None, None, None, None).recipe == "O2"
    (note,) = compared.level_notes(load(config, ["recipe=tf32"]), own)
    assert note == "AMPLITE_LEVEL=O2 has no effect: the configuration says what to compare"


def test_cells() -> None:
    assert command._spread(None, ".2f", 0.1) == "-"
    assert command._spread(0.9612, ".2f", None, 100) == "96.12"
    assert command._spread(-0.004, "+.2f", 0.001, 100) == "-0.40 ±0.10"


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
