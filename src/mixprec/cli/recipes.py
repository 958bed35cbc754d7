"""`mixprec recipes`: what a recipe does to each operand, and where it runs natively."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mixprec.cli.output import console, grouped_by_reason, print_json, print_table
from mixprec.hardware import ACCELERATORS

if TYPE_CHECKING:
    from mixprec.quantization import QuantSpec
    from mixprec.recipes import Recipe
    from mixprec.survey import Support

_TENSORS = ("x", "w", "g", "w", "g", "x")
_BLOCKS = {(-1, -1): "tensor", (1, -1): "row", (-1, 1): "column"}


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="A recipe; all are listed without it.", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """What a recipe does, and where it is native.

    Lists the recipes; with NAME, shows the six operands of the three products of a linear layer
    (x input, w weight, g gradient of the output) and the hardware that runs them natively.
    """
    from mixprec.recipes import RECIPES, get_recipe

    if name is not None:
        _show_recipe(get_recipe(name), as_json)
    elif as_json:
        print_json({"recipes": [_data(recipe) for recipe in RECIPES.values()]})
    else:
        rows = [(recipe.name, recipe.description) for recipe in RECIPES.values()]
        print_table(("recipe", "what it is"), rows)


def _show_recipe(recipe: Recipe, as_json: bool) -> None:
    """The six operands, and each GPU of the hardware table."""
    from mixprec.recipes import operands

    if as_json:
        print_json(_data(recipe))
        return
    console().print(f"{recipe}: {recipe.description}")
    print_table(
        ("operand", "of", "format", "block", "scale", "rounding"),
        [
            (path, tensor, *_words(spec))
            for (path, spec), tensor in zip(operands(recipe).items(), _TENSORS, strict=True)
        ],
    )
    print_table(("runs", "on", "why"), grouped_by_reason(_support(recipe)))


def _support(recipe: Recipe) -> dict[str, Support]:
    """Whether each GPU of the hardware table runs the recipe natively."""
    from mixprec.survey import native_support

    return {
        name: native_support(recipe, row.capability, vendor=row.vendor)
        for name, row in ACCELERATORS.items()
    }


def _data(recipe: Recipe) -> dict[str, Any]:
    """The recipe's own fields, and each GPU's answer."""
    hardware = {
        name: {"native": support.native, "reason": support.reason}
        for name, support in _support(recipe).items()
    }
    return {**recipe.to_dict(), "hardware": hardware}


def _words(spec: QuantSpec | None) -> tuple[str, str, str, str]:
    """Format, block, scale rule and rounding of an operand."""
    if spec is None:
        return "high precision", "", "", ""
    free, contraction = spec.block
    block = _BLOCKS.get(spec.block, f"{free} x {contraction}")
    delayed = f", delayed {spec.amax_history_len}" if spec.is_delayed else ""
    return str(spec.format), block, f"{spec.scale_rule}{delayed}", spec.rounding
