"""Recipes whose products are added up as by units of fewer bits."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import pytest
import torch

import mixprec
from mixprec.recipes import PRODUCTS, RECIPES, Recipe, get_recipe, with_accumulate

MODELS = ("hopper", "hopper_promoted")
MXFP8 = RECIPES["mxfp8"]
NARROW = [name for name, recipe in RECIPES.items() if recipe.output.is_narrow]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", RECIPES)
def test_variant_changes_the_sums_of_narrow_products_alone(name: str, model: str) -> None:
    recipe = RECIPES[name]
    variant = with_accumulate(recipe, model)
    for product in PRODUCTS:
        gemm, changed = getattr(recipe, product), getattr(variant, product)
        assert changed.accumulate == (model if gemm.is_narrow else gemm.accumulate)
        assert replace(changed, accumulate=gemm.accumulate) == gemm
    assert (variant is recipe) == (name not in NARROW)
    assert variant.name == (f"{name}_{model}" if name in NARROW else name)
    assert with_accumulate(variant, "fp32") == recipe
    assert with_accumulate(with_accumulate(recipe, "hopper"), model) == variant
    assert with_accumulate(variant, model) is variant


def test_products_in_high_precision_keep_their_sums() -> None:
    variant = with_accumulate(RECIPES["fp8_rowwise_hp_grad_weight"], "hopper")
    assert [getattr(variant, product).accumulate for product in PRODUCTS] == [
        "hopper",
        "hopper",
        "fp32",
    ]


def test_an_unknown_way_is_refused_for_every_recipe() -> None:
    for name in ("fp32", "mxfp8"):
        with pytest.raises(ValueError, match="accumulate: got 'hoper'; must be one of fp32, hopp"):
            with_accumulate(RECIPES[name], "hoper")


@pytest.mark.parametrize("name", NARROW)
def test_variants_survive_the_way_to_plain_values_and_back(name: str) -> None:
    variant = with_accumulate(RECIPES[name], "hopper_promoted")
    plain = variant.to_dict()
    assert plain["output"]["accumulate"] == "hopper_promoted"
    assert Recipe.from_dict(plain) == variant
    assert str(variant) == f"{name}_hopper_promoted"


def test_one_product_may_add_otherwise_in_toml() -> None:
    text = 'variant_of = "fp8_rowwise"\n[grad_weight]\naccumulate = "hopper"'
    recipe = Recipe.from_dict(tomllib.loads(text))
    assert [getattr(recipe, product).accumulate for product in PRODUCTS] == [
        "fp32",
        "fp32",
        "hopper",
    ]
    assert str(recipe) == "custom"
    for wrong, match in (
        ('"fp9"', "output.accumulate: got 'fp9'; must be one of"),
        ("3", "output.accumulate: got 3; must be one of"),
    ):
        text = f'variant_of = "fp8_rowwise"\n[output]\naccumulate = {wrong}'
        with pytest.raises(ValueError, match=match):
            Recipe.from_dict(tomllib.loads(text))
    with pytest.raises(ValueError, match=r"output\.accumulate: got 'hopper' with operands"):
        Recipe.from_dict({"variant_of": "bf16", "output": {"accumulate": "hopper"}})


def test_the_three_products_of_a_layer_add_as_the_recipe_says() -> None:
    x, w, g = torch.rand(256, 512), torch.rand(384, 512), torch.rand(256, 384)
    results = {}
    for how in ("fp32", *MODELS):
        recipe = with_accumulate(get_recipe("fp8_rowwise"), how)
        x_leaf, w_leaf = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = mixprec.linear(x_leaf, w_leaf, recipe=recipe)
        out.backward(g)
        results[how] = (out.detach(), x_leaf.grad, w_leaf.grad)
    for wide, hopper, promoted in zip(*(results[how] for how in results), strict=True):
        error = [float((y - wide).norm() / wide.norm()) for y in (hopper, promoted)]
        assert 1e-3 < error[0]
        assert error[1] < error[0]


def test_a_converted_model_is_emulated() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    report = mixprec.convert(model, with_accumulate(get_recipe("fp8_tensorwise"), "hopper"))
    (row,) = report.converted
    assert row.impl == "emulated"
    for impl in ("scaled_mm", "bf16_mm"):
        with pytest.raises(ValueError, match="accumulate: got 'hopper'; only the emulation adds"):
            mixprec.convert(torch.nn.Linear(32, 32), with_accumulate(MXFP8, "hopper"), impl=impl)
