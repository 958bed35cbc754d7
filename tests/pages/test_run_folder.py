"""A run's folder is read whatever of it is there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mixprec.pages.run_folder import read
from pages.runs import lines, write_run


def test_whole_folder(folder: Path) -> None:
    found = read(folder)
    assert found.missing == []
    assert set(found.documents) == {"config.toml", "environment.json", "result.json"}
    counts = {kind: len(records) for kind, records in found.records.items()}
    assert counts == {"loss": 10, "eval_loss": 2, "statistics": 2, "alarm": 2, "error": 0}
    assert found.records["loss"] == [record for record in lines() if "loss" in record]


def test_cut_off_and_foreign_lines_are_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path) / "metrics.jsonl"
    whole = path.read_text()
    path.write_bytes(b'[1]\n{"loss": 1}\n' + whole.encode() + b'{"step": 44, "lo\xff')
    found = read(tmp_path)
    last = len(whole.splitlines()) + 3
    assert found.missing == [f"metrics.jsonl: left out what cannot be read, line 1, 2, {last}"]
    assert len(found.records["loss"]) == 10


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("config.toml", "no config.toml: the configuration is not known"),
        ("environment.json", "no environment.json: the environment is not known"),
        ("metrics.jsonl", "no metrics.jsonl: there are no curves"),
        ("result.json", "no result.json: the run failed, was stopped, or is not over"),
    ],
)
def test_missing_file_is_said(folder: Path, tmp_path: Path, name: str, line: str) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink()
    assert read(tmp_path).missing == [line]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("result.json", "[1]", "result.json cannot be read: it holds no table"),
        ("result.json", "{", "result.json cannot be read: Expecting property name"),
        ("config.toml", "a = ", "config.toml cannot be read: Invalid value"),
    ],
)
def test_damaged_file_is_said(tmp_path: Path, name: str, content: str, line: str) -> None:
    write_run(tmp_path)
    (tmp_path / name).write_text(content)
    (said,) = read(tmp_path).missing
    assert said.startswith(line)
    assert name not in read(tmp_path).documents


def test_numbers_that_are_not_finite_are_not_known(tmp_path: Path) -> None:
    records = [{"step": 1, "loss": float("nan")}]
    assert read(write_run(tmp_path, records=records)).records["loss"] == [{"step": 1, "loss": None}]


@pytest.mark.parametrize("name", ["", "absent", "file", "empty", "config"])
def test_what_is_no_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.toml").write_text("")
    with pytest.raises(ValueError, match=r"run_dir: got '.*'; it (is no folder|holds none of)"):
        read(tmp_path / name if name else "")
