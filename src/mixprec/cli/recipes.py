"""`mixprec recipes`: what a recipe does to each operand and around, and where it runs natively."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mixprec.cli.measured import BLOCKS, DEFAULT_DATA, show_measured
from mixprec.cli.options import Json
from mixprec.cli.output import console, grouped_by_reason, print_json, print_table
from mixprec.hardware import ACCELERATORS

if TYPE_CHECKING:
    from mixprec.quantization import QuantSpec
    from mixprec.recipes import Recipe
    from mixprec.support import Support

_TENSORS = ("x", "w", "g", "w", "g", "x")
DEFAULT_POLICY = "cuda"


def recipes(
    name: Annotated[
        str | None, typer.Argument(help="A recipe; all are listed without it.", show_default=False)
    ] = None,
    operations: Annotated[
        bool,
        typer.Option("--operations", help="Of a 16-bit base: which operation runs in which type."),
    ] = False,
    policy: Annotated[
        str | None,
        typer.Option(
            help="With --operations: cuda (the default) or torch_cpu.",
            metavar="POLICY",
            show_default=False,
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="The error of one tensor under each operand (of NAME)."),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            help="With --measure: normal (the default), lognormal, outliers, FILE.npy, "
            "FILE.safetensors or FILE.safetensors:TENSOR.",
            metavar="DATA",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """What a recipe does, and where it is native.

    Lists the recipes; with NAME, shows the base, the parameters and their updates, the six operands
    of the three products of a linear layer (x input, w weight, g gradient of the output) and the
    hardware that runs them natively. Names that other tools give a recipe are known too.
    """
    from mixprec.recipes import RECIPES, get_recipe

    if policy is not None and not operations:
        raise ValueError(
            f"policy: got {policy!r} without --operations; nothing would follow from it; add that"
        )
    if data is not None and not measure:
        raise ValueError(
            f"data: got {data!r} without --measure; nothing would follow from it; add that"
        )
    if measure and operations:
        raise ValueError("measure: got it beside --operations; each is a table; choose one")
    if measure:
        chosen = RECIPES.values() if name is None else (get_recipe(name),)
        show_measured(chosen, data or DEFAULT_DATA, as_json)
    elif operations:
        _show_operations(_sixteen_bit(name), policy or DEFAULT_POLICY, as_json)
    elif name is not None:
        _show_recipe(get_recipe(name), as_json)
    elif as_json:
        print_json({"recipes": [_data(recipe) for recipe in RECIPES.values()]})
    else:
        rows = [(name, recipe.base, recipe.description) for name, recipe in RECIPES.items()]
        print_table(("recipe", "base", "what it is"), rows)


def _sixteen_bit(name: str | None) -> Recipe:
    """The recipe of a name, if its base has a policy of operations."""
    from mixprec.recipes import NARROW, get_recipe

    bases = " and ".join(NARROW)
    if name is None:
        raise ValueError(
            f"name: got none with --operations; the policy is that of a recipe on {bases}; give "
            "one, as in `mixprec recipes bf16 --operations`"
        )
    recipe = get_recipe(name)
    if recipe.base not in NARROW:
        raise ValueError(
            f"name: got {recipe} with --operations; its base, {recipe.base}, leaves every "
            f"operation in the type of its inputs; name a recipe on {bases}"
        )
    return recipe


def _show_operations(recipe: Recipe, policy: str, as_json: bool) -> None:
    """The rules of a policy, what each means under the recipe, and its operations."""
    from mixprec.policy import FOLLOWS, MEANINGS, POLICIES

    if policy not in POLICIES:
        raise ValueError(f"policy: got {policy!r}; must be one of {', '.join(POLICIES)}")
    names: dict[str, list[str]] = {rule: [] for rule in MEANINGS}
    for operation, rule in POLICIES[policy].items():
        names[rule].append(operation)
    rules: list[dict[str, Any]] = [
        {"rule": rule, "meaning": meaning.format(dtype=recipe.base), "operations": names[rule]}
        for rule, meaning in MEANINGS.items()
        if names[rule] or rule == FOLLOWS
    ]
    if as_json:
        print_json({"recipe": str(recipe), "base": recipe.base, "policy": policy, "rules": rules})
        return
    print_table(
        ("rule", "what it means", "operations"),
        [
            (row["rule"], row["meaning"], ", ".join(sorted(row["operations"])) or "all others")
            for row in rules
        ],
        title=f"{recipe}, policy {policy}: on every device",
    )


def _show_recipe(recipe: Recipe, as_json: bool) -> None:
    """The six operands, and each GPU of the hardware table."""
    from mixprec.recipes import operands

    if as_json:
        print_json(_data(recipe))
        return
    console().print(f"{recipe}: {recipe.description}")
    print_table(("around the products", ""), _around(recipe))
    print_table(
        ("operand", "of", "format", "block", "scale", "rounding"),
        [
            (path, tensor, *_words(spec))
            for (path, spec), tensor in zip(operands(recipe).items(), _TENSORS, strict=True)
        ],
    )
    print_table(("runs", "on", "why"), grouped_by_reason(_support(recipe)))


def _around(recipe: Recipe) -> list[tuple[str, str]]:
    """What a recipe does outside the products of a layer."""
    from mixprec.gemm.accumulation import FP32
    from mixprec.recipes import NARROW, PRODUCTS

    is_narrow = recipe.parameters in NARROW
    norms = ", batch normalisations fp32" if recipe.keep_batchnorm_fp32 else ""
    results = [getattr(recipe, product).out for product in PRODUCTS]
    sums = [getattr(recipe, product).accumulate for product in PRODUCTS]
    added = [("sums of products", ", ".join(dict.fromkeys(sums)))] if set(sums) != {FP32} else []
    out = ", ".join(dict.fromkeys(str(spec.format) if spec else "not rounded" for spec in results))
    return [
        ("base, for everything else", recipe.base),
        ("parameters", recipe.parameters + norms),
        ("update", recipe.update if is_narrow else f"in {recipe.parameters}"),
        ("loss scale", "none" if recipe.loss_scale is None else f"{recipe.loss_scale}"),
        ("results of products", out),
        *added,
    ]


def _support(recipe: Recipe) -> dict[str, Support]:
    """Whether each GPU of the hardware table runs the recipe natively."""
    from mixprec.support import native_support

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
    """Format and transform, block, scale rule and rounding of an operand."""
    if spec is None:
        return "high precision", "", "", ""
    free, contraction = spec.block
    block = BLOCKS.get(spec.block, f"{free} x {contraction}")
    delayed = f", delayed {spec.amax_history_len}" if spec.is_delayed else ""
    transformed = ", transformed" if spec.hadamard else ""
    return (
        f"{spec.format}{transformed}",
        block,
        f"{spec.scale_rule}{delayed}",
        spec.rounding,
    )
