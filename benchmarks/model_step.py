"""What a training step of a small transformer costs in each recipe, beside FP32, and its error.

    python benchmarks/model_step.py                   ViT-tiny, the recipes with a bar, a table
    python benchmarks/model_step.py --model gpt --recipes all
    python benchmarks/model_step.py --check           the bars; exits with 1 when one is missed
    python benchmarks/model_step.py --json            one JSON document

A step is forward and loss in the recipe's region, backward outside it, and AdamW, all eager. All
contenders run in one process, in turns; a figure is the median over the rounds of the ratio to FP32
within a round, and with --processes the best process counts. Errors are signal to noise ratios of
the logits and of the gradient of all parameters, in the first step, against float64. The peer,
torch.autocast(bfloat16), is slow on a CPU without units of 16 bits: with --peer it is timed in
three rounds.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from processes import best_of
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import mixprec
from mixprec.amp.setup import region, scaler_for
from mixprec.measure import interleaved, sqnr_db
from mixprec.train.models import MODELS, build_model

BARS = {"bf16": 1.6, "fp8_tensorwise": 1.35, "fp8_rowwise": 1.6, "mxfp8": 1.8, "nvfp4": 2.8}
"""The highest ratio to FP32, of ViT-tiny and of GPT-tiny, on two cores."""
TIMED = {name: recipe for name, recipe in mixprec.RECIPES.items() if recipe.parameters == "fp32"}
PEER = "torch.autocast bf16"
BATCH, ROUNDS, SLOW_ROUNDS, PROCESSES = 8, 15, 3, 3
Data = tuple[Tensor, Tensor]
Region = Callable[[], AbstractContextManager[object]]


def batch_of(model: str, preset: str, size: int) -> Data:
    """Random inputs and targets of a model."""
    arguments = MODELS[model].presets[preset]
    generator = torch.Generator().manual_seed(1)
    if model == "gpt":
        tokens = torch.randint(0, 256, (2, size, arguments["context"]), generator=generator)
        return tokens[0], tokens[1]
    pixels = arguments["size"]
    images = torch.randn(size, 3, pixels, pixels, generator=generator)
    return images, torch.randint(0, arguments["classes"], (size,), generator=generator)


class Contender:
    """A model with its optimizer, its gradient scaler, and the region of its forward pass."""

    def __init__(
        self, model: nn.Module, loss: Callable[..., Tensor], data: Data, recipe: mixprec.Recipe
    ) -> None:
        self.model, self.loss, self.data = model, loss, data
        mixprec.convert(model, recipe)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        mixprec.attach(model, self.optimizer)
        self.scaler = scaler_for(recipe)
        self.region: Region = functools.partial(region, recipe)

    def backward(self) -> Tensor:
        """Gradients of the parameters, scaled; the logits."""
        self.optimizer.zero_grad()
        inputs, targets = self.data
        with self.region():
            logits = self.model(inputs)
            loss = self.loss(logits, targets)
        self.scaler.scale(loss).backward()
        return logits.detach()

    def errors_of(self) -> tuple[Tensor, Tensor]:
        """Logits, and the gradient of all parameters in one."""
        logits = self.backward()
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        gradient = torch.cat(gradients)
        self.scaler.skip(self.optimizer)
        return logits, gradient

    def step(self) -> None:
        """One training step."""
        self.backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def contenders(model: str, preset: str, data: Data, names: list[str], peer: bool) -> dict[str, Any]:
    """FP32 first, then the recipes, then the peer; all with the same parameters."""
    torch.manual_seed(0)
    base, loss = build_model(model, {"preset": preset})
    make = functools.partial(Contender, loss=loss, data=data)
    found = {
        name: make(copy.deepcopy(base), recipe=TIMED[name])
        for name in dict.fromkeys(["fp32", *names])
    }
    if peer:
        found[PEER] = make(copy.deepcopy(base), recipe=TIMED["fp32"])
        found[PEER].region = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    inputs, targets = data
    wide = inputs.double() if inputs.is_floating_point() else inputs
    exact = Contender(base.double(), loss, (wide, targets), TIMED["fp32"])
    exact.region = nullcontext
    return found | {"exact": exact}


def measure(
    model: str, preset: str, batch: int, names: list[str], rounds: int, peer: bool = False
) -> dict[str, Any]:
    """Ratio to FP32, milliseconds and errors of every contender, in this process."""
    # one freed block of this size lifts glibc's thresholds: later blocks stay mapped, for everyone
    torch.empty(31 * 2**18).sum()
    found = contenders(model, preset, batch_of(model, preset, batch), names, peer)
    exact = found.pop("exact").errors_of()
    errors = {
        name: [sqnr_db(a, b) for a, b in zip(exact, each.errors_of(), strict=True)]
        for name, each in found.items()
    }
    steps = {name: each.step for name, each in found.items()}
    ratios: dict[str, float] = {}
    seconds: dict[str, float] = {}
    if peer:
        slow = interleaved({"fp32": steps["fp32"], PEER: steps.pop(PEER)}, SLOW_ROUNDS)
        ratios, seconds = dict(slow.ratios), dict(slow.seconds)
    timing = interleaved(steps, rounds)
    ratios, seconds = ratios | dict(timing.ratios), seconds | dict(timing.seconds)
    return {
        "model": model,
        "preset": preset,
        "batch": batch,
        "threads": torch.get_num_threads(),
        "contenders": {
            name: {
                "ratio": ratios[name],
                "milliseconds": 1e3 * seconds[name],
                "sqnr_db": errors[name],
            }
            for name in found
        },
    }


def check(results: list[dict[str, Any]]) -> list[str]:
    """The bars that were missed, a line each."""
    return [
        f"{name} in {result['model']}-{result['preset']}: {entry['ratio']:.2f}, bar {BARS[name]}"
        for result in results
        for name, entry in result["contenders"].items()
        if entry["ratio"] > BARS.get(name, float("inf"))
    ]


def show(result: dict[str, Any], console: Console) -> None:
    """One table of ratios and errors."""
    title = "{model}-{preset}, batch {batch}, {threads} threads".format(**result)
    table = Table(title=title)
    table.add_column("contender")
    for column in ("ratio", "bar", "ms", "SQNR dB logits / gradient"):
        table.add_column(column, justify="right")
    for name, entry in result["contenders"].items():
        errors = " / ".join(f"{value:.1f}" for value in entry["sqnr_db"])
        figures = f"{entry['ratio']:.2f}", str(BARS.get(name, "")), f"{entry['milliseconds']:.0f}"
        table.add_row(name, *figures, errors)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="vit", choices=("vit", "gpt"))
    parser.add_argument("--preset", default="tiny", help="of the model, as mixprec train has them")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--recipes", default=",".join(BARS), help="names with commas, or all")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--processes", type=int, default=0, help="fresh processes; 0 is this one")
    parser.add_argument("--peer", action="store_true", help="time torch.autocast(bfloat16) too")
    parser.add_argument("--check", action="store_true", help="both models, three processes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    models = ["vit", "gpt"] if options.check else [options.model]
    processes = options.processes or (PROCESSES if options.check else 0)
    names = list(TIMED) if options.recipes == "all" else options.recipes.split(",")
    results = []
    for model in models:
        settings = (model, options.preset, options.batch, names, options.rounds, options.peer)
        if processes:
            results.append(best_of(processes, __file__, arguments(*settings)))
        else:
            results.append(measure(*settings))
    missed = check(results) if options.check else []
    if options.json:
        print(json.dumps({"results": results, "missed": missed}))
    else:
        console = Console()
        for result in results:
            show(result, console)
        for line in missed:
            console.print(f"missed: {line}", style="bold red")
    return 1 if missed else 0


def arguments(
    model: str, preset: str, batch: int, names: list[str], rounds: int, peer: bool
) -> list[str]:
    """What a fresh process is given to measure one case."""
    given = ["--model", model, "--preset", preset, "--batch", str(batch), "--rounds", str(rounds)]
    return [*given, "--recipes", ",".join(names), *(["--peer"] if peer else [])]


if __name__ == "__main__":
    sys.exit(main())
