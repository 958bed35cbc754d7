"""What a page holds, by the standard library's parser: tables, figures, headings, addresses."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """Collects what a reader or a browser gets from a page; complains of tags that do not match.

    tables: rows of cells, by caption; headings: level and text; labels: what elements are called
    by the id of another; addresses: what the page would load or point to.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.captions: list[str] = []
        self.headings: list[tuple[int, str]] = []
        self.paragraphs: list[str] = []
        self.addresses: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.addresses += [given[name] for name in ("src", "href") if name in given]
        self.references += [*given.get("aria-labelledby", "").split(), given.get("for", "")]
        self.ids += [given["id"]] if "id" in given else []
        if tag == "table":
            self.tables.append([])
            self.captions.append("")
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append((int(tag[1]), ""))
        if tag == "p":
            self.paragraphs.append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inner = self.open[-1] if self.open else ""
        if inner in ("td", "th"):
            self.tables[-1][-1][-1] += data
        if inner == "caption":
            self.captions[-1] += data
        if inner == "p":
            self.paragraphs[-1] += data
        if re.fullmatch(r"h[1-6]", inner):
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)

    def table(self, caption: str) -> list[dict[str, str]]:
        """The rows of the table whose caption starts so, by heading."""
        found = [place for place, text in enumerate(self.captions) if text.startswith(caption)]
        assert len(found) == 1, (caption, self.captions)
        head, *rows = self.tables[found[0]]
        return [dict(zip(head, row, strict=True)) for row in rows]


def traces(text: str, name: str) -> list[dict[str, Any]]:
    """The traces of a figure as they are handed to the plotting library."""
    (start,) = (found.end() for found in re.finditer(rf'newPlot\(\s*"{name}",\s*', text))
    found, _ = json.JSONDecoder().raw_decode(text, start)
    return found
