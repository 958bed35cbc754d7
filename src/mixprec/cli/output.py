"""What the commands print: a table for people, or one JSON document."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Standard output, text taken literally; 80 columns where it is not a terminal."""
    return Console(markup=False, highlight=False, emoji=False)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    numeric: Collection[str] = (),
) -> None:
    """Prints a table in which nothing is cut: text too long for its column goes on below.

    Args:
        columns: Headings.
        rows: Cells as text, as many a row as there are columns.
        title: A line above the table.
        numeric: The headings of columns to align to the right.
    """
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for column in columns:
        right = column in numeric
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_json(data: Any) -> None:
    """Prints one JSON document; numbers that JSON lacks become the strings "nan", "inf", "-inf"."""
    print(json.dumps(_jsonable(data), indent=2, allow_nan=False))


def _jsonable(data: Any) -> Any:
    """The same data with tuples as lists and non-finite floats as strings."""
    if isinstance(data, Mapping):
        return {str(key): _jsonable(value) for key, value in data.items()}
    if isinstance(data, (list, tuple, set, frozenset)):
        return [_jsonable(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    return data
