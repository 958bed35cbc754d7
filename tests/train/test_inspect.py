"""[inspect]: a run's statistics in its records, the same after a resume, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mixprec.train.config import Config, load
from mixprec.train.loop import Preempted, run
from mixprec.train.toml_text import ConfigError

from .small_models import SMALL_NET, use

MakeConfig = Callable[..., Config]


@pytest.fixture(autouse=True)
def _small_net(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SMALL_NET)


def sampled(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if "statistics" in record]


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record["loss"] for record in map(json.loads, lines) if "loss" in record]


def run_quietly(config: Config, **options: Any) -> str:
    text = StringIO()
    run(config, console=Console(file=text, width=200), **options)
    return text.getvalue()


def test_a_run_records_its_sampled_steps_and_trains_as_without(
    small: MakeConfig, tmp_path: Path
) -> None:
    settings = ("recipe=fp8_delayed", "train.epochs=1", "train.log_every=1")
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    run_quietly(small(*settings), out=plain)
    said = run_quietly(small(*settings, "inspect.every=3"), out=watched)
    assert losses(plain) == losses(watched)
    records = sampled(watched)
    assert [record["step"] for record in records] == [3, 6]
    assert {row["layer"] for row in records[0]["statistics"]} == {"conv", "fc1", "fc2"}
    row = records[0]["statistics"][0]
    assert list(row) == [
        *("layer", "product", "operand", "name", "format", "amax", "range_use", "saturation"),
        *("underflow", "sqnr_db", "scale", "elements"),
    ]
    assert said.count(": lowest SQNR ") == 2


def test_a_resumed_run_samples_the_same_steps(small: MakeConfig, tmp_path: Path) -> None:
    settings = ("recipe=mxfp8", "train.epochs=1", "inspect.every=2", "checkpoint.every=3")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_quietly(small(*settings), out=whole)
    asked = iter([False, False, False, False, True])
    with pytest.raises(Preempted):
        run_quietly(small(*settings), out=parts, stop=lambda: next(asked))
    # every and the writer may change, the numbers may not
    run_quietly(small(*settings, "inspect.every=1"), out=parts, resume="auto")
    by_step = {record["step"]: record for record in sampled(parts)}
    assert set(by_step) == {2, 4, 6, 7}
    assert all(by_step[record["step"]] == record for record in sampled(whole))


def test_a_recipe_that_converts_nothing_says_so(small: MakeConfig, tmp_path: Path) -> None:
    said = run_quietly(small("train.epochs=1", "inspect.every=2"), out=tmp_path)
    assert "inspect.every: no layer is converted, so that there are no statistics" in said
    assert sampled(tmp_path) == []


def test_tensorboard_gets_every_figure(small: MakeConfig, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = ("recipe=mxfp8", "train.steps=4", "inspect.every=2", "inspect.tensorboard=true")
    run_quietly(small(*settings), out=tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    for record in sampled(tmp_path):
        for row in record["statistics"]:
            place = ".".join(filter(None, (row["layer"], row["product"], row["operand"])))
            curve = {point.step: point.value for point in events.Scalars(f"sqnr_db/{place}")}
            assert list(curve) == [2, 4]
            assert curve[record["step"]] == pytest.approx(row["sqnr_db"], rel=1e-6)


def test_tensorboard_that_is_not_there_is_refused_before_a_step(
    small: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    config = small("recipe=mxfp8", "inspect.every=2", "inspect.tensorboard=true")
    with pytest.raises(ValueError, match=r"inspect\.tensorboard: got true; TensorBoard cannot be"):
        run_quietly(config, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["inspect.every=0"], r"inspect\.every: got 0; "),
        (["inspect.evry=1"], r"inspect\.evry: got an unknown key; did you mean every\?"),
        (["inspect.tensorboard=true"], r"inspect\.tensorboard: got true without inspect\.every"),
        (
            ["inspect.every=5", "train.compile=true"],
            r"inspect\.every: got 5 with train\.compile; compiled code is not watched",
        ),
    ],
)
def test_settings_that_cannot_be(settings: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        load(None, settings)
