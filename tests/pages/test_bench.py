"""The pages of a benchmark hold its figures and reasons, and need nothing from a network."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mixprec.pages.bench import render, render_products
from pages.reading import Page, traces

ROW: dict[str, Any] = {
    "recipe": "bf16",
    "mode": "compiled",
    "batch": 16,
    "impl": "bf16_mm",
    "step_ms": 123.456,
    "throughput": 129.6,
    "peak_bytes": None,
    "param_bytes": 2529217536,
    "mfu": 0.4321,
    "times_ms": [123.0, 124.0],
}
RESULT: dict[str, Any] = {
    "model": "vit <huge>",
    "unit": "images",
    "order": "in turns",
    "steps": 50,
    "warmup": 11,
    "rows": [ROW, {**ROW, "recipe": "fp8_delayed", "throughput": 190.5}],
    "skipped": [{"recipe": "x", "mode": "eager", "batch": 32, "reason": "out of memory: a < b"}],
    "notes": ["emulated: timing is not hardware speed"],
}
PRODUCTS: dict[str, Any] = {
    "rows": [
        {"shape": "32x32x32", "recipe": "fp32", "ratio": 1.0, "sqnr": {"output": 140.0}},
        {"shape": "32x32x32", "recipe": "mxfp8", "ratio": 4.5, "sqnr": {"output": 28.4}},
    ],
    "pays": {"mxfp8": "never here (emulated)"},
    "notes": [],
}


def test_steps() -> None:
    page = render(RESULT)
    read = Page(page)
    assert read.headings[0] == (1, "vit <huge>: training steps")
    row, _ = read.table("Each contender's figures")
    assert row["step (ms), median"] == "123.5"
    assert row["parameters (bytes)"] == "2,529,217,536"
    assert row["images a second"] == "129.6"
    assert "skipped: x, eager, batch 32: out of memory: a &lt; b" in page
    assert "contenders in turns, 11 of 50 steps discarded" in page
    assert "times ms" not in page
    assert [bar["y"] for bar in traces(page, "speed")] == [[129.6, 190.5]]
    assert (2, "Memory") not in read.headings, "no bars where every peak is unknown"
    assert [address for address in read.addresses if not address.startswith("#")] == []


def test_memory_bars_where_a_peak_is_known() -> None:
    page = render({**RESULT, "rows": [{**ROW, "peak_bytes": 5}]})
    assert [bar["y"] for bar in traces(page, "memory")] == [[5]]
    assert len(re.findall(r"plotly\.js v", page)) == 1


def test_products() -> None:
    page = render_products(PRODUCTS)
    assert "mxfp8: pays never here (emulated)" in page
    _, row = Page(page).table("Each contender's figures")
    assert row["SQNR (dB) output"] == "28.4"
    assert [(trace["x"], trace["y"]) for trace in traces(page, "ratios")] == [
        (["32x32x32"], [1.0]),
        (["32x32x32"], [4.5]),
    ]


@pytest.mark.parametrize(("page", "result"), [(render, RESULT), (render_products, PRODUCTS)])
def test_no_rows_is_an_error(page: Any, result: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="result: got no rows"):
        page({**result, "rows": []})
