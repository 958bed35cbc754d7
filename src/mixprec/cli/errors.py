"""`mixprec errors`: what every recipe would do to each layer, from one high-precision run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mixprec.cli.measured import described, finite_or_text
from mixprec.cli.options import Json, Settings, names
from mixprec.cli.output import console, print_json, print_table

if TYPE_CHECKING:
    from mixprec.layer_errors import RecipeError

_DETAIL = ("recipe", "product", "operand", "quantised as", "SQNR dB", "saturated %", "underflow %")


def errors(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="A TOML file; without it the checkpoint's run, or mnist_cnn on mnist.",
            metavar="CONFIG",
            show_default=False,
        ),
    ] = None,
    settings: Settings = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="A folder RUN_DIR/checkpoints/step_...; the untrained model by default.",
            metavar="PATH",
            show_default=False,
        ),
    ] = None,
    recipes: Annotated[
        str | None,
        typer.Option(help="Names, as in mxfp8,nvfp4; all by default.", show_default=False),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            help="Every operand and product of one layer.", metavar="NAME", show_default=False
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Which recipe each layer can bear.

    Runs one batch forward and backward in high precision, and quantises what each layer multiplies
    as every recipe would. Shows for each layer the SQNR, in decibels, of the operand that the
    recipe spoils most; with --layer all operands and products of one.
    """
    from mixprec.layer_errors import recipe_errors_of_run
    from mixprec.train.config import load

    if config is None and checkpoint is not None:
        config = checkpoint.parent.parent / "config.toml"
    resolved = load(config, settings or [])
    rows = recipe_errors_of_run(resolved, checkpoint_path=checkpoint, recipes=names(recipes))
    if layer is not None:
        rows = _of_layer(rows, layer)
    if as_json:
        source = None if checkpoint is None else str(checkpoint)
        print_json(
            {"model": resolved.model, "checkpoint": source, "errors": [_data(row) for row in rows]}
        )
    elif layer is not None:
        print_table(_DETAIL, map(_cells, rows), title=layer, numeric=_DETAIL[4:])
    else:
        _show_worst(rows, resolved.model)


def _of_layer(rows: Iterable[RecipeError], layer: str) -> list[RecipeError]:
    places = dict.fromkeys(_place(row) for row in rows)
    found = [row for row in rows if layer in (row.layer, _place(row))]
    if not found:
        raise ValueError(f"layer: got {layer!r}; must be one of {', '.join(places)}")
    return found


def _show_worst(rows: Sequence[RecipeError], model: str) -> None:
    """A row a layer, a column a recipe."""
    recipes = list(dict.fromkeys(row.recipe for row in rows))
    worst: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.operand:
            mine = worst.setdefault(_place(row), {})
            known = mine.get(row.recipe, math.inf)
            # a NaN is the worst there is, and stays
            mine[row.recipe] = known if math.isnan(known) or row.sqnr_db >= known else row.sqnr_db
    print_table(
        ("layer", *recipes),
        [
            (place, *(_number(mine[name]) if name in mine else "" for name in recipes))
            for place, mine in worst.items()
        ],
        title=f"{model}: SQNR of the worst operand, dB",
        numeric=recipes,
    )
    console().print("More is better; --layer NAME shows each operand and product.")


def _place(row: RecipeError) -> str:
    return ":".join(filter(None, (row.layer or "(model)", row.name)))


def _cells(row: RecipeError) -> tuple[str, ...]:
    product = f"{row.product} {row.name}".strip()
    if row.figures is None or row.spec is None:
        return row.recipe, product, "", "the product", _number(row.sqnr_db), "", ""
    shares = (f"{100 * x:.3g}" for x in (row.figures.saturation, row.figures.underflow))
    return (
        row.recipe,
        product,
        row.operand,
        described(row.spec),
        _number(row.sqnr_db),
        *shares,
    )


def _number(sqnr: float) -> str:
    return "exact" if sqnr == math.inf else f"{sqnr:.1f}"


def _data(row: RecipeError) -> dict[str, Any]:
    """An operand's fields with its figures among them, or a product's."""
    from mixprec.serialization import to_plain

    plain = to_plain(row)
    spec, figures = plain.pop("spec"), plain.pop("figures")
    if row.figures is not None:
        plain |= {"spec": spec, **figures}
    return finite_or_text(plain)
