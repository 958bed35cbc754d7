"""What conversion of many and of large layers takes, and one emulated step of a 632M model.

    python benchmarks/large_models.py            a table
    python benchmarks/large_models.py --json     one JSON document
    python benchmarks/large_models.py --check    exit 1 where a bar is missed
    python benchmarks/large_models.py --only "huge step"     one case alone

Times are of this machine. Memory is the process's peak (resident set), each case in a process of
its own. Bars: 10,000 layers in 5 seconds, and 2.4 times as long as 5,000 at most; the vision
transformer `huge` in 2 seconds and 16 MiB; its step at batch 1 with SGD in 20 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import mixprec
from mixprec.train.models import VIT_PRESETS, VisionTransformer

RECIPE = "fp8_rowwise"
MEGABYTE = 2**20


def peak_bytes() -> int:
    """The process's largest resident set so far; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def convert(model: nn.Module) -> dict[str, float]:
    """Seconds and bytes that converting a model takes."""
    before, started = peak_bytes(), time.perf_counter()
    report = mixprec.convert(model, RECIPE)
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "bytes": peak_bytes() - before,
        "converted": len(report.converted),
    }


def many(count: int) -> dict[str, float]:
    """Conversion of so many small layers."""
    warm_up = nn.Linear(4, 4)
    mixprec.convert(warm_up, RECIPE)
    return convert(nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))))


def huge() -> dict[str, float]:
    """Conversion of the vision transformer of 632M parameters."""
    return convert(VisionTransformer(**VIT_PRESETS["huge"]))


def huge_step() -> dict[str, float]:
    """One emulated step of it: forward, loss, backward and SGD, of one image."""
    torch.manual_seed(0)
    model = VisionTransformer(**VIT_PRESETS["huge"])
    mixprec.convert(model, RECIPE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    started = time.perf_counter()
    loss = nn.functional.cross_entropy(model(torch.randn(1, 3, 256, 256)), torch.tensor([0]))
    loss.backward()
    optimizer.step()
    return {
        "seconds": time.perf_counter() - started,
        "bytes": peak_bytes(),
        "loss": loss.item(),
    }


CASES: dict[str, Callable[[], dict[str, float]]] = {
    "5,000 layers": lambda: many(5_000),
    "10,000 layers": lambda: many(10_000),
    "huge": huge,
    "huge step": huge_step,
}


def misses(found: dict[str, dict[str, float]]) -> list[str]:
    """The bars that are missed, of the cases that were run."""
    bars = {
        ("10,000 layers", "seconds"): 5.0,
        ("huge", "seconds"): 2.0,
        ("huge", "bytes"): 16 * MEGABYTE,
        ("huge step", "bytes"): 20e9,
    }
    missed = [
        f"{case}: {found[case][key]:.4g} {key}, bar {bar:.4g}"
        for (case, key), bar in bars.items()
        if case in found and found[case][key] > bar
    ]
    if {"5,000 layers", "10,000 layers"} <= found.keys():
        ratio = found["10,000 layers"]["seconds"] / found["5,000 layers"]["seconds"]
        missed += [f"10,000 layers: {ratio:.2f} times 5,000's, bar 2.4"] if ratio > 2.4 else []
    return missed


def in_a_process(case: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--only", case, "--json"]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, dict[str, float]] = json.loads(run.stdout)
    return result[case]


def table(found: dict[str, dict[str, Any]]) -> Table:
    """The figures of every case."""
    result = Table(title=f"{RECIPE}, emulated")
    for column in ("case", "seconds", "MiB", "else"):
        result.add_column(column)
    for case, figures in found.items():
        rest = {key: value for key, value in figures.items() if key not in ("seconds", "bytes")}
        words = ", ".join(f"{key} {value:.6g}" for key, value in rest.items())
        size = f"{figures['bytes'] / MEGABYTE:.0f}"
        result.add_row(case, f"{figures['seconds']:.2f}", size, words)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", choices=CASES)
    options = parser.parse_args()
    if options.only:
        found = {options.only: CASES[options.only]()}
    else:
        found = {case: in_a_process(case) for case in CASES}
    if options.json:
        print(json.dumps(found))
    else:
        Console().print(table(found))
    missed = misses(found) if options.check else []
    for line in missed:
        print(line, file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
