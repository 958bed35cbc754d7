"""`mixprec explain`: every operation of one forward pass, its types, and the rule that decided."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixprec.cli.options import Base, Json, Settings
from mixprec.cli.output import console, print_json, print_table

if TYPE_CHECKING:
    from mixprec.explanation import OperationRow


def explain(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A TOML file; without it mnist_cnn on mnist.",
            metavar="CONFIG",
            show_default=False,
        ),
    ] = None,
    settings: Settings = None,
    base: Base = None,
    show_all: Annotated[
        bool, typer.Option("--all", help="Also what computes nothing: view, transpose, reshape.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Which operation runs in which type, and why.

    Runs the first batch's forward pass and loss, without an update. Shows for each operation the
    types of its inputs, the type that it computes in, the type of its result and the rule of the
    policy that decided; a converted layer is one row.
    """
    from mixprec.explanation import explain_run
    from mixprec.train.config import load, recipe_line

    resolved = load(config, [*(settings or []), *([f"base={base}"] if base is not None else [])])
    found = explain_run(resolved)
    rows = [row for row in found if show_all or not row.is_view]
    if as_json:
        print_json({"model": resolved.model, "recipe": recipe_line(resolved), "operations": rows})
        return
    print_table(
        ("module", "operation", "input", "compute", "output", "rule"),
        [_cells(row) for row in rows],
        title=f"{resolved.model}, {recipe_line(resolved)}",
    )
    left_out = len(found) - len(rows)
    if left_out:
        console().print(f"left out: {left_out} that compute nothing (--all shows them)")


def _cells(row: OperationRow) -> tuple[str, ...]:
    """A row as words."""
    rule = f"{row.rule}, {row.impl}" if row.impl else row.rule
    return (
        row.module or "(model)",
        row.operation,
        _distinct(row.inputs),
        _distinct(row.compute),
        _distinct(row.outputs),
        rule,
    )


def _distinct(types: Sequence[str]) -> str:
    """Each type once, in the order of the operands."""
    return ", ".join(dict.fromkeys(types))
