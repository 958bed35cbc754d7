"""What the pages share: the frame, the colours, the plotting library, and a table of figures."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

# told apart by people who see few colours (Okabe and Ito)
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
# a drag zooms, a double click goes back; a bar of tools would cover the legend
INTERACTION = {"responsive": True, "displayModeBar": False}

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ font: 15px/1.4 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ padding: 0.3em 0.8em; border-bottom: 1px solid #ccc; text-align: right; }}
th {{ vertical-align: bottom; }}
.text {{ text-align: left; }}
</style>
</head>
<body>
<h1>{title}</h1>
{curves}
<div class="wide">{table}</div>
{notes}
</body>
</html>
"""


def graph_objects() -> Any:
    """plotly's figures.

    Raises: ImportError: plotly is missing (extra ``report``).
    """
    try:
        return importlib.import_module("plotly.graph_objects")
    except ImportError as error:
        raise ImportError(
            f"plotly: got {error}; pages need it; run pip install 'mixprec[report]'"
        ) from error


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row of the table for each mapping of headings to values, in the order of the headings.

    None leaves a cell empty, and a column with nothing else is left out.
    """
    known = (heading for row in rows for heading, value in row.items() if value is not None)
    headings = list(dict.fromkeys(known))
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr>{''.join(_cell(row.get(heading)) for heading in headings)}</tr>\n" for row in rows
    )
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>"


def _cell(value: Any) -> str:
    """Numbers to four digits, whole numbers in groups of three, lists joined."""
    if value is None:
        return "<td></td>"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        return f'<td class="text">{escape(text)}</td>'
    return f"<td>{f'{value:,}' if isinstance(value, int) else f'{value:.4g}'}</td>"
