"""Values that are not finite: what is skipped, what is gone back to, and when a run stops."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import Tensor

from mixprec.recipes import RECIPES
from mixprec.train import checkpoint, run
from mixprec.train.config import Config
from mixprec.train.faults import NonFiniteError
from mixprec.train.loop import Preempted
from mixprec.train.trainer import Trainer
from train.small_models import SMALL_NET, use
from train.test_mixed_precision import leaves

Small = Callable[..., Config]
RECIPE_SETTINGS = [*(f"recipe={name}" for name in RECIPES), "opt_level=O2", "opt_level=O3"]
SKIP, ROLLBACK = "train.on_nonfinite=skip", "train.on_nonfinite=rollback"
BAD = 4
"""The step, from 0, whose batch or gradient is not finite."""
WHERE = ["batch", "gradient"]


@pytest.fixture(autouse=True)
def _small_net(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SMALL_NET)


@pytest.fixture
def adam(small: Small) -> Small:
    return lambda *settings: small("optimizer.name=adamw", "optimizer.lr=0.01", *settings)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def poison(monkeypatch: pytest.MonkeyPatch, where: str, *steps: int) -> None:
    """Have the batch, or the gradient of a finite loss, be NaN in those steps, from 0."""
    batches, start = Trainer.batches, Trainer.__init__

    def bad_batches(trainer: Trainer, step: int) -> list[tuple[Tensor, Tensor]]:
        found = batches(trainer, step)
        return [(x * math.nan, y) for x, y in found] if step in steps else found

    def with_hook(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        start(trainer, *args, **kwargs)

        def hook(grad: Tensor) -> Tensor:
            return grad * math.nan if trainer.done in steps else grad

        trainer.model.fc2.weight.register_hook(hook)

    if where == "batch":
        monkeypatch.setattr(Trainer, "batches", bad_batches)
    else:
        monkeypatch.setattr(Trainer, "__init__", with_hook)


def numbers(trainer: Trainer) -> dict[str, Any]:
    """Every leaf of a trainer's state that a step's numbers come from."""
    state = trainer.state()
    kept = ("model", "numerics", "optimizer", "scheduler", "generators", "position")
    return dict(leaves({name: state[name] for name in kept}))


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]


def stepped(trainer: Trainer, until: int) -> Trainer:
    while trainer.done < until:
        trainer.step()
    return trainer


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("recipe", RECIPE_SETTINGS)
def test_a_skipped_step_leaves_what_no_step_leaves(
    adam: Small, monkeypatch: pytest.MonkeyPatch, recipe: str, where: str
) -> None:
    untouched = stepped(Trainer(adam(recipe)), BAD)
    untouched.done += 1
    expected = numbers(stepped(untouched, 9))
    poison(monkeypatch, where, BAD)
    trainer = stepped(Trainer(adam(recipe, SKIP)), 9)
    assert trainer.skipped == 1
    if where == "batch" or trainer.recipe.loss_scale is None:
        assert differing(numbers(trainer), expected) == []


def test_a_skipped_step_is_shown_and_recorded(
    adam: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    poison(monkeypatch, "batch", BAD)
    console = quiet()
    result = run(adam(SKIP, "train.log_every=1"), out=tmp_path, console=console)
    said = console.file.getvalue()
    fault = f"step {BAD + 1}: the loss is not finite; the first tensor at fault is the input batch"
    assert f"{fault}; skipped\n" in said
    assert f"step {BAD + 2} loss" in said
    assert "skipped 1" in said
    assert (result["outcome"], result["exit_code"], result["skipped"]) == ("finished", 0, 1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["error"] for line in lines if "error" in line] == [fault]
    assert [line["loss"] for line in lines if "loss" in line][BAD] is None


@pytest.mark.parametrize("recipe", ["recipe=fp32", "recipe=fp16", "opt_level=O3"])
def test_so_many_skipped_in_a_row_stop_the_run(
    adam: Small, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    poison(monkeypatch, "batch", 1, 2, 4, 5, 6, 7)
    trainer = stepped(Trainer(adam(recipe, SKIP, "train.nonfinite_limit=3")), 6)
    with pytest.raises(NonFiniteError, match=r"step 7: .* is the input batch; 3 steps in a"):
        trainer.step()
    assert trainer.done == 6


def test_the_count_in_a_row_is_in_the_checkpoint(
    adam: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, "batch", 4, 5, 6)
    config = adam(SKIP, "train.nonfinite_limit=3")
    state = stepped(Trainer(config), 6).state()
    resumed = Trainer(config)
    resumed.load_state(state)
    with pytest.raises(NonFiniteError, match="3 steps in a row were skipped"):
        resumed.step()


def test_an_overflow_that_lowers_the_loss_scale_is_no_fault(adam: Small) -> None:
    hot = [f"scaler.init_scale={2.0**40}", "recipe=fp16", SKIP, "train.nonfinite_limit=1"]
    trainer = stepped(Trainer(adam(*hot)), 3)
    assert (trainer.skipped, trainer.faults.in_a_row) == (3, 0)
    floor = adam(*hot[:3], f"scaler.min_scale={2.0**39}", "train.nonfinite_limit=2")
    with pytest.raises(NonFiniteError, match=r"smallest loss scale, .*; 2 steps in a row"):
        stepped(Trainer(floor), 4)


def went_back(config: Config, to: int, position: int, until: int) -> dict[str, Any]:
    """The numbers of a trainer whose weights of step `to` go on with the data of `position`."""
    trainer = stepped(Trainer(config), to)
    for step in range(to + 1, position + 1):
        if step % trainer.steps_per_epoch == 0:
            trainer._end_epoch()
    trainer.done = position
    return numbers(stepped(trainer, until))


@pytest.mark.parametrize("recipe", RECIPE_SETTINGS)
def test_rollback_goes_on_from_the_newest_checkpoint_after_the_fault(
    adam: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recipe: str
) -> None:
    settings = [recipe, "scaler.init_scale=8.0"]
    expected = went_back(adam(*settings), to=6, position=8, until=9)
    poison(monkeypatch, "gradient" if "bf16" in recipe else "batch", 7)
    config = adam(*settings, ROLLBACK, "checkpoint.every=3", "train.steps=9")
    console = quiet()
    result = run(config, out=tmp_path, console=console)
    assert (result["steps"], result["rollbacks"]) == (9, 1)
    assert "; back to step 6, and on after the data of 8" in console.file.getvalue()
    state = checkpoint.load(tmp_path / "checkpoints" / "step_00000009")
    found = dict(leaves({name: state[name] for name in ("model", "numerics", "optimizer")}))
    assert differing(found, {name: expected[name] for name in found}) == []
    assert state["scheduler"]["last_epoch"] == 1


def stopping_after(steps: int) -> Callable[[], bool]:
    calls: Iterator[int] = iter(range(1, 10_000))
    return lambda: next(calls) >= steps


@pytest.mark.parametrize("policy", [SKIP, ROLLBACK])
def test_resumed_runs_equal_the_one_with_the_fault(
    adam: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str
) -> None:
    poison(monkeypatch, "batch", 5, 7)
    settings = ["recipe=fp8_delayed", "base=bf16", "checkpoint.every=3", "checkpoint.keep=1"]
    config = adam(policy, *settings, "train.steps=9")
    run(config, out=tmp_path / "straight", console=quiet())
    expected = dict(leaves(checkpoint.newest(tmp_path / "straight" / "checkpoints", print)[1]))
    for every in (1, 2, 4, 6):
        folder = tmp_path / str(every)
        while not (folder / "result.json").exists() or outcome(folder) == "preempted":
            with suppress(Preempted):
                ask = stopping_after(every)
                run(config, out=folder, resume="auto", stop=ask, console=quiet())
        found = dict(leaves(checkpoint.newest(folder / "checkpoints", print)[1]))
        assert differing(found, expected) == [], every


def outcome(folder: Path) -> str:
    return json.loads((folder / "result.json").read_text())["outcome"]


def test_a_fault_before_the_first_checkpoint_goes_back_to_the_start(
    adam: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = went_back(adam(), to=0, position=2, until=3)
    poison(monkeypatch, "batch", 1)
    run(adam(ROLLBACK, "train.steps=3"), out=tmp_path, console=quiet())
    state = checkpoint.load(tmp_path / "checkpoints" / "step_00000003")
    found = dict(leaves({"model": state["model"]}))
    assert differing(found, {name: expected[name] for name in found}) == []


def test_so_many_ways_back_stop_the_run(
    adam: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    poison(monkeypatch, "batch", 1, 4, 7)
    config = adam(ROLLBACK, "train.nonfinite_limit=2", "checkpoint.every=1")
    with pytest.raises(NonFiniteError, match=r"step 8: .*; the run went back 2 times, as often as"):
        run(config, out=tmp_path, console=quiet())
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["outcome"], result["exit_code"], result["steps"]) == ("nonfinite", 3, 7)
    assert "went back 2 times" in result["error"]


def test_no_way_back_without_a_folder(adam: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, "batch", 1)
    with pytest.raises(NonFiniteError, match=r"step 2: the loss is not finite"):
        run(adam(ROLLBACK), console=quiet())


def test_a_run_that_stopped_may_go_on_by_another_policy(
    adam: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    poison(monkeypatch, "batch", 4)
    with pytest.raises(NonFiniteError):
        run(adam("checkpoint.every=2"), out=tmp_path, console=quiet())
    result = run(adam(SKIP, "checkpoint.every=2"), out=tmp_path, resume="auto", console=quiet())
    assert (result["skipped"], result["steps"]) == (1, 14)


def test_an_evaluation_that_is_not_finite_is_gone_back_from(
    adam: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    evaluate, calls = Trainer.evaluate, iter([True, False, False])

    def once(trainer: Trainer) -> Any:
        if next(calls):
            raise NonFiniteError(trainer.done, "the evaluation loss", "output of fc2")
        return evaluate(trainer)

    monkeypatch.setattr(Trainer, "evaluate", once)
    config = adam(ROLLBACK, "checkpoint.every=5", "train.steps=9")
    assert run(config, out=tmp_path, console=quiet())["rollbacks"] == 1


def test_skipping_changes_no_bit_of_finite_steps(adam: Small) -> None:
    clipped = ["train.clip_norm=100.0", "optimizer.options={fused=true}", "train.accumulate=2"]
    for settings in ([], clipped):
        plain, checked = (Trainer(adam(*settings, policy)) for policy in ("train.seed=1", SKIP))
        assert differing(numbers(stepped(checked, 5)), numbers(stepped(plain, 5))) == []


def test_a_run_that_was_asked_to_stop_under_another_policy_has_a_way_back(
    adam: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    often = ["checkpoint.every=4", "checkpoint.keep=1"]
    with pytest.raises(Preempted):
        run(adam(*often), out=tmp_path, stop=stopping_after(6), console=quiet())
    poison(monkeypatch, "batch", 6)
    result = run(adam(ROLLBACK, *often), out=tmp_path, resume="auto", console=quiet())
    assert (result["rollbacks"], result["outcome"]) == (1, "finished")


def test_a_state_that_is_not_worth_keeping_is_no_way_back(adam: Small) -> None:
    trainer = stepped(Trainer(adam(ROLLBACK)), 2)
    trainer.state(is_way_back=True)
    stepped(trainer, 4).model.fc2.bias.data[0] = math.inf
    with pytest.raises(NonFiniteError, match=r"is parameter fc2\.bias"):
        trainer.state(is_way_back=True)
    assert trainer.faults.way_back == 2
