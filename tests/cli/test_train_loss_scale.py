"""`mixprec train` with a loss scale: what a storm of overflows prints, leaves and exits with."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from train.conftest import write_idx_folder
from train.small_models import SMALL_NET, use

from mixprec.train import checkpoint
from mixprec.train.trainer import Trainer


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    file = folder / "small.toml"
    file.write_text(
        f'recipe = "fp16"\n[data]\npath = "{write_idx_folder(folder)}"\nbatch_size = 8\n'
        '[optimizer]\nname = "adamw"\nlr = 0.01\n'
        "[train]\nepochs = 4\nlog_every = 1\n[checkpoint]\nevery = 1\n"
    )
    return file


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    use(monkeypatch, SMALL_NET)


def metrics() -> list[dict[str, Any]]:
    lines = Path("runs/small/metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_storm_is_shown_and_the_run_ends_well(cli: Callable, config: Path) -> None:
    code, out, err = cli("train", str(config), "--set", f"scaler.init_scale={2.0**30}")
    assert (code, err) == (0, "")
    skipped = json.loads(Path("runs/small/result.json").read_text())["skipped"]
    assert skipped > 5
    words = " ".join(out.split())
    assert f"loss scale {2.0**30:g} skipped 1 " in words
    assert f"loss scale {2.0 ** (30 - skipped):g} skipped {skipped} " in words
    assert [line["step"] for line in metrics() if "loss" in line] == list(range(1, 29))


def test_an_overflow_on_the_floor_is_code_3_and_a_line_that_names_it(
    cli: Callable, config: Path
) -> None:
    floor = [f"scaler.init_scale={2.0**40}", f"scaler.min_scale={2.0**38}"]
    words = [part for setting in floor for part in ("--set", setting)]
    code, _, err = cli("train", str(config), *words)
    assert code == 3
    (line,) = err.strip().splitlines()
    assert line.startswith("mixprec: step 3: the gradient at the smallest loss scale, 2.74878e+11")
    assert "gradient conv.weight; lower the learning rate, or train in bf16" in line
    assert f"mixprec: {metrics()[-1]['error']}" == line
    kept = checkpoint.load(Path("runs/small/checkpoints/step_00000002"))
    assert kept["scaler"]["skipped"] == 2
    assert all(value.isfinite().all() for value in kept["model"].values())
    assert cli("train", str(config), *words, "--resume", "auto").code == 3


def test_a_loss_that_is_not_finite_is_code_3_and_leaves_the_scale(
    cli: Callable, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, trainers = Trainer.step, []

    def poisoned(trainer: Trainer) -> Any:
        trainers.append(trainer)
        if trainer.done == 2:
            with torch.no_grad():
                trainer.model.fc2.bias.fill_(math.nan)
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", poisoned)
    code, _, err = cli("train", str(config))
    assert code == 3
    assert "step 3: the loss is not finite; the first tensor at fault is parameter fc2.bias" in err
    assert trainers[-1].scaler.get_scale() == 65536.0
    assert trainers[-1].skipped == 0


def test_a_learning_rate_far_too_large_is_code_3_and_names_the_layer(
    cli: Callable, config: Path
) -> None:
    words = ["--set", "optimizer.name=sgd", "--set", "optimizer.lr=1e6"]
    code, _, err = cli("train", str(config), *words)
    assert code == 3
    (line,) = err.strip().splitlines()
    assert "the loss is not finite; the first tensor at fault is output of " in line
    assert "output of the model" not in line


def test_clipping_is_logged_without_the_scale(cli: Callable, config: Path) -> None:
    norms = {}
    for recipe in ("fp32", "fp16"):
        words = ["--set", f"recipe={recipe}", "--set", "train.clip_norm=0.5", "--out", recipe]
        assert cli("train", str(config), *words, "--set", "train.steps=3").code == 0
        lines = map(json.loads, Path(recipe, "metrics.jsonl").read_text().splitlines())
        norms[recipe] = [line["grad_norm"] for line in lines if "loss" in line]
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=0.05)
    assert min(norms["fp16"]) > 0.5
