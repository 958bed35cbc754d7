"""Runs the command line inside the test process, as a pipe would see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

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
