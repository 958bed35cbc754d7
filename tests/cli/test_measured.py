"""`mixprec recipes --measure`: the error of one tensor under each operand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from mixprec.noise import Noise
from mixprec.quantization_error import quantize_error
from mixprec.recipes import RECIPES
from mixprec.what_if import load_data


def rows(text: str) -> dict[str, list[str]]:
    """The figures of each operand, by its words."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    return {" ".join(line[:-4]): line[-4:] for line in lines if line[-1].replace(".", "").isdigit()}


def test_table_has_the_figures_of_every_operand_of_a_recipe(cli: Callable) -> None:
    outcome = cli("recipes", "mxfp8", "--measure")
    assert outcome.code == 0
    figures = quantize_error(load_data("normal"), RECIPES["mxfp8"].output.a)
    assert rows(outcome.out) == {
        "e4m3 1x32 e8m0_rceil": [
            "8.25",
            f"{figures.sqnr_db:.1f}",
            "0",
            f"{100 * figures.underflow:.3g}",
        ]
    }
    words = " ".join(outcome.out.split())
    assert "normal, float32 512x1024, as each operand" in words
    assert "mxfp8 output.a, output.b, grad_input.a, grad_input.b," in words


def test_table_of_all_recipes_names_each_and_fits(cli: Callable) -> None:
    out = cli("recipes", "--measure").out
    for name, recipe in RECIPES.items():
        assert not any(recipe.specs) or f" {name} " in out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


@pytest.mark.parametrize("data", ["normal", "lognormal", "outliers"])
def test_json_has_specification_uses_and_figures(cli: Callable, data: str) -> None:
    document = json.loads(cli("recipes", "nvfp4", "--measure", "--data", data, "--json").out)
    assert (document["data"], document["shape"]) == (data, [512, 1024])
    assert document["dtype"] == "float32"
    found = {entry["uses"]["nvfp4"][0]: entry for entry in document["operands"]}
    entry = found["grad_input.a"]
    spec = RECIPES["nvfp4"].grad_input.a
    figures = quantize_error(load_data(data), spec, noise=Noise(seed=0))
    assert entry["sqnr_db"] == figures.sqnr_db
    assert entry["underflow"] == figures.underflow
    assert entry["spec"]["rounding"] == "stochastic"
    assert found["grad_weight.b"]["spec"]["hadamard"] is True


def test_data_of_a_file_and_what_is_exact_or_not_finite(cli: Callable, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.ones((2, 32), dtype=np.float32))
    file = str(tmp_path / "x.npy")
    assert rows(cli("recipes", "mxfp8", "--measure", "--data", file).out) == {
        "e4m3 1x32 e8m0_rceil": ["8.25", "exact", "0", "0"]
    }
    np.save(tmp_path / "x.npy", np.full((2, 32), math.nan, dtype=np.float32))
    document = json.loads(cli("recipes", "mxfp8", "--measure", "--data", file, "--json").out)
    assert document["operands"][0]["sqnr_db"] == "nan"
    assert document["operands"][0]["nonfinite"] == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--data", "normal"), "data: got 'normal' without --measure"),
        (("bf16", "--measure", "--operations"), "measure: got it beside --operations"),
        (("--measure", "--data", "uniform"), "data: got 'uniform'; must be normal"),
        (("fp32", "--measure"), "name: got fp32 with --measure; it quantises nothing"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(
    cli: Callable, words: tuple[str, ...], error: str
) -> None:
    outcome = cli("recipes", *words)
    assert outcome.code == 2
    assert error in " ".join(outcome.err.split())


def test_measuring_leaves_the_global_generator_alone(cli: Callable) -> None:
    before = torch.get_rng_state()
    cli("recipes", "mxfp4", "--measure")
    assert torch.equal(torch.get_rng_state(), before)
