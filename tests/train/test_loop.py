"""A whole run: its folder, resuming, stopping, and what it refuses."""

from __future__ import annotations

import io
import json
import math
import pickletools
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from mixprec.train import checkpoint, run
from mixprec.train.config import Config, load
from mixprec.train.faults import NonFiniteError
from mixprec.train.loop import Preempted
from mixprec.train.models import MnistCNN
from mixprec.train.trainer import Trainer

Small = Callable[..., Config]
VARYING = {"grad_bytes", "step_ms", "seconds"}


def stopping_after(steps: int) -> Callable[[], bool]:
    calls: Iterator[int] = iter(range(1, 10_000))
    return lambda: next(calls) >= steps


def records(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in VARYING} for line in lines]


def steady(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key not in VARYING}


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def straight(small: Small, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    config = small("recipe=fp8_delayed", "train.log_every=1", "train.save_model=true")
    return folder, run(config, out=folder, console=quiet())


def test_the_result(straight: tuple[Path, dict]) -> None:
    folder, result = straight
    assert json.loads((folder / "result.json").read_text()) == result
    assert (result["model"], result["recipe"], result["device"]) == (
        "mnist_cnn",
        "fp8_delayed",
        "cpu",
    )
    assert (result["steps"], result["seed"]) == (14, 1)
    assert 0 <= result["accuracy"] <= 1
    assert result["step_ms"] > 0


def test_the_metrics(straight: tuple[Path, dict]) -> None:
    folder, result = straight
    lines = records(folder)
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 15))
    assert [line["step"] for line in evaluations] == [7, 14]
    assert steps[-1]["loss"] == result["train_loss"]
    assert evaluations[-1]["accuracy"] == result["accuracy"]
    assert {line["lr"] for line in steps} == {0.1, 0.1 * 0.7}


def test_the_resolved_configuration_runs_again(straight: tuple[Path, dict], small: Small) -> None:
    expected = small("recipe=fp8_delayed", "train.log_every=1", "train.save_model=true")
    assert load(straight[0] / "config.toml") == expected


def test_the_environment(straight: tuple[Path, dict]) -> None:
    environment = json.loads((straight[0] / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["threads"] == torch.get_num_threads()
    assert environment["device"] == "cpu"


def test_the_model_file_holds_plain_weights(straight: tuple[Path, dict]) -> None:
    file = straight[0] / "model.pt"
    state = torch.load(file, weights_only=True)
    MnistCNN().load_state_dict(state)
    newest = checkpoint.load(checkpoint.listed(straight[0] / "checkpoints")[-1])
    assert [name for name in state if not torch.equal(state[name], newest["model"][name])] == []
    with zipfile.ZipFile(file) as archive:
        data = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        names = {
            arg for op, arg, _ in pickletools.genops(archive.read(data)) if op.name == "GLOBAL"
        }
    assert not any("mixprec" in name for name in names)


@pytest.mark.parametrize("stop", [2, 7, 9])
def test_resumed_run_leaves_what_the_uninterrupted_one_does(
    straight: tuple[Path, dict], small: Small, tmp_path: Path, stop: int
) -> None:
    config = small("recipe=fp8_delayed", "train.log_every=1", "train.save_model=true")
    with pytest.raises(Preempted) as stopped:
        run(config, out=tmp_path, stop=stopping_after(stop), console=quiet())
    assert stopped.value.path == tmp_path / "checkpoints" / f"step_{stop:08d}"
    # What a crash leaves after the checkpoint is dropped, a half-written line too.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": stop + 1, "loss": 0.0}) + '\n{"step": ')
    console = quiet()
    result = run(config, out=tmp_path, resume="auto", console=console)
    assert f"resumed after step {stop} of 14" in console.file.getvalue()
    assert steady(result) == steady(straight[1])
    assert records(tmp_path) == records(straight[0])
    ours, theirs = (torch.load(f / "model.pt", weights_only=True) for f in (tmp_path, straight[0]))
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_a_finished_run_resumes_to_its_result(
    straight: tuple[Path, dict], small: Small, tmp_path: Path
) -> None:
    config = small("train.epochs=1")
    first = run(config, out=tmp_path, console=quiet())
    again = run(config, out=tmp_path, resume="auto", console=quiet())
    assert again["step_ms"] is None
    assert steady(again) == steady(first)


def test_a_damaged_newest_checkpoint_is_passed_by(
    straight: tuple[Path, dict], small: Small, tmp_path: Path
) -> None:
    settings = ["recipe=fp8_delayed", "train.log_every=1", "train.save_model=true"]
    config = small(*settings, "checkpoint.every=3")
    with pytest.raises(Preempted):
        run(config, out=tmp_path, stop=stopping_after(8), console=quiet())
    newest = checkpoint.listed(tmp_path / "checkpoints")[-1]
    (newest / "model.safetensors").write_bytes(b"\0" * 100)
    console = quiet()
    result = run(config, out=tmp_path, resume="auto", console=console)
    said = console.file.getvalue()
    assert "skipped a damaged checkpoint" in said
    assert "resumed after step 6" in said
    assert steady(result) == steady(straight[1])


def test_resume_from_a_named_checkpoint(small: Small, tmp_path: Path) -> None:
    config = small("checkpoint.every=5", "checkpoint.keep=9")
    expected = run(config, out=tmp_path / "a", console=quiet())
    path = tmp_path / "a" / "checkpoints" / "step_00000005"
    assert steady(run(config, out=tmp_path / "b", resume=path, console=quiet())) == steady(expected)
    (path / "tree.json").unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"tree\.json is missing"):
        run(config, resume=path, console=quiet())


def test_a_run_goes_on_longer(small: Small, tmp_path: Path) -> None:
    run(small("train.epochs=1"), out=tmp_path, console=quiet())
    longer = run(small("train.epochs=2"), out=tmp_path, resume="auto", console=quiet())
    assert steady(longer) == steady(run(small("train.epochs=2"), console=quiet()))


def test_auto_without_a_checkpoint_starts_and_says_so(small: Small, tmp_path: Path) -> None:
    console = quiet()
    run(small("train.steps=1"), out=tmp_path, resume="auto", console=console)
    assert "starting from the beginning" in console.file.getvalue()


def test_a_folder_with_another_run_is_refused(small: Small, tmp_path: Path) -> None:
    run(small("train.steps=1"), out=tmp_path, console=quiet())
    with pytest.raises(ValueError, match=r"out: got .*; it holds another run; pass --resume auto"):
        run(small("train.steps=1"), out=tmp_path, console=quiet())
    with pytest.raises(ValueError, match="resume: got 'auto' without a run folder"):
        run(small(), resume="auto")


def test_a_dry_run_takes_one_step_with_its_numerics_and_writes_nothing(
    small: Small, tmp_path: Path
) -> None:
    config = small("train.dry_run=true", "recipe=fp8_rowwise", "train.save_model=true")
    console = quiet()
    result = run(config, out=tmp_path / "out", console=console)
    assert (result["steps"], result["recipe"]) == (1, "fp8_rowwise")
    assert not (tmp_path / "out").exists()
    plain = run(small("train.dry_run=true"), console=quiet())
    assert plain["loss"] != result["loss"]


def test_a_non_finite_loss_keeps_the_last_finite_checkpoint(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def poisoned(trainer: Trainer) -> Any:
        if trainer.done == 5:
            with torch.no_grad():
                trainer.model.conv1.weight.fill_(math.nan)
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", poisoned)
    with pytest.raises(NonFiniteError, match=r"step 6: .*conv1\.weight"):
        run(small("checkpoint.every=2"), out=tmp_path, console=quiet())
    kept = checkpoint.load(checkpoint.listed(tmp_path / "checkpoints")[-1])
    assert kept["position"]["step"] == 4
    assert all(value.isfinite().all() for value in kept["model"].values())
    assert "conv1.weight" in records(tmp_path)[-1]["error"]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["outcome"], result["exit_code"], result["steps"]) == ("nonfinite", 3, 5)


def test_generators_of_the_caller_are_left_alone(small: Small) -> None:
    before = torch.get_rng_state()
    run(small("train.steps=1"), console=quiet())
    assert torch.equal(before, torch.get_rng_state())


def test_plain_lines_off_a_terminal(small: Small) -> None:
    console = quiet()
    run(small("train.log_every=5", "train.epochs=1"), console=console)
    lines = console.file.getvalue().splitlines()
    steps = [line.split(" loss ")[0] for line in lines if line.startswith("epoch")]
    assert steps == ["epoch 1 step 5", "epoch 1 step 7"]
    assert "\x1b" not in console.file.getvalue()


def test_a_bar_on_a_terminal(small: Small) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    run(small("train.epochs=1"), console=console)
    shown = console.file.getvalue()
    assert "7/7" in shown
    assert "\x1b" in shown


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_checkpoint_of_elsewhere_does_not_go_on_in_the_folder_of_another_run(
    small: Small, tmp_path: Path
) -> None:
    for name in "ab":
        run(small("train.steps=2"), out=tmp_path / name, console=quiet())
    before = contents(tmp_path / "b")
    resume = tmp_path / "a" / "checkpoints" / "step_00000002"
    with pytest.raises(ValueError, match=r"out: got .*b; it holds another run"):
        run(small("train.steps=3"), out=tmp_path / "b", resume=resume, console=quiet())
    assert contents(tmp_path / "b") == before
    own = tmp_path / "b" / "checkpoints" / "step_00000002"
    assert run(small("train.steps=3"), out=tmp_path / "b", resume=own, console=quiet())


@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_configuration_of_the_user_is_not_overwritten(
    small: Small, tmp_path: Path, resume: str | None
) -> None:
    (tmp_path / "config.toml").write_text("# mine")
    with pytest.raises(ValueError, match=r"out: got .*; its config\.toml is not a run's"):
        run(small("train.steps=1"), out=tmp_path, resume=resume, console=quiet())
    assert contents(tmp_path) == {tmp_path / "config.toml": b"# mine"}


def test_a_run_goes_on_from_its_own_configuration(small: Small, tmp_path: Path) -> None:
    first = run(small("train.steps=1"), out=tmp_path, console=quiet())
    again = run(tmp_path / "config.toml", out=tmp_path, resume="auto", console=quiet())
    assert steady(again) == steady(first)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("", "out: got ''; a folder has a name"),
        ("file", "out: got '.*file'; it is a file; name a folder"),
        ("file/below", "out: got '.*below'; it cannot be written .*; name a folder"),
    ],
)
def test_a_place_that_cannot_be_written(
    small: Small, tmp_path: Path, name: str, match: str
) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ValueError, match=match):
        run(small("train.steps=1"), out=str(tmp_path / name) if name else "", console=quiet())


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (["train.steps=4"], r"train\.steps: got 4, 4 steps in all; .* has 9 steps done; give more"),
        (["train.epochs=1"], r"train\.epochs: got 1, 7 steps in all; .* has 9 steps done"),
    ],
)
def test_a_run_that_would_be_over_before_its_checkpoint(
    small: Small, tmp_path: Path, settings: list[str], match: str
) -> None:
    run(small("train.steps=9"), out=tmp_path, console=quiet())
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=match):
        run(small(*settings), out=tmp_path, resume="auto", console=quiet())
    assert contents(tmp_path) == before
