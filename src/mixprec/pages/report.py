"""`report`: the page of any folder that this package leaves: a run, a comparison or a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mixprec.pages import bench, comparison, run
from mixprec.pages.run_folder import PLAN, RESULT, RunFolder, read

_PAGE = "report.html"
# What a result of each kind has, and what renders it.
_TABLES: Mapping[str, tuple[frozenset[str], Callable[[RunFolder], str]]] = {
    "comparison": (
        frozenset({"model", "data", "notes", "runs"}),
        lambda folder: comparison.render(folder.documents[RESULT], folder.documents.get(PLAN)),
    ),
    "products": (
        frozenset({"rows", "pays", "notes"}),
        lambda folder: bench.render_products(folder.documents[RESULT]),
    ),
    "benchmark": (
        frozenset({"model", "rows", "skipped", "order", "notes"}),
        lambda folder: bench.render(folder.documents[RESULT]),
    ),
}


def report(
    run_dir: str | Path, *, against: str | Path | None = None, out: str | Path | None = None
) -> dict[str, Any]:
    """Write one self-contained HTML page of a folder.

    Args:
        run_dir: The folder of `mixprec train`, whatever of it is there, also of a run that failed
            or goes on; or of `mixprec compare` or `mixprec bench`.
        against: Another run's folder: its curves beside the first's, and what differs between them.
        out: The page's file; `report.html` in the folder by default.

    Returns: `page`, its path; `kind`: run, comparison, benchmark or products; of a run also the
        number of `records` by kind, and `missing`, lines that say what is not there, by folder.

    Raises:
        ValueError: A folder is no run's, or `against` is given with another kind.
        ImportError: plotly is missing (extra ``report``).
        OSError: The page cannot be written.
    """
    folder = read(run_dir)
    other = None if against is None else read(against)
    kinds = [_kind(found) for found in (folder, other) if found is not None]
    if other is not None and set(kinds) != {"run"}:
        raise ValueError(
            f"against: got {str(against)!r}, a {kinds[1]}, beside a {kinds[0]}; only runs can be "
            "set against each other; name two folders of mixprec train"
        )
    page = folder.path / _PAGE if out is None else Path(out)
    if kinds[0] in _TABLES:
        text = _TABLES[kinds[0]][1](folder)
        found: dict[str, Any] = {}
    else:
        text = run.render(folder, other)
        found = {
            "records": {kind: len(lines) for kind, lines in folder.records.items()},
            "missing": {
                str(each.path): each.missing for each in (folder, other) if each is not None
            },
        }
    page.write_text(text, encoding="utf-8")
    return {"page": str(page), "kind": kinds[0], **found}


def _kind(folder: RunFolder) -> str:
    keys = folder.documents.get(RESULT, {}).keys()
    return next((kind for kind, (needed, _) in _TABLES.items() if needed <= keys), "run")
