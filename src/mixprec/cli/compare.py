"""`mixprec compare`: one model under several recipes, one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mixprec.cli.options import Base, Device, Json, Recipes, names
from mixprec.cli.output import (
    MEMORY,
    console,
    megabytes,
    number,
    print_json,
    print_table,
    written_page,
)

COLUMNS = (
    "recipe",
    "train loss",
    "eval loss",
    "accuracy %",
    "difference",
    "SQNR dB x/w/g",
    "step ms",
    "ratio",
    "impl",
)


def compare(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A TOML file; without it mnist_cnn on mnist, three epochs.",
            metavar="CONFIG",
            show_default=False,
        ),
    ] = None,
    recipes: Recipes = None,
    steps: Annotated[
        int | None, typer.Option(help="Stop after so many optimizer steps.", show_default=False)
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each recipe; the spread is shown.")] = 1,
    out: Annotated[
        str | None,
        typer.Option(
            help="Folder for result.json, losses.csv, compare.html.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    device: Device = None,
    base: Base = None,
    accumulate: Annotated[
        str | None,
        typer.Option(
            help="How products of 8 bits and less are added: fp32, hopper, hopper_promoted; "
            "several separated by commas.",
            metavar="A,B",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare recipes: the same model, weights, batches and dropout masks in each.

    Shows loss, accuracy, SQNR of activations x, weights w and gradients g, step time and memory.
    Exit code 3: no run has a finite loss.
    """
    from rich.console import Console

    from mixprec.pages.comparison import render
    from mixprec.train.compare import run
    from mixprec.train.faults import EXIT_CODES

    result = run(
        config,
        recipes=names(recipes),
        steps=steps,
        seeds=seeds,
        out=out,
        device=device,
        base=base,
        accumulate=names(accumulate),
        console=Console(stderr=as_json),
    )
    files = []
    if out is not None:
        page = Path(out) / "compare.html"
        files = written_page(page, lambda: render(result), beside=["result.json", "losses.csv"])
    if as_json:
        print_json(result)
    else:
        _show(result)
        for line in files:
            console().print(line, soft_wrap=True)
    if all(run["failure"] for run in result["runs"]):
        raise typer.Exit(EXIT_CODES["nonfinite"])


def _show(result: Mapping[str, Any]) -> None:
    runs = result["runs"]
    seeds = ", ".join(map(str, result["seeds"]))
    print_table(
        COLUMNS,
        [_row(run) for run in runs],
        title=f"{result['model']} on {result['data']}, {result['steps']} steps, seed {seeds}",
        numeric=set(COLUMNS) - {"recipe", "impl"},
    )
    print_table(
        ("recipe", *MEMORY.values()),
        [(run["recipe"], *(megabytes(run[key]) for key in MEMORY)) for run in runs],
        title="memory of a step, MB",
        numeric=MEMORY.values(),
    )
    for run in runs:
        if run["failure"]:
            console().print(f"{run['recipe']}: {run['failure']}")
        if run["loss_scale"] is not None:
            console().print(_scale_line(run, result["seeds"]))
    if result["process_peak_bytes"] is not None:
        peak = megabytes(result["process_peak_bytes"], 0)
        console().print(f"process peak {peak} MB: all runs, libraries and data together")
    for note in result["notes"]:
        console().print(note)


def _scale_line(run: Mapping[str, Any], seeds: Sequence[int]) -> str:
    """Where a run's loss scale ended and what it cost; of the last seed."""
    skipped = run["skipped"]
    steps = "1 step" if skipped == 1 else f"{skipped} steps"
    seed = f" (seed {seeds[-1]})" if len(seeds) > 1 else ""
    scale = f"loss scale {run['loss_scale']:g} after the last step"
    return f"{run['recipe']}: {scale}, {steps} skipped{seed}"


def _row(run: Mapping[str, Any]) -> tuple[str, ...]:
    spread = run["spread"]
    return (
        run["recipe"],
        _spread(run["train_loss"], ".4f", spread["train_loss"]),
        _spread(run["loss"], ".4f", spread["loss"]),
        _spread(run["accuracy"], ".2f", spread["accuracy"], 100),
        _spread(run["accuracy_difference"], "+.2f", spread["accuracy_difference"], 100),
        "/".join(number(run["sqnr"][kind], ".0f") for kind in "xwg"),
        number(run["step_ms"], ".1f"),
        number(run["step_ratio"], ".2f"),
        run["impl"],
    )


def _spread(value: float | None, form: str, deviation: float | None, factor: float = 1) -> str:
    """A number, with its deviation over the seeds if there is one."""
    text = number(value, form, factor)
    return (
        text
        if None in (value, deviation)
        else f"{text} ±{number(deviation, form.lstrip('+'), factor)}"
    )
