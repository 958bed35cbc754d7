"""The pages of a benchmark hold its figures and reasons, and need nothing from a network."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mixprec.pages.bench import render, render_products

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
    assert "<h1>vit &lt;huge&gt;: training steps</h1>" in page
    assert "<td>123.5</td>" in page
    assert "<td>2,529,217,536</td>" in page
    assert "images a second" in page
    assert "skipped: x, eager, batch 32: out of memory: a &lt; b" in page
    assert "contenders in turns, 11 of 50 steps discarded" in page
    assert "times ms" not in page
    assert 'id="speed"' in page
    assert 'id="memory"' not in page, "no bars where every peak is unknown"
    assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=", page)


def test_memory_bars_where_a_peak_is_known() -> None:
    page = render({**RESULT, "rows": [{**ROW, "peak_bytes": 5}]})
    assert 'id="memory"' in page
    assert len(re.findall(r"plotly\.js v", page)) == 1


def test_products() -> None:
    page = render_products(PRODUCTS)
    assert "mxfp8: pays never here (emulated)" in page
    assert "<td>28.4</td>" in page
    assert "sqnr output" in page


@pytest.mark.parametrize(("page", "result"), [(render, RESULT), (render_products, PRODUCTS)])
def test_no_rows_is_an_error(page: Any, result: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="result: got no rows"):
        page({**result, "rows": []})
