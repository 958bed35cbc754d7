"""Recipes beyond their products: base, parameters, updates, loss scale, names of other tools."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest

from mixprec.recipes import OPT_LEVELS, RECIPES, Recipe, get_recipe, with_base

Around = tuple[str, str, str, Any]
PLAIN: Around = ("fp32", "fp32", "plain", None)
AROUND: dict[str, Around] = {
    "fp64": ("fp64", "fp64", "plain", None),
    "fp64_emulated": ("fp64", "fp64", "plain", None),
    "bf16": ("bf16", "fp32", "plain", None),
    "fp16": ("fp16", "fp32", "plain", "dynamic"),
    "bf16_pure": ("bf16", "bf16", "stochastic", None),
    "fp16_pure": ("fp16", "fp16", "stochastic", "dynamic"),
}
LEVELS: dict[str, tuple[Any, ...]] = {
    "O0": (*PLAIN, False),
    "O1": ("fp16", "fp32", "plain", "dynamic", False),
    "O2": ("fp16", "fp16", "masters", "dynamic", True),
    "O3": ("fp16", "fp16", "plain", 1.0, False),
}
SAME_AS = {
    # Lightning
    "64-true": "fp64",
    "32-true": "fp32",
    "16-mixed": "fp16",
    "bf16-mixed": "bf16",
    # Accelerate
    "no": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    # torch
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "tfloat32": "tf32",
}


def around(recipe: Recipe) -> Around:
    return (recipe.base, recipe.parameters, recipe.update, recipe.loss_scale)


@pytest.mark.parametrize("name", RECIPES)
def test_training_step_of_every_recipe(name: str) -> None:
    assert around(RECIPES[name]) == AROUND.get(name, PLAIN)
    assert not RECIPES[name].keep_batchnorm_fp32


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_pure_recipe_has_the_products_of_the_mixed_one(name: str) -> None:
    mixed, pure = RECIPES[name], RECIPES[f"{name}_pure"]
    assert (pure.output, pure.grad_input, pure.grad_weight) == (
        mixed.output,
        mixed.grad_input,
        mixed.grad_weight,
    )


# ---- names


@pytest.mark.parametrize("name", SAME_AS)
def test_name_of_another_tool_is_the_recipe_itself(name: str) -> None:
    for spelled in (name, name.upper(), name.capitalize()):
        assert get_recipe(spelled) is RECIPES[SAME_AS[name]]


def test_fp8_of_another_tool_is_tensorwise_on_bf16() -> None:
    recipe = get_recipe("fp8")
    assert recipe == replace(RECIPES["fp8_tensorwise"], base="bf16")
    assert str(recipe) == "fp8_tensorwise on bf16"


@pytest.mark.parametrize(
    ("name", "pure", "loss_scale"),
    [("bf16-true", "bf16_pure", None), ("16-true", "fp16_pure", None)],
)
def test_true_precision_of_another_tool_updates_plainly(
    name: str, pure: str, loss_scale: Any
) -> None:
    recipe, own = get_recipe(name), RECIPES[pure]
    assert around(recipe) == (own.base, own.base, "plain", loss_scale)
    assert recipe.output == own.output
    assert (recipe.name, str(recipe)) == (name, name)
    assert get_recipe(name.upper()) is recipe


@pytest.mark.parametrize("level", LEVELS)
def test_levels_are_recipes(level: str) -> None:
    recipe = OPT_LEVELS[level]
    assert (*around(recipe), recipe.keep_batchnorm_fp32) == LEVELS[level]
    assert get_recipe(level) is recipe
    assert get_recipe(level.lower()) is recipe
    assert recipe.description


def test_levels_that_are_recipes_of_the_table_keep_their_names() -> None:
    names = [str(recipe) for recipe in OPT_LEVELS.values()]
    assert names == ["fp32", "fp16", "O2", "O3"]
    assert set(OPT_LEVELS) == set(LEVELS)


@pytest.mark.parametrize("name", ["fp8", "bf16-true", "16-true", "O2", "O3"])
def test_variant_with_a_name_of_its_own_round_trips(name: str) -> None:
    recipe = get_recipe(name)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert Recipe.from_dict({"variant_of": name}) is recipe


@pytest.mark.parametrize(
    ("name", "near"), [("bf16-mixd", "bf16-mixed"), ("bf16pure", "bf16_pure"), ("O5", "")]
)
def test_unknown_name_of_a_tool_is_answered_with_near_ones(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"recipe: got '{name}'; unknown, .*{near}"):
        get_recipe(name)


# ---- bases


@pytest.mark.parametrize(
    ("base", "loss_scale"), [("fp64", None), ("fp32", None), ("bf16", None), ("fp16", "dynamic")]
)
@pytest.mark.parametrize("name", ["fp8_rowwise", "fp16", "tf32"])
def test_base_brings_its_loss_scale(name: str, base: Any, loss_scale: Any) -> None:
    recipe = with_base(RECIPES[name], base)
    assert recipe == replace(RECIPES[name], base=base, loss_scale=loss_scale)
    own = name if base == RECIPES[name].base else f"{name} on {base}"
    assert str(recipe) == own


@pytest.mark.parametrize("base", ["tf32", "e4m3", "", None])
def test_another_base_is_refused(base: Any) -> None:
    with pytest.raises(ValueError, match=r"base: got .*; must be one of fp64, fp32, bf16, fp16"):
        with_base(RECIPES["fp8_rowwise"], base)


def test_custom_recipe_says_its_base() -> None:
    assert str(Recipe()) == "custom"
    assert str(Recipe(base="bf16")) == "custom on bf16"
    assert str(Recipe(name="mine", base="fp16")) == "mine on fp16"


# ---- plain values


def read(toml: str) -> Recipe:
    return Recipe.from_dict(tomllib.loads(toml))


def test_variant_in_base_and_loss_scale_keeps_its_name() -> None:
    assert read('variant_of = "fp8_rowwise"\nbase = "fp16"') == with_base(
        RECIPES["fp8_rowwise"], "fp16"
    )
    scaled = read('variant_of = "fp16"\nloss_scale = 128')
    assert scaled == replace(RECIPES["fp16"], loss_scale=128)
    assert str(scaled) == "fp16"
    assert read('variant_of = "fp16"\nloss_scale = "none"').loss_scale is None
    both = read('variant_of = "fp8_rowwise"\nbase = "fp16"\nloss_scale = 8.0')
    assert (str(both), both.loss_scale) == ("fp8_rowwise on fp16", 8.0)


@pytest.mark.parametrize(
    "change",
    [
        'update = "compensated"',
        'parameters = "fp32"\nupdate = "plain"',
        "keep_batchnorm_fp32 = true",
        'output.out = "none"',
    ],
)
def test_variant_in_anything_else_loses_the_name(change: str) -> None:
    recipe = read(f'variant_of = "bf16_pure"\n{change}')
    assert (recipe.name, recipe.description) == ("", "")
    assert recipe != replace(RECIPES["bf16_pure"], name="", description="")
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    named = read(f'variant_of = "bf16_pure"\nname = "mine"\n{change}')
    assert named == replace(recipe, name="mine")


def test_variant_of_another_tool_s_name() -> None:
    recipe = read('variant_of = "fp8"\ngrad_weight.a = "none"\ngrad_weight.b = "none"')
    assert (recipe.base, recipe.grad_weight.a) == ("bf16", None)
    assert read('variant_of = "O2"\nupdate = "plain"') == replace(
        OPT_LEVELS["O2"], update="plain", name="", description=""
    )


@pytest.mark.parametrize("value", ["dynamic", 1, 0.5, 2.0**24, None])
def test_loss_scales_that_are_taken(value: Any) -> None:
    recipe = replace(RECIPES["fp16"], loss_scale=value)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
