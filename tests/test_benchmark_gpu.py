"""The prepared GPU script: its dry run on a CPU, and how it judges products."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from mixprec.gemm import GemmSpec
from mixprec.recipes import PRODUCTS

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SECTIONS = ("correctness", "products", "steps", "fp64", "compiled steps")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_products")


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


@pytest.mark.slow
def test_dry_run_fills_every_section(tmp_path: Path, products: ModuleType) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--dry-run", "--out", str(tmp_path)]
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
