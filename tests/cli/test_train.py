"""`mixprec train`: settings, exit codes, and the examples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mixprec.train.config import load
from mixprec.train.trainer import Trainer

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run(cli: Callable, config: Path) -> None:
    code, out, err = cli("train", str(config), "--set", "recipe=rowwise", "--save-model")
    assert (code, err) == (0, "")
    assert "fc1" in out
    assert "epoch 1 step 7 loss" in out
    assert "results in runs/small" in out
    folder = Path("runs/small")
    assert json.loads((folder / "result.json").read_text())["recipe"] == "fp8_rowwise"
    assert torch.load(folder / "model.pt", weights_only=True)["fc1.weight"].shape == (128, 9216)


def test_json_is_one_document_on_standard_output(cli: Callable, config: Path) -> None:
    code, out, err = cli("train", str(config), "--out", "here", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(Path("here/result.json").read_text())
    assert "epoch 1 step 7 loss" in err


def test_base_goes_over_the_file(cli: Callable, config: Path) -> None:
    words = ["--set", "recipe=rowwise", "--set", "base=fp16", "--base", "bf16", "--json"]
    code, out, err = cli("train", str(config), *words, "--set", "train.steps=1")
    assert code == 0
    assert "recipe fp8_rowwise on bf16 (configuration)" in err
    result = json.loads(out)
    assert (result["recipe"], result["base"]) == ("fp8_rowwise on bf16", "bf16")


def test_loss_scale_is_in_the_lines_and_the_metrics(cli: Callable, config: Path) -> None:
    # at 2**30 the first gradients overflow FP16
    hot = ["--set", "recipe=fp16", "--set", "scaler.init_scale=1073741824.0"]
    words = [*hot, "--set", "train.log_every=1", "--set", "train.steps=2"]
    code, out, _ = cli("train", str(config), *words)
    assert code == 0
    lines = [line for line in out.splitlines() if "loss scale" in line]
    assert [line.split("loss scale ")[1] for line in lines] == [
        f"{2**30:g} skipped 1",
        f"{2**29:g} skipped 2",
    ]
    rows = [json.loads(line) for line in Path("runs/small/metrics.jsonl").read_text().splitlines()]
    steps = [(row["loss_scale"], row["skipped"]) for row in rows if "loss" in row]
    assert steps == [(2.0**30, 1), (2.0**29, 2)]
    assert json.loads(Path("runs/small/result.json").read_text())["skipped"] == 2


def test_level_of_the_environment_gives_the_recipe(
    cli: Callable, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPLITE_LEVEL", "O2")
    code, out, _ = cli("train", str(config), "--dry-run")
    assert code == 0
    assert "recipe O2 on fp16 (AMPLITE_LEVEL)" in out


@pytest.mark.parametrize(
    ("setting", "label"),
    [("recipe=rowwise", "fp8_rowwise on fp32"), ("opt_level=O0", "fp32 on fp32")],
)
def test_configuration_wins_over_the_environment(
    cli: Callable, config: Path, monkeypatch: pytest.MonkeyPatch, setting: str, label: str
) -> None:
    monkeypatch.setenv("AMPLITE_LEVEL", "O2")
    code, out, _ = cli("train", str(config), "--set", setting, "--dry-run")
    assert code == 0
    ignored = "AMPLITE_LEVEL=O2 has no effect: the configuration names a recipe"
    assert f"recipe {label} (configuration; {ignored})" in out


def test_level_of_the_environment_that_there_is_not(
    cli: Callable, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPLITE_LEVEL", "2")
    assert "they refuse other values than O0 to O3" in " ".join(cli("doctor").out.split())
    code, _, err = cli("train", str(config), "--dry-run")
    assert code == 2
    assert (
        err == "mixprec: AMPLITE_LEVEL: got '2'; must be one of O0, O1, O2, O3, with the letter O\n"
    )


def test_resume_auto_goes_on(cli: Callable, config: Path) -> None:
    assert cli("train", str(config), "--set", "train.steps=4").code == 0
    code, _, err = cli("train", str(config))
    assert code == 2
    assert "--resume auto" in err
    code, out, _ = cli("train", str(config), "--resume", "auto")
    assert code == 0
    assert "resumed after step 4 of 7" in out


def test_dry_run_writes_nothing(cli: Callable, config: Path) -> None:
    code, out, _ = cli("train", str(config), "--dry-run", "--set", "recipe=tensorwise")
    assert code == 0
    assert "epoch 1 step 1 loss" in out
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set", "train.sed=3"], ["train.sed: got an unknown key; did you mean seed?"]),
        (
            ["--set", "train.seed=x", "--set", "data.batch_size=0"],
            ["data.batch_size: got 0", "train.seed: got 'x'"],
        ),
        (["--set", "recipe=fp9"], ["recipe: got 'fp9'; unknown"]),
        (["--set", "data.path=/nowhere"], ["data.path: got /nowhere; it has no train-images"]),
        (["--resume", "nowhere"], ["checkpoint: got nowhere; it has no manifest.json"]),
        (["--set", 'convert.skip=["nolayer"]'], ["skip"]),
        (["--device", "tpu"], ["train.device: got 'tpu'"]),
        (["--base", "int8"], ["base: got 'int8'; input should be 'fp32', 'bf16' or 'fp16'"]),
    ],
)
def test_wrong_input_is_a_line_each_and_code_2(
    cli: Callable, config: Path, words: list[str], expected: list[str]
) -> None:
    code, _, err = cli("train", str(config), *words)
    assert code == 2
    assert "Traceback" not in err
    lines = err.strip().splitlines()
    assert len(lines) == len(expected)
    for line, part in zip(lines, expected, strict=True):
        assert part in line


def test_a_device_that_is_not_there(
    cli: Callable, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    code, _, err = cli("train", str(config), "--device", "cuda")
    assert code == 2
    assert err.startswith("mixprec: train.device: got 'cuda'; this machine")
    assert len(err.splitlines()) == 1


def test_a_missing_file(cli: Callable) -> None:
    code, _, err = cli("train", "absent.toml")
    assert code == 2
    assert err.startswith("mixprec: config: got absent.toml; cannot be read")


def test_a_non_finite_loss_is_code_3(
    cli: Callable, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def poisoned(trainer: Trainer) -> Any:
        if trainer.done == 3:
            with torch.no_grad():
                trainer.model.fc2.bias.fill_(math.nan)
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", poisoned)
    code, _, err = cli("train", str(config), "--json")
    assert code == 3
    last = err.strip().splitlines()[-1]
    assert last.startswith("mixprec: step 4: the loss is not finite")
    assert "parameter fc2.bias" in last
    assert [path.name for path in Path("runs/small/checkpoints").iterdir()] == ["step_00000002"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_take_a_step(cli: Callable, example: Path) -> None:
    code, out, err = cli("train", str(example), "--dry-run", "--set", "data.eval_batch_size=50")
    assert (code, err) == (0, "")
    assert "converted" in out


def test_there_are_examples_of_a_run_and_of_a_custom_format() -> None:
    recipes = {path.stem: load(path).recipe for path in EXAMPLES}
    assert recipes["mnist"] == "fp8_tensorwise"
    custom = recipes["custom_format"]
    assert isinstance(custom, dict)
    assert custom["output"]["a"]["format"] == {"exponent": 4, "mantissa": 2}


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--out", ""], "out: got ''; a folder has a name"),
        (["--out", __file__], f"out: got {__file__!r}; it is a file; name a folder"),
        (["--device", ""], "train.device: got ''"),
        (["--set", "train=3", "--dry-run"], "train: got 3, of which train.dry_run cannot be set"),
        (["--set", "optimizer.options={rho=[1]}"], "optimizer.options.rho: got [1]; adadelta: "),
    ],
)
def test_values_that_cannot_be_used(
    cli: Callable, config: Path, words: list[str], line: str
) -> None:
    code, _, err = cli("train", str(config), *words)
    assert code == 2
    assert err.startswith(f"mixprec: {line}")
    assert len(err.splitlines()) == 1


def test_the_configuration_is_not_overwritten(cli: Callable, config: Path) -> None:
    Path("config.toml").write_bytes(config.read_bytes())
    code, _, err = cli("train", "config.toml", "--out", ".")
    assert code == 2
    assert err.startswith("mixprec: out: got .; its config.toml is not a run's")
    assert Path("config.toml").read_bytes() == config.read_bytes()
    assert [path.name for path in Path().iterdir()] == ["config.toml"]


def test_the_report_fits_the_terminal_and_breaks_no_word(cli: Callable, config: Path) -> None:
    words = ["--set", "recipe=fp8_rowwise_hp_grad_weight", "--dry-run"]
    code, out, _ = cli("train", str(config), *words)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "fp8_rowwise_hp_grad_weight" in out


@pytest.mark.filterwarnings("default")
def test_a_warning_is_a_plain_line(cli: Callable, config: Path) -> None:
    words = ["--set", "recipe=rowwise", "--set", 'convert.skip=["fc*", "conv*"]', "--dry-run"]
    code, out, err = cli("train", str(config), *words)
    assert code == 0
    assert "NOTHING WAS CONVERTED" in out
    assert len(err.splitlines()) == 1
    assert err.startswith("mixprec: warning: convert: nothing was converted")
