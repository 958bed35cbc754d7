"""The trainer on several ranks against one process: every recipe, uneven and empty slices, NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import Job, Outcome, Results
from rich.console import Console
from torch import Tensor
from train.small_models import SLOPE, use
from train.test_mixed_precision import leaves

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
from mixprec.train import checkpoint
from mixprec.train import trainer as train
from mixprec.train.checkpoint import Shards
from mixprec.train.distributed import Ranks, Strategy
from mixprec.train.faults import NonFiniteError
from mixprec.train.loop import run
from mixprec.train.sharded_checkpoint import assembled
from mixprec.train.splits import Dataset, Split
from mixprec.train.trainer import Trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not built in"),
]
SIZES = (2, 3)
STRATEGIES: tuple[Strategy, ...] = ("ddp", "fsdp")
# one with a loss scale, and one of each kind of scale, with noise among them
KINDS = ("fp16", "fp8_delayed", "fp8_rowwise", "nvfp4")


class Slicing(NamedTuple):
    """How many rows a run has, how many a step, and how many steps are looked at."""

    rows: int
    batch: int
    steps: int
    is_bad: bool = False

    def trainer(self, recipe: str, strategy: Strategy = "none") -> Trainer:
        shared = () if strategy == "none" else (ranks(strategy),)
        skips = ["train.on_nonfinite=skip"] if self.is_bad else []
        rows = data(self.rows, **(BAD if self.is_bad else {}))
        return Trainer(config(recipe, *skips, batch=self.batch), rows, *shared)


def whole_blocks(size: int) -> Slicing:
    """Slices begin where blocks of up to 128 rows do, so that all values are one process's."""
    return Slicing(rows=4 * 128 * size, batch=128 * size, steps=STEPS if size == 2 else 5)


# blocks of rows begin elsewhere on each rank; an epoch ends with one row
CUT_BLOCKS = Slicing(rows=ROWS, batch=BATCH, steps=5)
# the second step has the one row, on the first rank; the third has the other, on the second rank
BAD = {"gradient": 46, "batch": 250}
SKIPPED = Slicing(rows=256, batch=64, steps=5, is_bad=True)


def recipes_of(size: int) -> tuple[str, ...]:
    return tuple(RECIPES) if size == 2 else KINDS


def steps(recipe: str, slicing: Slicing, strategy: Strategy) -> Outcome:
    trainer = slicing.trainer(recipe, strategy)
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


def of_each(recipes: tuple[str, ...], slicing: Slicing) -> Outcome:
    """The steps of every recipe under both strategies."""
    with small_net():
        return {
            f"{strategy} {recipe}": steps(recipe, slicing, strategy)
            for strategy in STRATEGIES
            for recipe in recipes
        }


def with_whole_blocks(rank: int) -> Outcome:
    size = dist.get_world_size()
    return of_each(recipes_of(size), whole_blocks(size))


def with_cut_blocks(rank: int) -> Outcome:
    return of_each(KINDS, CUT_BLOCKS)


def skipping(rank: int) -> Outcome:
    # slices of three ranks cut blocks, which fp16 has not
    return of_each(KINDS if dist.get_world_size() == 2 else ("fp16",), SKIPPED)


def going_back(rank: int) -> Outcome:
    runs = [(strategy, recipe) for strategy in STRATEGIES for recipe in KINDS]
    return {f"{strategy} {recipe}": str(went_back(recipe, strategy)) for strategy, recipe in runs}


def went_back(recipe: str, strategy: Strategy) -> Path:
    """The folder of a run of 5 steps, of which the third has a batch that is not finite."""
    settings = ["train.on_nonfinite=rollback", "checkpoint.every=2", "checkpoint.keep=9"]
    rest = ["train.steps=5", "train.log_every=1", f"distributed.strategy={strategy}"]
    out = Path.cwd() / f"{strategy}_{recipe}"
    with small_net(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "dataset_of", lambda _: data(256, batch=BAD["batch"]))
        run(config(recipe, *settings, *rest, batch=64), out=out, console=Console(quiet=True))
    return out


def stopping(rank: int) -> Outcome:
    found: Outcome = {}
    with small_net():
        for strategy in STRATEGIES:
            trainer = Trainer(config("fp16"), data(batch=4), ranks(strategy))
            with pytest.raises(NonFiniteError) as caught:
                list(map(Trainer.step, [trainer] * 5))
            found[strategy] = str(caught.value)
            found[f"{strategy} end"] = digest(whole(trainer.model.state_dict()))
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


def small_beside_large(*sharing: Ranks) -> Tensor:
    """A 16-bit parameter's gradient of four batches, of which one is 2**10 times the others."""
    inputs = torch.full((8, 16), 2.0**-10)
    inputs[3] = 1.0
    rows = Split(inputs=inputs, targets=torch.zeros(8, dtype=torch.int64))
    with pytest.MonkeyPatch.context() as patch:
        use(patch, SLOPE)
        settings = config("bf16_pure", "train.accumulate=4", batch=2)
        trainer = Trainer(settings, Dataset(train=rows, evaluation=rows), *sharing)
        trainer._gradients()
    (gradient,) = (parameter.grad for parameter in trainer.model.parameters())
    assert gradient is not None
    return whole(gradient)


def accumulating(rank: int) -> Outcome:
    return {"gradient": small_beside_large(ranks("fsdp"))}


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
    2: (
        with_whole_blocks,
        skipping,
        going_back,
        stopping,
        with_a_bad_shard,
        accumulating,
        figures,
    ),
    3: (with_whole_blocks, with_cut_blocks, skipping, stopping),
}


@pytest.fixture(scope="module")
def found_of(results_of: Callable[[int], Results]) -> Callable[[int, Job, str], Outcome]:
    """What ranks found for a strategy and recipe; fails where they do not agree to the bit."""
    of_job = cache(lambda size, job: results_of(size)(job))

    def found(size: int, job: Job, case: str) -> Outcome:
        outcome: Outcome = joined([of_rank[case] for of_rank in of_job(size, job)])
        return outcome

    return found


def require_steps_of_one_process(mine: Outcome, alone: Trainer, distance: float) -> None:
    """From equal state: the same weights to the bit, the loss, and the state near afterwards."""
    weights: list[str] = []
    generators = alone.state()["generators"]
    for state, loss, there in zip(mine["states"], mine["losses"], mine["models"], strict=True):
        alone.load_state({**state, "generators": generators})
        with weight_operands(weights):
            assert alone.step().loss == pytest.approx(loss, rel=1e-6, nan_ok=True)
        for name, value in alone.model.state_dict().items():
            away = (value.double() - there[name].double()).norm()
            assert away <= distance * value.double().norm(), name
    assert mine["weights"] == weights
    score = alone.evaluate()
    assert mine["score"] == pytest.approx((score.loss, score.accuracy), rel=1e-2)


def recorded_losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


@cache
def losses_of_one_process(recipe: str, slicing: Slicing) -> list[float]:
    """Of a run of its own, the same for all strategies."""
    alone = slicing.trainer(recipe)
    return [alone.step().loss for _ in range(slicing.steps)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("size", "recipe"), [(n, r) for n in SIZES for r in recipes_of(n)])
def test_each_step_and_the_whole_run_are_those_of_one_process(
    found_of: Callable[..., Outcome], size: int, recipe: str, strategy: Strategy
) -> None:
    slicing = whole_blocks(size)
    mine = found_of(size, with_whole_blocks, f"{strategy} {recipe}")
    with small_net():
        # sums in another order round 16-bit weights elsewhere
        distance = 1e-3 if recipe.endswith("_pure") else 1e-4
        require_steps_of_one_process(mine, slicing.trainer(recipe), distance)
        expected = losses_of_one_process(recipe, slicing)
    assert mine["losses"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("recipe", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_are_near_where_slices_cut_blocks_or_are_empty(
    found_of: Callable[..., Outcome], strategy: Strategy, recipe: str
) -> None:
    mine = found_of(3, with_cut_blocks, f"{strategy} {recipe}")
    with small_net():
        require_steps_of_one_process(mine, CUT_BLOCKS.trainer(recipe), 1e-2)


@pytest.mark.parametrize(("size", "recipe"), [*((2, recipe) for recipe in KINDS), (3, "fp16")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_skipped_steps_and_those_after_them_are_those_of_one_process(
    found_of: Callable[..., Outcome], strategy: Strategy, size: int, recipe: str
) -> None:
    mine = found_of(size, skipping, f"{strategy} {recipe}")
    before, *after = (mine["states"][step] for step in (1, 2, 3))
    for kind in ("model", "numerics", "optimizer"):
        expected = dict(leaves(before[kind]))
        assert all(dict(leaves(state[kind])) == expected for state in after)
    assert [math.isnan(loss) for loss in mine["losses"]] == [False, False, True, False, False]
    with small_net():
        require_steps_of_one_process(mine, SKIPPED.trainer(recipe), 1e-4)


@pytest.mark.parametrize("recipe", KINDS)
def test_a_run_that_went_back_goes_on_as_that_of_one_process(
    on_two: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.chdir(tmp_path)
    alone = went_back(recipe, "none")
    for strategy in STRATEGIES:
        first, *others = (Path(found[f"{strategy} {recipe}"]) for found in on_two(going_back))
        assert others == [first]
        assert json.loads((first / "result.json").read_text())["rollbacks"] == 1
        assert recorded_losses(first) == pytest.approx(recorded_losses(alone), rel=1e-3)
        to, there = (checkpoint.load(first / "checkpoints" / f"step_0000000{n}") for n in (2, 3))
        in_shards = [isinstance(value, Shards) for value in there["model"].values()]
        assert all(in_shards) == any(in_shards) == (strategy == "fsdp")
        to, there = assembled(to, None), assembled(there, None)
        for kind in ("model", "numerics", "optimizer"):
            assert dict(leaves(there[kind])) == dict(leaves(to[kind]))


@pytest.mark.parametrize("size", SIZES)
def test_nan_on_one_rank_stops_all(results_of: Callable[[int], Results], size: int) -> None:
    first, *others = results_of(size)(stopping)
    assert all(other == first for other in others)
    for strategy in STRATEGIES:
        assert first[strategy].endswith("the first tensor at fault is the input batch")


def test_a_bad_shard_of_one_rank_is_seen_by_all(on_two: Results) -> None:
    told = "step 0: a parameter is not finite; the first tensor at fault is parameter head.weight"
    assert on_two(with_a_bad_shard) == [{"told": told}] * 2


def test_batches_of_16_bits_are_added_up_in_float32_in_shards_too(on_two: Results) -> None:
    alone = small_beside_large()
    assert alone.dtype == torch.float32
    # no sum of these in 16 bits
    assert not torch.equal(alone, alone.bfloat16().float())
    assert all(torch.equal(found["gradient"], alone) for found in on_two(accumulating))


def test_result_has_what_gathers_sent(on_two: Results) -> None:
    # rows of three weights and biases, filled up to the same on both ranks, in both passes
    codes, biases = 24 * 32 + 16 * 48 + 3 * 32, 4 * (24 + 16 + 3)
    sent = 2 * (codes + biases) + 3 * 4
    for found in on_two(figures):
        assert found["figure"] == found["by hand"]
        assert found["figure"]["bytes"] == sent
        assert found["figure"]["fp32_bytes"] == 2 * (4 * codes + biases)
    assert "MB sent, 27.0 % of FP32's, 54.0 % of BF16's" in on_two(figures)[0]["shown"]
