"""Pages hold what the result holds, and need nothing from a network."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest

from mixprec.pages.comparison import render
from mixprec.pages.curves import powers_of_two
from pages.reading import Page, traces

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


@pytest.fixture(scope="module")
def text() -> str:
    return render(RESULT)


def test_table_holds_every_entry(text: str) -> None:
    first, second = Page(text).table("Each recipe's figures")
    assert first == {
        "recipe": "fp32",
        "evaluation loss": "0.1235",
        "accuracy": "0.971",
        "step (ms), median": "12.5",
        "step ratio": "1",
        "activations (bytes)": "1,234,567",
        "parameters (bytes)": "4,800,000",
        "implementation": "native",
        "SQNR (dB) output.a": "",
        "SQNR (dB) grad_input.a": "",
    }
    assert second["SQNR (dB) grad_input.a"] == "24.8"
    assert second["evaluation loss"] == ""


def test_page_loads_nothing_and_is_whole(text: str) -> None:
    page = Page(text)
    assert [address for address in page.addresses if not address.startswith("#")] == []
    assert page.open == []
    assert text.startswith("<!DOCTYPE html>")
    assert page.headings[0] == (1, "mnist_cnn on mnist")
    assert page.paragraphs[:2] == ["emulated: timing is not hardware speed", "sums < 24 bits"]


def test_curves_are_drawn_from_the_result(text: str) -> None:
    drawn = traces(text, "curves")
    assert [trace["name"] for trace in drawn] == ["fp32", "fp8_tensorwise"]
    for trace, run in zip(drawn, RESULT["runs"], strict=True):
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
    line, marks = traces(text, "scales")
    assert (line["name"], line["x"], line["y"]) == ("fp8_tensorwise", [1, 2, 3], SCALES)
    assert (marks["name"], marks["x"], marks["y"]) == (
        "fp8_tensorwise: skipped",
        [1, 2],
        SCALES[:2],
    )
    assert [tick in text for tick in ('"65,536"', '"32,768"', '"16,384"')] == [True] * 3


def test_loss_scale_and_skipped_steps_are_cells_of_runs_that_have_them() -> None:
    cells = Page(render(with_scales())).table("Each recipe's figures")
    found = [(row["last loss scale"], row["skipped steps"]) for row in cells]
    assert found == [("", ""), ("1.638e+04", "2")]


@pytest.mark.parametrize("scale_curve", [None, {"step": [], "loss_scale": [], "skipped": []}])
def test_runs_without_a_loss_scale_have_no_figure_of_it(scale_curve: Any) -> None:
    result = copy.deepcopy(RESULT)
    for run in result["runs"]:
        run |= {"loss_scale": None, "skipped": 0, "scale_curve": scale_curve}
    text = render(result)
    assert "scales" not in Page(text).ids
    assert "skipped steps" not in text


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([1.0], ["0.5", "1", "2"]),
        ([2.0**40, 2.0**41], ["2^39", "2^40", "2^41", "2^42"]),
        ([3.0], ["1", "2", "4", "8"]),
    ],
)
def test_ticks_arepowers_of_two(values: list[float], shown: list[str]) -> None:
    assert powers_of_two(values)["ticktext"] == shown


def test_ticks_stay_few() -> None:
    ticks = powers_of_two([1.0, 2.0**24])["tickvals"]
    assert 4 <= len(ticks) <= 10


def test_names_are_escaped() -> None:
    result = copy.deepcopy(RESULT)
    result["runs"][0]["recipe"] = "<script>alert(1)</script>"
    result["runs"][0]["seeds"] = [1, 2]
    text = render(result)
    assert "<script>alert" not in text
    first, _ = Page(text).table("Each recipe's figures")
    assert (first["recipe"], first["seeds"]) == ("<script>alert(1)</script>", "1, 2")


def test_render_changes_nothing_and_repeats(text: str) -> None:
    before = copy.deepcopy(RESULT)
    assert render(RESULT) == text
    assert before == RESULT


@pytest.mark.parametrize("result", [{}, {"runs": []}])
def test_render_refuses_a_result_without_runs(result: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="result: got no runs; a page needs at least one"):
        render(result)


def test_missing_plotly_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    with pytest.raises(ImportError, match=r"pages need it; run pip install 'mixprec\[report\]'"):
        render(RESULT)
