"""What a run leaves behind and what it shows: a folder of records, and lines or a progress bar.

A run folder holds `config.toml` (resolved), `environment.json`, `metrics.jsonl` (one JSON object a
line: a training step has `loss`, an evaluation `eval_loss`), `result.json` and checkpoints.
"""

import csv
import json
import math
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mixprec.nn import Report


def environment(device: torch.device) -> dict[str, Any]:
    """What the numbers of a run depend on besides its configuration."""
    record: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "platform": platform.platform(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        record["gpu"] = torch.cuda.get_device_name(device)
        record["capability"] = torch.cuda.get_device_capability(device)
    return record


def named_folder(out: str | Path) -> Path:
    """The path; ValueError where the name is empty, which as a path would be the current folder."""
    if not str(out):
        raise ValueError("out: got ''; a folder has a name; name one, or leave it out")
    return Path(out)


def create_folder(out: str | Path) -> Path:
    """The folder of that name, made where it is not there yet, in which files can be written.

    Raises: ValueError: The name is empty, or of a file, or of a place that cannot be written.
    """
    folder = named_folder(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        reason = "it is a file" if folder.is_file() else f"it cannot be written ({error.strerror})"
        raise ValueError(f"out: got {str(out)!r}; {reason}; name a folder") from error
    return folder


def write_json(path: Path, value: Any) -> None:
    """Strict JSON: a float that is not finite becomes null, since JSON has no name for it."""
    _replace(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def _replace(path: Path, text: str) -> None:
    """Write a file that is the old one or the new one, whenever the process is killed."""
    beside = path.with_name(f".writing_{path.name}")
    beside.write_text(text)
    beside.replace(path)


def write_losses(path: Path, result: Mapping[str, Any]) -> None:
    """One row a seed and step, one column a recipe; empty where a run had failed by then."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["seed", "step", *(entry["recipe"] for entry in result["runs"])])
        for seed, records in zip(result["seeds"], result["by_seed"], strict=True):
            rows = zip_longest(*(record["curve"] for record in records), fillvalue="")
            writer.writerows([seed, step, *losses] for step, losses in enumerate(rows, start=1))


def finite(value: Any) -> Any:
    """The same nested data with None for each float that is not finite."""
    if isinstance(value, Mapping):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class ProgressLines:
    """A progress bar on a terminal; elsewhere plain lines, one for each message."""

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.console = console or Console(file=sys.stderr)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def advance(self, done: int, text: str) -> None:
        """Move the bar to `done` units, with a text beside it; no output off a terminal."""
        self._bar.update(self._task, completed=done, description=text)

    def line(self, text: str) -> None:
        """A message that stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, report: Report) -> None:
        """A table that stays, as wide as the console."""
        self.console.print(report.table())

    def status(self, done: int, text: str) -> None:
        """A message that the bar replaces: the bar's text on a terminal, a line elsewhere."""
        self.advance(done, text)
        if not self.console.is_terminal:
            self.line(text)


class Metrics:
    """`metrics.jsonl`, line by line; a resumed run drops the lines after its checkpoint first."""

    def __init__(self, path: Path | None, resumed_at: int = 0) -> None:
        self._path = path
        if path is not None:
            kept = path.read_text().splitlines() if resumed_at and path.exists() else []
            _replace(path, "".join(f"{line}\n" for line in kept if _step(line) <= resumed_at))

    def write(self, **record: Any) -> None:
        """Append one object; each has `step`, the optimizer steps done when it was written."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(finite(record), allow_nan=False) + "\n")


def _step(line: str) -> float:
    # A line cut off by a crash is dropped with those after the checkpoint.
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
