"""A command with its cuBLAS set to emulate: what will take effect, the run, and what the log says.

The variables and who reads them are in ``variables``, their settings and the log in ``cublas``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch

from mixprec import cublas, survey
from mixprec.cublas import Emulation, Log
from mixprec.train.config import LEVEL_VARIABLE
from mixprec.variables import Machine, Variable, check_value, read_variables

TEMPORARY = "a temporary file"
_SHOWN = (
    LEVEL_VARIABLE,
    cublas.DOUBLE,
    cublas.SINGLE,
    cublas.STRATEGY,
    cublas.BITS,
    cublas.SPECIAL_VALUES,
    cublas.LOG_ON,
    cublas.LOG_TO,
)
_FORWARDED = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
_FROM_TERMINAL = ("SIGINT", "SIGQUIT")  # a terminal sends them to the command as well
_SIGNALLED = 128
_LISTEN_SECONDS = 0.1
_PROBE = """
import dataclasses, json, sys
from mixprec import survey
json.dump(dataclasses.asdict(survey.machine()), sys.stdout, default=sorted)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a launch sets, and what of it will take effect.

    Attributes:
        command: Program and arguments; empty where none was given.
        changes: The variables that are set, or taken out of the environment where None.
        variables: Every variable of emulation, logging and level that the command will see set,
            those it inherits included, each with its effect.
        machine: What decided it: the torch and the first GPU of this interpreter.
        notes: What follows from several settings together, a line each.
    """

    command: tuple[str, ...]
    changes: Mapping[str, str | None]
    variables: tuple[Variable, ...]
    machine: Machine
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended.

    Attributes:
        exit_code: Its own, or 128 + n where signal n ended it.
        signal: Name of that signal; "" without.
        seconds: Wall-clock time.
        log: What cuBLAS logged; None where logging was not asked for.
        log_file: Where the log stays; None for a temporary one.
    """

    exit_code: int
    signal: str
    seconds: float
    log: Log | None
    log_file: str | None


def plan(
    command: Sequence[str] = (),
    *,
    emulation: Emulation | None = None,
    opt_level: str | None = None,
    log: bool | str | os.PathLike[str] = False,
) -> Plan:
    """What a launch with these arguments, those of ``run``, would do; nothing is run.

    Finds out about GPUs in a process of its own, so that this one holds none while the command
    runs.

    Raises:
        ValueError: A setting that would be ignored, or a log that is already there.
    """
    wanted = {} if emulation is None else emulation.environment()
    changes = {n: value for n, value in wanted.items() if value is not None or n in os.environ}
    if opt_level is not None:
        changes[LEVEL_VARIABLE] = check_value(LEVEL_VARIABLE, opt_level, argument="opt_level")
    path = _log_path(log)
    if log is not False:
        changes |= {cublas.LOG_ON: "1", cublas.LOG_TO: TEMPORARY if path is None else str(path)}
    environment = _changed(changes)
    here = _machine()
    found = {row.name: row for row in read_variables(environment, here)}
    return Plan(
        command=tuple(command),
        changes=changes,
        variables=tuple(found[name] for name in _SHOWN if found[name].value is not None),
        machine=here,
        notes=tuple(_notes(environment)),
    )


def run(
    command: Sequence[str],
    *,
    emulation: Emulation | None = None,
    opt_level: str | None = None,
    log: bool | str | os.PathLike[str] = False,
    announce: Callable[[Plan], None] | None = None,
    stdout: int | None = None,
) -> Outcome:
    """Runs a command under settings of cuBLAS, and reads its log.

    Args:
        command: Program and arguments, run without a shell.
        emulation: What cuBLAS shall emulate; nothing is changed where None.
        opt_level: O0 to O3, the level of ``mixprec train`` and ``compare``.
        log: Whether cuBLAS logs its calls, to a file if a path is given, else to a temporary one.
        announce: Gets the plan before the command starts.
        stdout: A file descriptor for the command's standard output; this process's where None.

    Returns: How it ended. Signals that stop or tell a job something are passed on to the command.

    Raises:
        ValueError: No command, a setting that would be ignored, a log that is already there.
        FileNotFoundError: There is no such program.
        OSError: The program cannot be started.

    Edge cases: a setting without effect here stops nothing; the plan says so. A command that
    forks writes one log.
    """
    if not command:
        raise ValueError("command: got none; must be a program and its arguments; pass some")
    found = plan(command, emulation=emulation, opt_level=opt_level, log=log)
    if announce is not None:
        announce(found)
    with tempfile.TemporaryDirectory(prefix="mixprec-") as folder:
        changes = dict(found.changes)
        path = _log_path(log)
        if log is not False:
            changes[cublas.LOG_TO] = str(path or Path(folder) / "cublas.log")
        start = time.perf_counter()
        code = _wait(found.command, _changed(changes), stdout)
        seconds = time.perf_counter() - start
        lines = None if log is False else _read_log(Path(str(changes[cublas.LOG_TO])))
    return Outcome(
        exit_code=code if code >= 0 else _SIGNALLED - code,
        signal="" if code >= 0 else _signal_name(-code),
        seconds=seconds,
        log=lines,
        log_file=None if path is None else str(path),
    )


def _signal_name(number: int) -> str:
    """SIGTERM for 15; the number of one without a name."""
    names = {int(known): known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")


def _changed(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment with the changes."""
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _log_path(log: bool | str | os.PathLike[str]) -> Path | None:
    """Where a log stays, whatever folder the command changes to; None where nowhere."""
    if isinstance(log, bool):
        return None
    path = Path(log).absolute()
    if not path.parent.is_dir():
        raise ValueError(f"log: got {str(log)!r}; its folder does not exist; make it first")
    if path.is_dir() or (path.is_file() and path.stat().st_size > 0):
        raise ValueError(
            f"log: got {str(log)!r}, which exists; its calls would be counted too; name a new file"
        )
    return path


def _read_log(path: Path) -> Log:
    """The table of a log; an empty one where cuBLAS wrote none."""
    if not path.exists():
        return cublas.parse_log(())
    with path.open(encoding="utf-8", errors="replace") as lines:
        return cublas.parse_log(lines)


def _notes(environment: Mapping[str, str]) -> Iterator[str]:
    """What follows from several settings together."""
    details = [
        name
        for name in (cublas.STRATEGY, cublas.BITS, cublas.SPECIAL_VALUES)
        if name in environment
    ]
    doubles, singles = (environment.get(name) == "1" for name in (cublas.DOUBLE, cublas.SINGLE))
    if details and not (doubles or singles):
        yield (
            f"{', '.join(details)}: acts only on what the program itself allows to be emulated, "
            f"since {cublas.DOUBLE} and {cublas.SINGLE} are not 1"
        )
    bits = environment.get(cublas.BITS, "")
    if doubles and bits.isdecimal() and int(bits) > 0:
        parts = cublas.slices(int(bits))
        kept = parts * cublas.SLICE_BITS - 1
        yield f"{bits} mantissa bits: {parts} slices of 8 bits, which keep {kept}"
    elif doubles:
        yield "mantissa bits: as many as the operands need, above 79 native (cuBLAS's default)"


def _machine() -> Machine:
    """The survey's machine, found in a process of its own where there are GPUs."""
    return _survey_elsewhere() if torch.cuda.device_count() else survey.machine()


def _survey_elsewhere() -> Machine:
    """As ``survey.machine``, without a trace of a GPU in this process."""
    command = [sys.executable, "-c", _PROBE]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    data = json.loads(done.stdout)
    versions = {
        name: None if data[name] is None else tuple(data[name])
        for name in ("cuda", "cublas", "capability")
    }
    return dataclasses.replace(
        Machine(**data | versions), cpu_features=frozenset(data["cpu_features"])
    )


def _wait(command: Sequence[str], environment: Mapping[str, str], stdout: int | None) -> int:
    """Runs a command to its end: its exit code, or minus the signal that ended it."""
    early: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    with _handlers(forward):
        try:
            process = subprocess.Popen(command, env=environment, stdout=stdout)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            why = "no such program" if missing else f"cannot be run ({error.strerror})"
            raise type(error)(
                f"command: got {command[0]!r}; {why}; name a program, and write -- before it"
            ) from error
        for number in early:
            process.send_signal(number)
        # Python calls handlers in its main thread, which a wait without an end would keep from it
        # where the signal came just before the wait, or to another thread
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LISTEN_SECONDS)
    return process.returncode


@contextmanager
def _handlers(forward: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Signals go to the command for as long as the block runs; only a main thread can do that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Ignoring a signal would be inherited by the command; a function that does nothing is not.
    wanted = {name: forward for name in _FORWARDED} | {
        name: lambda *_: None for name in _FROM_TERMINAL
    }
    numbers = {getattr(signal, name): act for name, act in wanted.items() if hasattr(signal, name)}
    before = {number: signal.signal(number, act) for number, act in numbers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
