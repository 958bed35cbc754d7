"""Runs of a tiny model: the rows, the memory, the order, and what is skipped and why."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn

from bench.tiny import CLASSES, INNER, PARAMETERS, TINY, batch, build
from mixprec import bench
from mixprec.bench import contender, steps
from mixprec.memory import live_bytes

RECIPES = ["fp32", "bf16", "fp8_delayed"]
ADAM_COUNTS = 4 * 4  # a float32 count of steps for each of the four parameters


def run(**arguments: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"workload": TINY, "recipes": RECIPES, "batches": [8], "steps": 6}
    quiet = Console(file=io.StringIO())
    return bench.run(**(usual | {"device": "cpu", "console": quiet} | arguments))


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return run(batches=[8, 16])


def test_rows(result: dict[str, Any]) -> None:
    rows = result["rows"]
    expected = [(label, "eager", rows) for rows in (8, 16) for label in RECIPES]
    assert [(row["recipe"], row["mode"], row["batch"]) for row in rows] == expected
    for row in rows:
        assert len(row["times_ms"]) == 6 - 2
        assert min(row["times_ms"]) <= row["step_ms"] <= max(row["times_ms"])
        assert row["step_ms_mean"] == pytest.approx(sum(row["times_ms"]) / 4)
        assert row["throughput"] == pytest.approx(1e3 * row["batch"] / row["step_ms"])
        assert row["mfu"] is None
    assert [row["speedup"] for row in rows if row["recipe"] == "fp32"] == [1.0, 1.0]
    assert (result["order"], result["skipped"], result["parameters"]) == (
        "in turns",
        [],
        PARAMETERS,
    )
    assert result["notes"] == [
        "emulated: timing is not hardware speed",
        "2 of 2 linear layers: <= 1024 inputs or outputs, too few for 8 bits to pay",
    ]


def test_time_until_the_loss_of_the_baseline(result: dict[str, Any]) -> None:
    for place, row in enumerate(result["rows"]):
        goal = result["rows"][place - place % len(RECIPES)]["loss"]
        reached = [step for step, loss in enumerate(row["losses"], start=1) if loss <= goal]
        expected = reached[0] * row["step_ms"] / 1e3 if reached else None
        assert row["seconds_to_loss"] == expected
        assert row["losses"][-1] == row["loss"]
        assert len(row["losses"]) == 6
    assert result["rows"][0]["seconds_to_loss"] is not None


def test_speedup_is_the_median_of_the_ratios_within_a_step(result: dict[str, Any]) -> None:
    first, second = result["rows"][:2]
    ratios = sorted(a / b for a, b in zip(first["times_ms"], second["times_ms"], strict=True))
    assert second["speedup"] == pytest.approx((ratios[1] + ratios[2]) / 2)


def test_memory_by_kind(result: dict[str, Any]) -> None:
    for row in result["rows"]:
        assert row["param_bytes"] == row["grad_bytes"] == 4 * PARAMETERS
        assert row["optimizer_bytes"] == 2 * 4 * PARAMETERS + ADAM_COUNTS
        assert row["peak_bytes"] > 4 * 4 * PARAMETERS + row["saved_bytes"]
    small, large = (row["saved_bytes"] for row in result["rows"] if row["recipe"] == "fp32")
    assert large > 1.5 * small


def test_fp32_is_a_plain_loop_of_torch(result: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = build()
    generator = torch.Generator().manual_seed(0)
    batches = [batch(16, generator) for _ in range(4)]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(6):
        inputs, targets = batches[step % 4]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
    assert result["rows"][3]["loss"] == loss.item()


def test_one_at_a_time_gives_the_same_losses_and_memory(result: dict[str, Any]) -> None:
    alone = run(batches=[8, 16], alone=True)
    assert alone["order"] == "one at a time"
    kinds = ("recipe", "batch", "loss", "saved_bytes", "optimizer_bytes", "peak_bytes")
    for a, b in zip(alone["rows"], result["rows"], strict=True):
        assert [a[key] for key in kinds] == [b[key] for key in kinds]


def test_the_generator_is_left_as_it_was() -> None:
    before = torch.get_rng_state()
    run(recipes=["fp32"], steps=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_largest_batch_under_a_limit() -> None:
    limit = 2**16
    result = run(recipes=["fp32", "bf16"], batches="auto", memory_limit=limit, steps=3)
    assert result["order"] == "one at a time"
    assert result["memory_limit_bytes"] == limit
    for row in result["rows"]:
        assert row["peak_bytes"] <= limit
        larger = run(recipes=[row["recipe"]], batches=[row["batch"] + 1], memory_limit=limit)
        assert (larger["rows"], len(larger["skipped"])) == ([], 1)
        reason = larger["skipped"][0]["reason"]
        assert reason.startswith("out of memory: memory: got")
    assert all(row["batch"] > 1 for row in result["rows"])


def test_no_batch_that_fits_is_skipped_with_its_reason() -> None:
    result = run(recipes=["fp32"], batches="auto", memory_limit=9 * PARAMETERS)
    assert result["rows"] == []
    assert result["skipped"][0]["reason"].startswith("out of memory")
    tiny = run(memory_limit=PARAMETERS)
    assert len(tiny["skipped"]) == len(RECIPES)
    assert "weights and their gradients" in tiny["skipped"][0]["reason"]


def test_what_cannot_run_is_skipped_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("graph break\nat a place")

    monkeypatch.setattr(torch, "compile", refuse)
    result = run(
        recipes=["fp32", "mxfp4"],
        modes=["eager", "compiled"],
        impl="scaled_mm",
        peers=["transformer_engine"],
    )
    assert [row["recipe"] for row in result["rows"]] == ["fp32"]
    reasons = [(skip["recipe"], skip["mode"], skip["reason"]) for skip in result["skipped"]]
    assert ("fp32", "compiled", "compile refused: graph break") in reasons
    eager = {recipe: reason for recipe, mode, reason in reasons if mode == "eager"}
    assert eager["mxfp4"].startswith("cannot run: impl: got 'scaled_mm'")
    assert eager["transformer_engine DelayedScaling"].startswith("transformer_engine.pytorch")
    assert all("\n" not in reason and len(reason) <= 200 for _, _, reason in reasons)


def test_a_device_that_is_not_here_skips_everything() -> None:
    result = run(device="cuda:99")
    assert result["rows"] == []
    assert all(skip["reason"].startswith("no device") for skip in result["skipped"])


def test_a_failure_between_steps_ends_that_contender_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = contender.Contender.timed_step

    def failing(self: contender.Contender) -> None:
        if self.case.label == "bf16" and len(self.step_ms) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried\nmore")
        plain(self)

    monkeypatch.setattr(contender.Contender, "timed_step", failing)
    for alone in (False, True):
        result = run(alone=alone)
        assert [row["recipe"] for row in result["rows"]] == ["fp32", "fp8_delayed"]
        reason = "out of memory: CUDA out of memory. Tried"
        assert [skip["reason"] for skip in result["skipped"]] == [reason]


def test_a_contender_is_freed_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    plain = contender.Contender.__init__

    def counting(self: contender.Contender, *arguments: Any) -> None:
        held.append(live.now)
        plain(self, *arguments)

    monkeypatch.setattr(contender.Contender, "__init__", counting)
    with live_bytes() as live:
        run(alone=True, recipes=["fp32", "fp8_tensorwise", "bf16"], steps=3)
    # the generators' state, and no model
    assert held == [held[0]] * 3
    assert held[0] < 4 * PARAMETERS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_rows() -> None:
    result = run(recipes=["fp8_tensorwise"], modes=["eager", "compiled"])
    assert result["skipped"] == []
    eager, compiled = result["rows"]
    assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-3)
    assert (eager["peak_bytes"] is None, compiled["peak_bytes"] is None) == (False, True)
    assert (eager["speedup"], compiled["speedup"]) == (1.0, 1.0)


def test_a_process_of_its_own_needs_a_preset() -> None:
    with pytest.raises(ValueError, match="process_peaks: got it with a workload"):
        run(process_peaks=True)


@pytest.mark.slow
def test_the_peak_of_a_row_in_a_process_of_its_own() -> None:
    result = run(
        workload=None, preset="mnist-cnn", recipes=["fp32"], batches=[2], process_peaks=True
    )
    (row,) = result["rows"]
    assert row["peak_bytes"] < row["process_peak_bytes"] < 2**33


def test_pure_recipes_hold_weights_in_16_bits() -> None:
    rows = run(recipes=["fp32", "bf16_pure", "O2"])["rows"]
    assert [row["param_bytes"] for row in rows] == [4 * PARAMETERS, *[2 * PARAMETERS] * 2]


def test_a_batch_norm_keeps_its_buffers_in_the_peak() -> None:
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(INNER, CLASSES), nn.BatchNorm1d(CLASSES))

    result = run(workload=dataclasses.replace(TINY, build=normed), recipes=["fp32"], steps=3)
    assert result["rows"][0]["param_bytes"] == 4 * (INNER * CLASSES + 3 * CLASSES)


def test_reasons_have_a_line() -> None:
    assert steps.reason_of(RuntimeError("")) == "cannot run: RuntimeError"
    assert steps.reason_of(MemoryError("\n  full\nx")) == "out of memory: full"
    assert steps.reason_of(ImportError("no x")) == "no x"
