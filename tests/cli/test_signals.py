"""Signals to `mixprec train`: a checkpoint at the end of the step, exit code 75, and going on."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mixprec.train.config import Config, load
from mixprec.train.trainer import Trainer

STOPS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def send(monkeypatch: pytest.MonkeyPatch, during: int, *numbers: int) -> None:
    """Have this process get those signals in the step after so many."""
    step = Trainer.step

    def interrupted(trainer: Trainer) -> Any:
        if trainer.done == during:
            for number in numbers:
                os.kill(os.getpid(), number)
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", interrupted)


@pytest.mark.parametrize("number", STOPS, ids=lambda number: number.name)
def test_a_signal_saves_a_checkpoint_and_is_code_75(
    cli: Callable, config: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = [signal.getsignal(each) for each in STOPS]
    send(monkeypatch, 2, number)
    code, _, err = cli("train", str(config))
    assert code == 75
    assert "a checkpoint is in runs/small/checkpoints/step_00000003" in err
    result = json.loads(Path("runs/small/result.json").read_text())
    assert (result["outcome"], result["exit_code"], result["steps"]) == ("preempted", 75, 3)
    assert [signal.getsignal(each) for each in STOPS] == before
    assert cli("train", str(config), "--resume", "auto").code == 0
    result = json.loads(Path("runs/small/result.json").read_text())
    assert (result["outcome"], result["exit_code"], result["steps"]) == ("finished", 0, 7)


def test_a_second_sigint_stops_at_once(
    cli: Callable, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    send(monkeypatch, 3, signal.SIGINT, signal.SIGINT)
    assert cli("train", str(config)).code == 130
    assert [path.name for path in Path("runs/small/checkpoints").iterdir()] == ["step_00000002"]
    assert not Path("runs/small/result.json").exists()
    assert signal.getsignal(signal.SIGINT) == before


def test_a_signal_after_the_last_step_changes_nothing(
    cli: Callable, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(monkeypatch, 6, signal.SIGTERM, signal.SIGTERM, signal.SIGUSR1)
    assert cli("train", str(config)).code == 0


@pytest.mark.parametrize(
    ("kind", "outcome", "code"), [(OSError, "error", 1), (UnicodeError, "wrong input", 2)]
)
def test_an_error_is_in_the_result(
    cli: Callable,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
    outcome: str,
    code: int,
) -> None:
    def broken(_: Trainer) -> None:
        raise kind("the cable is out")

    monkeypatch.setattr(Trainer, "step", broken)
    assert cli("train", str(config)).code == code
    result = json.loads(Path("runs/small/result.json").read_text())
    told = {"steps": 0, "error": "the cable is out"}
    assert result == {"outcome": outcome, "exit_code": code} | told


def images(workers: int) -> Config:
    small = [f"model_options.{key}={n}" for key, n in dict(size=8, patch=4, width=12).items()]
    shape = ["model_options.depth=1", "model_options.classes=7", "data.options.items=22"]
    return load(None, ["model=vit", *small, *shape, "data.batch_size=4", f"data.workers={workers}"])


def test_signals_to_all_processes_leave_the_workers_of_the_data_at_work() -> None:
    expected, trainer = Trainer(images(0)), Trainer(images(1))
    others = set(multiprocessing.active_children())
    for _ in range(2):
        trainer.step()
    workers = set(multiprocessing.active_children()) - others
    assert workers
    for worker in workers:
        for number in STOPS:
            os.kill(worker.pid or 0, number)
    trainer.step()
    assert workers <= set(multiprocessing.active_children())
    for _ in range(3):
        expected.step()
    trainer.close()
    assert trainer.loss == expected.loss
    assert workers.isdisjoint(multiprocessing.active_children())
    assert torch.equal(trainer.model.head.weight, expected.model.head.weight)
