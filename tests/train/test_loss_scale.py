"""Loss scaling in the training loop: skipped steps, storms, the floor, clipping, the schedule."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from mixprec.amp import GradScaler
from mixprec.train import checkpoint, compare, run
from mixprec.train.config_fields import Config, ScalerConfig
from mixprec.train.faults import NonFiniteError
from mixprec.train.loop import Preempted
from mixprec.train.trainer import Trainer
from train.small_models import SLOPE, SMALL_NET, slope_data, use

Small = Callable[..., Config]
ADAM = ["optimizer.name=adamw", "optimizer.lr=0.01"]
STORM = [f"scaler.init_scale={2.0**30}", *ADAM]
"""The gradients overflow FP16 until the scale has come down by some powers of two."""
ON_THE_FLOOR = [f"scaler.init_scale={2.0**40}", f"scaler.min_scale={2.0**37}", *ADAM]


@pytest.fixture(autouse=True)
def _small_net(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SMALL_NET)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def updated(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of what an update changes: parameters, masters and the optimizer's state."""
    found = {name: value.clone() for name, value in trainer.model.named_parameters()}
    state = trainer.optimizer.state_dict()
    kept = state.get("mixed_precision", {}).get("kept", {})
    found |= {f"kept {index}": value.clone() for index, value in kept.items() if value is not None}
    for index, entry in state["state"].items():
        found |= {f"state {index} {key}": value.clone() for key, value in entry.items()}
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def overflow_while(trainer: Trainer, condition: Callable[[], bool]) -> None:
    """Make a gradient infinite, as an overflow does, in each step for which that holds."""
    spread = lambda grad: grad * math.inf if condition() else grad  # noqa: E731
    trainer.model.fc2.weight.register_hook(spread)


@pytest.mark.parametrize("recipe", ["fp16", "fp16_pure", "O2"])
def test_a_storm_skips_steps_halves_the_scale_and_goes_on(small: Small, recipe: str) -> None:
    trainer = Trainer(small(f"recipe={recipe}", "train.epochs=4", *STORM))
    scale, skipped = 2.0**30, 0
    for _ in range(28):
        before = updated(trainer)
        record = trainer.step()
        assert record.loss_scale == scale
        assert math.isfinite(record.loss)
        overflowed = record.skipped > skipped
        assert same(before, updated(trainer)) == overflowed
        scale, skipped = scale / 2 if overflowed else scale, record.skipped
    assert 5 < skipped < 25
    assert trainer.scaler.get_scale() == scale
    assert trainer.done == 28


def test_a_storm_is_in_the_log_the_metrics_and_the_result(small: Small, tmp_path: Path) -> None:
    config = small("recipe=fp16", "train.epochs=4", "train.log_every=1", *STORM)
    console = quiet()
    result = run(config, out=tmp_path, console=console)
    steps = [line for line in records(tmp_path) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 29))
    assert steps[0]["loss_scale"] == 2.0**30
    assert result["skipped"] == steps[-1]["skipped"] > 5
    counts = [0, *(line["skipped"] for line in steps)]
    for line, (before, after) in zip(steps, pairwise(counts), strict=True):
        assert line["loss_scale"] == 2.0 ** (30 - before)
        assert after - before in (0, 1)
    shown = console.file.getvalue()
    assert f" loss scale {2.0**30:g} skipped 1\n" in shown
    assert f" loss scale {steps[-1]['loss_scale']:g} skipped {result['skipped']}\n" in shown


def test_a_recipe_without_loss_scale_shows_none(small: Small, tmp_path: Path) -> None:
    console = quiet()
    result = run(small("recipe=bf16", "train.log_every=1"), out=tmp_path, console=console)
    assert result["skipped"] == 0
    assert all(line["loss_scale"] is None for line in records(tmp_path) if "loss" in line)
    assert "loss scale" not in console.file.getvalue()


def test_an_overflow_on_the_floor_ends_the_run_and_names_the_gradient(
    small: Small, tmp_path: Path
) -> None:
    config = small("recipe=fp16", "checkpoint.every=1", "train.log_every=1", *ON_THE_FLOOR)
    with pytest.raises(NonFiniteError) as stopped:
        run(config, out=tmp_path, console=quiet())
    message = str(stopped.value)
    assert message.startswith(
        f"step 4: the gradient at the smallest loss scale, {2.0**37:g} (scaler.min_scale), after 4 "
        "skipped steps, is not finite; the first tensor at fault is gradient conv.weight; lower"
    )
    assert records(tmp_path)[-1] == {"step": 4, "error": message}
    scales = [line["loss_scale"] for line in records(tmp_path) if "loss" in line]
    assert scales == [2.0**40, 2.0**39, 2.0**38]
    assert json.loads((tmp_path / "result.json").read_text())["outcome"] == "nonfinite"
    newest = checkpoint.load(checkpoint.listed(tmp_path / "checkpoints")[-1])
    assert newest["position"]["step"] == newest["scaler"]["skipped"] == 3
    assert newest["scaler"]["scale"] == 2.0**37
    fresh = Trainer(config).state()["model"]
    trained = {name: value for name, value in fresh.items() if not name.startswith("norm.")}
    assert trained
    assert all(torch.equal(newest["model"][name], value) for name, value in trained.items())
    with pytest.raises(NonFiniteError) as again:
        run(config, out=tmp_path, resume="auto", console=quiet())
    assert str(again.value) == message


def test_overflows_at_a_constant_scale_are_skipped_without_end(small: Small) -> None:
    trainer = Trainer(small('recipe={variant_of = "fp16", loss_scale = 1e12}', *ADAM))
    before = updated(trainer)
    found = [trainer.step() for _ in range(5)]
    assert [(record.loss_scale, record.skipped) for record in found] == [
        (torch.tensor(1e12).item(), step) for step in range(1, 6)
    ]
    assert same(before, updated(trainer))


def test_a_comparison_shows_the_scale_and_goes_on_beside_a_run_on_the_floor(small: Small) -> None:
    config = small(*ON_THE_FLOOR)
    storm, bf16 = compare.run(config, recipes=["fp16", "bf16"], steps=6, console=quiet())["runs"]
    assert "step 4: the gradient at the smallest loss scale" in storm["failure"]
    assert (storm["loss_scale"], storm["skipped"], storm["accuracy"]) == (2.0**37, 4, None)
    assert (bf16["loss_scale"], bf16["skipped"], bf16["failure"]) == (None, 0, None)
    assert len(bf16["curve"]["loss"]) == 6


def test_defaults_of_the_configuration_are_those_of_the_scaler() -> None:
    parameters = signature(GradScaler).parameters
    for name, value in asdict(ScalerConfig()).items():
        assert parameters[name].default == value, name


@pytest.mark.parametrize(
    ("recipe", "scale"),
    [("fp16", 1.0), ("fp16", 1024.0), ("fp16", 65536.0), ("O2", 65536.0), ("bf16", None)],
)
def test_clipping_is_of_the_gradient_without_its_scale(
    small: Small, monkeypatch: pytest.MonkeyPatch, recipe: str, scale: float | None
) -> None:
    use(monkeypatch, SLOPE)
    sgd = ["optimizer.name=sgd", "optimizer.lr=1.0", "train.clip_norm=1.0"]
    trainer = Trainer(
        small(f"recipe={recipe}", *sgd, f"scaler.init_scale={scale or 1.0}"), slope_data()
    )
    with torch.no_grad():
        trainer.model.fc.weight.zero_()
    record = trainer.step()
    assert (record.grad_norm, record.loss_scale, record.skipped) == (2.0, scale, 0)
    update = trainer.model.fc.weight.float()
    torch.testing.assert_close(update, torch.full((1, 16), -0.25), rtol=1e-5, atol=0)


def test_the_norm_in_the_metrics_does_not_depend_on_the_scale(small: Small, tmp_path: Path) -> None:
    norms = []
    for scale in (256.0, 4096.0):
        settings = ["recipe=fp16", "train.clip_norm=0.5", "train.log_every=1", "train.steps=3"]
        out = tmp_path / str(scale)
        run(small(*settings, *ADAM, f"scaler.init_scale={scale}"), out=out, console=quiet())
        norms.append([line["grad_norm"] for line in records(out) if "loss" in line])
    # a larger scale saves the smallest gradients
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)
    assert min(norms[0]) > 0.5


def test_the_schedule_counts_epochs_and_the_optimizer_steps_that_were_taken(small: Small) -> None:
    settings = ["recipe=fp16", "data.batch_size=28", "train.epochs=5", "optimizer.gamma=0.5"]
    trainer = Trainer(small(*settings, "optimizer.name=adamw", "optimizer.lr=0.16"))
    overflow_while(trainer, lambda: trainer.done < 3)
    found = [trainer.step() for _ in range(10)]
    assert [record.lr for record in found] == [
        0.16, 0.16, 0.08, 0.08, 0.04, 0.04, 0.02, 0.02, 0.01, 0.01
    ]  # fmt: skip
    assert [record.skipped for record in found] == [1, 2, 3, 3, 3, 3, 3, 3, 3, 3]
    steps = {entry["step"].item() for entry in trainer.optimizer.state_dict()["state"].values()}
    assert steps == {7}
    assert trainer.done == trainer.total == 10


def test_an_epoch_that_ends_with_a_skip_after_resuming_is_like_any_other(small: Small) -> None:
    config = small("recipe=fp16", "optimizer.gamma=0.5")
    straight, resumed = Trainer(config), Trainer(config)
    for trainer in (straight, resumed):
        overflow_while(trainer, lambda trainer=trainer: trainer.done == 6)
    for _ in range(6):
        straight.step()
    resumed.load_state(straight.state())
    assert [resumed.step() for _ in range(2)] == [straight.step() for _ in range(2)]
    assert resumed.skipped == 1
    assert resumed.optimizer.param_groups[0]["lr"] == 0.05


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_scale(small: Small) -> None:
    trainer = Trainer(small("recipe=fp16"))
    trainer.step()
    with torch.no_grad():
        trainer.model.fc2.bias[3] = math.nan
    before = updated(trainer)
    with pytest.raises(NonFiniteError, match=r"step 2: the loss is not finite; .*fc2\.bias"):
        trainer.step()
    assert (trainer.scaler.get_scale(), trainer.skipped, trainer.done) == (65536.0, 0, 1)
    assert before.keys() == updated(trainer).keys()


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["recipe=fp16"], "output of fc1"),
        (["recipe=fp8_rowwise", "base=fp16"], "output of fc1"),
        (["opt_level=O2"], "output of fc1"),
        (["recipe=bf16"], None),
        (["recipe=fp32"], None),
    ],
    ids=str,
)
def test_an_activation_beyond_the_range_of_fp16_is_named(
    small: Small, settings: list[str], fault: str | None
) -> None:
    trainer = Trainer(small(*settings))
    with torch.no_grad():
        # each weight fits, the sums of their products do not
        trainer.model.fc1.weight.fill_(30000.0)
    if fault is None:
        assert math.isfinite(trainer.step().loss)
        return
    with pytest.raises(NonFiniteError, match=f"step 1: the loss is not finite; .* is {fault}$"):
        trainer.step()
    assert trainer.scaler.get_scale() == 65536.0


@pytest.mark.parametrize("stop", [2, 9])
def test_a_run_stopped_in_a_storm_leaves_what_the_uninterrupted_one_does(
    small: Small, tmp_path: Path, stop: int
) -> None:
    config = small("recipe=fp16", "train.epochs=4", "train.log_every=1", *STORM)
    straight = run(config, out=tmp_path / "straight", console=quiet())
    calls = iter(range(1, 100))
    with pytest.raises(Preempted):
        run(config, out=tmp_path / "parts", stop=lambda: next(calls) >= stop, console=quiet())
    resumed = run(config, out=tmp_path / "parts", resume="auto", console=quiet())
    varying = {"step_ms", "seconds"}
    assert {k: v for k, v in resumed.items() if k not in varying} == {
        k: v for k, v in straight.items() if k not in varying
    }
    lines = [records(tmp_path / name) for name in ("straight", "parts")]
    for line in [*lines[0], *lines[1]]:
        line.pop("step_ms", None)
    assert lines[0] == lines[1]
