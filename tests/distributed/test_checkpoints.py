"""Runs stopped on some ranks and resumed on others; damaged shards; torchrun's command line."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Outcome, Results, run_on_ranks
from rich.console import Console

from distributed.small_runs import config, data, small_net
from mixprec.train import checkpoint, loop, trainer
from mixprec.train.checkpoint import CheckpointError
from mixprec.train.distributed import Ranks
from mixprec.train.loop import Preempted, run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not built in"),
]
# masters, their types and what a loss scaler knows are all of a sharded checkpoint's kinds of state
RECIPES = {"delayed": "fp8_delayed", "masters": '{variant_of = "fp16_pure", update = "masters"}'}


def went(
    recipe: str, name: str, strategy: str, *, stop: int = 0, resume: str | None = None
) -> list[str]:
    """Run in a folder of that name up to a step, or to the end; what was printed."""
    calls, shown = count(1), StringIO()
    settings = ["train.log_every=1", "checkpoint.every=3", f"distributed.strategy={strategy}"]
    with small_net(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "dataset_of", lambda _: data())
        try:
            run(
                config(RECIPES[recipe], *settings, "train.steps=10"),
                out=folder(recipe, name),
                resume=resume,
                console=Console(file=shown, width=300),
                stop=lambda: next(calls) == stop,
            )
        except Preempted:
            pass
    return shown.getvalue().splitlines()


def folder(recipe: str, name: str) -> Path:
    return Path.cwd() / f"{recipe}_{name}"


def losses(recipe: str, name: str) -> list[float]:
    lines = (folder(recipe, name) / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def sharded(rank: int) -> Outcome:
    told = {}
    for recipe in RECIPES:
        went(recipe, "sharded", "fsdp", stop=5)
        told[recipe] = went(recipe, "alone", "fsdp", resume="auto")
    return told


def damaged(rank: int) -> Outcome:
    went("delayed", "damaged", "fsdp", stop=5)
    dist.barrier()
    newest = folder("delayed", "damaged") / "checkpoints" / "step_00000005"
    if rank == 0:
        file = sorted((newest / "shards").iterdir())[-1]
        file.write_bytes(file.read_bytes()[:-8])
    dist.barrier()
    sent, hashed = [0], []
    at_first, verify = Ranks.at_first, checkpoint._verify

    def counted(ranks: Ranks, do: Callable[[], Any]) -> Any:
        value = at_first(ranks, do)
        sent.append(len(pickle.dumps(value)))
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "at_first", counted)
        patch.setattr(checkpoint, "_verify", lambda *file: [hashed.append(file), verify(*file)])
        told = went("delayed", "damaged", "fsdp", resume="auto")
    return {"told": told, "sent": max(sent), "hashed": len(hashed)}


def elsewhere(path: Path, name: str) -> Any:
    raise FileNotFoundError(name)


def unseen(rank: int) -> Outcome:
    """A checkpoint that the first rank can read, and another cannot."""
    went("delayed", "unseen", "fsdp", stop=5)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(checkpoint, "_json", elsewhere)
        with pytest.raises(CheckpointError) as caught:
            went("delayed", "unseen", "fsdp", resume="auto")
    return {"told": str(caught.value)}


JOBS: tuple[Callable[[int], Outcome], ...] = (sharded, damaged, unseen)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What three ranks found, after one process stopped runs that they go on with."""
    place = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for recipe in RECIPES:
            went(recipe, "straight", "none")
            went(recipe, "alone", "none", stop=5)
        yield run_on_ranks(JOBS, place, 3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_of_three_ranks_is_gone_on_with_by_one(runs: Results, recipe: str) -> None:
    told = went(recipe, "sharded", "none", resume="auto")
    assert any(line == "resumed after step 5 of 10" for line in told)
    assert losses(recipe, "sharded") == pytest.approx(losses(recipe, "straight"), rel=1e-4)
    files = folder(recipe, "sharded") / "checkpoints"
    assert [path.name for path in sorted(files.iterdir())] == ["step_00000009", "step_00000010"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_of_one_process_is_gone_on_with_by_three(runs: Results, recipe: str) -> None:
    first, *others = runs(sharded)
    assert any(line == "resumed after step 5 of 10" for line in first[recipe])
    assert all(other[recipe] == [] for other in others)
    assert losses(recipe, "alone") == pytest.approx(losses(recipe, "straight"), rel=1e-4)


def test_a_damaged_shard_is_passed_by_on_all_ranks_alike(runs: Results) -> None:
    first, *others = runs(damaged)
    # the name of a checkpoint, and no more, goes from the one that verifies it to the others
    assert first["hashed"]
    assert all(other["hashed"] == 0 for other in others)
    assert first["sent"] < 1000
    told = first["told"]
    assert any("skipped a damaged checkpoint" in line and "shard-0000" in line for line in told)
    assert any(line == "resumed after step 3 of 10" for line in told)
    assert losses("delayed", "damaged") == pytest.approx(losses("delayed", "straight"), rel=1e-4)


def test_a_checkpoint_that_one_rank_cannot_read_is_one_line_on_all(runs: Results) -> None:
    first, *others = runs(unseen)
    assert others == [first] * 2
    assert first["told"].startswith("checkpoint: got ")
    assert "step_00000005; rank 2 cannot read it (checkpoint: got " in first["told"]
    assert first["told"].endswith("; give a folder that all ranks see")


def torchrun(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A tiny training run of two ranks in a folder, started by torchrun."""
    (folder / "tiny.toml").write_text(
        'model = "gpt"\n'
        "[model_options]\ncontext = 8\nwidth = 8\ndepth = 1\nheads = 1\n"
        "[data]\nbatch_size = 3\n[data.options]\nmax_bytes = 500\n"
        '[train]\ndevice = "cpu"\nlog_every = 1\n[distributed]\nstrategy = "fsdp"\n'
    )
    # a port that is free, where the default one may be taken, and no name to be looked up
    place = ["--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    launch = [sys.executable, "-m", "torch.distributed.run", *place]
    return subprocess.run(
        [*launch, *words], cwd=folder, capture_output=True, text=True, check=False
    )


def test_torchrun_resumes_from_the_command_line(tmp_path: Path) -> None:
    words = ["-m", "mixprec", "train", "tiny.toml", "--out", "out", "--resume", "auto"]
    for steps in (2, 3):
        done = torchrun(tmp_path, *words, "--set", f"train.steps={steps}")
        assert done.returncode == 0, done.stderr
    assert "resumed after step 2 of 3" in done.stdout + done.stderr
    result = json.loads((tmp_path / "out" / loop._RESULT).read_text())
    assert (result["ranks"], result["strategy"], result["steps"]) == (2, "fsdp", 3)


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="threads have no priority here")
def test_exit_code_stands_though_gloo_lets_go_of_tensors_late(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("late_workers.py"))
    done = torchrun(tmp_path, script, "train", "tiny.toml", "--set", "train.steps=2")
    assert done.returncode == 0, done.stderr
    assert "results in runs/tiny" in done.stdout
