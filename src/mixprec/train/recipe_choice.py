"""The recipe that a configuration chooses: a name, a table of fields, or one of these by layer."""

import dataclasses
from typing import Any

from torch import nn

from mixprec.nn import keep_sensitive
from mixprec.recipes import Base, Recipe, get_recipe, with_base

RecipeTable = str | dict[str, Any]
RecipeChoice = Recipe | dict[str, Recipe]
_RECIPE_FIELDS = {"variant_of", *(entry.name for entry in dataclasses.fields(Recipe))}
_AROUND = ("base", "parameters", "keep_batchnorm_fp32", "update", "loss_scale")


def resolve_recipe(choice: RecipeTable, base: Base | None = None) -> RecipeChoice:
    """The recipe that a configuration asks for.

    Args:
        choice: A recipe's name; a table of a recipe's own fields (`variant_of` names the recipe
            that it changes); or a table from name patterns to either, first match wins.
        base: In place of each recipe's own.

    Raises:
        ValueError: An unknown name or field; the message names the nearest.
    """
    if isinstance(choice, str) or choice.keys() & _RECIPE_FIELDS:
        return _one_recipe(choice, base)
    return {pattern: _one_recipe(value, base) for pattern, value in choice.items()}


def by_layer(
    model: nn.Module,
    choice: RecipeTable,
    base: Base | None,
    keep_first: int,
    keep_last_share: float,
) -> RecipeChoice:
    """What `resolve_recipe` gives, the model's sensitive layers apart where that is asked."""
    recipe = resolve_recipe(choice, base)
    if not keep_first and not keep_last_share:
        return recipe
    return keep_sensitive(model, recipe, keep_first=keep_first, keep_last_share=keep_last_share)


def step_recipe(choice: RecipeTable, base: Base | None = None) -> Recipe:
    """The recipe for what is around the layers: base, parameters, updates, loss scale.

    Raises:
        ValueError: A choice by layer whose recipes differ in these.
    """
    recipe = resolve_recipe(choice, base)
    if isinstance(recipe, Recipe):
        return recipe
    steps = {tuple(getattr(entry, name) for name in _AROUND): entry for entry in recipe.values()}
    if len(steps) > 1:
        kinds = " and ".join(
            f"{entry} (base {entry.base}, parameters {entry.parameters})"
            for entry in steps.values()
        )
        raise ValueError(
            f"recipe: got {kinds}; a run has one base and one kind of parameters and updates; set "
            "base, or choose recipes that agree"
        )
    return next(iter(steps.values()))


def recipe_label(choice: RecipeTable, base: Base | None = None) -> str:
    """A short name for what `resolve_recipe` takes, for tables and records."""
    recipe = resolve_recipe(choice, base)
    if isinstance(recipe, dict):
        return "by layer: " + ", ".join(dict.fromkeys(map(str, recipe.values())))
    return str(recipe)


def _one_recipe(choice: RecipeTable, base: Base | None) -> Recipe:
    recipe = get_recipe(choice) if isinstance(choice, str) else Recipe.from_dict(choice)
    return recipe if base is None else with_base(recipe, base)
