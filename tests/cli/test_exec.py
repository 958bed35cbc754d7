"""`mixprec exec`: what it says, where it says it, and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mixprec import cublas, launch
from mixprec.variables import Machine

LOGS = """
import os
with open(os.environ["CUBLAS_LOGDEST_DBG"], "w") as log:
    for name in ("cublasDgemm_v2", "cublasHgemm"):
        print(f"I! cuBLAS (v13.1.0) function cublasStatus_t {name}(int) called:", file=log)
        print("i!Process=7; Thread=1; MathMode=CUBLAS_DEFAULT_MATH", file=log)
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in launch._SHOWN:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(cuda=(13, 0), cublas=(13, 1, 0, 3), capability=(9, 0))
    monkeypatch.setattr(launch, "_machine", lambda: machine)


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.usefixtures("hopper")
def test_says_what_takes_effect_before_the_command(cli: Callable) -> None:
    options = ("--fp64-emulation", "79", "--strategy", "eager", "--fp32-emulation")
    code, out, err = cli("exec", *options, "--", "sh", "-c", "exit 7")
    assert (code, out) == (7, "")
    said = words(err)
    assert "torch: CUDA 13.0; cuBLAS: 13.1.0.3; GPU: capability 9.0" in said
    assert "CUBLAS_EMULATE_DOUBLE_PRECISION=1 yes: set, and read here" in said
    assert "CUBLAS_EMULATION_STRATEGY=eager yes: set, and read here" in said
    assert "CUBLAS_EMULATE_SINGLE_PRECISION=1 no: cuBLAS emulates nothing on compute" in said
    assert "79 mantissa bits: 10 slices of 8 bits" in said
    assert max(map(len, err.splitlines())) <= 80


def test_says_why_nothing_takes_effect_here(cli: Callable) -> None:
    code, out, err = cli("exec", "--fp64-emulation", "55", "--", "true")
    assert (code, out) == (0, "")
    assert "torch: without CUDA; cuBLAS: none; GPU: none from NVIDIA" in err
    assert "=1 no: this torch is built without CUDA" in words(err)


@pytest.mark.parametrize("options", [("--dry-run",), ()])
def test_without_a_command_it_only_says_it(cli: Callable, options: tuple[str, ...]) -> None:
    command = ("sh", "-c", "exit 7") if options else ()
    code, out, err = cli("exec", "--opt-level", "O1", *options, *command)
    assert (code, err) == (0, "")
    assert "AMPLITE_LEVEL=O1 yes: set, and read here" in words(out)


def test_page_shows_what_is_printed(cli: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_machine", Machine)
    options = ("--fp64-emulation", "79", "--strategy", "eager", "--log")
    page = (Path(__file__).parents[2] / "docs" / "exec.md").read_text()
    lines = [line.rstrip() for line in cli("exec", *options, "--", "true").err.splitlines()]
    assert "\n".join(filter(None, lines)) in page


def test_nothing_set(cli: Callable) -> None:
    assert "nothing is set" in cli("exec").out


@pytest.mark.usefixtures("hopper")
def test_fixed_bits_are_taken_out_for_auto(cli: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cublas.BITS, "55")
    out = cli("exec", "--fp64-emulation", "auto").out
    assert f"taken out of the environment: {cublas.BITS}" in words(out)


def test_table_of_the_log(cli: Callable, tmp_path: Path) -> None:
    path = tmp_path / "calls.log"
    code, out, err = cli("exec", "--log-file", str(path), "--", sys.executable, "-c", LOGS)
    assert (code, out) == (0, "")
    assert "cuBLAS 13.1.0, 1 process" in err
    assert "cublasDgemm FP64 1 0 0 1 0" in words(err)
    assert "cublasHgemm FP16 1 0 1 0 0" in words(err)
    assert "not said: the log has the call, not whether it was emulated" in words(err)
    assert str(path) in err.replace("\n", "")
    assert path.read_text().count("I! cuBLAS") == 2


def test_empty_log(cli: Callable) -> None:
    assert "cuBLAS logged no product" in words(cli("exec", "--log", "--", "true").err)


def test_json_has_the_plan_and_the_outcome(cli: Callable) -> None:
    code, out, err = cli(
        "exec", "--json", "--fp64-emulation", "79", "--log", sys.executable, "-c", LOGS
    )
    data = json.loads(out)
    assert (code, err) == (0, "")
    assert data["command"][0] == sys.executable
    assert data["changes"]["CUBLAS_EMULATE_DOUBLE_PRECISION"] == "1"
    assert {row["has_effect"] for row in data["variables"]} == {False}
    assert (data["exit_code"], data["signal"], data["log_file"]) == (0, "", None)
    assert [row["routine"] for row in data["log"]["calls"]] == ["cublasDgemm", "cublasHgemm"]
    assert data["log"]["calls"][0]["not_said"] == 1


def test_json_of_a_plan(cli: Callable) -> None:
    data = json.loads(cli("exec", "--json", "--special-values", "inf,nan").out)
    assert data["changes"] == {cublas.SPECIAL_VALUES: "3"}
    assert "exit_code" not in data


def test_signal_is_128_and_its_number(cli: Callable) -> None:
    code, _, err = cli("exec", "--", "sh", "-c", "kill -TERM $$")
    assert code == 143
    assert "ended by SIGTERM" in err


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("no-such-program", 127, "mixprec: command: got 'no-such-program'; no such program"),
        ("/etc/passwd", 126, "mixprec: command: got '/etc/passwd'; cannot be run"),
    ],
)
def test_command_that_cannot_be_run(cli: Callable, command: str, code: int, said: str) -> None:
    outcome = cli("exec", "--", command)
    assert outcome.code == code
    assert said in outcome.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--fp64-emulation", "0"), "fp64-emulation: got '0'; must be a number of mantissa bits"),
        (("--fp64-emulation", "full"), "fp64-emulation: got 'full'; must be"),
        (("--strategy", "fast"), "strategy: got 'fast'; must be performant or eager"),
        (("--special-values", "none,inf"), "special_values: got 'none'; must be of 'inf' and"),
        (("--opt-level", "O9"), "opt_level: got 'O9'; must be O0, O1, O2 or O3"),
    ],
)
def test_wrong_setting_is_one_line_and_nothing_runs(
    cli: Callable, tmp_path: Path, options: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "ran"
    code, out, err = cli("exec", *options, "--", "touch", str(path))
    assert (code, out) == (2, "")
    assert err.startswith(f"mixprec: {said}")
    assert err.count("\n") == 1
    assert not path.exists()


def test_words_after_the_command_are_its_own(cli: Callable, tmp_path: Path) -> None:
    path = tmp_path / "words"
    code = "import sys; open(sys.argv[1], 'w').write(repr(sys.argv[2:]))"
    for separator in ((), ("--",)):
        command = (sys.executable, "-c", code, str(path), "--json", "--log", "--", "--help")
        assert cli("exec", *separator, *command).code == 0
        assert path.read_text() == "['--json', '--log', '--', '--help']"


def piped(*options: str) -> subprocess.CompletedProcess[str]:
    """A command that copies its input, launched in a fresh interpreter."""
    base = [sys.executable, "-m", "mixprec.cli.main", "exec", *options, "--"]
    return subprocess.run(
        [*base, "sh", "-c", "cat; echo said >&2"],
        input="in",
        capture_output=True,
        text=True,
        check=True,
    )


def test_standard_output_stays_the_commands() -> None:
    done = piped("--fp64-emulation", "79")
    assert done.stdout == "in"
    assert done.stderr.endswith("said\n")


@pytest.mark.slow
def test_json_is_alone_on_standard_output() -> None:
    done = piped("--json")
    assert json.loads(done.stdout)["exit_code"] == 0
    assert done.stderr == "insaid\n"
