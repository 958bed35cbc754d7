"""Runs the command line inside the test process, as a pipe would see it; a run for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from train.conftest import write_idx_folder

from mixprec.cli.main import main


class Outcome(NamedTuple):
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Outcome]:
    """Calls ``mixprec`` with the given words."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words: str) -> Outcome:
        with pytest.raises(SystemExit) as exit_:
            main(words)
        printed = capsys.readouterr()
        code = exit_.value.code
        return Outcome(code if isinstance(code, int) else 0, printed.out, printed.err)

    return run


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch on a few digits, with a checkpoint every other step."""
    folder = tmp_path_factory.mktemp("digits")
    file = folder / "small.toml"
    file.write_text(
        f'[data]\npath = "{write_idx_folder(folder)}"\nbatch_size = 8\n'
        "[optimizer]\nlr = 0.1\n[train]\nepochs = 1\n[checkpoint]\nevery = 2\n"
    )
    return file
