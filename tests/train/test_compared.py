"""What a comparison runs: recipes by their labels, each with each way of adding up."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from mixprec.recipes import RECIPES, with_accumulate
from mixprec.train import compare
from mixprec.train.compared import chosen_recipes
from mixprec.train.config import Config
from train.small_models import SMALL_NET, use

Small = Callable[..., Config]


@pytest.mark.parametrize(
    ("recipes", "accumulate", "labels"),
    [
        (["fp32", "fp8_rowwise"], None, ["fp32", "fp8_rowwise"]),
        (["fp32", "fp8_rowwise"], "hopper", ["fp32", "fp8_rowwise_hopper"]),
        (
            ["bf16", "mxfp8", "fp8"],
            ["fp32", "hopper"],
            [
                "bf16",
                "mxfp8",
                "mxfp8_hopper",
                "fp8_tensorwise on bf16",
                "fp8_tensorwise_hopper on bf16",
            ],
        ),
        (
            [with_accumulate(RECIPES["nvfp4"], "hopper")],
            ["fp32", "hopper_promoted"],
            ["nvfp4", "nvfp4_hopper_promoted"],
        ),
        (
            [{"head*": "fp32", "*": "fp8_rowwise"}],
            "hopper",
            ["by layer: fp32, fp8_rowwise_hopper"],
        ),
    ],
)
def test_each_recipe_adds_up_in_each_way_that_changes_it(
    small: Small, recipes: list[Any], accumulate: str | list[str] | None, labels: list[str]
) -> None:
    assert list(chosen_recipes(small(), recipes, accumulate)) == labels


def test_an_unknown_way_is_refused(small: Small) -> None:
    with pytest.raises(ValueError, match="accumulate: got 'ada'; must be one of fp32, hopper"):
        chosen_recipes(small(), ["fp32"], "ada")


def test_a_comparison_of_sums_trains(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SMALL_NET)
    result = compare.run(
        small(),
        recipes=["fp32", "fp8_tensorwise"],
        accumulate=["fp32", "hopper", "hopper_promoted"],
        steps=3,
        console=Console(file=io.StringIO()),
    )
    names = ["fp8_tensorwise", "fp8_tensorwise_hopper", "fp8_tensorwise_hopper_promoted"]
    assert [run["recipe"] for run in result["runs"]] == ["fp32", *names]
    assert [run["failure"] for run in result["runs"]] == [None] * 4
    curves = [run["curve"] for run in result["runs"][1:]]
    assert curves[0] != curves[1]
    assert all(run["impl"] == "emulated" for run in result["runs"][2:])
