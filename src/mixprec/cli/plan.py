"""`mixprec plan`: memory, native layers and roofline of a run on hardware one need not have."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mixprec.cli.options import Base, Json, Settings, names
from mixprec.cli.output import console, print_json, print_table

if TYPE_CHECKING:
    from mixprec.planning.qualification import LayerPlan
    from mixprec.planning.records import Plan, RecipePlan

_FILE = "plan.json"
_MEMORY = ("parameters", "gradients", "masters", "optimizer", "activations", "peak")
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def plan(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A TOML file; without it mnist_cnn on mnist.",
            metavar="CONFIG",
            show_default=False,
        ),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            help="l4, a100, h100, h200, b200, gb200, mi300x or cpu; need not be here.",
            metavar="NAME",
        ),
    ] = "h100",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Of one GPU, such as 80GB or 75.5GiB; by default the target's own.",
            metavar="SIZE",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[int, typer.Option(help="Over how many the run is fully sharded.")] = 1,
    recipes: Annotated[
        str | None,
        typer.Option(
            help="Names separated by commas, in place of the file's.",
            metavar="A,B,C",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Rows of one GPU's batch; over the file.", show_default=False)
    ] = None,
    torch_version: Annotated[
        str | None,
        typer.Option(
            "--torch",
            help="The torch release that would run it; by default this one.",
            metavar="VERSION",
            show_default=False,
        ),
    ] = None,
    settings: Settings = None,
    base: Base = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help=f"File for the plan as JSON, or a folder for {_FILE}.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Memory, native layers and roofline of a run, on hardware one need not have.

    Runs one training step on shapes alone: no data, no memory, no arithmetic.
    """
    from mixprec.planning import plan as planned
    from mixprec.train.config import load

    if out is not None and not out.parent.is_dir():
        raise ValueError(
            f"out: got {out}; its folder is not there; make {out.parent}, or name another file"
        )
    resolved = load(config, [*(settings or []), *([f"base={base}"] if base is not None else [])])
    found = planned(
        resolved,
        target,
        memory,
        gpus,
        recipes=names(recipes),
        batch=batch,
        torch_version=torch_version,
    )
    if out is not None:
        file = out / _FILE if out.is_dir() else out
        file.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json(asdict(found))
        return
    _show(found)
    if out is not None:
        console().print(f"the plan is in {file}")


def _show(plan: Plan) -> None:
    gpus = "" if plan.gpus == 1 else f"{plan.gpus} x "
    where = f"{gpus}{plan.target} with {size(plan.memory_bytes)}"
    print_table(
        ("recipe", *_MEMORY, "fits", "largest batch"),
        [_memory_row(entry) for entry in plan.recipes],
        title=f"{plan.model}, {plan.parameters:,} parameters, on {where}, batch {plan.batch}"
        f"{'' if plan.gpus == 1 else ' on each'}",
        numeric={*_MEMORY, "largest batch"},
    )
    rooflines = ("time %", "step ms", "speed-up", "products alone")
    print_table(
        ("recipe", "native", "emulated", "left", *rooflines, "compared with"),
        [_roofline_row(entry) for entry in plan.recipes],
        title="layers, and the roofline of a step: the most that peak rates allow, no forecast",
        numeric={"native", "emulated", "left", *rooflines},
    )
    for entry in plan.recipes:
        rows = grouped(entry.layers)
        if rows:
            print_table(
                ("layers", "on the units", "why not, or what is filled up"),
                rows,
                title=f"{entry.recipe} on {plan.target}, torch {plan.torch}",
            )
    for note in plan.notes:
        console().print(note)


def _memory_row(entry: RecipePlan) -> tuple[str, ...]:
    sizes = (size(getattr(entry.memory, name)) for name in _MEMORY)
    return entry.recipe, *sizes, "yes" if entry.fits else "no", f"{entry.largest_batch:,}"


def _roofline_row(entry: RecipePlan) -> tuple[str, ...]:
    counts = Counter(layer.status for layer in entry.layers)
    layers = [str(counts[status]) for status in ("native", "emulated", "left")]
    line = entry.roofline
    if line is None:
        return entry.recipe, *layers, *"----", "no rates of it"
    return (
        entry.recipe,
        *layers,
        f"{100 * line.share:.1f}",
        _milliseconds(line.seconds),
        f"{line.speedup:.2f}",
        f"{line.product_speedup:.2f}",
        line.baseline,
    )


def _milliseconds(seconds: float) -> str:
    """Three digits; whole ones where there are more."""
    count = 1e3 * seconds
    return f"{count:,.0f}" if count >= 1000 else f"{count:.3g}"


def grouped(layers: Sequence[LayerPlan]) -> list[tuple[str, ...]]:
    """A row for all layers with one status and reason; numbers of blocks are stars."""
    groups: dict[tuple[str, str], Counter[str]] = {}
    for layer in layers:
        pattern = re.sub(r"(?<![^.])\d+(?![^.])", "*", layer.name) or "(model)"
        why = "; ".join(filter(None, (layer.reason, _filled(layer))))
        groups.setdefault((layer.status, why), Counter())[pattern] += 1
    return [
        (", ".join(f"{name} ({n})" if n > 1 else name for name, n in counts.items()), *key)
        for key, counts in groups.items()
    ]


def _filled(layer: LayerPlan) -> str:
    """What the units multiply more than the layer has: "grad_weight K 100 to 112"."""
    parts = []
    for product in layer.products:
        pairs = zip("MNK", product.sizes, product.filled, strict=True)
        grown = [f"{axis} {old} to {new}" for axis, old, new in pairs if new != old]
        if grown:
            parts.append(f"{product.product} {', '.join(grown)}")
    return f"filled up: {'; '.join(dict.fromkeys(parts))}" if parts else ""


def size(count: int) -> str:
    """Bytes in decimal units: 80.0 GB."""
    for unit, name in _UNITS:
        if count >= unit:
            return (
                f"{count / unit:.3g} {name}" if count < 100 * unit else f"{count / unit:.0f} {name}"
            )
    return f"{count} B"
