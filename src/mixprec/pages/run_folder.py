"""A run's folder as data, whatever of it is there; what is missing is said in words."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIG = "config.toml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
RESULT = "result.json"
PLAN = "plan.json"
_EXPECTED = {
    CONFIG: "the configuration is not known",
    ENVIRONMENT: "the environment is not known",
    METRICS: "there are no curves",
    RESULT: "the run failed, was stopped, or is not over",
}
# A record's kind is the first of these keys that it has; a training step's is its loss.
_KINDS = ("statistics", "alarm", "error", "eval_loss", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """What a folder holds.

    documents: the content of each file of JSON or TOML that could be read, by its name; records:
    the lines of metrics.jsonl by kind, `loss` (a training step), `eval_loss`, `statistics`,
    `alarm`, `error`, each with a number `step`, in their order; missing: a line for each file or
    line that is not there or cannot be read.
    """

    path: Path
    documents: Mapping[str, Mapping[str, Any]]
    records: Mapping[str, list[dict[str, Any]]]
    missing: list[str] = field(default_factory=list)


def read(path: str | Path) -> RunFolder:
    """The folder of a run, of a comparison or of a benchmark.

    Raises: ValueError: It is no folder, or holds none of the files that a run leaves.
    """
    folder = Path(path)
    if not str(path) or not folder.is_dir():
        raise ValueError(f"run_dir: got {str(path)!r}; it is no folder; name the folder of a run")
    # a config.toml alone is anybody's
    if not any((folder / name).is_file() for name in (ENVIRONMENT, METRICS, RESULT)):
        raise ValueError(
            f"run_dir: got {str(path)!r}; it holds none of {METRICS}, {RESULT}, {ENVIRONMENT}; "
            "name the folder of a run"
        )
    missing: list[str] = []
    documents = {}
    for name in (CONFIG, ENVIRONMENT, RESULT, PLAN):
        content = _document(folder / name, missing)
        if content is not None:
            documents[name] = content
    return RunFolder(
        path=folder,
        documents=documents,
        records=_records(folder / METRICS, missing),
        missing=missing,
    )


def _document(path: Path, missing: list[str]) -> Mapping[str, Any] | None:
    if not path.exists():
        if path.name in _EXPECTED:
            missing.append(f"no {path.name}: {_EXPECTED[path.name]}")
        return None
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else _parsed(text)
    except (OSError, ValueError) as error:
        missing.append(f"{path.name} cannot be read: {error}")
        return None
    if not isinstance(content, dict):
        missing.append(f"{path.name} cannot be read: it holds no table")
        return None
    return content


def _records(path: Path, missing: list[str]) -> dict[str, list[dict[str, Any]]]:
    records: dict[str, list[dict[str, Any]]] = {kind: [] for kind in _KINDS}
    if not path.exists():
        missing.append(f"no {path.name}: {_EXPECTED[path.name]}")
        return records
    unread = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        missing.append(f"{path.name} cannot be read: {error}")
        return records
    for number, text in enumerate(lines, start=1):
        record = _record(text)
        kind = next((kind for kind in _KINDS if record and kind in record), None)
        if record is None:
            unread.append(number)
        elif kind is not None:
            records[kind].append(record)
    if unread:
        numbers = ", ".join(map(str, unread[:5])) + (", ..." if len(unread) > 5 else "")
        missing.append(f"{path.name}: left out what cannot be read, line {numbers}")
    return records


def _parsed(text: str) -> Any:
    # strict JSON has no name for a number that is not finite; other writers' is not known either
    return json.loads(text, parse_constant=lambda _: None)


def _record(text: str) -> dict[str, Any] | None:
    try:
        record = _parsed(text)
    except ValueError:
        return None
    is_whole = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if is_whole else None
