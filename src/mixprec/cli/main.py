"""The `mixprec` command: its verbs, and one place that turns errors into a line and an exit code.

Exit codes: 0 done, 1 error, 2 usage or configuration, 3 stopped on a non-finite loss, 75 preempted
with a checkpoint saved.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer

from mixprec.cli.bench import bench
from mixprec.cli.compare import compare
from mixprec.cli.doctor import doctor
from mixprec.cli.errors import errors
from mixprec.cli.exec import exec_
from mixprec.cli.explain import explain
from mixprec.cli.formats import formats
from mixprec.cli.plan import plan
from mixprec.cli.recipes import recipes
from mixprec.cli.report import report
from mixprec.cli.train import train
from mixprec.train.faults import EXIT_CODES, WRONG_INPUT

app = typer.Typer(
    name="mixprec",
    help="Mixed-precision training for PyTorch: native where the hardware has it, else emulated.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"mixprec {version('mixprec')}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    context.obj["debug"] = debug


for command in (formats, recipes, doctor, explain, errors, train, report):
    app.command()(command)
app.command(short_help="Memory, native layers and roofline elsewhere.")(plan)
app.command(short_help="One model under several recipes, one table.")(compare)
app.add_typer(bench, name="bench", short_help="Step time and memory by recipe; GEMM tables.")
# Words after the first one of the command are the command's own.
app.command("exec", context_settings={"allow_interspersed_args": False})(exec_)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    Wrong input (ValueError, TypeError, a missing file or library) ends in one line on standard
    error and exit code 2, a failure of the system (a full disk) in one line and exit code 1; the
    traceback is shown with ``--debug``. Anything else is a fault of the program and shows its
    traceback at once. A warning is one line on standard error.

    Args:
        arguments: Words of the command line; those of the process where None.
    """
    _run(arguments, {"debug": False})


def program() -> None:
    """`main` as a process of its own, whose exit code stands on several ranks too.

    A thread of gloo that lets go of a tensor while the interpreter takes itself apart ends the
    process by SIGABRT (pytorch issue 190489), and torch has nothing that waits for such a thread:
    `destroy_process_group` does not. So a rank leaves that part of Python's end out.
    """
    options = {"debug": False, "is_rank": False}
    try:
        _run(None, options)
    except SystemExit as ended:
        if not options["is_rank"] or isinstance(ended.code, str):
            raise
        atexit._run_exitfuncs()
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(ended.code or 0)


def _run(arguments: Sequence[str] | None, options: dict[str, bool]) -> None:
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning
            app(arguments, prog_name="mixprec", obj=options)
    except (*WRONG_INPUT, OSError) as error:
        if options["debug"]:
            raise
        print(f"mixprec: {str(error).strip() or type(error).__name__}", file=sys.stderr)
        if isinstance(error, WRONG_INPUT):
            sys.exit(EXIT_CODES["wrong input"])
        # What could not be written would be tried again, and complained about, on the way out.
        sys.stdout = None
        sys.exit(EXIT_CODES["error"])


def _print_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"mixprec: warning: {message}", file=sys.stderr)


if __name__ == "__main__":
    program()
