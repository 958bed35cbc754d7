"""A plan beside what was measured: the figures that both have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from mixprec.pages.page import HEADINGS, number, paragraph, table

# A result's name of what the plan's memory has; it counts masters with the optimizer's state.
_MEMORY = {
    "param_bytes": ("parameters",),
    "grad_bytes": ("gradients",),
    "optimizer_bytes": ("optimizer", "masters"),
    "saved_bytes": ("activations",),
    "peak_bytes": ("peak",),
}


def plan_table(plan: Mapping[str, Any], measured: Mapping[str, Mapping[str, Any]]) -> str:
    """The table, and for what was planned.

    Args:
        plan: What ``mixprec plan --json`` prints.
        measured: The figures of a result and its ``device``, by the recipe's name.
    """
    entries = [entry for entry in _listed(plan.get("recipes")) if isinstance(entry, Mapping)]
    rows = [row for entry in entries for row in _rows(entry, measured)]
    if not rows:
        return paragraph("plan.json holds no plan: mixprec plan CONFIG --out RUN_DIR writes one.")
    names = ("model", "target", "gpus", "batch", "torch")
    said = ", ".join(f"{name} {plan[name]}" for name in names if name in plan)
    notes = map(str, _listed(plan.get("notes")))
    return table(rows, f"Plan beside measurement: {said}") + "".join(map(paragraph, notes))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _rows(
    entry: Mapping[str, Any], measured: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    recipe = str(entry.get("recipe"))
    found = measured.get(recipe, {})
    memory, roofline = _held(entry, "memory"), _held(entry, "roofline")
    figures = [
        (HEADINGS[key], _sum(memory.get(name) for name in names), found.get(key))
        for key, names in _MEMORY.items()
    ]
    seconds = number(roofline.get("seconds"))
    least = None if seconds is None else 1e3 * seconds
    # peak rates are a GPU's
    step = found.get("step_ms") if str(found.get("device")).startswith("cuda") else None
    figures += [
        ("step (ms): the least that peak rates allow", least, step),
        ("largest batch that fits", entry.get("largest_batch"), None),
        ("speed-up that peak rates allow at most", roofline.get("speedup"), None),
    ]
    for name, planned, own in figures:
        value, real = number(planned), number(own)
        if value is not None:
            yield {
                "figure": name,
                "recipe": recipe,
                "planned": value,
                "measured": real,
                "measured / planned": real / value if real is not None and value else None,
            }


def _sum(values: Iterable[Any]) -> float | None:
    known = [number(value) for value in values]
    return None if None in known else sum(filter(None, known))


def _held(entry: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = entry.get(name)
    return value if isinstance(value, Mapping) else {}
