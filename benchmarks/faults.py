"""What a killed run loses: SIGKILL at random moments, then the same command until it is done.

    python benchmarks/faults.py                     100 kills over all recipes, a table
    python benchmarks/faults.py --kills 10 --recipes fp32,nvfp4
    python benchmarks/faults.py --json              one JSON document

Each run trains a small vision transformer with checkpoints every few steps. Half of the kills come
at any moment of the process's life, half while a checkpoint is written. A killed run is started
again with `resume="auto"` until it finishes, then its last checkpoint, its metrics and its result
are compared, bit for bit, with those of a run that nobody disturbed; times are left out. Exits
with 1 where anything differs.

A killed process leaves to the system what it had written: that the disk has it is not tested here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from mixprec.recipes import RECIPES
from mixprec.train import checkpoint, run
from mixprec.train.config import Config, load

STEPS, EVERY = 30, 2
SHAPE = {"size": 28, "patch": 7, "channels": 1, "classes": 10, "width": 32, "depth": 1, "heads": 2}
SETTINGS = [
    "model=vit",
    *(f"model_options.{key}={value}" for key, value in SHAPE.items()),
    "data.name=mnist",
    "data.batch_size=8",
    "optimizer.name=adamw",
    "optimizer.lr=0.003",
    f"train.steps={STEPS}",
    "train.log_every=1",
    "train.device=cpu",
    f"checkpoint.every={EVERY}",
]
VARYING = {"step_ms", "seconds", "grad_bytes"}
LEFTOVERS = (".writing_*", ".replaced_*", ".removing_*")
POLL_SECONDS = 2e-4
WRITE_SECONDS = 8e-3
"""About the time that a checkpoint of this size takes, file system included."""


def write_digits(folder: Path, rows: int = 96) -> None:
    """Noise for images, in the files of MNIST."""
    draw = torch.Generator().manual_seed(0)
    for part, count in (("train", rows), ("t10k", 16)):
        images = torch.randint(256, (count, 28, 28), generator=draw, dtype=torch.uint8)
        labels = torch.arange(count).remainder(10).to(torch.uint8)
        for kind, values in (("images-idx3", images), ("labels-idx1", labels)):
            shape = struct.pack(f">{values.dim()}I", *values.shape)
            head = bytes([0, 0, 8, values.dim()]) + shape
            (folder / f"{part}-{kind}-ubyte").write_bytes(head + values.numpy().tobytes())


@dataclass
class Case:
    """One recipe: how often its runs were killed, and what differed afterwards."""

    recipe: str
    config: Config
    expected: Mapping[str, Any]
    seconds: float
    runs: int = 0
    kills: int = 0
    in_a_write: int = 0
    differing: int = 0


def start(config: Config, folder: Path) -> int:
    """Train in a copy of this process, which has imported everything; its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with Path(os.devnull).open("w") as nowhere:
                run(config, out=folder, resume="auto", console=Console(file=nowhere))
            code = 0
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int | None:
    """The exit code of a child, None while it lives."""
    found, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def left_behind(folder: Path) -> bool:
    """Whether a write is under way, or was cut off."""
    return any(any((folder / "checkpoints").glob(pattern)) for pattern in LEFTOVERS)


def disturb(child: int, folder: Path, delay: float, aim: float | None) -> bool:
    """Kill a child after a delay, and, with an aim, so long after the next write began.

    Returns: Whether it was killed, rather than done before.
    """
    due = time.monotonic() + delay
    while time.monotonic() < due or (aim is not None and not left_behind(folder)):
        if (code := ended(child)) is not None:
            if code:
                raise RuntimeError(f"run: got exit code {code}; see what it prints; run it alone")
            return False
        time.sleep(POLL_SECONDS)
    time.sleep(aim or 0.0)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree by their paths, tensors as bits."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from leaves(entry, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for place, entry in enumerate(value):
            yield from leaves(entry, f"{path}/{place}")
    elif isinstance(value, Tensor):
        bits = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        yield path, (value.dtype, tuple(value.shape), bits)
    elif path.rpartition("/")[2] not in VARYING:
        yield path, repr(value)


def left_by(folder: Path) -> dict[str, Any]:
    """All that a run left in its folder, but its times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = checkpoint.listed(folder / "checkpoints")
    return {
        **dict(leaves(checkpoint.load(last[-1]), "checkpoint")),
        **dict(leaves([path.name for path in last], "checkpoints")),
        **dict(leaves([json.loads(line) for line in lines], "metrics")),
        **dict(leaves(json.loads((folder / "result.json").read_text()), "result")),
    }


def undisturbed(recipe: str, data: Path, folder: Path) -> Case:
    """A case with what a run of it leaves, and how long it takes."""
    config = load(None, [*SETTINGS, f"data.path={data}", f"recipe={recipe}"])
    started = time.monotonic()
    disturb(start(config, folder), folder, delay=1e9, aim=None)
    seconds = time.monotonic() - started
    return Case(recipe=recipe, config=config, expected=left_by(folder), seconds=seconds)


def killed_and_resumed(case: Case, folder: Path, draw: random.Random, most: int) -> None:
    """One run, killed at most so often, and compared."""
    kills = 0
    while True:
        delay = draw.uniform(0, case.seconds) if kills < most else 1e9
        aim = draw.choice([None, draw.uniform(0, WRITE_SECONDS)]) if kills < most else None
        if not disturb(start(case.config, folder), folder, delay, aim):
            break
        kills += 1
        case.in_a_write += left_behind(folder)
    case.runs += 1
    case.kills += kills
    found, expected = left_by(folder), case.expected
    case.differing += any(found.get(key) != expected.get(key) for key in found | expected)


def measure(kills: int, recipes: list[str], seed: int, console: Console) -> list[Case]:
    """Kill runs of the recipes in turn until there were so many kills."""
    torch.set_num_threads(1)
    # what a first step imports, so that the copies of this process have it
    importlib.import_module("torch._dynamo")
    draw = random.Random(seed)
    with (
        tempfile.TemporaryDirectory() as name,
        # a thread that draws the bar would be missing in the copies of this process
        Progress(console=console, auto_refresh=False) as progress,
    ):
        top = Path(name)
        write_digits(top)
        bar = progress.add_task("undisturbed runs", total=len(recipes) + kills)
        cases = []
        for recipe in recipes:
            cases.append(undisturbed(recipe, top, top / recipe))
            progress.update(bar, advance=1, refresh=True)
        while (done := sum(case.kills for case in cases)) < kills:
            case = min(cases, key=lambda case: case.kills)
            folder = top / f"{case.recipe}_{case.runs}"
            killed_and_resumed(case, folder, draw, most=min(4, kills - done))
            done = sum(case.kills for case in cases)
            text = f"{done} kills, {sum(case.differing for case in cases)} runs differ"
            progress.update(bar, completed=len(recipes) + done, description=text, refresh=True)
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started = time.monotonic()
    cases = measure(
        options.kills, options.recipes.split(","), options.seed, Console(stderr=options.json)
    )
    columns = ("recipe", "runs", "kills", "in_a_write", "differing")
    rows = [{column: getattr(case, column) for column in columns} for case in cases]
    total = {column: sum(row[column] for row in rows) for column in columns[1:]}
    seconds = time.monotonic() - started
    if options.json:
        print(json.dumps({"total": total, "seconds": seconds, "recipes": rows}, indent=1))
    else:
        table = Table(*(column.replace("_", " ") for column in columns))
        for row in [*rows, {"recipe": "all", **total}]:
            table.add_row(*(str(row[column]) for column in columns))
        Console().print(table)
    return 1 if total["differing"] else 0


if __name__ == "__main__":
    sys.exit(main())
