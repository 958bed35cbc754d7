"""Run folders and the pages of them, each written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from mixprec.pages import run
from mixprec.pages.run_folder import read
from pages.runs import write_run


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run: steps, evaluations, statistics, alarms, loss scale."""
    return write_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="session")
def text(folder: Path) -> str:
    """The page of that run."""
    return run.render(read(folder))
