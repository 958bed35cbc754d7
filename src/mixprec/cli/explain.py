"""`mixprec explain`: every operation of a forward and a backward pass, its types, what decided."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mixprec.cli.measured import described
from mixprec.cli.options import Base, Json, Settings
from mixprec.cli.output import console, print_json, print_table

if TYPE_CHECKING:
    from mixprec.explanation import OperationRow

_COLUMNS = ("module", "operation", "input", "compute", "output", "rule")
_OPERAND_COLUMNS = ("recipe", "product", "first", "second", "impl", "modules")


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

    Runs the first batch's forward pass, loss and backward pass, without an update. Shows for each
    operation the types of its inputs, the type that it computes in, the type of its result and the
    rule of the policy that decided; of backward the gradients' types. Converted layers show their
    products, and a table of how the operands of these are quantised.
    """
    from mixprec.explanation import explain_run
    from mixprec.train.config import load, recipe_line

    resolved = load(config, [*(settings or []), *([f"base={base}"] if base is not None else [])])
    found = explain_run(resolved)
    rows = [row for row in found if show_all or not row.is_view]
    if as_json:
        operations = [_data(row) for row in rows]
        print_json(
            {"model": resolved.model, "recipe": recipe_line(resolved), "operations": operations}
        )
        return
    console().print(f"{resolved.model}, {recipe_line(resolved)}")
    for phase in dict.fromkeys(row.phase for row in rows):
        print_table(_COLUMNS, _counted(row for row in rows if row.phase == phase), title=phase)
    products = [row for row in rows if row.operands]
    if products:
        print_table(_OPERAND_COLUMNS, _operands(products), title="operands of the products")
    left_out = len(found) - len(rows)
    if left_out:
        console().print(f"left out: {left_out} that compute nothing (--all shows them)")


def _data(row: OperationRow) -> dict[str, Any]:
    from mixprec.serialization import to_plain

    return {**to_plain(row), "operands": [to_plain(spec) for spec in row.operands]}


def _counted(rows: Iterable[OperationRow]) -> list[tuple[str, ...]]:
    """Rows as words; what a module does alike several times is there once, with its number.

    So is what modules do alike whose paths differ in numbers alone.
    """
    places: dict[tuple[str, ...], list[str]] = {}
    for (module, operation, *rest), count in Counter(map(_cells, rows)).items():
        pattern = ".".join("0" if part.isdecimal() else part for part in module.split("."))
        times = operation if count == 1 else f"{operation} x{count}"
        places.setdefault((pattern, times, *rest), []).append(module)
    return [(_joined(modules), *rest) for (_, *rest), modules in places.items()]


def _joined(modules: Sequence[str]) -> str:
    """Paths that differ in numbers alone as one: ``blocks.0-11.qkv``."""
    paths = (module.split(".") for module in modules)
    parts = [list(dict.fromkeys(values)) for values in zip(*paths, strict=True)]
    is_whole = math.prod(map(len, parts)) == len(modules)
    return ".".join(values[0] if len(values) == 1 else _span(values, is_whole) for values in parts)


def _span(numbers: Sequence[str], is_whole: bool) -> str:
    low, *_, high = sorted(map(int, numbers))
    return f"{low}-{high}" if is_whole and high - low == len(numbers) - 1 else "*"


def _cells(row: OperationRow) -> tuple[str, ...]:
    """A row as words."""
    types = map(_distinct, (row.inputs, row.compute, row.outputs))
    return row.module or "(model)", row.operation, *types, row.rule


def _operands(rows: Iterable[OperationRow]) -> list[tuple[str, ...]]:
    """Each way of quantising the two operands of a product once, with the modules that have it."""
    modules: dict[tuple[str, ...], dict[str, None]] = {}
    for row in rows:
        product = row.operation if row.phase == "backward" else "output"
        ways = (
            described(spec) if spec else high
            for spec, high in zip(row.operands, row.compute, strict=True)
        )
        key = (row.rule.removeprefix("recipe "), product, *ways, row.impl)
        modules.setdefault(key, {})[row.module or "(model)"] = None
    return [(*key, str(len(names))) for key, names in modules.items()]


def _distinct(types: Sequence[str]) -> str:
    """Each type once, in the order of the operands."""
    return ", ".join(dict.fromkeys(types))
