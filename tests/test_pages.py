"""Pages hold what the result holds, and need nothing from a network."""

from __future__ import annotations

import copy
import json
import re
import sys
from html.parser import HTMLParser
from typing import Any

import pytest

from mixprec.pages.comparison import _powers_of_two, render

RESULT: dict[str, Any] = {
    "model": "mnist_cnn",
    "data": "mnist",
    "notes": ["emulated: timing is not hardware speed", "sums < 24 bits"],
    "runs": [
        {
            "recipe": "fp32",
            "loss": 0.123456,
            "accuracy": 0.971,
            "step_ms": 12.5,
            "step_ratio": 1.0,
            "saved_bytes": 1234567,
            "param_bytes": 4800000,
            "impl": "native",
            "failure": None,
            "spread": {"loss": None},
            "curve": {"step": [1, 2, 3], "loss": [2.3, 1.1, 0.5]},
        },
        {
            "recipe": "fp8_tensorwise",
            "loss": None,
            "accuracy": 0.968,
            "step_ms": 14.25,
            "step_ratio": 1.14,
            "saved_bytes": 345678,
            "param_bytes": 4800000,
            "impl": "emulated",
            "sqnr": {"output.a": 28.61, "grad_input.a": 24.8},
            "curve": {"step": [1, 2, 3], "loss": [2.3, 1.2, None]},
        },
    ],
}


class Page(HTMLParser):
    """Collects the cells of the table and every address that the page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def text() -> str:
    return render(RESULT)


def test_table_holds_every_entry(text: str) -> None:
    head, fp32, fp8 = Page(text).rows
    first, second = dict(zip(head, fp32, strict=True)), dict(zip(head, fp8, strict=True))
    assert first == {
        "recipe": "fp32",
        "evaluation loss": "0.1235",
        "accuracy": "0.971",
        "step (ms)": "12.5",
        "step ratio": "1",
        "saved for backward (bytes)": "1,234,567",
        "parameters (bytes)": "4,800,000",
        "implementation": "native",
        "SQNR (dB) output.a": "",
        "SQNR (dB) grad_input.a": "",
    }
    assert second["SQNR (dB) grad_input.a"] == "24.8"
    assert second["evaluation loss"] == ""


def test_page_loads_nothing_and_is_whole(text: str) -> None:
    page = Page(text)
    assert page.addresses == []
    assert page.open == []
    assert text.startswith("<!DOCTYPE html>")
    assert "<h1>mnist_cnn on mnist</h1>" in text
    assert "<p>emulated: timing is not hardware speed</p>\n<p>sums &lt; 24 bits</p>" in text
    assert not re.search(r"@import|url\(\s*['\"]?https?:", text.split("<script")[0])


def test_curves_are_drawn_from_the_result(text: str) -> None:
    drawn = re.findall(r'Plotly\.newPlot\(\s*"curves",\s*(\[.*?\}\]),\s*\{', text, re.DOTALL)
    (traces,) = (json.loads(trace) for trace in drawn)
    assert [trace["name"] for trace in traces] == ["fp32", "fp8_tensorwise"]
    for trace, run in zip(traces, RESULT["runs"], strict=True):
        assert (trace["x"], trace["y"]) == (run["curve"]["step"], run["curve"]["loss"])


SCALES = [65536.0, 32768.0, 16384.0]


def with_scales() -> dict[str, Any]:
    """The second run lost its first two steps to overflows."""
    result = copy.deepcopy(RESULT)
    first, second = result["runs"]
    first |= {"loss_scale": None, "skipped": 0, "scale_curve": None}
    curve = {"step": [1, 2, 3], "loss_scale": SCALES, "skipped": [1, 2]}
    second |= {"loss_scale": 16384.0, "skipped": 2, "scale_curve": curve}
    return result


def test_loss_scale_is_drawn_with_its_skipped_steps() -> None:
    text = render(with_scales())
    drawn = re.findall(r'Plotly\.newPlot\(\s*"scales",\s*(\[.*?\}\]),\s*\{', text, re.DOTALL)
    (line, marks) = json.loads(drawn[0])
    assert (line["name"], line["x"], line["y"]) == ("fp8_tensorwise", [1, 2, 3], SCALES)
    assert (marks["name"], marks["x"], marks["y"]) == (
        "fp8_tensorwise: skipped",
        [1, 2],
        SCALES[:2],
    )
    assert [tick in text for tick in ('"65,536"', '"32,768"', '"16,384"')] == [True] * 3
    assert Page(text).addresses == []


def test_loss_scale_and_skipped_steps_are_cells_of_runs_that_have_them() -> None:
    head, *rows = Page(render(with_scales())).rows
    cells = [dict(zip(head, row, strict=True)) for row in rows]
    found = [(row["last loss scale"], row["skipped steps"]) for row in cells]
    assert found == [("", ""), ("1.638e+04", "2")]


@pytest.mark.parametrize("scale_curve", [None, {"step": [], "loss_scale": [], "skipped": []}])
def test_runs_without_a_loss_scale_have_no_figure_of_it(scale_curve: Any) -> None:
    result = copy.deepcopy(RESULT)
    for run in result["runs"]:
        run |= {"loss_scale": None, "skipped": 0, "scale_curve": scale_curve}
    text = render(result)
    assert 'newPlot( "scales"' not in " ".join(text.split())
    assert "skipped steps" not in text


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([1.0], ["0.5", "1", "2"]),
        ([2.0**40, 2.0**41], ["2^39", "2^40", "2^41", "2^42"]),
        ([3.0], ["1", "2", "4", "8"]),
    ],
)
def test_ticks_are_powers_of_two(values: list[float], shown: list[str]) -> None:
    assert _powers_of_two(values)["ticktext"] == shown


def test_ticks_stay_few() -> None:
    ticks = _powers_of_two([1.0, 2.0**24])["tickvals"]
    assert 4 <= len(ticks) <= 10


def test_names_are_escaped() -> None:
    result = copy.deepcopy(RESULT)
    result["runs"][0]["recipe"] = "<script>alert(1)</script>"
    result["runs"][0]["seeds"] = [1, 2]
    text = render(result)
    assert "<script>alert" not in text
    assert "<script>alert(1)</script>" in Page(text).rows[1]
    assert "1, 2" in Page(text).rows[1]


def test_render_changes_nothing_and_repeats(text: str) -> None:
    before = copy.deepcopy(RESULT)
    assert render(RESULT) == text
    assert before == RESULT


@pytest.mark.parametrize("result", [{}, {"runs": []}])
def test_render_refuses_a_result_without_runs(result: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="result: got no runs; a page needs at least one"):
        render(result)


def test_missing_plotly_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ImportError, match=r"pages need it; run pip install 'mixprec\[report\]'"):
        render(RESULT)
