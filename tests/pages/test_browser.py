"""Pages in a headless Chromium: drawn, quiet, narrow, usable by keyboard, asking for nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mixprec.pages import bench, comparison
from mixprec.pages.report import report
from pages.browser import Browser, executable
from pages.runs import LAYERS, write_run
from pages.test_bench import RESULT as BENCHMARK
from pages.test_comparison import with_scales

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(executable() is None, reason="no browser on this machine"),
]
PHONE, DESK = 390, 1280
SIZES = """[...document.querySelectorAll(".js-plotly-plot")].map(plot => {
  const {width, height} = plot.querySelector(".main-svg").getBoundingClientRect();
  return [plot.id, Math.round(width), Math.round(height)]; })"""
DRAWN = """[...document.querySelectorAll(".js-plotly-plot")].map(plot =>
  plot.querySelectorAll("path.js-line, .point path, .hm image, .heatmaplayer image").length)"""
OUTSIDE = """[...document.querySelectorAll(".main-svg")].filter(svg => {
  const box = svg.closest("figure .drawing").getBoundingClientRect();
  const {left, right, top, bottom} = svg.getBoundingClientRect();
  return left < box.left - 1 || right > box.right + 1 || top < box.top - 1
    || bottom > box.bottom + 1; }).map(svg => svg.parentElement.id)"""
SHOWN = "document.getElementById('statistics-0').data.findIndex(trace => trace.visible)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = executable()
    assert path is not None
    with Browser(path, tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of each kind."""
    folder = tmp_path_factory.mktemp("pages")
    first, second = write_run(folder / "first"), write_run(folder / "second", recipe="mxfp8")
    failed = write_run(folder / "failed", records=[{"step": 1, "error": "not finite"}])
    (failed / "result.json").unlink()
    (folder / "compare.html").write_text(comparison.render(with_scales()))
    (folder / "bench.html").write_text(bench.render(BENCHMARK))
    return {
        "run": Path(report(first)["page"]),
        "runs": Path(report(first, against=second, out=folder / "against.html")["page"]),
        "failed": Path(report(failed)["page"]),
        "comparison": folder / "compare.html",
        "benchmark": folder / "bench.html",
    }


@pytest.mark.parametrize(
    ("kind", "plots"),
    [("run", 4), ("runs", 5), ("failed", 0), ("comparison", 2), ("benchmark", 1)],
)
def test_page_is_drawn_at_any_width_and_asks_for_nothing(
    browser: Browser, pages: dict[str, Path], kind: str, plots: int
) -> None:
    browser.open(pages[kind], width=PHONE)
    for width in (PHONE, DESK):
        browser.resize(width)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        sizes = browser.evaluate(SIZES)
        assert len(sizes) == plots
        for name, plot_width, height in sizes:
            assert 0.8 * width < plot_width <= width, name
            assert height >= 200, name
        assert all(count > 0 for count in browser.evaluate(DRAWN))
    assert browser.evaluate("document.querySelector('h1').innerText.length") > 0
    names = browser.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(set(names)) == len(names)
    assert browser.evaluate(OUTSIDE) == [], "every plot lies within its figure"
    assert browser.complaints() == []
    assert browser.requested() == []


def test_browser_tells_of_requests_errors_and_width(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        '<img src="http://127.0.0.1:9/x.png"><p style="width: 500px">x</p>'
        "<script>throw new Error('of the page')</script>"
    )
    browser.open(page, width=PHONE)
    assert browser.requested() == ["http://127.0.0.1:9/x.png"]
    assert "of the page" in "".join(browser.complaints())
    assert browser.evaluate("document.documentElement.scrollWidth") > PHONE


def test_statistic_is_chosen_by_keyboard_and_its_table_follows(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["run"])
    assert browser.evaluate(SHOWN) == 0
    for _ in range(40):
        browser.press("Tab")
        if browser.evaluate("document.activeElement.tagName") == "SELECT":
            break
    outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus is seen"
    browser.press("ArrowDown", "ArrowDown")
    browser.until(f"{SHOWN} == 2")
    browser.press("Tab", "Enter")
    rows = browser.until(
        """(() => { const rows = [...document.querySelectorAll(
          'details[data-plot="statistics-0"] tr')];
        return rows.length && rows.map(row => [...row.cells].map(cell => cell.textContent)); })()"""
    )
    names = [LAYERS[0], f"{LAYERS[1]} q", LAYERS[2]]
    exponents = [["-2", "-4"], ["-1", "-3"], ["0", "-2"]]
    table = [[name, *values] for name, values in zip(names, exponents, strict=True)]
    assert rows == [["layer", "step 20", "step 40"], *table], "log2 of amax"


def test_curves_are_a_table_too(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"], width=PHONE)
    rows = browser.evaluate(
        """(async () => { const box = document.querySelector('details[data-plot="curves"]');
        const opened = new Promise(done => box.addEventListener("toggle", done, {once: true}));
        box.open = true; await opened;
        return [...box.querySelectorAll("tr")].map(
          row => [...row.cells].map(cell => cell.textContent)); })()"""
    )
    head = ["step", "first, training", "first, evaluation", "first: alarm"]
    assert rows[0] == head
    assert rows[5] == ["20", "1.5", "1.25", "saturation blocks.0.mlp.2"]
    assert len(rows) == 11
    assert browser.evaluate("document.documentElement.scrollWidth") <= PHONE


def test_plots_follow_the_scheme(browser: Browser, pages: dict[str, Path]) -> None:
    colors = """[getComputedStyle(document.body).backgroundColor,
      getComputedStyle(document.querySelector("#curves .xtick text")).fill]"""
    browser.open(pages["run"])
    assert browser.evaluate(colors) == ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
    browser.scheme("dark")
    assert browser.evaluate(colors) == ["rgb(20, 23, 27)", "rgb(230, 233, 236)"]
