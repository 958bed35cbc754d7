"""What watching costs: a sampled step, and one between two samples, beside an unwatched step.

    python benchmarks/watch.py                      two models, some recipes, a table
    python benchmarks/watch.py --check              exits with 1 where the bar is missed
    python benchmarks/watch.py --json               one JSON document

Three copies of one training run in turns in one process; a ratio is the median over the rounds of
the time by the unwatched step's in the same round. Overhead at every=N is

    (sampled - 1) / N + (1 - 1 / N) (between - 1)

of the run; the last term is a comparison of whole numbers, and its ratio noise around 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from mixprec.inspection.watch import Watcher
from mixprec.measure import interleaved
from mixprec.train.config import load
from mixprec.train.trainer import Trainer

MODELS = {
    "mnist_cnn": ["model=mnist_cnn"],
    "gpt tiny": ["model=gpt", 'model_options={preset="tiny"}', "data.batch_size=8"],
}
RECIPES = ("fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "mxfp8", "nvfp4")
BAR = 0.02
NEVER = 10**9
SAMPLED, BETWEEN = "sampled", "between"


def _step(settings: list[str], recipe: str, every: int | None) -> Callable[[], object]:
    trainer = Trainer(load(None, [*settings, f"recipe={recipe}", "train.epochs=1000"]))
    if every is not None:
        trainer.watcher = Watcher(trainer.model, every, on_record=lambda _: None)
    return trainer.step


def measure(model: str, recipe: str, rounds: int, every: int) -> dict[str, Any]:
    """Times and overhead of one model under one recipe."""
    contenders = {"unwatched": None, SAMPLED: 1, BETWEEN: NEVER}
    steps = {name: _step(MODELS[model], recipe, each) for name, each in contenders.items()}
    timing = interleaved(steps, rounds)
    sampled, between = timing.ratios[SAMPLED], timing.ratios[BETWEEN]
    return {
        "model": model,
        "recipe": recipe,
        "step_ms": 1e3 * timing.seconds["unwatched"],
        SAMPLED: sampled,
        BETWEEN: between,
        "overhead": (sampled - 1) / every,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--check", action="store_true", help=f"the bar is {BAR:.0%}")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = [
        measure(model, recipe, options.rounds, options.every)
        for model in options.models.split(",")
        for recipe in options.recipes.split(",")
    ]
    if options.json:
        print(json.dumps({"every": options.every, "bar": BAR, "rows": rows}, indent=1))
    else:
        table = Table(
            "model", "recipe", "step ms", SAMPLED, BETWEEN, f"overhead at {options.every}"
        )
        for row in rows:
            table.add_row(
                row["model"],
                row["recipe"],
                f"{row['step_ms']:.1f}",
                f"{row[SAMPLED]:.2f}",
                f"{row[BETWEEN]:.3f}",
                f"{row['overhead']:.2%}",
            )
        Console().print(table)
    missed = [row for row in rows if row["overhead"] > BAR]
    return int(options.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
