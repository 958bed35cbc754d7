"""`report` writes the page of any folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mixprec.pages import bench, comparison
from mixprec.pages.report import report
from pages.reading import Page
from pages.runs import write_run
from pages.test_bench import PRODUCTS
from pages.test_bench import RESULT as BENCHMARK
from pages.test_comparison import RESULT as COMPARISON


def write_result(folder: Path, result: object) -> Path:
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_run(folder: Path, tmp_path: Path) -> None:
    found = report(folder, out=tmp_path / "page.html")
    counts = {"loss": 10, "eval_loss": 2, "statistics": 2, "alarm": 2, "error": 0}
    assert found == {
        "page": str(tmp_path / "page.html"),
        "kind": "run",
        "records": counts,
        "missing": {str(folder): []},
    }
    assert Page((tmp_path / "page.html").read_text()).headings[0] == (1, "first")


def test_page_lies_in_the_folder(tmp_path: Path) -> None:
    assert report(write_run(tmp_path))["page"] == str(tmp_path / "report.html")
    assert (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("kind", "result", "render"),
    [
        ("comparison", COMPARISON, comparison.render),
        ("benchmark", BENCHMARK, bench.render),
        ("products", PRODUCTS, bench.render_products),
    ],
)
def test_other_folders_get_the_page_of_their_command(
    tmp_path: Path, kind: str, result: dict, render: object
) -> None:
    written = report(write_result(tmp_path / "x", result))
    assert written == {"page": str(tmp_path / "x" / "report.html"), "kind": kind}
    assert (tmp_path / "x" / "report.html").read_text() == render(result)  # type: ignore[operator]


def test_against_takes_runs_alone(folder: Path, tmp_path: Path) -> None:
    other = write_result(tmp_path / "x", COMPARISON)
    with pytest.raises(ValueError, match=r"against: got '.*x', a comparison, beside a run"):
        report(folder, against=other)
    with pytest.raises(ValueError, match=r"against: got '.*', a run, beside a comparison"):
        report(other, against=folder)
    with pytest.raises(ValueError, match="run_dir: got"):
        report(folder, against=tmp_path)
