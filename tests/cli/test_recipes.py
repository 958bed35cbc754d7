"""`mixprec recipes`: six operands in words, and the hardware that runs them natively."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from mixprec.hardware import ACCELERATORS
from mixprec.recipes import RECIPES, Recipe

# The table of the definitions: operand, tensor, format, block, scale rule, rounding.
E4M3_ROW = ["e4m3", "row", "pow2", "nearest_even"]
TENSORWISE = {
    "output.a": ["x", "e4m3", "tensor", "real", "nearest_even"],
    "output.b": ["w", "e4m3", "tensor", "real", "nearest_even"],
    "grad_input.a": ["g", "e5m2", "tensor", "real", "nearest_even"],
    "grad_input.b": ["w", "e4m3", "tensor", "real", "nearest_even"],
    "grad_weight.a": ["g", "e5m2", "tensor", "real", "nearest_even"],
    "grad_weight.b": ["x", "e4m3", "tensor", "real", "nearest_even"],
}
OPERANDS = {
    "fp8_tensorwise": TENSORWISE,
    "fp8_rowwise_hp_grad_weight": {
        "output.a": ["x", *E4M3_ROW],
        "output.b": ["w", *E4M3_ROW],
        "grad_input.a": ["g", *E4M3_ROW],
        "grad_input.b": ["w", "e4m3", "tensor", "pow2", "nearest_even"],
        "grad_weight.a": ["g", "high", "precision"],
        "grad_weight.b": ["x", "high", "precision"],
    },
    "fp8_delayed": {
        path: [*row[:3], "real,", "delayed", "16", row[4]] for path, row in TENSORWISE.items()
    },
    "tf32": {
        path: [row[0], "tf32", "tensor", "none", "nearest_even"] for path, row in TENSORWISE.items()
    },
}


def operands(text: str) -> dict[str, list[str]]:
    """The rows of a printed recipe by operand."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    return {row[0]: row[1:] for row in rows if row[0].split(".")[-1] in ("a", "b")}


def test_list_names_every_recipe(cli: Callable) -> None:
    out = cli("recipes").out
    words = " ".join(out.split())
    for name, recipe in RECIPES.items():
        assert f"{name} " in words
        assert recipe.description.split()[0] in words
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


@pytest.mark.parametrize("name", OPERANDS)
def test_recipe_shows_its_six_operands(cli: Callable, name: str) -> None:
    assert operands(cli("recipes", name).out) == OPERANDS[name]


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_says_where_it_is_native(cli: Callable, name: str) -> None:
    out = cli("recipes", name).out
    assert all(f" {gpu} " in out for gpu in ACCELERATORS)
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


def test_reasons_name_the_format_and_the_hardware(cli: Callable) -> None:
    out = cli("recipes", "fp8_tensorwise").out
    assert "e4m3: no units in Ampere (8.0); Ada (8.9) has" in out
    assert "native on Hopper (9.0)" in out


@pytest.mark.parametrize("name", RECIPES)
def test_json_reads_back_as_the_recipe(cli: Callable, name: str) -> None:
    data = json.loads(cli("recipes", name, "--json").out)
    hardware = data.pop("hardware")
    assert set(hardware) == set(ACCELERATORS)
    assert all(isinstance(row["native"], bool) and row["reason"] for row in hardware.values())
    assert Recipe.from_dict(data) == RECIPES[name]


def test_json_lists_all(cli: Callable) -> None:
    data = json.loads(cli("recipes", "--json").out)["recipes"]
    assert [entry["name"] for entry in data] == list(RECIPES)


def test_alias_resolves_and_unknown_name_is_one_line(cli: Callable) -> None:
    aliased = cli("recipes", "rowwise_with_gw_hp").out
    assert aliased == cli("recipes", "fp8_rowwise_hp_grad_weight").out
    code, out, err = cli("recipes", "fp8_tensorwize")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "recipe: got 'fp8_tensorwize'" in err
    assert "fp8_tensorwise" in err
