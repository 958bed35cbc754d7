"""The frame of every page: contrast, structure, tables."""

from __future__ import annotations

import re

import pytest

from mixprec.pages.figure import ALARM_COLOR, COLORS, DASHES, MOST_POINTS, figure, line
from mixprec.pages.frame import STYLE
from mixprec.pages.page import Section, document, settings_tables, table
from pages.reading import Page


def schemes() -> list[dict[str, str]]:
    """The colours by name, light and dark."""
    light, dark = re.findall(r":root \{([^}]*--paper[^}]*)\}", STYLE)
    return [dict(re.findall(r"--(\w+): (#\w{6})", text)) for text in (light, dark)]


def luminance(color: str) -> float:
    """Relative luminance of sRGB as WCAG 2 defines it."""
    parts = (int(color[place : place + 2], 16) / 255 for place in (1, 3, 5))
    linear = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    """The ratio of two colours as WCAG 2 defines it, 1 to 21."""
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_computed_as_wcag_has_it() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("scheme", schemes(), ids=["light", "dark"])
def test_text_and_lines_stand_out(scheme: dict[str, str]) -> None:
    paper = scheme["paper"]
    text = {name: contrast(scheme[name], paper) for name in ("ink", "dim", "link", "alarm")}
    assert {name: ratio for name, ratio in text.items() if ratio < 4.5} == {}
    assert contrast(scheme["ink"], scheme["shade"]) >= 4.5
    lines = {color: contrast(color, paper) for color in (*COLORS, ALARM_COLOR)}
    assert {color: ratio for color, ratio in lines.items() if ratio < 3} == {}


def test_runs_differ_by_more_than_colour() -> None:
    styles = [line("", [1], [1], place)["line"] for place in range(len(COLORS) * len(DASHES))]
    assert len({(style["color"], style["dash"]) for style in styles}) == len(styles)
    assert len({style["dash"] for style in styles[:5]}) == 5


def test_sections_have_headings_in_order_and_links() -> None:
    sections = [Section("One & only", ["<p>a</p>"]), Section("Left out", [""])]
    page = Page(document("A <title>", ["<p>b</p>"], sections))
    assert page.headings == [(1, "A <title>"), (2, "One & only")]
    assert page.addresses == ["#content", "#about-one-only"]
    assert {"#" + name for name in page.ids} >= set(page.addresses)
    assert [tag for tag in ("header", "nav", "main", "footer") if page.tags.count(tag) != 1] == []


def test_table_aligns_numbers_and_leaves_out_what_nobody_has() -> None:
    rows = [
        {"name": "a", "x": 1234567, "y": None, "z": "text", "list": [1, 2]},
        {"name": "<b>", "x": 0.123456, "y": None, "z": None, "list": "a longer text " * 3},
    ]
    text = table(rows, "Some & more")
    page = Page(text)
    assert page.table("Some & more") == [
        {"name": "a", "x": "1,234,567", "z": "text", "list": "1, 2"},
        {"name": "<b>", "x": "0.1235", "z": "", "list": "a longer text " * 3},
    ]
    assert '<th scope="col">x</th>' in text
    assert '<th scope="col" class="text">z</th>' in text
    assert '<td class="long">a longer' in text


def test_settings_of_two_runs_show_differences_first() -> None:
    first = {"recipe": "fp16", "train": {"steps": 10, "lr": 0.00012345}, "skip": []}
    second = {"recipe": "fp16", "train": {"steps": 20}, "skip": [], "new": True}
    page = Page(settings_tables("Settings", {"a": first, "b": second}))
    assert page.table("Settings: differences") == [
        {"setting": "train.steps", "a": "10", "b": "20"},
        {"setting": "train.lr", "a": "0.00012345", "b": ""},
        {"setting": "new", "a": "", "b": "true"},
    ]
    assert len(page.tables[1]) == 6
    assert "No difference." in settings_tables("Settings", {"a": first, "b": dict(first)})
    assert settings_tables("Settings", {"a": {}}) == ""


def test_long_curves_keep_their_extremes() -> None:
    steps = list(range(50_000))
    losses: list[float | None] = [1.0 + step / 1e6 for step in steps]
    losses[31_337], losses[41_000], losses[41_001] = 99.0, -5.0, None
    drawn = line("x", steps, losses, 0)
    assert len(drawn["x"]) <= MOST_POINTS
    assert drawn["x"] == sorted(set(drawn["x"]))
    points = dict(zip(drawn["x"], drawn["y"], strict=True))
    assert (points[31_337], points[41_000]) == (99.0, -5.0)
    assert all(losses[step] == value for step, value in points.items())


def test_every_figure_is_named_and_has_a_table() -> None:
    page = Page(figure("loss", "What <it> is", [], x={"title": "step"}, y={"title": "loss"}))
    assert {"loss", "loss-caption"} <= set(page.ids)
    assert page.references.count("loss-caption") == 2, "the plot and its table are called by it"
    assert page.tags.count("details") == 1
