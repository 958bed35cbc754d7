"""The heat map of statistics: what is drawn of which layer, operand and step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mixprec.pages import heat_map as module
from mixprec.pages.heat_map import STATISTICS, heat_map
from pages.reading import Page, traces
from pages.runs import FIELDS, LAYERS, lines, row

SAMPLES = [record for record in lines() if "statistics" in record]
LABELS = ["blocks.0.mlp.0", "blocks.0.mlp.2 q", "head <b>"]


@pytest.fixture(scope="module")
def text() -> str:
    return heat_map(SAMPLES, "statistics-0", "first")


def drawn(text: str) -> dict[str, dict[str, Any]]:
    """The traces by the name under which they are chosen."""
    page = Options(text)
    return dict(zip(page.options, traces(text, "statistics-0"), strict=True))


class Options(Page):
    """The options of the choice, too."""

    def __init__(self, text: str) -> None:
        self.options: list[str] = []
        super().__init__(text)

    def handle_data(self, data: str) -> None:
        super().handle_data(data)
        if self.open and self.open[-1] == "option":
            self.options.append(data)


def test_each_statistic_of_each_operand_is_a_map(text: str) -> None:
    maps = drawn(text)
    words = [statistic.words for statistic in STATISTICS]
    operands = [f"{word}: output, operand a" for word in words]
    assert list(maps) == [operands[0], "SQNR: output, the product", *operands[1:]]
    assert [name for name, trace in maps.items() if trace["visible"]] == [operands[0]]
    for trace in maps.values():
        assert (trace["x"], trace["y"]) == ([20, 40], LABELS)


def test_values_are_those_of_the_records(text: str) -> None:
    maps = drawn(text)
    for statistic in STATISTICS:
        expected = []
        for place, layer in enumerate(LAYERS):
            values = [row(layer, place, step)[statistic.field] for step in (20, 40)]
            if statistic.field in ("amax", "scale"):
                values = [math.log2(value) for value in values]
            if statistic.field in ("saturation", "underflow"):
                values = [100 * value for value in values]
            expected.append(values)
        shown = maps[f"{statistic.words}: output, operand a"]["z"]
        gaps = [[value is None for value in values] for values in expected]
        assert [[value is None for value in values] for values in shown] == gaps
        known = [value for values in shown for value in values if value is not None]
        wanted = [value for values in expected for value in values if value is not None]
        assert known == pytest.approx(wanted, rel=1e-5)
    assert maps["SQNR: output, the product"]["z"] == [[25.5, 25.5], [None, None], [None, None]]


def test_last_step_is_a_table(text: str) -> None:
    rows = Page(text).table("first: statistics of step 40")
    assert [r["layer"] for r in rows] == [*LABELS, LABELS[0]]
    assert (rows[0]["amax"], rows[0]["underflow"], rows[0]["elements"]) == ("0.0625", "0.04", "64")
    assert {name.replace("_", " ") for name in FIELDS} | {"SQNR (dB)"} <= rows[0].keys()


def test_shares_that_are_all_zero_have_a_scale() -> None:
    rows = [{"layer": "a", "product": "output", "operand": "a", "saturation": 0.0}]
    (trace,) = traces(heat_map([{"step": 1, "statistics": rows}], "s", "r"), "s")
    assert (trace["zmin"], trace["zmax"], trace["z"]) == (0, 1, [[0.0]])


def test_zero_has_no_logarithm() -> None:
    rows = [{"layer": "a", "product": "output", "operand": "a", "amax": 0.0, "sqnr_db": 1.0}]
    (trace,) = traces(heat_map([{"step": 1, "statistics": rows}], "s", "r"), "s")
    assert trace["z"] == [[1.0]]


def test_many_samples_are_thinned_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CELLS", 0)
    rows = [{"layer": "a", "product": "output", "operand": "a", "sqnr_db": 1.0}]
    text = heat_map([{"step": step, "statistics": rows} for step in range(100)], "s", "r")
    (trace,) = traces(text, "s")
    assert trace["x"] == list(range(4, 100, 5))
    assert "20 of 100 samples" in text


@pytest.mark.parametrize("statistics", [[], None, "text", [1, None]])
def test_no_rows_no_map(statistics: Any) -> None:
    assert heat_map([{"step": 1, "statistics": statistics}], "s", "r") == ""
    assert heat_map([], "s", "r") == ""


def test_rows_of_other_kinds_do_no_harm() -> None:
    rows = [{"layer": None, "sqnr_db": "high", "amax": True, "new": [1]}, {"sqnr_db": 3}]
    (trace,) = traces(heat_map([{"step": 1, "statistics": rows}], "s", "r"), "s")
    assert (trace["y"], trace["z"]) == (["(model)"], [[3.0]])
