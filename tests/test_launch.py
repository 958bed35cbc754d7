"""A command under settings of cuBLAS: what is set, how it ends, and what its log says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mixprec import cublas, launch, survey
from mixprec.cublas import Emulation
from mixprec.variables import Machine

HOPPER = Machine(cuda=(13, 0), cublas=(13, 1, 0, 3), capability=(9, 0))
NAMES = launch._SHOWN

# A program that logs as cuBLAS does, where the variables ask for it.
LOGS = """
import os
if os.environ.get("CUBLAS_LOGINFO_DBG") == "1":
    with open(os.environ["CUBLAS_LOGDEST_DBG"], "a") as log:
        for name in ("cublasCreate_v2", "cublasDgemm_v2", "cublasDgemm_v2", "cublasHgemm"):
            print(f"I! cuBLAS (v13.1.0) function cublasStatus_t {name}(int) called:", file=log)
            print("i!Process=7; Thread=1; MathMode=CUBLAS_DEFAULT_MATH", file=log)
"""
SHOWS = """
import os, sys
names = sys.argv[2:]
open(sys.argv[1], "w").write(repr({name: os.environ.get(name) for name in names}))
"""


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_machine", lambda: HOPPER)


def python(code: str, *words: str) -> list[str]:
    return [sys.executable, "-c", code, *words]


def seen(tmp_path: Path, **settings: object) -> dict[str, str | None]:
    """The variables as a command sees them."""
    path = tmp_path / "seen"
    launch.run(python(SHOWS, str(path), *NAMES), **settings)  # type: ignore[arg-type]
    found = eval(path.read_text())
    assert isinstance(found, dict)
    return found


def test_command_sees_the_settings_and_this_process_does_not(tmp_path: Path) -> None:
    before = dict(os.environ)
    settings = Emulation(fp64=79, fp32=False, strategy="eager", special_values=("inf", "nan"))
    found = seen(tmp_path, emulation=settings, opt_level="O2")
    assert found == {
        "AMPLITE_LEVEL": "O2",
        "CUBLAS_EMULATE_DOUBLE_PRECISION": "1",
        "CUBLAS_EMULATE_SINGLE_PRECISION": "0",
        "CUBLAS_EMULATION_STRATEGY": "eager",
        "CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT": "79",
        "CUBLAS_EMULATION_SPECIAL_VALUES_SUPPORT_MASK": "3",
        "CUBLAS_LOGINFO_DBG": None,
        "CUBLAS_LOGDEST_DBG": None,
    }
    assert dict(os.environ) == before


def test_auto_bits_are_not_fixed_by_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(cublas.BITS, "55")
    assert seen(tmp_path)[cublas.BITS] == "55"
    assert seen(tmp_path, emulation=Emulation(fp64="auto"))[cublas.BITS] is None
    assert launch.plan(emulation=Emulation(fp64="auto")).changes[cublas.BITS] is None
    monkeypatch.delenv(cublas.BITS)
    assert cublas.BITS not in launch.plan(emulation=Emulation(fp64="auto")).changes


@pytest.mark.parametrize("code", [0, 1, 2, 7, 75, 255])
def test_exit_code_is_the_commands(code: int) -> None:
    outcome = launch.run(["sh", "-c", f"exit {code}"])
    assert (outcome.exit_code, outcome.signal) == (code, "")
    assert (outcome.log, outcome.log_file) == (None, None)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGKILL", "SIGSEGV", "SIGINT"])
def test_signal_that_ends_the_command(name: str) -> None:
    number = getattr(signal, name)
    default = "" if name == "SIGKILL" else f"signal.signal({number}, signal.SIG_DFL);"
    outcome = launch.run(python(f"import os, signal; {default} os.kill(os.getpid(), {number})"))
    assert (outcome.exit_code, outcome.signal) == (128 + number, name)


def test_signal_without_a_name() -> None:
    outcome = launch.run(python("import os; os.kill(os.getpid(), 40)"))
    assert (outcome.exit_code, outcome.signal) == (168, "signal 40")


WAITS = """
import signal, sys, time
signal.signal(getattr(signal, sys.argv[2]), lambda *_: sys.exit(9))
open(sys.argv[1], "w").close()
# not a pause, which a signal just before it would leave without an end
time.sleep(600)
"""
LAUNCHES = """
import sys
from mixprec import launch
sys.exit(launch.run(sys.argv[1:]).exit_code)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("interrupts", [True, False])
def test_signal_is_passed_on(tmp_path: Path, name: str, interrupts: bool) -> None:
    ready = tmp_path / "ready"
    before = signal.getsignal(getattr(signal, name))

    def send() -> None:
        while not ready.exists():
            time.sleep(0.01)
        if interrupts:
            os.kill(os.getpid(), getattr(signal, name))
        else:
            # to a thread that does not wait for the command, as if just before the wait
            signal.pthread_kill(threading.get_ident(), getattr(signal, name))

    thread = threading.Thread(target=send)
    thread.start()
    outcome = launch.run(python(WAITS, str(ready), name))
    thread.join()
    assert (outcome.exit_code, outcome.signal) == (9, "")
    assert signal.getsignal(getattr(signal, name)) is before


@pytest.mark.slow
def test_interrupt_from_the_terminal_leaves_the_exit_code_to_the_command(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    process = subprocess.Popen(
        python(LAUNCHES, *python(WAITS, str(ready), "SIGINT")), start_new_session=True
    )
    while not ready.exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait() == 9


def test_run_outside_the_main_thread() -> None:
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(launch.run(["sh", "-c", "exit 4"]).exit_code)
    )
    thread.start()
    thread.join()
    assert codes == [4]


def test_no_command_is_an_error() -> None:
    with pytest.raises(ValueError, match="command: got none; must be a program"):
        launch.run([])


def test_program_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="command: got 'no-such-program'; no such program"):
        launch.run(["no-such-program", "x"])


def test_program_that_cannot_be_run(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("text")
    with pytest.raises(PermissionError, match=r"cannot be run \(Permission denied\)"):
        launch.run([str(path)])
    path.chmod(0o755)
    with pytest.raises(OSError, match=r"cannot be run \(Exec format error\)"):
        launch.run([str(path)])


def test_log_is_read_and_a_temporary_one_is_gone(tmp_path: Path) -> None:
    plans: list[launch.Plan] = []
    outcome = launch.run(python(LOGS), log=True, announce=plans.append)
    assert outcome.log is not None
    assert [(row.routine, row.calls, row.native, row.not_said) for row in outcome.log.calls] == [
        ("cublasDgemm", 2, 0, 2),
        ("cublasHgemm", 1, 1, 0),
    ]
    assert (outcome.log.versions, outcome.log_file) == (("13.1.0",), None)
    assert plans[0].changes[cublas.LOG_TO] == launch.TEMPORARY
    found = seen(tmp_path, log=True)
    assert found[cublas.LOG_ON] == "1"
    assert not Path(str(found[cublas.LOG_TO])).parent.exists()


def test_log_stays_where_a_path_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = f"import os; os.chdir('/')\n{LOGS}"
    outcome = launch.run(python(code), log="calls.log")
    assert outcome.log_file == str(tmp_path / "calls.log")
    assert outcome.log is not None
    assert sum(row.calls for row in outcome.log.calls) == 3
    with pytest.raises(ValueError, match=r"log: got 'calls\.log', which exists; its calls would"):
        launch.run(python(LOGS), log="calls.log")


def test_log_that_cublas_did_not_write(tmp_path: Path) -> None:
    outcome = launch.run(["true"], log=True)
    assert outcome.log is not None
    assert (outcome.log.calls, outcome.log.versions) == ((), ())
    with pytest.raises(ValueError, match=r"log: got '.*nowhere/x'; its folder does not exist"):
        launch.run(["true"], log=tmp_path / "nowhere" / "x")


@pytest.mark.usefixtures("hopper")
def test_plan_says_what_takes_effect() -> None:
    settings = Emulation(fp64=79, fp32=True, strategy="eager")
    found = launch.plan(emulation=settings, opt_level="O1", log=True)
    effects = {row.name: (row.has_effect, row.reason) for row in found.variables}
    read_here = (True, "set, and read here")
    assert effects == {
        "AMPLITE_LEVEL": read_here,
        "CUBLAS_EMULATE_DOUBLE_PRECISION": read_here,
        "CUBLAS_EMULATE_SINGLE_PRECISION": (
            False,
            "cuBLAS emulates nothing on compute capability 9.0",
        ),
        "CUBLAS_EMULATION_STRATEGY": read_here,
        "CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT": read_here,
        "CUBLAS_LOGINFO_DBG": read_here,
        "CUBLAS_LOGDEST_DBG": read_here,
    }
    assert found.notes == ("79 mantissa bits: 10 slices of 8 bits, which keep 79",)


@pytest.mark.usefixtures("hopper")
def test_plan_lists_what_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cublas.STRATEGY, "fast")
    found = launch.plan(emulation=Emulation(fp64=53))
    effects = {row.name: row.reason for row in found.variables}
    assert effects[cublas.STRATEGY] == "got 'fast'; only performant or eager acts"
    assert found.notes == ("53 mantissa bits: 7 slices of 8 bits, which keep 55",)


@pytest.mark.usefixtures("hopper")
def test_plan_notes_details_of_an_emulation_that_is_not_allowed() -> None:
    (note,) = launch.plan(emulation=Emulation(strategy="eager", fp64="off")).notes
    assert note.startswith("CUBLAS_EMULATION_STRATEGY: acts only on what the program itself allows")
    assert launch.plan(emulation=Emulation(strategy="eager", fp32=True)).notes == ()
    (note,) = launch.plan(emulation=Emulation(fp64="auto")).notes
    assert note.startswith("mantissa bits: as many as the operands need")


@pytest.mark.parametrize("level", ["O4", "2", ""])
def test_level_is_checked(level: str) -> None:
    with pytest.raises(ValueError, match=f"opt_level: got {level!r}; must be O0, O1, O2 or O3"):
        launch.plan(opt_level=level)


@pytest.mark.slow
def test_survey_in_a_process_of_its_own_is_the_same() -> None:
    assert launch._survey_elsewhere() == survey.machine()
    assert launch._machine() == survey.machine()
