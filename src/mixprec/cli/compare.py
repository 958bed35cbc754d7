"""`mixprec compare`: one model under several recipes, one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mixprec.cli.options import Base, Device, Json
from mixprec.cli.output import console, print_json, print_table
from mixprec.cli.train import NON_FINITE

MEGABYTE = 1e6
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
MEMORY = {
    "param_bytes": "parameters",
    "grad_bytes": "gradients",
    "optimizer_bytes": "optimiser state",
    "saved_bytes": "activations",
    "peak_bytes": "peak",
}


def compare(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A TOML file; without it mnist_cnn on mnist, three epochs.",
            metavar="CONFIG",
            show_default=False,
        ),
    ] = None,
    recipes: Annotated[
        str | None,
        typer.Option(
            help="Names separated by commas; the others are compared with the first.",
            metavar="A,B,C",
            show_default=False,
        ),
    ] = None,
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

    result = run(
        config,
        recipes=_names(recipes),
        steps=steps,
        seeds=seeds,
        out=out,
        device=device,
        base=base,
        accumulate=_names(accumulate),
        console=Console(stderr=as_json),
    )
    if out is not None:
        (Path(out) / "compare.html").write_text(render(result), encoding="utf-8")
    if as_json:
        print_json(result)
    else:
        _show(result)
        if out is not None:
            console().print(f"result.json, losses.csv and compare.html are in {out}")
    if all(run["failure"] for run in result["runs"]):
        raise typer.Exit(NON_FINITE)


def _names(listed: str | None) -> list[str] | None:
    return None if listed is None else [name.strip() for name in listed.split(",")]


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
        [
            (run["recipe"], *(_cell(run[key], ".2f", None, 1 / MEGABYTE) for key in MEMORY))
            for run in runs
        ],
        title="memory of a step, MB",
        numeric=MEMORY.values(),
    )
    for run in runs:
        if run["failure"]:
            console().print(f"{run['recipe']}: {run['failure']}")
        if run["loss_scale"] is not None:
            console().print(_scale_line(run, result["seeds"]))
    if result["process_peak_bytes"] is not None:
        peak = result["process_peak_bytes"] / MEGABYTE
        console().print(f"process peak {peak:.0f} MB: all runs, libraries and data together")
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
        _cell(run["train_loss"], ".4f", spread["train_loss"]),
        _cell(run["loss"], ".4f", spread["loss"]),
        _cell(run["accuracy"], ".2f", spread["accuracy"], 100),
        _cell(run["accuracy_difference"], "+.2f", spread["accuracy_difference"], 100),
        "/".join(_cell(run["sqnr"][kind], ".0f") for kind in "xwg"),
        _cell(run["step_ms"], ".1f"),
        _cell(run["step_ratio"], ".2f"),
        run["impl"],
    )


def _cell(value: float | None, form: str, deviation: float | None = None, factor: float = 1) -> str:
    """A number, with its deviation over the seeds if there is one; a dash where it is unknown."""
    if value is None:
        return "-"
    text = f"{value * factor:{form}}"
    return text if deviation is None else f"{text} ±{deviation * factor:{form.lstrip('+')}}"
