"""The prepared GPU script: its dry run on a CPU, and how it judges products."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from gemm.fake_cuda import FakeCuda

from mixprec.gemm import GemmSpec
from mixprec.recipes import PRODUCTS, RECIPES

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CPU = torch.device("cpu")
SECTIONS = ("correctness", "products", "steps", "fp64", "compiled steps")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def products(load: Callable[[str], ModuleType]) -> ModuleType:
    return load("gpu_products")


def test_a_product_is_judged_by_the_bound(products: ModuleType) -> None:
    a, b = torch.ones(1, 4), torch.ones(1, 4)
    allowed = 7 * 2.0**-24 * 4 + 2.0**-24 * (4 + 7 * 2.0**-24 * 4)
    for error, passes in ((0.0, True), (0.9 * allowed, True), (1.2 * allowed, False)):
        ratios = products.errors(torch.tensor([[4.0 + error]]), a, b, GemmSpec(), 0.0)
        assert (max(ratios) <= 1) == passes
    assert products.errors(torch.tensor([[float("nan")]]), a, b, GemmSpec(), 0.0)[0] == float("inf")


def test_what_units_drop_is_added_to_the_bound_and_shown_apart(products: ModuleType) -> None:
    a, b = torch.ones(1, 4), torch.ones(1, 4)
    found = products.errors(torch.tensor([[4.0 + 2.0**-12]]), a, b, GemmSpec(), 2.0**-13)
    assert found[0] <= 1 < found[1]


def test_a_wrong_operand_or_sum_fails(products: ModuleType) -> None:
    verdict = products.Verdict()
    assert not verdict.passes
    verdict.add("float32", (0.5, 0.5), True)
    assert verdict.passes
    verdict.add("float32", (0.1, 0.1), False)
    assert not verdict.passes


@pytest.mark.parametrize(
    ("capability", "impl", "recipe", "reason"),
    [
        ((9, 0), "scaled_mm", "fp8_tensorwise", None),
        ((9, 0), "scaled_mm", "fp8_rowwise", None),
        ((9, 0), "scaled_mm", "fp8_blockwise", None),
        ((9, 0), "scaled_mm", "mxfp8", "device: compute capability 9.0 (Hopper) has no blocks of"),
        ((9, 0), "bf16_mm", "nvfp4", None),
        ((9, 0), "fp16_mm", "fp8_delayed", None),
        ((9, 0), "fp16_mm", "mxfp8", "a: got blocks of (1, 32) scaled by e8m0_rceil; FP16"),
        ((10, 0), "scaled_mm", "nvfp4", None),
        ((10, 0), "scaled_mm", "fp8_blockwise", "device: compute capability 10.0 (Blackwell) has"),
        ((8, 0), "scaled_mm", "fp8_rowwise", "device: compute capability 8.0 (Ampere) has no FP8"),
        ((8, 0), "bf16_mm", "bf16", None),
        ((9, 0), "emulated", "tf32", None),
    ],
)
def test_what_an_implementation_can_run_is_asked_of_it(
    capability: tuple[int, int],
    impl: str,
    recipe: str,
    reason: str | None,
    products: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeCuda(capability).install(monkeypatch)
    for why in products.why_not(RECIPES[recipe], impl, CPU).values():
        assert (why is None) == (reason is None)
        assert why is None or why.startswith(reason)
        assert why is None or "use impl=" not in why


def test_a_product_in_high_precision_is_nobodys(products: ModuleType) -> None:
    reasons = products.why_not(RECIPES["fp8_rowwise_hp_grad_weight"], "emulated", CPU)
    assert [product for product, why in reasons.items() if why is not None] == ["grad_weight"]


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise_hp_grad_weight", "nvfp4"])
def test_native_rows_pass_on_the_strict_fake(
    recipe: str, products: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCuda((10, 0)).install(monkeypatch)
    rows = list(products.correctness(recipe, CPU))
    assert [(row["impl"], row["product"]) for row in rows] == [
        (impl, product) for impl in products.IMPLS for product in PRODUCTS
    ]
    assert {row["status"] for row in rows if row["impl"] == "scaled_mm"} <= {"pass", "not run"}
    assert "pass" in {row["status"] for row in rows if row["impl"] == "scaled_mm"}
    assert not [row for row in rows if row["status"] == "fail"]
    assert {call.name for call in fake.calls} & {"scaled_mm", "block_scaled_mm"}


@pytest.mark.parametrize("wrong", [1 + 2.0**-6, float("nan")])
def test_a_wrong_product_fails(
    wrong: float, products: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCuda((10, 0)).install(monkeypatch)
    right = fake.scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: right(*a, **k).mul_(wrong))
    rows = list(products.correctness("fp8_rowwise", CPU))
    assert {row["status"] for row in rows if row["impl"] == "scaled_mm"} == {"fail"}
    assert {row["status"] for row in rows if row["impl"] == "emulated"} == {"pass"}


def test_units_that_add_in_fewer_bits_have_a_wider_bound(
    products: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert products.cut_of("scaled_mm", CPU) == 0
    FakeCuda((9, 0)).install(monkeypatch)
    assert products.cut_of("scaled_mm", CPU) == 132 * 2.0**-13
    assert products.cut_of("bf16_mm", CPU) == 0


def test_what_no_longer_fits_is_dropped_and_failures_are_kept(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, now = load("gpu"), 0.0
    monkeypatch.setattr(gpu, "time", SimpleNamespace(monotonic=lambda: now))
    ran: list[str] = []

    def slow() -> list[dict[str, Any]]:
        nonlocal now
        now += 0.2
        return [{"case": "slow"}]

    def fail() -> list[dict[str, Any]]:
        raise RuntimeError("no such kernel")

    tasks = [
        gpu.Task("slow", 0.1, slow),
        gpu.Task("large", 50.0, lambda: [ran.append("large")]),
        gpu.Task("broken", 0.1, fail),
        gpu.Task("small", 0.1, lambda: [{"case": "small"}]),
    ]
    entries: list[dict[str, Any]] = []
    gpu.run_tasks(tasks, 60.0, entries.append)
    assert [next(iter(entry)) for entry in entries] == ["row", "dropped", "error", "row"]
    assert ran == []
    # twice as long as expected, so that what follows is expected to be slow too
    assert entries[1]["dropped"]["case"] == "large"
    assert entries[2]["error"]["error"] == "RuntimeError: no such kernel"


def test_running_out_of_memory_is_a_row(
    load: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = load("gpu_steps")

    def none_left(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(steps, "Steps", none_left)
    row = steps.measure("bf16", "test", 2, CPU, backend=None, warmup=1, steps=1)
    assert (row["recipe"], row["why"]) == ("bf16", "out of memory")


def test_speedups_are_over_the_baseline_of_the_row_and_of_eager_mode(
    load: Callable[[str], ModuleType],
) -> None:
    report = load("gpu_report")

    def row(recipe: str, mode: str, batch: int, speed: float) -> dict[str, Any]:
        key = {"model": "vit", "mode": mode, "batch": batch, "recipe": recipe}
        return key | ({"images_per_second": speed} if speed else {"why": "out of memory"})

    eager = [row(report.BASELINE, "eager", 16, 100), row("fp8_rowwise", "eager", 16, 150)]
    eager += [row(report.BASELINE, "eager", 32, 0), row("fp8_rowwise", "eager", 32, 200)]
    found = report.with_speedups(eager, [])
    assert [entry["speedup"] for entry in found] == [1, 1.5, None, None]
    assert [entry["overall"] for entry in found] == [1, 1.5, None, 2]
    compiled = [row(report.BASELINE, "compiled", 16, 125), row("bf16", "compiled", 16, 250)]
    found = report.with_speedups(compiled, eager)
    assert [entry["speedup"] for entry in found] == [1, 2]
    assert [entry["overall"] for entry in found] == [1.25, 2.5]


@pytest.mark.slow
def test_dry_run_fills_every_section(tmp_path: Path, products: ModuleType) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--dry-run", "--out", str(tmp_path)]
    # however busy the machine is, nothing is dropped
    command += ["--minutes", "1000"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads((tmp_path / "gpu_dry_run.json").read_text())
    assert tuple(result["sections"]) == SECTIONS
    page = (tmp_path / "gpu_dry_run.md").read_text()
    for name, section in result["sections"].items():
        assert f"## {name}" in page
        assert section["rows"]
        assert not section["errors"]
    rows = result["sections"]["correctness"]["rows"]
    emulated = {(row["recipe"], row["product"]) for row in rows if row["impl"] == "emulated"}
    assert emulated == {(name, product) for name in products.quantising() for product in PRODUCTS}
    assert all(row["status"] == "pass" or row.get("why") for row in rows)
