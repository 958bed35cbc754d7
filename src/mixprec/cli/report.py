"""`mixprec report`: a run as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mixprec.cli.options import Json
from mixprec.cli.output import console, print_json


def report(
    run_dir: Annotated[
        Path,
        typer.Argument(
            help="The folder of mixprec train, compare or bench.",
            metavar="RUN_DIR",
            show_default=False,
        ),
    ],
    against: Annotated[
        Path | None,
        typer.Option(
            help="Another run: its curves too, and what differs.",
            metavar="RUN_DIR",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page; report.html in RUN_DIR by default.", metavar="FILE", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """A run as one self-contained HTML page.

    Losses, step time, loss scale, alarms, statistics by layer, configuration and environment; of a
    run that failed or goes on, what there is. It opens without a network.
    """
    from mixprec.pages.report import report as write

    written = write(run_dir, against=against, out=out)
    if as_json:
        print_json(written)
        return
    for folder, lines in written.get("missing", {}).items():
        for line in lines:
            console().print(f"{folder}: {line}", soft_wrap=True)
    console().print(f"{written['kind']}: {written['page']}", soft_wrap=True)
