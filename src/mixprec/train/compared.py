"""What a comparison compares: its configuration, and the recipes that it runs."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mixprec.recipes import Recipe, with_accumulate
from mixprec.train.config import LEVEL_VARIABLE, Config, from_dict, load
from mixprec.train.config import to_dict as config_table
from mixprec.train.recipe_choice import RecipeTable, recipe_label, resolve_recipe

DEFAULT_RECIPES = (
    "fp32",
    "bf16",
    "fp16",
    "fp8_tensorwise",
    "fp8_delayed",
    "fp8_rowwise",
    "fp8_rowwise_hp_grad_weight",
)
DEFAULT_EPOCHS = 3
# a convolution of one channel is the sensitive layer, and windows of 3x3 cost a CPU most
DEFAULT_SKIP = ("conv*",)


def configuration(
    config: Config | str | Path | None, steps: int | None, device: str | None, base: str | None
) -> Config:
    """The configuration of a comparison, with what was asked for in its place."""
    if config is None:
        skip = list(DEFAULT_SKIP)
        config = load(None, [f"train.epochs={DEFAULT_EPOCHS}", f"convert.skip={skip}"])
    elif not isinstance(config, Config):
        config = load(config)
    table = config_table(config)
    table["train"] |= {"steps": steps} if steps is not None else {}
    table["train"] |= {"device": device} if device is not None else {}
    table |= {"base": base} if base is not None else {}
    return from_dict(table)


def chosen_recipes(
    base: Config,
    recipes: RecipeTable | Recipe | Sequence[RecipeTable | Recipe] | None,
    accumulate: str | Sequence[str] | None = None,
) -> dict[str, RecipeTable]:
    """The recipes of a comparison by their labels, each with each way of adding up."""
    if isinstance(recipes, str | dict | Recipe):
        recipes = [recipes]
    if recipes is not None and not isinstance(recipes, Sequence):
        raise TypeError(
            f"recipes: got {recipes!r}; a recipe is a name, a Recipe or a table; give one or a list"
        )
    if recipes is not None and not recipes:
        raise ValueError("recipes: got none; a comparison needs one at least; name some")
    own = recipe_label(base.recipe, base.base)
    asked = [*DEFAULT_RECIPES, base.recipe] if recipes is None else list(recipes)
    chosen: dict[str, RecipeTable] = {}
    for entry in asked:
        table = entry.to_dict() if isinstance(entry, Recipe) else entry
        recipe = base.recipe if table in (own, base.recipe) else from_dict({"recipe": table}).recipe
        label = recipe_label(recipe, base.base)
        if label in chosen and recipes is not None:
            raise ValueError(f"recipes: got {label} twice; each is run once; leave one out")
        chosen.setdefault(label, recipe)
    return chosen if accumulate is None else _accumulated(base, chosen, accumulate)


def _accumulated(
    base: Config, chosen: Mapping[str, RecipeTable], accumulate: str | Sequence[str]
) -> dict[str, RecipeTable]:
    names = [accumulate] if isinstance(accumulate, str) else accumulate
    variants: dict[str, RecipeTable] = {}
    for table in chosen.values():
        recipe = resolve_recipe(table)
        for name in names:
            changed: RecipeTable
            if isinstance(recipe, dict):
                changed = {
                    pattern: with_accumulate(entry, name).to_dict()
                    for pattern, entry in recipe.items()
                }
            else:
                variant = with_accumulate(recipe, name)
                changed = table if variant == recipe else variant.to_dict()
            variants.setdefault(recipe_label(changed, base.base), changed)
    return variants


def level_notes(config: Config, labels: Sequence[str]) -> list[str]:
    """What the environment's level did to a comparison of these recipes; nothing where unset."""
    level = os.environ.get(LEVEL_VARIABLE)
    if level is None:
        return []
    own = recipe_label(config.recipe, config.base)
    is_source = config.recipe_source == LEVEL_VARIABLE
    if is_source and own in labels:
        return [f"{own}: named by {LEVEL_VARIABLE}={level}"]
    named = "list of recipes" if is_source else "configuration"
    return [f"{LEVEL_VARIABLE}={level} has no effect: the {named} says what to compare"]
