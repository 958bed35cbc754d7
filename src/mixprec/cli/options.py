"""Options that several verbs have alike."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Over the file, as often as needed: --set recipe=bf16",
        metavar="SECTION.KEY=VALUE",
        show_default=False,
    ),
]
Base = Annotated[
    str | None,
    typer.Option(
        help="fp32, bf16 or fp16: what all but converted layers run in; over the file.",
        metavar="TYPE",
        show_default=False,
    ),
]
Recipes = Annotated[
    str | None,
    typer.Option(
        help="Names separated by commas; the others are compared with the first.",
        metavar="A,B,C",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(help="auto, cpu, mps, cuda or cuda:N; over the file.", show_default=False),
]


def names(listed: str | None) -> list[str] | None:
    """The words of an option that takes several; None where it was not given."""
    return None if listed is None else [name.strip() for name in listed.split(",")]
