"""Two ranks on bad days: asked to stop, not finite, one at fault, one gone."""

from __future__ import annotations

import io
import json
import math
import os
import signal
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from train.conftest import write_idx_folder
from train.small_models import SMALL_NET

from mixprec.cli.main import main
from mixprec.train import checkpoint, models
from mixprec.train.trainer import Trainer

pytestmark = pytest.mark.slow
RANKS = 2
# less than what a rank waits for another that is silent: none of these days takes that long
LIMIT_SECONDS = 900


class CableError(Exception):
    """What happens to one rank in the middle of a step."""


def at_step(trainer: Trainer, rank: int, step: int) -> bool:
    return (trainer.ranks.rank, trainer.done) == (rank, step)


def asked_to_stop(trainer: Trainer) -> None:
    if at_step(trainer, 1, 2):
        os.kill(os.getpid(), signal.SIGUSR1)


def raises(trainer: Trainer) -> None:
    if at_step(trainer, 1, 2):
        raise CableError("the cable is out")


def dies(trainer: Trainer) -> None:
    if at_step(trainer, 1, 2):
        os.kill(os.getpid(), signal.SIGKILL)


def nothing(_: Trainer) -> None:
    """A day like any other."""


def nan_on_one_rank(batches: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(inputs * math.nan, targets) for inputs, targets in batches]


SCENES: dict[str, tuple[Callable[[Trainer], None], list[str]]] = {
    "stopped": (asked_to_stop, []),
    "gone on": (nothing, ["--resume", "auto"]),
    "skip": (nothing, ["--set", "train.on_nonfinite=skip"]),
    "rollback": (nothing, ["--set", "train.on_nonfinite=rollback"]),
    "stop": (nothing, []),
    "raises": (raises, []),
    "dies": (dies, []),
}
"""What happens to rank 1 within a step, and how the command goes on; the last one ends it."""
POISONED = {"skip", "rollback", "stop"}
BAD = 5
FAULT = "step 6: the loss is not finite; the first tensor at fault is the input batch"


def play(scene: str) -> tuple[int, str]:
    """One command on this rank: its exit code and what it printed to standard error."""
    act, words = SCENES[scene]
    loss_of, batches = Trainer.loss_of, Trainer.batches

    def in_a_step(trainer: Trainer, inputs: Tensor, targets: Tensor) -> Tensor:
        act(trainer)
        return loss_of(trainer, inputs, targets)

    def poisoned(trainer: Trainer, step: int) -> Any:
        found = batches(trainer, step)
        bad = scene in POISONED and step == BAD and trainer.ranks.rank == 1
        return nan_on_one_rank(found) if bad else found

    Trainer.loss_of, Trainer.batches = in_a_step, poisoned
    folder = scene if scene != "gone on" else "stopped"
    err = io.StringIO()
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(err):
            main(["train", "small.toml", "--out", f"runs/{folder}", *words])
    except SystemExit as exit_:
        return exit_.code or 0, err.getvalue()
    except Exception as error:  # of the program itself: a traceback, exit code 1
        return 1, f"{type(error).__name__}: {error}"
    finally:
        Trainer.loss_of, Trainer.batches = loss_of, batches
    return -1, ""


def with_store(init: Callable[..., None], own: dist.Store, backend: str, **rest: Any) -> None:
    init(backend, **{**rest, "store": own})


def rank_main(rank: int, folder: str) -> None:
    os.chdir(folder)
    torch.set_num_threads(1)
    models.MODELS = {"mnist_cnn": SMALL_NET}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(RANKS), "TORCHELASTIC_ERROR_FILE": f"error.{rank}"}
    init = dist.init_process_group
    for scene in SCENES:
        # a file, since a port that is free now may be taken by the time it is used
        store = dist.FileStore(f"{folder}/{scene}.store", RANKS)
        dist.init_process_group = partial(with_store, init, store)
        code, err = play(scene)
        Path(f"{scene}.{rank}").write_text(json.dumps({"code": code, "err": err}))


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what each rank's commands ended with."""
    folder = tmp_path_factory.mktemp("days")
    (folder / "small.toml").write_text(
        f'[data]\npath = "{write_idx_folder(folder)}"\nbatch_size = 8\n'
        '[optimizer]\nname = "adamw"\nlr = 0.01\n[train]\nsteps = 7\nlog_every = 1\n'
        "[checkpoint]\nevery = 2\n"
    )
    context = mp.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(rank, str(folder))) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT_SECONDS)
    alive = [rank.is_alive() for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert not any(alive), f"still running after {LIMIT_SECONDS} seconds: {alive}"
    return folder


def ends(days: Path, scene: str) -> list[tuple[int, str]]:
    found = [json.loads((days / f"{scene}.{rank}").read_text()) for rank in range(RANKS)]
    return [(each["code"], each["err"]) for each in found]


def result(days: Path, scene: str) -> dict[str, Any]:
    return json.loads((days / "runs" / scene / "result.json").read_text())


def weights(days: Path, scene: str) -> dict[str, Tensor]:
    found = checkpoint.newest(days / "runs" / scene / "checkpoints", print)
    assert found is not None
    return found[1]["model"]


def test_a_signal_to_one_rank_stops_all_after_the_same_step(days: Path) -> None:
    assert [code for code, _ in ends(days, "stopped")] == [75, 75]
    assert [code for code, _ in ends(days, "gone on")] == [0, 0]
    finished = result(days, "stopped")
    assert (finished["outcome"], finished["steps"], finished["ranks"]) == ("finished", 7, RANKS)


def test_ranks_skip_alike_what_is_not_finite_on_one(days: Path) -> None:
    assert [code for code, _ in ends(days, "skip")] == [0, 0]
    assert (result(days, "skip")["skipped"], result(days, "skip")["steps"]) == (1, 7)
    assert all(value.isfinite().all() for value in weights(days, "skip").values())
    lines = (days / "runs" / "skip" / "metrics.jsonl").read_text().splitlines()
    errors = [json.loads(line)["error"] for line in lines if "error" in json.loads(line)]
    assert errors == [FAULT]


def test_ranks_go_back_alike(days: Path) -> None:
    assert [code for code, _ in ends(days, "rollback")] == [0, 0]
    assert (result(days, "rollback")["rollbacks"], result(days, "rollback")["steps"]) == (1, 7)


def test_ranks_stop_alike(days: Path) -> None:
    for code, err in ends(days, "stop"):
        assert code == 3
        assert FAULT in err
    assert (result(days, "stop")["outcome"], result(days, "stop")["steps"]) == ("nonfinite", 5)


def test_a_rank_that_raises_ends_all_with_its_error_shown(days: Path) -> None:
    (other, said), (code, err) = ends(days, "raises")
    assert (code, err) == (1, "CableError: the cable is out")
    assert other == 1
    assert said
    recorded = json.loads((days / "error.1").read_text())
    assert "the cable is out" in json.dumps(recorded)
    assert result(days, "raises")["outcome"] == "error"


def test_a_rank_that_is_gone_ends_the_other(days: Path) -> None:
    ended = json.loads((days / "dies.0").read_text())
    assert ended["code"] == 1
    assert not (days / "dies.1").exists()
    assert (result(days, "dies")["outcome"], result(days, "dies")["exit_code"]) == ("error", 1)
