"""The page of a run, or of a run against another: what it did, and where it went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from mixprec.pages.curves import loss_scales, losses, records
from mixprec.pages.heat_map import heat_map
from mixprec.pages.page import (
    HEADINGS,
    Section,
    cells,
    document,
    folded,
    number,
    paragraph,
    settings_tables,
    table,
)
from mixprec.pages.planned import plan_table
from mixprec.pages.run_folder import CONFIG, ENVIRONMENT, PLAN, RESULT, RunFolder

_HEADINGS = HEADINGS | {"loss": "evaluation loss", "train_loss": "training loss, last step"}
_MOST_ALARMS = 8

Runs = Mapping[str, RunFolder]


def render(run: RunFolder, against: RunFolder | None = None) -> str:
    """One HTML page, plotting library included; what is missing in a folder is said on it.

    Raises: ImportError: plotly is missing (extra ``report``).
    """
    folders = [run] if against is None else [run, against]
    runs = dict(zip(_names(folders), folders, strict=True))
    last = max((step for folder in folders for step in _steps(folder)), default=1)
    sections = [
        Section("Result", [_results(runs)]),
        Section("Alarms", _alarms(runs)),
        Section("Loss", [_losses(runs, last)]),
        Section("Step time and memory", _costs(runs, last)),
        Section("Loss scale", [_scales(runs, last)]),
        Section("Statistics", _statistics(runs)),
        Section("Plan", _plans(runs)),
        Section("Configuration", [_settings("Every setting, defaults too", CONFIG, runs)]),
        Section("Environment", [_settings("What it ran on", ENVIRONMENT, runs)]),
    ]
    return document(" against ".join(runs), _summary(runs), sections)


def _names(folders: Sequence[RunFolder]) -> list[str]:
    """The folders' own names where those differ, else their paths, else both with a number."""
    for names in (
        [folder.path.resolve().name for folder in folders],
        [str(folder.path) for folder in folders],
    ):
        if len(set(names)) == len(names):
            return names
    return [f"{folder.path} ({number})" for number, folder in enumerate(folders, start=1)]


def _summary(runs: Runs) -> list[str]:
    found = []
    for name, folder in runs.items():
        state, failed = _state(folder)
        lead = f"{name}: " if len(runs) > 1 else ""
        found.append(paragraph(f"{lead}{state}", "alarm" if failed else None))
        found += [paragraph(f"{lead}{line}.") for line in folder.missing]
    return found


def _state(folder: RunFolder) -> tuple[str, bool]:
    """What became of a run, in a sentence; and whether it failed."""
    errors, result = folder.records["error"], folder.documents.get(RESULT)
    if result is None and errors:
        return f"Failed: {errors[-1]['error']}.", True
    if result is None:
        steps = _steps(folder)
        last = f"Not over: the last record is of step {max(steps)}." if steps else "No records."
        return last, False
    if "error" in result:
        outcome = str(result.get("outcome", "failed")).capitalize()
        return f"{outcome}: {result['error']}.", result.get("outcome") != "preempted"
    what = [str(result[key]) for key in ("model", "recipe", "device") if result.get(key)]
    faults = f" {len(errors)} faults were met and passed by." if errors else ""
    return f"{', '.join(what)}: {result.get('steps')} steps.{faults}", False


def _steps(folder: RunFolder) -> list[int]:
    return [record["step"] for kind in folder.records.values() for record in kind]


def _results(runs: Runs) -> str:
    results = {
        name: cells(folder.documents[RESULT], _HEADINGS)
        for name, folder in runs.items()
        if RESULT in folder.documents
    }
    if not results:
        return paragraph("No result.")
    rows = [
        {"figure": heading, **{name: found.get(heading) for name, found in results.items()}}
        for heading in dict.fromkeys(heading for found in results.values() for heading in found)
    ]
    return table(rows, "The result of each run" if len(runs) > 1 else "The result of the run")


def _alarms(runs: Runs) -> list[str]:
    """A heading, what to do, and a table of places for each kind of alarm."""
    groups: dict[tuple[str, str], dict[tuple[str, str, str], list[dict[str, Any]]]] = {}
    for name, folder in runs.items():
        for step, alarm in _each_alarm(folder):
            kind, remedy, layer, operand = (
                str(alarm.get(part) or "") for part in ("kind", "suggestion", "layer", "operand")
            )
            places = groups.setdefault((kind, remedy), {})
            places.setdefault((name, layer, operand), []).append({"step": step, **alarm})
    parts = []
    for (kind, remedy), places in groups.items():
        what = kind.replace("_", " ")
        rows = [
            _alarm_row(*place, found, with_run=len(runs) > 1) for place, found in places.items()
        ]
        parts.append(f"<h3>{escape(what)}</h3>\n{paragraph(remedy) if remedy else ''}")
        parts.append(table(rows[:_MOST_ALARMS], f"{what}, by place"))
        if len(rows) > _MOST_ALARMS:
            more = table(rows[_MOST_ALARMS:], f"{what}, further places")
            parts.append(folded(f"{len(rows) - _MOST_ALARMS} further places", more))
    return parts or [paragraph("No alarm was recorded.")]


def _alarm_row(
    run: str, layer: str, operand: str, found: Sequence[Mapping[str, Any]], *, with_run: bool
) -> dict[str, Any]:
    """The alarms of one place, with the text and the figures of the first."""
    figures = found[0].get("figures")
    return {
        "layer": layer or "(model)",
        "operand": operand or None,
        "what": found[0].get("text"),
        "run": run if with_run else None,
        "step": found[0]["step"],
        "times": len(found) if len(found) > 1 else None,
        **(cells(figures, {}) if isinstance(figures, Mapping) else {}),
    }


def _each_alarm(folder: RunFolder) -> Iterable[tuple[int, Mapping[str, Any]]]:
    for record in folder.records["alarm"]:
        if isinstance(record["alarm"], Mapping):
            yield record["step"], record["alarm"]


def _losses(runs: Runs, last: int) -> str:
    training = {name: _curve(folder.records["loss"], "loss") for name, folder in runs.items()}
    evaluations = {
        name: _curve(folder.records["eval_loss"], "eval_loss", "loss")
        for name, folder in runs.items()
    }
    alarms: dict[str, Mapping[str, list[Any]]] = {}
    for name, folder in runs.items():
        by_step: dict[int, list[str]] = {}
        for step, alarm in _each_alarm(folder):
            text = f"{alarm.get('kind')} {alarm.get('layer') or ''}".strip()
            by_step.setdefault(step, []).append(text)
        texts = [_joined(list(dict.fromkeys(lines))) for lines in by_step.values()]
        alarms[name] = {"step": list(by_step), "text": texts}
    if not any(curve["step"] for curve in [*training.values(), *evaluations.values()]):
        return paragraph("No step and no evaluation was recorded.")
    drawn = losses(training, last, evaluations, alarms)
    scores = [
        {"step": record["step"], "run": name if len(runs) > 1 else None}
        | cells(
            {key: record.get(key) for key in ("eval_loss", "accuracy")},
            {"eval_loss": "evaluation loss"},
        )
        for name, folder in runs.items()
        for record in folder.records["eval_loss"]
    ]
    return drawn + (
        table(scores, "Evaluations") if scores else paragraph("No evaluation was recorded.")
    )


def _joined(lines: Sequence[str]) -> str:
    more = len(lines) - _MOST_ALARMS
    return "<br>".join([*lines[:_MOST_ALARMS], *([f"and {more} more"] if more > 0 else [])])


def _costs(runs: Runs, last: int) -> list[str]:
    times = {name: _curve(f.records["loss"], "step_ms", "value") for name, f in runs.items()}
    parts = [records("times", "Time of the recorded steps.", "step (ms)", times, last)]
    kinds = dict.fromkeys(
        key for f in runs.values() for r in f.records["loss"] for key in r if key.endswith("_bytes")
    )
    for kind in kinds:
        curves = {name: _curve(f.records["loss"], kind, "value") for name, f in runs.items()}
        quantity = HEADINGS.get(kind, kind.replace("_", " "))
        parts.append(records(kind, f"{quantity} by step.", quantity, curves, last))
    if not parts[0]:
        parts.append(paragraph("No step time was recorded."))
    held = [key for f in runs.values() for key in f.documents.get(RESULT, {})]
    if not kinds and not any(key.endswith("_bytes") for key in held):
        parts.append(paragraph("Memory was not recorded: mixprec bench and compare measure it."))
    return parts


def _scales(runs: Runs, last: int) -> str:
    scales = {}
    for name, folder in runs.items():
        scaled = [r for r in folder.records["loss"] if (number(r.get("loss_scale")) or 0) > 0]
        counts = pairwise([0, *(number(r.get("skipped")) or 0 for r in scaled)])
        scales[name] = {
            "step": [record["step"] for record in scaled],
            "loss_scale": [record["loss_scale"] for record in scaled],
            "skipped": [r["step"] for r, (a, b) in zip(scaled, counts, strict=True) if b > a],
        }
    drawn = loss_scales(scales, last)
    if not drawn:
        return paragraph("No loss scale: the base needs none, or no step was recorded.")
    return drawn + paragraph("A step skipped between two records is marked at the next record.")


def _statistics(runs: Runs) -> list[str]:
    parts = []
    for place, (name, folder) in enumerate(runs.items()):
        drawn = heat_map(folder.records["statistics"], f"statistics-{place}", name)
        absent = f"{name}: no statistics were recorded; inspect.every=100 asks for them."
        parts.append(drawn or paragraph(absent))
    return parts


def _plans(runs: Runs) -> list[str]:
    parts = []
    for folder in runs.values():
        if PLAN in folder.documents:
            result = folder.documents.get(RESULT, {})
            parts.append(plan_table(folder.documents[PLAN], {str(result.get("recipe")): result}))
    return parts


def _settings(caption: str, document_name: str, runs: Runs) -> str:
    held = {
        name: folder.documents[document_name]
        for name, folder in runs.items()
        if document_name in folder.documents
    }
    return settings_tables(caption, held) or paragraph("Not known.")


def _curve(
    lines: Sequence[Mapping[str, Any]], key: str, name: str | None = None
) -> dict[str, list[Any]]:
    """The steps of records that have a key, and its numbers; None for one that is not finite."""
    held = [record for record in lines if key in record]
    return {
        "step": [record["step"] for record in held],
        name or key: [number(record[key]) for record in held],
    }
