"""Recipes as data: the table says what the definitions say, and plain values make any other."""

from __future__ import annotations

import math
import tomllib
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from mixprec import FORMATS, RECIPES, FloatFormat, GemmSpec, QuantSpec, Recipe
from mixprec.recipes import OPERANDS, PRODUCTS, RECIPE_ALIASES, get_recipe, operands

E4M3, E5M2, TF32 = FORMATS["e4m3"], FORMATS["e5m2"], FORMATS["tf32"]
TENSOR, GRADIENT = QuantSpec(format=E4M3), QuantSpec(format=E5M2)
DELAYED = QuantSpec(format=E4M3, amax_history_len=16)
DELAYED_GRADIENT = QuantSpec(format=E5M2, amax_history_len=16)
ROW = QuantSpec(format=E4M3, block=(1, -1), scale_rule="pow2")
WHOLE = QuantSpec(format=E4M3, block=(-1, -1), scale_rule="pow2")
ROUNDED = QuantSpec(format=TF32, scale_rule="none")
# overflow reaches infinity, where a loss scaler sees it
BF16, FP16 = (
    QuantSpec(format=FORMATS[name], scale_rule="none", saturate=False) for name in ("bf16", "fp16")
)

DEFINED = {
    "fp64": (None,) * 6,
    "fp64_emulated": (None,) * 6,
    "fp32": (None,) * 6,
    "bf16": (BF16,) * 6,
    "fp16": (FP16,) * 6,
    "bf16_pure": (BF16,) * 6,
    "fp16_pure": (FP16,) * 6,
    "tf32": (ROUNDED,) * 6,
    "fp8_tensorwise": (TENSOR, TENSOR, GRADIENT, TENSOR, GRADIENT, TENSOR),
    "fp8_delayed": (DELAYED, DELAYED, DELAYED_GRADIENT, DELAYED, DELAYED_GRADIENT, DELAYED),
    "fp8_rowwise": (ROW,) * 6,
    "fp8_rowwise_hp_grad_weight": (ROW, ROW, ROW, WHOLE, None, None),
}


def table(toml: str) -> dict[str, Any]:
    return tomllib.loads(toml)


@pytest.mark.parametrize("name", DEFINED)
def test_six_operands_are_those_of_the_definition(name: str) -> None:
    assert RECIPES[name].specs == DEFINED[name]
    assert operands(RECIPES[name]) == dict(zip(OPERANDS, DEFINED[name], strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_results_are_rounded_where_the_definition_says(name: str) -> None:
    want = {"bf16": BF16, "fp16": FP16, "bf16_pure": BF16, "fp16_pure": FP16}.get(name)
    assert [getattr(RECIPES[name], product).out for product in PRODUCTS] == [want] * 3


def test_table_has_every_recipe_of_this_stage() -> None:
    assert set(DEFINED) <= set(RECIPES)
    assert all(name == recipe.name and recipe.description for name, recipe in RECIPES.items())


def test_operands_are_named_by_product_and_side() -> None:
    assert OPERANDS == (
        "output.a",
        "output.b",
        "grad_input.a",
        "grad_input.b",
        "grad_weight.a",
        "grad_weight.b",
    )


@pytest.mark.parametrize("name", RECIPES)
def test_only_native_recipes_are_high_precision(name: str) -> None:
    recipe = RECIPES[name]
    is_exact = {getattr(recipe, product).is_exact for product in PRODUCTS}
    assert is_exact == {name == "fp64_emulated"}
    is_unquantised = all(spec is None for spec in recipe.specs)
    assert recipe.is_high_precision == (is_unquantised and is_exact == {False})
    assert recipe.is_high_precision == (name in ("fp32", "fp64"))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=str)
def test_plain_values_round_trip(recipe: Recipe) -> None:
    data = recipe.to_dict()
    assert Recipe.from_dict(data) == recipe
    assert Recipe.from_dict(data).to_dict() == data
    assert isinstance(data["output"]["a"], (dict, str))


def test_plain_values_are_plain_all_the_way() -> None:
    def check(value: object) -> None:
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value)
            for entry in value.values():
                check(entry)
        elif isinstance(value, list):
            for entry in value:
                check(entry)
        else:
            assert type(value) in (str, int, float, bool)

    for recipe in RECIPES.values():
        check(recipe.to_dict())
    custom = FloatFormat(exponent=4, mantissa=2)
    check(Recipe(output=GemmSpec(a=QuantSpec(format=custom))).to_dict())


@pytest.mark.parametrize(
    "fmt",
    [FloatFormat(exponent=4, mantissa=2), FloatFormat(exponent=3, mantissa=4, specials="ieee")],
    ids=str,
)
def test_custom_format_round_trips_by_its_fields(fmt: FloatFormat) -> None:
    spec = QuantSpec(format=fmt, block=(1, 32), rounding="stochastic", min_amax=1e-6)
    recipe = Recipe(output=GemmSpec(a=spec, b=None), name="mine", description="a test")
    data = recipe.to_dict()
    assert data["output"]["b"] == "none"
    assert data["output"]["a"]["format"]["exponent"] == fmt.exponent
    assert Recipe.from_dict(data) == recipe
    assert Recipe.from_dict(data).output.a == spec


def test_base_is_changed_only_where_told() -> None:
    data = table("""
        variant_of = "fp8_tensorwise"
        output.a.format = {exponent = 4, mantissa = 2}
        grad_weight.b = "none"
        grad_input.a = {format = "e4m3", block = [1, -1], scale_rule = "pow2"}
    """)
    recipe, base = Recipe.from_dict(data), RECIPES["fp8_tensorwise"]
    assert recipe.output.a == replace(TENSOR, format=FloatFormat(exponent=4, mantissa=2))
    assert recipe.grad_weight.b is None
    assert recipe.grad_input.a == ROW
    unchanged = ("output.b", "grad_input.b", "grad_weight.a")
    for path in unchanged:
        assert operands(recipe)[path] == operands(base)[path]
    assert (recipe.name, str(recipe)) == ("", "custom")


def test_operand_fields_change_one_at_a_time() -> None:
    data = table('variant_of = "fp8_rowwise"\noutput.a.rounding = "stochastic"\nname = "noisy"')
    recipe = Recipe.from_dict(data)
    assert recipe.output.a == replace(ROW, rounding="stochastic")
    assert recipe.output.b == ROW
    assert str(recipe) == "noisy"


def test_base_alone_is_the_base_and_nothing_is_high_precision() -> None:
    assert Recipe.from_dict({"variant_of": "rowwise"}) is RECIPES["fp8_rowwise"]
    assert Recipe.from_dict({}).is_high_precision


def test_quantising_a_high_precision_operand_needs_a_format() -> None:
    data = table('variant_of = "fp8_rowwise_hp_grad_weight"\ngrad_weight.a.format = "e5m2"')
    assert Recipe.from_dict(data).grad_weight.a == GRADIENT
    with pytest.raises(ValueError, match=r"grad_weight\.a: got no format; an operand that is"):
        Recipe.from_dict({"grad_weight": {"a": {"block": [1, -1]}}})


@pytest.mark.parametrize("alias", RECIPE_ALIASES)
def test_alias_stands_for_a_recipe(alias: str) -> None:
    assert get_recipe(alias) is RECIPES[RECIPE_ALIASES[alias]]
    assert get_recipe(alias.upper()) is get_recipe(alias)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("tensorwise", "fp8_tensorwise"),
        ("rowwise", "fp8_rowwise"),
        ("rowwise_with_gw_hp", "fp8_rowwise_hp_grad_weight"),
        ("delayed", "fp8_delayed"),
        ("float32", "fp32"),
        ("tfloat32", "tf32"),
    ],
)
def test_names_that_people_type_resolve(alias: str, name: str) -> None:
    assert get_recipe(alias) is RECIPES[name]


def test_value_is_its_own_recipe() -> None:
    recipe = Recipe(output=GemmSpec(a=ROW))
    assert get_recipe(recipe) is recipe


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("fp8_tensorwize", "did you mean fp8_tensorwise"),
        ("rowwice", "did you mean .*rowwise"),
        ("fp8-delayed", "did you mean fp8_delayed"),
        ("zebra", "no.* is near it; choose from fp64, fp64_emulated, fp32, tf32, bf16"),
    ],
)
def test_unknown_name_is_answered_with_near_ones(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"recipe: got '{name}'; unknown, {near}"):
        get_recipe(name)


@pytest.mark.parametrize("value", [None, 3, {"variant_of": "fp32"}])
def test_neither_name_nor_recipe(value: object) -> None:
    with pytest.raises(TypeError, match=r"recipe: got .*; must be a name or a Recipe"):
        get_recipe(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"outputs": {}}, r"recipe: got unknown key 'outputs'; did you mean output\?"),
        ({"zebra": 1}, r"recipe: got unknown key 'zebra'; choose from variant_of, output"),
        ({"output": {"c": {}}}, r"output: got unknown key 'c'; choose from a, b, out"),
        ({"output": "e4m3"}, r"output: got 'e4m3'; must be a table with a, b and out"),
        ({"output": {"out": {"format": "e4m3"}}}, r"output\.out: got QuantSpec.*without a scale"),
        ({"grad_input": {"out": {"rounding": "up"}}}, r"grad_input\.out: got no format"),
        (
            {"variant_of": "bf16", "output": {"a": {"saturate": "no"}}},
            r"output\.a\.saturate: got 'no'; must be True or False",
        ),
        (
            {"variant_of": "rowwise", "output": {"a": {"saturate": False}}},
            r"output\.a\.saturate: got False with format e4m3, scale_rule 'pow2'",
        ),
        ({"base": "fp8"}, r"base: got 'fp8'; must be one of fp64, fp32, bf16, fp16"),
        ({"base": "none"}, r"base: got None; must be one of"),
        ({"parameters": "tf32"}, r"parameters: got 'tf32'; must be one of fp64, fp32, bf16, fp16"),
        ({"update": "kahan"}, r"update: got 'kahan'; must be one of plain, masters, stochastic"),
        ({"update": "masters"}, r"update: got 'masters' with parameters fp32; only parameters"),
        ({"keep_batchnorm_fp32": "no"}, r"keep_batchnorm_fp32: got 'no'; must be True or False"),
        *(
            ({"loss_scale": value}, r"loss_scale: got .*; must be 'dynamic', a finite number above")
            for value in (0, -1.0, True, math.inf, math.nan, "static", [1.0])
        ),
        ({"name": "bf16"}, r"name: got 'bf16'; that name has another definition"),
        ({"variant_of": "fp16", "name": "O2"}, r"name: got 'O2'; that name has another"),
        ({"output": {"a": "e4m3"}}, r"output\.a: got 'e4m3'; must be a table or 'none'"),
        ({"output": {"a": {"formt": "e4m3"}}}, r"output\.a: got unknown key 'formt'; did you mean"),
        ({"output": {"a": {"format": "e4m9"}}}, r"format: got 'e4m9'; unknown, did you mean"),
        (
            {"output": {"a": {"format": {"exponent": 4, "mantisa": 2}}}},
            r"output\.a\.format: got unknown key 'mantisa'; did you mean mantissa",
        ),
        (
            {"output": {"a": {"format": {"exponent": 0, "mantissa": 2}}}},
            r"output\.a\.format\.exponent: got 0; must lie in 1\.\.11",
        ),
        ({"output": {"a": {"format": {"exponent": 4}}}}, r"output\.a\.format.*mantissa"),
        ({"output": {"a": {"format": "e4m3", "block": 3}}}, r"output\.a\.block: got 3"),
        ({"output": {"a": {"format": "e4m3", "block": [0, 1]}}}, r"output\.a\.block: got \(0, 1\)"),
        (
            {"output": {"a": {"format": "e4m3", "scale_rule": "pow"}}},
            r"output\.a\.scale_rule: got 'pow'; must be one of none, real, pow2",
        ),
        (
            {"output": {"a": {"format": "e4m3", "min_amax": "small"}}},
            r"output\.a\.min_amax: got 'small'",
        ),
        (
            {"output": {"a": {"format": "e4m3", "amax_history_len": "long"}}},
            r"output\.a\.amax_history_len: got 'long'",
        ),
        ({"variant_of": "fp9"}, r"recipe: got 'fp9'; unknown"),
    ],
)
def test_unknown_keys_and_values_are_named_with_their_place(
    data: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        Recipe.from_dict(data)


def test_settings_of_another_kind_of_recipe_are_refused() -> None:
    with pytest.raises(ValueError, match=r"output\.a\.amax_history_len: got 16 with block"):
        Recipe.from_dict({"variant_of": "rowwise", "output": {"a": {"amax_history_len": 16}}})
    with pytest.raises(ValueError, match=r"output\.a\.scale_rule: got 'none' with block"):
        Recipe.from_dict({"variant_of": "rowwise", "output": {"a": {"scale_rule": "none"}}})


def test_recipes_are_values() -> None:
    assert len({*RECIPES.values(), replace(RECIPES["fp32"])}) == len(RECIPES)
    assert replace(RECIPES["tf32"], name="other") != RECIPES["tf32"]
    with pytest.raises(FrozenInstanceError):
        RECIPES["fp32"].name = "changed"  # type: ignore[misc]
    with pytest.raises(TypeError):
        RECIPES["new"] = RECIPES["fp32"]  # type: ignore[index]


def test_product_takes_specs_only() -> None:
    with pytest.raises(TypeError, match=r"b: got FloatFormat; must be a QuantSpec or None"):
        GemmSpec(a=ROW, b=E4M3)  # type: ignore[arg-type]


def test_result_takes_a_spec_without_scale_and_noise() -> None:
    with pytest.raises(TypeError, match=r"out: got FloatFormat; must be a QuantSpec or None"):
        GemmSpec(out=FORMATS["bf16"])  # type: ignore[arg-type]
    for wrong in (TENSOR, replace(BF16, saturate=True, rounding="stochastic")):
        with pytest.raises(ValueError, match=r"out: got .*; a result is rounded to nearest"):
            GemmSpec(out=wrong)


def test_overflow_to_infinity_is_for_unscaled_values_with_infinities() -> None:
    e4m3 = replace(TENSOR, scale_rule="none")
    for spec, fields in (
        (TENSOR, {}),
        (e4m3, {}),
        (BF16, {"rounding": "stochastic"}),
        (DELAYED_GRADIENT, {}),
    ):
        with pytest.raises(ValueError, match=r"saturate: got False with format"):
            replace(spec, saturate=False, **fields)
    assert not replace(e4m3, format=E5M2, saturate=False).saturate


def test_result_of_a_product_from_plain_values() -> None:
    data = table('variant_of = "tensorwise"\noutput.out.format = "bf16"')
    recipe = Recipe.from_dict(data)
    assert recipe.output == GemmSpec(a=TENSOR, b=TENSOR, out=replace(BF16, saturate=True))
    assert recipe.grad_input == RECIPES["fp8_tensorwise"].grad_input
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    data = table('variant_of = "bf16"\noutput.out = "none"')
    assert Recipe.from_dict(data).output == GemmSpec(a=BF16, b=BF16)
