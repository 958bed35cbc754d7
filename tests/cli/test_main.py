"""The command itself: help, version, errors and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version

import pytest

from mixprec.cli import formats
from mixprec.cli.main import main

VERBS = [
    *("formats", "recipes", "doctor", "plan", "explain", "errors"),
    *("train", "compare", "bench", "report", "exec"),
]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """The installed command in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-W", "error", *words],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "80"},
        check=False,
    )


def test_version(cli: Callable) -> None:
    assert cli("--version") == (0, f"mixprec {version('mixprec')}\n", "")


def test_help_names_every_verb(cli: Callable) -> None:
    code, out, err = cli("--help")
    assert (code, err) == (0, "")
    for verb in VERBS:
        assert f"\n  {verb} " in out
    assert "..." not in out.split("Commands:")[1]


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb(cli: Callable, verb: str) -> None:
    code, out, _ = cli(verb, "--help")
    assert code == 0
    assert f"Usage: mixprec {verb}" in out
    assert "--json" in out or verb == "train"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x: got 1; must be 2; pass 2"),
        TypeError("x: got a list"),
        ImportError("plotly is missing: pip install mixprec[report]"),
        FileNotFoundError(2, "No such file or directory", "run.toml"),
        PermissionError(13, "Permission denied", "/out"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_is_one_line_and_code_2(
    cli: Callable, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(text: str) -> None:
        raise error

    monkeypatch.setattr(formats, "parse_values", fail)
    assert cli("formats", "--cast=1") == (2, "", f"mixprec: {error}\n")
    with pytest.raises(type(error)):
        main(("--debug", "formats", "--cast=1"))


def test_fault_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "parse_values", lambda text: {}["missing"])
    with pytest.raises(KeyError):
        main(("formats", "--cast=1"))


@pytest.mark.parametrize("words", [("nope",), ("formats", "--nope"), ("formats", "extra")])
def test_wrong_usage_is_code_2(cli: Callable, words: tuple[str, ...]) -> None:
    code, out, err = cli(*words)
    assert (code, out) == (2, "")
    assert "Error: " in err
    assert "Traceback" not in err


def test_help_names_every_command() -> None:
    done = run("-m", "mixprec.cli.main", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("formats", "recipes", "doctor", "train", "compare"):
        assert command in done.stdout


def test_module_runs_as_a_program() -> None:
    done = run("-m", "mixprec.cli.main", "formats", "--cast=1,x")
    assert done.returncode == 2
    assert done.stderr.startswith("mixprec: cast: got 'x'")


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_full_disk_is_one_line_and_code_1(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mixprec.cli.main", "formats", *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "mixprec: [Errno 28] No space left on device\n"
