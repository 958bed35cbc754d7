"""What the pages share: the document and its sections, and tables of figures and of settings."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mixprec.pages.figure import plotting_library
from mixprec.pages.frame import SCRIPT, STYLE

_LONG = 30
HEADINGS = {
    "train_loss": "training loss",
    "impl": "implementation",
    "step_ms": "step (ms), median",
    "skipped": "skipped steps",
    "param_bytes": "parameters (bytes)",
    "grad_bytes": "gradients (bytes)",
    "optimizer_bytes": "optimiser state (bytes)",
    "saved_bytes": "activations (bytes)",
    "peak_bytes": "peak of live tensors (bytes)",
    "process_peak_bytes": "process peak (bytes)",
    "sqnr": "SQNR (dB)",
    "gathers": "gathered weights,",
}


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and what stands below it, as HTML."""

    heading: str
    parts: Sequence[str]

    @property
    def name(self) -> str:
        """The section's address within the page."""
        return "about-" + re.sub(r"\W+", "-", self.heading.lower()).strip("-")


def document(title: str, summary: Sequence[str], sections: Sequence[Section]) -> str:
    """A whole page: one file with its style, its script and the plotting library.

    Args:
        title: The page's heading, as text.
        summary: Paragraphs below it, as HTML.
        sections: In order; one without parts is left out.

    Raises: ImportError: plotly is missing (extra ``report``).
    """
    held = [section for section in sections if any(section.parts)]
    links = "\n".join(
        f'<a href="#{section.name}">{escape(section.heading)}</a>' for section in held
    )
    body = "\n".join(
        f'<section id="{section.name}" aria-labelledby="{section.name}-heading">\n'
        f'<h2 id="{section.name}-heading">{escape(section.heading)}</h2>\n'
        f"{''.join(section.parts)}\n</section>"
        for section in held
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
<script>{plotting_library()}</script>
</head>
<body>
<a class="skip" href="#content">Skip to the content</a>
<header>
<h1>{escape(title)}</h1>
{"".join(summary)}
</header>
<nav aria-label="Sections" tabindex="0">
{links}
</nav>
<main id="content">
{body}
</main>
<footer><p>Written by mixprec. Nothing on this page is loaded from a network.</p></footer>
<script>{SCRIPT}</script>
</body>
</html>
"""


def paragraph(text: str, kind: str | None = None) -> str:
    """A paragraph of plain text."""
    of_kind = f' class="{kind}"' if kind else ""
    return f"<p{of_kind}>{escape(text)}</p>\n"


def folded(summary: str, content: str) -> str:
    """Content that is shown when its summary is chosen."""
    return f"<details>\n<summary>{escape(summary)}</summary>\n{content}</details>\n"


def table(rows: Sequence[Mapping[str, Any]], caption: str) -> str:
    """A row of the table for each mapping of headings to values, in the order of the headings.

    None leaves a cell empty, and a column with nothing else is left out. A table wider than the
    page scrolls within its own box.
    """
    columns: dict[str, list[Any]] = {}
    for heading in dict.fromkeys(heading for row in rows for heading in row):
        values = [row.get(heading) for row in rows]
        if any(value is not None for value in values):
            columns[heading] = values
    texts = {name for name, values in columns.items() if not all(map(_is_number, values))}
    head = "".join(f'<th scope="col"{_class(h in texts)}>{escape(h)}</th>' for h in columns)
    body = ""
    for line in zip(*columns.values(), strict=True):
        row = ""
        for heading, value in zip(columns, line, strict=True):
            tag, scope = ("td", "") if row else ("th", ' scope="row"')
            row += f"<{tag}{scope}{_class(heading in texts, value)}>{_written(value)}</{tag}>"
        body += f"<tr>{row}</tr>\n"
    return (
        f'<div class="wide" role="region" tabindex="0" aria-label="{escape(caption)}">\n'
        f"<table>\n<caption>{escape(caption)}</caption>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>\n{body}</tbody>\n</table>\n</div>\n"
    )


def cells(
    row: Mapping[str, Any], headings: Mapping[str, str], left_out: Collection[str] = ()
) -> dict[str, Any]:
    """Heading to value; a mapping (SQNR by operand) becomes a cell for each of its entries."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        heading = headings.get(key, key.replace("_", " "))
        if isinstance(value, Mapping):
            found |= {f"{heading} {name}": inner for name, inner in value.items()}
        elif key not in left_out:
            found[heading] = value
    return found


def settings_tables(caption: str, by_run: Mapping[str, Mapping[str, Any]]) -> str:
    """Nested settings as rows of dotted names, a column a run; of several, differences first."""
    flat = {label: _flattened(values) for label, values in by_run.items()}
    names = list(dict.fromkeys(name for values in flat.values() for name in values))
    rows = [
        {"setting": name, **{label: values.get(name, "") for label, values in flat.items()}}
        for name in names
    ]
    if not rows:
        return ""
    if len(flat) == 1:
        return table(rows, caption)
    different = [row for row in rows if len({row[label] for label in flat}) > 1]
    first = (
        table(different, f"{caption}: differences") if different else paragraph("No difference.")
    )
    return first + folded(f"All {len(rows)} settings", table(rows, caption))


def _flattened(values: Mapping[str, Any], path: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= _flattened(value, f"{path}{key}.")
        else:
            is_text = isinstance(value, str)
            found[f"{path}{key}"] = value if is_text else json.dumps(value, default=str)
    return found


def number(value: Any) -> float | None:
    """The value where it is a number, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _is_number(value: Any) -> bool:
    """Whether a value stands in a column of numbers; nothing stands in any."""
    return value is None or number(value) is not None


def _class(is_text: bool, value: Any = None) -> str:
    kind = "long" if isinstance(value, str) and len(value) > _LONG else "text"
    return f' class="{kind}"' if is_text else ""


def _written(value: Any) -> str:
    """Numbers to four digits, whole numbers in groups of three, lists joined."""
    if value is None:
        return ""
    if number(value) is None:
        return escape(", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
