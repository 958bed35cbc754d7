"""The `mixprec` command: its verbs, and one place that turns errors into a line and an exit code.

Exit codes: 0 done, 1 error, 2 usage or configuration, 3 stopped on a non-finite loss, 75 preempted
with a checkpoint saved.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from mixprec.cli.compare import compare
from mixprec.cli.doctor import doctor
from mixprec.cli.formats import formats
from mixprec.cli.recipes import recipes
from mixprec.cli.train import train

USAGE_ERROR = 2

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


for command in (formats, recipes, doctor, train):
    app.command()(command)
app.command(short_help="One model under several recipes, one table.")(compare)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits.

    Wrong input (ValueError, TypeError, a missing file or library) ends in one line on standard
    error and exit code 2; its traceback is shown with ``--debug``. Anything else is a fault of the
    program and shows its traceback at once.

    Args:
        arguments: Words of the command line; those of the process where None.
    """
    options = {"debug": False}
    try:
        app(arguments, prog_name="mixprec", obj=options)
    except (ValueError, TypeError, ImportError, OSError) as error:
        if options["debug"]:
            raise
        print(f"mixprec: {str(error).strip() or type(error).__name__}", file=sys.stderr)
        sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    main()
