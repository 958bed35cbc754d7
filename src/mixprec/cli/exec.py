"""`mixprec exec`: a command whose cuBLAS emulates FP64 or FP32; what takes effect, what it did."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mixprec.cli.options import Json
from mixprec.cli.output import console, print_json, print_table
from mixprec.variables import dotted

if TYPE_CHECKING:
    from rich.console import Console

    from mixprec.cublas import Log
    from mixprec.launch import Outcome, Plan

CANNOT_RUN = 126
NO_SUCH_PROGRAM = 127
_STANDARD_ERROR = 2
LOG_COLUMNS = ("routine", "type", "calls", "emulated", "native", "not said", "allowed")


def exec_(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="Program and arguments.", metavar="-- COMMAND", show_default=False),
    ] = None,
    fp64: Annotated[
        str | None,
        typer.Option(
            "--fp64-emulation",
            help="FP64 from 8-bit integers: mantissa bits as 55 or 79; auto: what the operands "
            "need; off.",
            metavar="BITS",
            show_default=False,
        ),
    ] = None,
    fp32: Annotated[
        bool | None,
        typer.Option(
            "--fp32-emulation/--no-fp32-emulation",
            help="FP32 from BF16, allowed or forbidden.",
            show_default=False,
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="performant: where that is faster; eager: wherever it is possible.",
            show_default=False,
        ),
    ] = None,
    special_values: Annotated[
        str | None,
        typer.Option(
            help="What emulated products keep: none, inf, nan or inf,nan.",
            metavar="VALUES",
            show_default=False,
        ),
    ] = None,
    opt_level: Annotated[
        str | None,
        typer.Option(help="O0 to O3, for mixprec train and compare.", show_default=False),
    ] = None,
    log: Annotated[
        bool, typer.Option("--log", help="Let cuBLAS log its calls, and tabulate them.")
    ] = False,
    log_file: Annotated[
        Path | None,
        typer.Option(
            help="As --log, and keep the log: a new file.", metavar="PATH", show_default=False
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would take effect.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a command with emulation in cuBLAS.

    Says on standard error which settings take effect on this machine, and after the run what
    cuBLAS logged. Without a command it only says the first, on standard output. The exit code is
    the command's; 128 + n: signal n ended it; 126, 127: it cannot be run, there is none.
    With --json the command's standard output goes to standard error.
    """
    from mixprec import launch
    from mixprec.cublas import Emulation

    emulation = Emulation(
        fp64=_bits(fp64), fp32=fp32, strategy=strategy, special_values=_names(special_values)
    )
    settings: dict[str, Any] = {
        "emulation": emulation,
        "opt_level": opt_level,
        "log": log if log_file is None else log_file,
    }
    if command and not dry_run:
        raise typer.Exit(_run(command, settings, as_json))
    found = launch.plan(command or (), **settings)
    if as_json:
        print_json(_plan_data(found))
    else:
        _show_plan(found, console())


def _run(command: list[str], settings: dict[str, Any], as_json: bool) -> int:
    """Runs a command, shows its plan before and its outcome after: the exit code."""
    from mixprec import launch

    plans: list[Plan] = []

    def announce(found: Plan) -> None:
        plans.append(found)
        if not as_json:
            _show_plan(found, _stderr())

    stdout = _STANDARD_ERROR if as_json else None
    try:
        outcome = launch.run(command, **settings, announce=announce, stdout=stdout)
    except OSError as error:
        typer.echo(f"mixprec: {error}", err=True)
        return NO_SUCH_PROGRAM if isinstance(error, FileNotFoundError) else CANNOT_RUN
    if as_json:
        print_json(_plan_data(plans[0]) | _outcome_data(outcome))
    else:
        _show_outcome(outcome, _stderr())
    return outcome.exit_code


def _bits(text: str | None) -> int | Literal["auto", "off"] | None:
    """Mantissa bits as they are written on a command line."""
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if text == "off":
        return "off"
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise ValueError(
        f"fp64-emulation: got {text!r}; must be a number of mantissa bits from 1 on, auto or off; "
        "write for example --fp64-emulation 79"
    )


def _names(text: str | None) -> tuple[str, ...] | None:
    """Special values as they are written on a command line."""
    if text is None:
        return None
    return () if text == "none" else tuple(name.strip() for name in text.split(","))


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False)


def _show_plan(found: Plan, out: Console) -> None:
    """What decides, what is set, and what takes effect."""
    here = found.machine
    cuda = "without CUDA" if here.cuda is None else f"CUDA {dotted(here.cuda)}"
    library = "not found" if here.cublas is None else dotted(here.cublas)
    library = "none" if here.cuda is None else library
    gpu = "none from NVIDIA" if here.capability is None else f"capability {dotted(here.capability)}"
    out.print(f"torch: {cuda}; cuBLAS: {library}; GPU: {gpu}")
    removed = [name for name, value in found.changes.items() if value is None]
    if removed:
        out.print(f"taken out of the environment: {', '.join(removed)}")
    rows = [
        (f"{row.name}={row.value}", f"{'yes' if row.has_effect else 'no'}: {row.reason}")
        for row in found.variables
    ]
    if rows:
        print_table(("environment variable", "effect here"), rows, out=out)
    else:
        out.print("nothing is set")
    for note in found.notes:
        out.print(note)


def _show_outcome(outcome: Outcome, out: Console) -> None:
    """The table of the log, and where the log is."""
    if outcome.signal:
        out.print(f"mixprec: ended by {outcome.signal}")
    if outcome.log is None:
        return
    if outcome.log.calls:
        _show_log(outcome.log, out)
    else:
        out.print("cuBLAS logged no product: the command made none, or does not use cuBLAS")
    if outcome.log_file is not None:
        out.print(f"log: {outcome.log_file}", soft_wrap=True)


def _show_log(log: Log, out: Console) -> None:
    """Calls by routine, and what the words mean."""
    processes = "1 process" if log.processes == 1 else f"{log.processes} processes"
    print_table(
        LOG_COLUMNS,
        [(row.routine, row.type or "not said", *map(str, _counts(row))) for row in log.calls],
        title=f"cuBLAS {', '.join(log.versions)}, {processes}",
        numeric=LOG_COLUMNS[2:],
        out=out,
    )
    if any(row.not_said for row in log.calls):
        out.print(
            "not said: the log has the call, not whether it was emulated. allowed: its compute "
            "type or math mode allows emulation."
        )


def _counts(row: Any) -> tuple[int, ...]:
    return (row.calls, row.emulated, row.native, row.not_said, row.allowed)


def _plan_data(found: Plan) -> dict[str, Any]:
    """A plan as JSON has it."""
    here = found.machine
    return {
        "command": list(found.command),
        "torch_cuda": None if here.cuda is None else dotted(here.cuda),
        "cublas": None if here.cublas is None else dotted(here.cublas),
        "capability": None if here.capability is None else dotted(here.capability),
        "changes": dict(found.changes),
        "variables": list(found.variables),
        "notes": list(found.notes),
    }


def _outcome_data(outcome: Outcome) -> dict[str, Any]:
    """How a command ended, as JSON has it."""
    return {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}
