"""What a linear layer's forward and backward pass costs in each recipe, beside FP32 and others.

    python benchmarks/linear_step.py                one size, every recipe, a table
    python benchmarks/linear_step.py --check        the bars; exits with 1 when one is missed
    python benchmarks/linear_step.py --json         one JSON document

All contenders run in one process, in turns; a figure is the median over the rounds of the ratio
to FP32 within a round, and with --processes the best process counts. Errors are signal to
quantisation noise ratios of output, grad_input and grad_weight, against float64. The peer is
torchao's emulation; for 16 bits, torch.autocast(bfloat16), whose own 16-bit products are slow on a
CPU without units for them, so that it is timed in three rounds only.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from processes import best_of
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import mixprec
from mixprec import amp
from mixprec.measure import interleaved, sqnr_db
from mixprec.recipes import NARROW

BARS = {
    "fp8_tensorwise": 1.20,
    "fp8_delayed": 1.20,
    "fp8_rowwise": 1.40,
    "fp8_blockwise": 1.45,
    "mxfp8": 1.45,
    "nvfp4": 2.0,
    "bf16 region": 1.35,
    "fp16 region": 1.35,
}
PEERS = {"fp8_tensorwise": "tensorwise", "fp8_delayed": "tensorwise", "fp8_rowwise": "rowwise"}
SIZES = ("1024,1024,1024", "64,9216,128", "256,192,576")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SLOW_ROUNDS = 3
Step = Callable[[], tuple[Tensor, Tensor, Tensor]]
Region = Callable[[], AbstractContextManager[object]]


def _layer(columns: int, rows: int, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(columns, rows).to(dtype)


def _step(
    layer: nn.Module, x: Tensor, gradient: Tensor, forward: Callable[[Tensor], Tensor] | None = None
) -> Step:
    def step() -> tuple[Tensor, Tensor, Tensor]:
        out = (forward or layer)(x)
        out.backward(gradient)
        found = (out.detach(), x.grad, layer.weight.grad)
        x.grad = None
        layer.zero_grad()
        return found

    return step


def _region_step(region: Region, layer: nn.Module, x: Tensor, gradient: Tensor) -> Step:
    """A step as users write it: forward in a region of 16 bits, backward outside."""

    def forward(inputs: Tensor) -> Tensor:
        with region():
            return layer(inputs)

    return _step(layer, x, gradient, forward)


def _regions(sizes: tuple[int, int, int], x: Tensor, gradient: Tensor) -> dict[str, Step]:
    return {
        f"{name} region": _region_step(
            functools.partial(amp.autocast, name),
            _layer(sizes[1], sizes[2], torch.float32),
            x.float().detach().requires_grad_(),
            gradient.to(dtype),
        )
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    }


def _slow_peers(sizes: tuple[int, int, int], x: Tensor, gradient: Tensor) -> dict[str, Step]:
    region = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    layer = _layer(sizes[1], sizes[2], torch.float32)
    inputs = x.float().detach().requires_grad_()
    return {"torch.autocast bf16": _region_step(region, layer, inputs, gradient.bfloat16())}


def _converted(
    sizes: tuple[int, int, int], dtype: torch.dtype, x: Tensor, gradient: Tensor
) -> dict[str, Step]:
    """A converted layer for every recipe; those with narrow parameters multiply like another."""
    found = {}
    for name, recipe in mixprec.RECIPES.items():
        if recipe.is_high_precision or recipe.parameters in NARROW:
            continue
        layer = _layer(sizes[1], sizes[2], dtype)
        mixprec.convert(layer, recipe)
        found[name] = _step(layer, x, gradient)
        # a history with an entry, as in every step but the first; rolling it is not timed, no more
        # than the optimizer's step is
        found[name]()
        mixprec.sync_scales(layer)
    return found


def _peers(sizes: tuple[int, int, int], x: Tensor, gradient: Tensor) -> dict[str, Step]:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    found = {}
    for name in dict.fromkeys(PEERS.values()):
        config = Float8LinearConfig.from_recipe_name(name)
        # its constructor takes a recipe name or settings, not both
        object.__setattr__(config, "emulate", True)
        layer = Float8Linear.from_float(_layer(sizes[1], sizes[2], x.dtype), config)
        found[f"torchao {name}"] = _step(layer, x, gradient)
    return found


def measure(sizes: tuple[int, int, int], dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Ratios to FP32 and errors of every contender at one size, in this process."""
    # one freed block of this size lifts glibc's thresholds: later blocks stay mapped, for everyone
    torch.empty(31 * 2**18).sum()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sizes[0], sizes[1], generator=generator)
    gradient = torch.randn(sizes[0], sizes[2], generator=generator)
    base = _layer(sizes[1], sizes[2], torch.float32)
    steps = {"fp32": _step(base, x.clone().requires_grad_(), gradient)}
    own_x, own_gradient = x.to(dtype).requires_grad_(), gradient.to(dtype)
    steps |= _converted(sizes, dtype, own_x, own_gradient)
    steps |= _regions(sizes, x, gradient) | _peers(sizes, own_x, own_gradient)
    slow = _slow_peers(sizes, x, gradient)
    exact_layer = _layer(sizes[1], sizes[2], dtype).double()
    exact = _step(exact_layer, own_x.detach().double().requires_grad_(), own_gradient.double())()
    errors = {
        name: [sqnr_db(reference, approx) for reference, approx in zip(exact, step(), strict=True)]
        for name, step in (steps | slow).items()
    }
    timing = interleaved(steps, rounds)
    slow_timing = interleaved({"fp32": steps["fp32"]} | slow, SLOW_ROUNDS)
    ratios = {**slow_timing.ratios, **timing.ratios}
    seconds = {**slow_timing.seconds, **timing.seconds}
    return {
        "sizes": sizes,
        "dtype": str(dtype).removeprefix("torch."),
        "contenders": {
            name: {
                "ratio": ratios[name],
                "milliseconds": 1e3 * seconds[name],
                "sqnr_db": errors[name],
            }
            for name in steps | slow
        },
    }


def arguments(sizes: str, dtype: str, rounds: int) -> list[str]:
    """What a fresh process is given to measure one case."""
    return ["--sizes", sizes, "--dtype", dtype, "--rounds", str(rounds)]


def check(results: list[dict[str, Any]]) -> list[str]:
    """The bars that were missed, a line each."""
    missed = []
    for result in results:
        contenders, where = result["contenders"], f"{result['sizes']} {result['dtype']}"
        for name, peer in PEERS.items():
            ratio, theirs = contenders[name]["ratio"], contenders[f"torchao {peer}"]["ratio"]
            if ratio >= theirs:
                missed.append(f"{name} at {where}: {ratio:.2f}, torchao's {peer} {theirs:.2f}")
        if list(result["sizes"]) == [1024, 1024, 1024] and result["dtype"] == "float32":
            for name, bar in BARS.items():
                if contenders[name]["ratio"] > bar:
                    missed.append(f"{name} at {where}: {contenders[name]['ratio']:.2f}, bar {bar}")
    return missed


def show(result: dict[str, Any], console: Console) -> None:
    """One table of ratios and errors."""
    rows, inner, columns = result["sizes"]
    threads = torch.get_num_threads()
    title = f"linear {rows}x{inner}x{columns}, {result['dtype']} input, {threads} threads"
    table = Table(title=title)
    table.add_column("contender")
    for column in ("ratio", "ms", "SQNR dB y / dx / dw"):
        table.add_column(column, justify="right")
    for name, entry in result["contenders"].items():
        errors = " / ".join(f"{value:.1f}" for value in entry["sqnr_db"])
        table.add_row(name, f"{entry['ratio']:.2f}", f"{entry['milliseconds']:.2f}", errors)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", default=SIZES[0], help="rows,inner,columns")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--processes", type=int, default=0, help="fresh processes; 0 is this one")
    parser.add_argument("--check", action="store_true", help="every size and type, three processes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.check:
        cases = [(sizes, dtype) for sizes in SIZES for dtype in DTYPES]
        rounds = max(options.rounds, 41)
        results = [best_of(3, __file__, arguments(*case, rounds)) for case in cases]
    elif options.processes:
        case = arguments(options.sizes, options.dtype, options.rounds)
        results = [best_of(options.processes, __file__, case)]
    else:
        first, second, third = (int(size) for size in options.sizes.split(","))
        results = [measure((first, second, third), DTYPES[options.dtype], options.rounds)]
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


if __name__ == "__main__":
    sys.exit(main())
