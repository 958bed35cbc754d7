"""`mixprec recipes`: six operands in words, and the hardware that runs them natively."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from mixprec.hardware import ACCELERATORS
from mixprec.policy import POLICIES
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
    "nvfp4": {
        "output.a": ["x", "e2m1", *"1 x 16".split(), "nvfp4", "nearest_even"],
        "output.b": ["w", "e2m1", *"16 x 16".split(), "nvfp4", "nearest_even"],
        "grad_input.a": ["g", "e2m1", *"1 x 16".split(), "nvfp4", "stochastic"],
        "grad_input.b": ["w", "e2m1", *"16 x 16".split(), "nvfp4", "nearest_even"],
        "grad_weight.a": ["g", *"e2m1, transformed 1 x 16".split(), "nvfp4", "stochastic"],
        "grad_weight.b": ["x", *"e2m1, transformed 1 x 16".split(), "nvfp4", "nearest_even"],
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


def around(text: str) -> dict[str, str]:
    """The rows of what a recipe does around the products."""
    block = text.split("around the products")[1].split("operand")[0]
    rows = [re.split(r" {3,}", line.strip()) for line in block.splitlines()]
    return dict(row for row in rows if len(row) == 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp32", ("fp32", "fp32", "in fp32", "none", "not rounded")),
        ("bf16", ("bf16", "fp32", "in fp32", "none", "bf16")),
        ("fp16_pure", ("fp16", "fp16", "stochastic", "dynamic", "fp16")),
        ("O2", ("fp16", "fp16, batch normalisations fp32", "masters", "dynamic", "fp16")),
        ("O3", ("fp16", "fp16", "plain", "1.0", "fp16")),
        ("fp8", ("bf16", "fp32", "in fp32", "none", "not rounded")),
    ],
)
def test_recipe_shows_what_is_around_the_products(
    cli: Callable, name: str, expected: tuple[str, ...]
) -> None:
    assert tuple(around(cli("recipes", name).out).values()) == expected


@pytest.mark.parametrize(
    ("theirs", "ours"), [("bf16-mixed", "bf16"), ("16-mixed", "fp16"), ("64-true", "fp64")]
)
def test_names_of_other_tools_resolve(cli: Callable, theirs: str, ours: str) -> None:
    assert cli("recipes", theirs) == cli("recipes", ours)


@pytest.mark.parametrize("policy", ["cuda", "torch_cpu"])
def test_operations_are_the_whole_policy(cli: Callable, policy: str) -> None:
    words = ["recipes", "bf16", "--operations", "--policy", policy]
    data = json.loads(cli(*words, "--json").out)
    assert (data["recipe"], data["base"], data["policy"]) == ("bf16", "bf16", policy)
    rules = {name: row["rule"] for row in data["rules"] for name in row["operations"]}
    assert rules == dict(POLICIES[policy])
    code, out, err = cli(*words)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    listed = {word.strip(",") for word in out.split()}
    assert set(POLICIES[policy]) <= listed
    assert all(row["rule"] in out for row in data["rules"])


def test_operations_under_the_policies_differ_where_torch_does(cli: Callable) -> None:
    rules = {}
    for policy in POLICIES:
        out = cli("recipes", "fp16", "--operations", "--policy", policy, "--json").out
        rows = json.loads(out)["rules"]
        rules[policy] = {name: row["rule"] for row in rows for name in row["operations"]}
    # torch's own lists: layer norm is FP32 on CUDA and follows its input on the CPU
    assert rules["cuda"]["layer_norm"] == "fp32"
    assert "layer_norm" not in rules["torch_cpu"]
    assert rules["cuda"]["linear"] == rules["torch_cpu"]["linear"] == "16-bit"


def test_operations_name_the_type_of_the_base(cli: Callable) -> None:
    assert (
        cli("recipes", "bf16", "--operations").out
        == cli("recipes", "bf16-mixed", "--operations").out
    )
    meanings = [
        json.loads(cli("recipes", name, "--operations", "--json").out)["rules"][0]["meaning"]
        for name in ("bf16", "fp16", "fp8")
    ]
    assert meanings == [
        f"inputs rounded to {dtype}; the result is {dtype}" for dtype in ("bf16", "fp16", "bf16")
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["fp8_rowwise", "--operations"],
            "name: got fp8_rowwise with --operations; its base, fp32,",
        ),
        (["--operations"], "name: got none with --operations"),
        (
            ["bf16", "--operations", "--policy", "tpu"],
            "policy: got 'tpu'; must be one of cuda, torch",
        ),
        (["bf16", "--policy", "cuda"], "policy: got 'cuda' without --operations"),
    ],
)
def test_operations_that_there_are_none_of(cli: Callable, words: list[str], line: str) -> None:
    code, out, err = cli("recipes", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"mixprec: {line}")


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
