"""What the commands print: a table for people, or one JSON document."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from mixprec.support import Support

MEMORY = {
    "param_bytes": "parameters",
    "grad_bytes": "gradients",
    "optimizer_bytes": "optimiser state",
    "saved_bytes": "activations",
    "peak_bytes": "peak",
}
_MEGABYTE = 1e6
_GAP = 3
_MARGINS = 2


def console() -> Console:
    """Standard output, text taken literally; 80 columns where it is not a terminal."""
    return Console(markup=False, highlight=False, emoji=False)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    numeric: Collection[str] = (),
    out: Console | None = None,
) -> None:
    """Prints a table in which nothing is cut.

    Long text goes on below, at spaces; a number never breaks. Columns that do not fit beside each
    other follow in a further table under the same first column.

    Args:
        columns: Headings.
        rows: Cells as text, as many a row as there are columns.
        title: A line above the table.
        numeric: The headings of columns to align to the right.
        out: Where; standard output by default.
    """
    cells = list(rows)
    least = [
        _least_width(column, [row[i] for row in cells], whole=column in numeric)
        for i, column in enumerate(columns)
    ]
    most = [_longest_line([column, *(row[i] for row in cells)]) for i, column in enumerate(columns)]
    out = out or console()
    for group in _groups(least, out.width):
        table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
        title = None
        room = out.width - _MARGINS - _GAP * (len(group) - 1)
        widths = _widths([least[i] for i in group], [most[i] for i in group], room)
        for i, width in zip(group, widths, strict=True):
            table.add_column(
                columns[i],
                justify="right" if columns[i] in numeric else "left",
                width=width,
                overflow="fold",
            )
        for row in cells:
            table.add_row(*(row[i] for i in group))
        out.print(table)


def number(value: float | None, form: str, factor: float = 1) -> str:
    """A number as a cell; a dash where it is unknown."""
    return "-" if value is None else f"{value * factor:{form}}"


def megabytes(value: int | None, digits: int = 2) -> str:
    """Bytes as a cell, in 10^6."""
    return number(value, f".{digits}f", 1 / _MEGABYTE)


def _least_width(heading: str, cells: Sequence[str], *, whole: bool) -> int:
    """Width that breaks no word, nor, if whole, any cell."""
    words = heading.split() + [
        word for cell in cells for word in ([cell] if whole else cell.split())
    ]
    return max(map(len, words), default=0)


def _longest_line(cells: Iterable[str]) -> int:
    return max((len(line) for cell in cells for line in cell.splitlines()), default=0)


def _widths(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Widths from the least to the most that fill the room, the narrowest growing first."""
    # not left to rich, which cuts the last column where it may not narrow the others far enough
    widths = list(least)
    for _ in range(sum(widths), room):
        growing = [i for i, width in enumerate(widths) if width < most[i]]
        if growing:
            widths[min(growing, key=widths.__getitem__)] += 1
    while sum(widths) > max(room, len(widths)):
        widths[widths.index(max(widths))] -= 1
    return widths


def _groups(widths: Sequence[int], available: int) -> list[list[int]]:
    """Columns by index, in tables that fit; the first column is in all of them."""
    groups = [[0]]
    room = available - widths[0] - _MARGINS
    for i in range(1, len(widths)):
        needed = widths[i] + _GAP
        if needed > room and len(groups[-1]) > 1:
            groups.append([0])
            room = available - widths[0] - _MARGINS
        groups[-1].append(i)
        room -= needed
    return groups


def written_page(path: Path, render: Callable[[], str], *, beside: Sequence[str]) -> list[str]:
    """Writes a page into a folder that holds other files; lines that say what is there.

    Without the plotting library there is no page, and a line says so.
    """
    names, missing = list(beside), []
    try:
        path.write_text(render(), encoding="utf-8")
        names.append(path.name)
    except ImportError as error:
        missing.append(f"no {path.name}: {error}")
    *others, last = names
    listed = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    return [f"{listed} in {path.parent}", *missing]


def print_json(data: Any) -> None:
    """Prints one JSON document; records become objects, a number JSON lacks is a ValueError."""
    print(json.dumps(data, indent=2, allow_nan=False, default=_as_object), flush=True)


def _as_object(value: Any) -> dict[str, Any]:
    """A record or a read-only mapping as what JSON knows."""
    if isinstance(value, Mapping):
        return dict(value)
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def grouped_by_reason(supports: Mapping[str, Support]) -> list[tuple[str, str, str]]:
    """Rows of "native" or "emulated", the names that share a reason, and the reason."""
    groups: dict[tuple[bool, str], list[str]] = {}
    for name, support in supports.items():
        groups.setdefault((support.native, support.reason), []).append(name)
    return [
        ("native" if native else "emulated", "\n".join(names), reason)
        for (native, reason), names in groups.items()
    ]
