"""Alarms of training runs: each provoked in a run, all silent in a healthy one of every recipe."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from mixprec.nn.state import converted_layers
from mixprec.recipes import RECIPES
from mixprec.train import run
from mixprec.train import trainer as trainer_module
from mixprec.train.alarms import RunAlarms
from mixprec.train.config import Config
from mixprec.train.faults import NonFiniteError
from mixprec.train.models import ModelEntry
from mixprec.train.trainer import Trainer
from train.small_models import SMALL_NET, SmallNet, use

Small = Callable[..., Config]
HEALTHY = [
    *("optimizer.name=adamw", "optimizer.lr=0.003", "train.epochs=3"),
    *("inspect.every=5", "checkpoint.every=99"),
]


@pytest.fixture(autouse=True)
def _small_net(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SMALL_NET)


class Ran:
    """What a run said: its alarms by line of its metrics, its other lines, and its console."""

    def __init__(self, config: Config, folder: Path, fails: bool = False) -> None:
        console = Console(file=io.StringIO(), width=200)
        self.error: NonFiniteError | None = None
        try:
            run(config, out=folder, console=console)
        except NonFiniteError as error:
            self.error = error
        assert (self.error is not None) == fails
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.records = [json.loads(line) for line in lines]
        self.alarms = [(line["step"], line["alarm"]) for line in self.records if "alarm" in line]
        self.shown = console.file.getvalue()

    def of(self, kind: str) -> list[tuple[int, dict[str, Any]]]:
        found = [(step, alarm) for step, alarm in self.alarms if alarm["kind"] == kind]
        # shown as often as it is written: once for a layer
        assert self.shown.count(f"{kind.replace('_', ' ')}") >= len(found)
        assert len({alarm["layer"] for _, alarm in found}) == len(found)
        return found


EVERYDAY = ("fp16", "fp8_delayed", "nvfp4")
BY_RECIPE = [
    pytest.param(name, marks=[] if name in EVERYDAY else pytest.mark.slow) for name in RECIPES
]


@pytest.mark.parametrize("recipe", BY_RECIPE)
def test_a_healthy_run_of_every_recipe_is_silent(small: Small, tmp_path: Path, recipe: str) -> None:
    ran = Ran(small(f"recipe={recipe}", *HEALTHY), tmp_path)
    assert ran.alarms == []
    assert "ALARM" not in ran.shown
    losses = [line["loss"] for line in ran.records if "loss" in line]
    assert losses[-1] < losses[0]
    sampled = [line for line in ran.records if "statistics" in line]
    quantises = any(spec is not None for spec in RECIPES[recipe].specs)
    assert bool(sampled) == quantises or recipe == "fp64_emulated"


def test_a_scale_that_is_not_rolled_any_more(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attach_for_two_steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def after(*_: Any) -> None:
            steps.append(1)
            if len(steps) <= 2:
                trainer_module.layers.sync_scales(model)
            for _, layer in converted_layers(model):
                layer.forget_weight()

        steps: list[int] = []
        optimizer.register_step_post_hook(after)

    monkeypatch.setattr(trainer_module.layers, "attach", attach_for_two_steps)
    options = ["optimizer.lr=0.03", "train.epochs=4", "inspect.every=3"]
    ran = Ran(small("recipe=fp8_delayed", *HEALTHY, *options), tmp_path)
    step, alarm = ran.of("stale_scale")[0]
    figures = alarm["figures"]
    assert figures["steps"] > 16
    assert figures["largest_amax"] >= 4 * figures["smallest_amax"]
    rows = [
        row
        for line in ran.records
        for row in line.get("statistics", [])
        if row["layer"] == alarm["layer"]
        and f"{row['product']}.{row['operand']}" == alarm["operand"]
        and line["step"] >= step - figures["steps"]
    ]
    assert len({row["scale"] for row in rows}) == 1


def test_a_gradient_that_dies(small: Small, tmp_path: Path) -> None:
    # one step of a huge rate leaves no unit that fires
    options = ["optimizer.name=sgd", "optimizer.lr=30", "train.epochs=2", "inspect.every=1"]
    ran = Ran(small("recipe=bf16", *options), tmp_path)
    layers = {alarm["layer"] for _, alarm in ran.of("dead_gradient")}
    # of the last layer the weight, by which nothing is multiplied any more
    assert layers == {"conv", "norm", "fc1", "fc2"}


def test_weights_that_outrun_their_history_saturate(small: Small, tmp_path: Path) -> None:
    options = ["optimizer.lr=0.5", "train.epochs=1", "inspect.every=1"]
    ran = Ran(small("recipe=fp8_delayed", *HEALTHY, *options), tmp_path)
    step, alarm = ran.of("saturation")[0]
    assert step >= 3
    (row,) = (
        row
        for line in ran.records
        if line["step"] == step
        for row in line.get("statistics", [])
        if row["layer"] == alarm["layer"]
        and f"{row['product']}.{row['operand']}" == alarm["operand"]
    )
    assert row["saturation"] == alarm["figures"]["saturation"] > 0.01


def test_a_loss_scale_that_collapses(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, ModelEntry(build=SmallNet, loss=lambda y, t: 3e4 * F.nll_loss(y, t)))
    ran = Ran(small("recipe=fp16", *HEALTHY, "train.log_every=1"), tmp_path)
    ((step, alarm),) = ran.of("loss_scale_collapse")
    scales = {line["step"]: line["loss_scale"] for line in ran.records if "loss" in line}
    assert alarm["figures"] == {"loss_scale": 4.0, "highest": 65536.0, "floor": 1.0}
    assert scales[step] == 4.0
    assert scales[step - 1] == 8.0


def test_updates_that_bfloat16_weights_cannot_hold(small: Small, tmp_path: Path) -> None:
    options = ["optimizer.lr=1e-5", "train.epochs=1"]
    ran = Ran(small("recipe=bf16-true", *HEALTHY, *options), tmp_path)
    found = {alarm["layer"]: (step, alarm) for step, alarm in ran.of("lost_updates")}
    step, alarm = found["fc1"]
    assert (step, alarm["operand"]) == (5, "weight")
    assert alarm["figures"]["lost"] > 0.9


@pytest.mark.filterwarnings("ignore:convert. nothing was converted:UserWarning")
def test_a_conversion_that_finds_no_layer(small: Small, tmp_path: Path) -> None:
    skip = 'convert.skip=["conv", "fc1", "fc2"]'
    ran = Ran(small("recipe=mxfp8", skip, "train.epochs=1"), tmp_path)
    ((step, alarm),) = ran.of("nothing_quantised")
    assert step == 0
    assert re.match(r"none of \d+ modules was converted: ", alarm["text"])
    # in 16 bits the region casts what the conversion leaves
    assert Ran(small("recipe=bf16", skip, "train.epochs=1"), tmp_path / "region").alarms == []


class Beside(SmallNet):
    """Multiplies by the layers' weights beside the layers."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(F.linear(x.flatten(1)[:, :324], self.fc1.weight, self.fc1.bias))
        return F.log_softmax(F.linear(hidden, self.fc2.weight, self.fc2.bias), dim=1)


@pytest.mark.filterwarnings("ignore:watch. no product of a converted layer:UserWarning")
def test_converted_layers_that_nobody_calls(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, ModelEntry(build=Beside, loss=F.nll_loss))
    ran = Ran(small("recipe=fp8_rowwise", *HEALTHY, "train.epochs=1"), tmp_path)
    ((step, alarm),) = ran.of("nothing_quantised")
    assert step == 5
    assert alarm["text"].startswith("none of 3 converted layers made a product in a step: conv")


class Elementwise(nn.Module):
    """No product that a region could run in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        return F.log_softmax(self.weight * x.flatten(1)[:, :1], dim=1)


@pytest.mark.filterwarnings("ignore:convert. nothing was converted:UserWarning")
def test_a_region_in_which_nothing_runs_in_16_bits(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, ModelEntry(build=Elementwise, loss=F.nll_loss))
    ran = Ran(small("recipe=bf16", "train.epochs=1"), tmp_path)
    ((step, alarm),) = ran.of("nothing_quantised")
    assert step == 1
    assert re.fullmatch(r"none of the \d+ operations in the region ran in bfloat16", alarm["text"])


# ---- the first tensor that is not finite


class Failing(SmallNet):
    """Goes wrong in one operation, from the third step on."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.calls, self.function = 0, function

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        y = super().forward(x)
        return y + self.function(y) if self.calls > 2 else y


def fails_by(monkeypatch: pytest.MonkeyPatch, function: Callable[[Tensor], Tensor]) -> None:
    use(monkeypatch, ModelEntry(build=lambda: Failing(function), loss=F.nll_loss))


@pytest.mark.parametrize("recipe", ["fp32", "fp16", "nvfp4"])
def test_the_operation_that_made_a_loss_nan(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    fails_by(monkeypatch, torch.log)
    ran = Ran(small(f"recipe={recipe}", "train.log_every=1"), tmp_path, fails=True)
    ((step, alarm),) = ran.of("nonfinite")
    assert step == ran.error.step == 3
    assert alarm["layer"] == ""
    # of log-softmax's output, which is below 0
    assert alarm["text"].startswith(
        "first in forward: log in the model itself, forward: float32 [8"
    )
    assert alarm["figures"]["input0_largest"] < 0
    assert alarm["figures"]["output_nan"] == 80
    assert ran.records[-1] == {"step": 3, "error": str(ran.error)}


def test_the_operation_that_made_a_gradient_nan(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails_by(monkeypatch, lambda y: (y * 0).sqrt())
    config = small("recipe=fp8_tensorwise", "train.clip_norm=1.0")
    ((step, alarm),) = Ran(config, tmp_path, fails=True).of("nonfinite")
    assert step == 3
    assert "div in the model itself, backward (SqrtBackward0)" in alarm["text"]


def test_an_overflow_on_the_floor_of_the_loss_scale(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, ModelEntry(build=SmallNet, loss=lambda y, t: 1e9 * F.nll_loss(y, t)))
    ran = Ran(small("recipe=fp16", "scaler.init_scale=16"), tmp_path, fails=True)
    assert [alarm["kind"] for _, alarm in ran.alarms] == ["loss_scale_collapse", "nonfinite"]
    _, alarm = ran.alarms[-1]
    assert ", backward (" in alarm["text"]
    assert alarm["figures"]["output_inf"] > 0


def test_a_parameter_that_an_evaluation_finds(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(SmallNet):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training and self.fc2.bias.isfinite().all():
                self.fc2.bias.data[3] = math.nan
            return super().forward(x)

    use(monkeypatch, ModelEntry(build=Late, loss=F.nll_loss))
    ran = Ran(small("recipe=fp32", "train.epochs=1"), tmp_path, fails=True)
    ((_, alarm),) = ran.of("nonfinite")
    assert alarm["layer"] == "fc2"
    assert "fc2.bias was not finite before the step: float32 [10]" in alarm["text"]


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_the_replay_has_the_step_s_noise_and_dropout_and_changes_nothing(
    small: Small, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    fails_by(monkeypatch, lambda y: (y * 0).sqrt())
    config = small(f"recipe={recipe}", "train.clip_norm=1.0", "train.accumulate=2")
    trainer = Trainer(config)
    inside = trainer.criterion
    seen: list[tuple[float, list[Tensor]]] = []

    def criterion(output: Tensor, targets: Tensor) -> Tensor:
        loss = inside(output, targets)
        counts = [
            buffer.clone()
            for _, layer in converted_layers(trainer.model)
            for buffer in layer.numerics_buffers().values()
            if not buffer.is_floating_point()
        ]
        seen.append((loss.item(), counts))
        return loss

    trainer.criterion = criterion
    trainer.step()
    alarms = RunAlarms(trainer)
    with pytest.raises(NonFiniteError) as failed:
        trainer.step()
    before, generator = trainer.state(), torch.get_rng_state()
    batches = seen[2:4]
    (alarm,) = alarms.failed(failed.value)
    assert (alarm.kind, seen[-2:]) == ("nonfinite", batches)
    assert (len(batches[0][1]) > 0) == (recipe == "nvfp4")
    after = trainer.state()
    assert all(torch.equal(before["model"][k], v) for k, v in after["model"].items())
    assert str(before["numerics"]) == str(after["numerics"])
    assert torch.equal(generator, torch.get_rng_state())
    assert trainer.done == 1


@pytest.mark.parametrize("recipe", ["bf16_pure", "O2", "fp8_delayed"])
def test_looking_changes_no_bit_of_the_training(small: Small, tmp_path: Path, recipe: str) -> None:
    models = []
    for every in ([], ["inspect.every=1"]):
        folder = tmp_path / str(len(every))
        Ran(small(f"recipe={recipe}", "train.epochs=1", "train.save_model=true", *every), folder)
        models.append(torch.load(folder / "model.pt", weights_only=True))
    assert all(torch.equal(models[0][name], value) for name, value in models[1].items())
