"""The trainer on several ranks against one process: every recipe, uneven and empty slices, NaN."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from io import StringIO
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import Job, Outcome, Results
from rich.console import Console

from distributed.small_runs import (
    BATCH,
    ROWS,
    STEPS,
    config,
    data,
    digest,
    joined,
    own,
    ranks,
    small_net,
    weight_operands,
    whole,
)
from mixprec.nn import count_gathers
from mixprec.recipes import RECIPES
from mixprec.train import trainer as train
from mixprec.train.distributed import Strategy
from mixprec.train.faults import NonFiniteError
from mixprec.train.loop import run
from mixprec.train.trainer import Trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not built in"),
]
STRATEGY: dict[int, Strategy] = {2: "fsdp", 3: "ddp"}
# one with a loss scale, and one of each kind of scale, with noise among them
KINDS = ("fp16", "fp8_delayed", "fp8_rowwise", "nvfp4")


class Slicing(NamedTuple):
    """How many rows a run has, how many a step, and how many steps are looked at."""

    rows: int
    batch: int
    steps: int

    def trainer(self, recipe: str, strategy: Strategy = "none") -> Trainer:
        shared = () if strategy == "none" else (ranks(strategy),)
        return Trainer(config(recipe, batch=self.batch), data(self.rows), *shared)


def whole_blocks(size: int) -> Slicing:
    """Slices begin where blocks of up to 128 rows do, so that all values are one process's."""
    return Slicing(rows=4 * 128 * size, batch=128 * size, steps=STEPS)


# blocks of rows begin elsewhere on each rank; an epoch ends with one row
CUT_BLOCKS = Slicing(rows=ROWS, batch=BATCH, steps=5)


def recipes_of(size: int) -> tuple[str, ...]:
    return tuple(RECIPES) if size == 2 else KINDS


def steps(recipe: str, slicing: Slicing) -> Outcome:
    trainer = slicing.trainer(recipe, STRATEGY[dist.get_world_size()])
    states, losses = [], []
    weights: list[str] = []
    for _ in range(slicing.steps):
        state = trainer.state()
        # thousands of numbers, from which a step without dropout draws nothing
        states.append(own({key: state[key] for key in state if "generators" not in key}))
        with weight_operands(weights):
            losses.append(trainer.step().loss)
    end = own(trainer.model.state_dict())
    score = trainer.evaluate()
    return {
        "losses": losses,
        "weights": weights,
        "score": (score.loss, score.accuracy),
        "models": [*(state["model"] for state in states[1:]), end],
        "states": states,
    }


def with_whole_blocks(rank: int) -> Outcome:
    size = dist.get_world_size()
    with small_net():
        return {recipe: steps(recipe, whole_blocks(size)) for recipe in recipes_of(size)}


def with_cut_blocks(rank: int) -> Outcome:
    with small_net():
        return {recipe: steps(recipe, CUT_BLOCKS) for recipe in KINDS}


def with_a_nan(rank: int) -> Outcome:
    found: Outcome = {}
    with small_net():
        for policy in ("stop", "skip"):
            rows = data()
            rows.train.inputs[4, 3] = torch.nan  # type: ignore[attr-defined]
            settings = [f"train.on_nonfinite={policy}", "train.nonfinite_limit=9"]
            sharing = ranks(STRATEGY[dist.get_world_size()])
            trainer = Trainer(config("fp16", *settings), rows, sharing)
            try:
                for _ in range(5):
                    trainer.step()
                found[policy] = f"done {trainer.done}, skipped {trainer.skipped}"
            except NonFiniteError as error:
                found[policy] = str(error)
            found[f"{policy} end"] = digest(whole(trainer.model.state_dict()))
    return found


def with_a_bad_shard(rank: int) -> Outcome:
    """What the state of a model says that is not finite on one rank alone."""
    with small_net(), torch.no_grad():
        trainer = Trainer(config("fp32"), data(), ranks("fsdp"))
        if rank == 1:
            trainer.model.head.weight.to_local()[0, 0] = torch.inf
        with pytest.raises(NonFiniteError) as caught:
            trainer.state()
    return {"told": str(caught.value)}


def figures(rank: int) -> Outcome:
    """A run's figure for its gathers, what it printed, and the same step counted by hand."""
    shown = StringIO()
    with small_net(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "dataset_of", lambda _: data())
        settings = config("fp8_tensorwise", "distributed.strategy=fsdp", "train.steps=2")
        result = run(settings, console=Console(file=shown, width=200))
        trainer = Trainer(settings, data(), ranks("fsdp"))
        with count_gathers(trainer.model) as count:
            trainer.step()
    by_hand = count.traffic().to_dict()
    return {"figure": result["gathers"], "by hand": by_hand, "shown": shown.getvalue()}


JOBS = {
    2: (with_whole_blocks, with_cut_blocks, with_a_nan, with_a_bad_shard, figures),
    3: (with_whole_blocks, with_cut_blocks, with_a_nan),
}


@pytest.fixture(scope="module")
def found_of(results_of: Callable[[int], Results]) -> Callable[[int, Job, str], Outcome]:
    """What ranks found for a job and a recipe; fails where they do not agree to the bit."""
    of_job = cache(lambda size, job: results_of(size)(job))

    def found(size: int, job: Job, recipe: str) -> Outcome:
        outcome: Outcome = joined([of_rank[recipe] for of_rank in of_job(size, job)])
        return outcome

    return found


def require_steps_of_one_process(mine: Outcome, alone: Trainer, distance: float) -> None:
    """From equal state: the same weights to the bit, the loss, and the state near afterwards."""
    weights: list[str] = []
    generators = alone.state()["generators"]
    for state, loss, there in zip(mine["states"], mine["losses"], mine["models"], strict=True):
        alone.load_state({**state, "generators": generators})
        with weight_operands(weights):
            assert alone.step().loss == pytest.approx(loss, rel=1e-6)
        for name, value in alone.model.state_dict().items():
            away = (value.double() - there[name].double()).norm()
            assert away <= distance * value.double().norm(), name
    assert mine["weights"] == weights
    score = alone.evaluate()
    assert mine["score"] == pytest.approx((score.loss, score.accuracy), rel=1e-2)


CASES = [(size, recipe) for size in STRATEGY for recipe in recipes_of(size)]


@pytest.mark.parametrize(("size", "recipe"), CASES)
def test_each_step_and_the_whole_run_are_those_of_one_process(
    found_of: Callable[..., Outcome], size: int, recipe: str
) -> None:
    slicing = whole_blocks(size)
    mine = found_of(size, with_whole_blocks, recipe)
    with small_net():
        alone = slicing.trainer(recipe)
        losses = [alone.step().loss for _ in range(slicing.steps)]
        # sums in another order round 16-bit weights elsewhere
        distance = 1e-3 if recipe.endswith("_pure") else 1e-4
        require_steps_of_one_process(mine, slicing.trainer(recipe), distance)
    assert mine["losses"] == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("recipe", KINDS)
@pytest.mark.parametrize("size", STRATEGY)
def test_steps_are_near_where_slices_cut_blocks_or_are_empty(
    found_of: Callable[..., Outcome], size: int, recipe: str
) -> None:
    mine = found_of(size, with_cut_blocks, recipe)
    with small_net():
        require_steps_of_one_process(mine, CUT_BLOCKS.trainer(recipe), 1e-2)


@pytest.mark.parametrize("size", STRATEGY)
def test_nan_on_one_rank_stops_or_skips_on_all(
    results_of: Callable[[int], Results], size: int
) -> None:
    first, *others = results_of(size)(with_a_nan)
    assert all(other == first for other in others)
    assert first["stop"].endswith("the first tensor at fault is the input batch")
    assert first["skip"].startswith("done 5, skipped ")
    assert not first["skip"].endswith(" 0")


def test_a_bad_shard_of_one_rank_is_seen_by_all(on_two: Results) -> None:
    told = "step 0: a parameter is not finite; the first tensor at fault is parameter head.weight"
    assert on_two(with_a_bad_shard) == [{"told": told}] * 2


def test_result_has_what_gathers_sent(on_two: Results) -> None:
    # rows of three weights and biases, filled up to the same on both ranks, in both passes
    codes, biases = 24 * 32 + 16 * 48 + 3 * 32, 4 * (24 + 16 + 3)
    sent = 2 * (codes + biases) + 3 * 4
    for found in on_two(figures):
        assert found["figure"] == found["by hand"]
        assert found["figure"]["bytes"] == sent
        assert found["figure"]["fp32_bytes"] == 2 * (4 * codes + biases)
    assert "MB sent, 27.0 % of FP32's, 54.0 % of BF16's" in on_two(figures)[0]["shown"]
