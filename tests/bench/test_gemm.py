"""Single layers by size: figures, the size that pays, and what is skipped."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from mixprec.bench import gemm

SHAPES = [(32, 32, 32), (16, 64, 32)]


def run(**arguments: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"shapes": SHAPES, "rounds": 3, "device": "cpu"}
    return gemm.run(**(usual | {"console": Console(file=io.StringIO())} | arguments))


def test_rows_by_rising_size() -> None:
    recipes = ["fp32", "fp8_tensorwise", "fp64", "bf16_pure"]
    result = run(shapes=[(32, 64, 32), (32, 32, 32)], recipes=recipes)
    assert [(row["shape"], row["recipe"]) for row in result["rows"]] == [
        (shape, recipe) for shape in ("32x32x32", "32x64x32") for recipe in recipes
    ]
    by_recipe = {row["recipe"]: row for row in result["rows"]}
    size = 6 * 32 * 64 * 32
    for row in by_recipe.values():
        assert row["tflops"] == pytest.approx(size / (row["ms"] * 1e-3) / 1e12)
    assert by_recipe["fp32"]["ratio"] == 1.0
    # e4m3 has four bits of significand, e5m2 three: 6.02 dB apart
    error = by_recipe["fp8_tensorwise"]["sqnr"]
    assert error["output"] == pytest.approx(28.5, abs=1.5)
    assert error["grad_input"] < error["output"] - 2
    assert min(by_recipe["fp32"]["sqnr"].values()) > 120
    # where not a bit differs, the ratio is infinite, which JSON does not know
    assert all(value is None or value > 290 for value in by_recipe["fp64"]["sqnr"].values())
    assert 45 < by_recipe["bf16_pure"]["sqnr"]["output"] < 60
    assert list(result["pays"]) == recipes[1:]
    assert result["notes"] == ["emulated: timing is not hardware speed"]


def rows(ratios: list[float | None], impl: str) -> list[dict[str, Any]]:
    return [
        {"shape": str(place), "recipe": "a", "impl": impl, "ratio": ratio}
        for place, ratio in enumerate(ratios)
    ]


@pytest.mark.parametrize(
    ("ratios", "impl", "expected"),
    [
        ([2.0, 0.9, 0.8], "scaled_mm", "from 1"),
        ([0.9, 1.1, 0.8], "scaled_mm", "from 2"),
        ([0.9, 0.9], "scaled_mm", "from 0"),
        ([0.9, 1.0], "scaled_mm", "never in these shapes"),
        ([2.0, 1.5], "emulated", "never here (emulated)"),
        ([], "", "never in these shapes"),
        ([None, None], "emulated", "never in these shapes"),
    ],
)
def test_the_size_from_which_a_recipe_pays(
    ratios: list[float | None], impl: str, expected: str
) -> None:
    others = [{"shape": "0", "recipe": "b", "impl": "emulated", "ratio": 1.0}]
    assert gemm.pays([*rows(ratios, impl), *others], "a") == expected


def test_a_recipe_that_cannot_run_is_skipped() -> None:
    result = run(recipes=["fp32", "mxfp6_e3m2"], impl="scaled_mm")
    assert [row["recipe"] for row in result["rows"]] == ["fp32", "fp32"]
    assert [skip["shape"] for skip in result["skipped"]] == ["32x32x32", "16x64x32"]
    assert "impl: got 'scaled_mm'" in result["skipped"][0]["reason"]
    without_baseline = run(recipes=["mxfp6_e3m2", "fp32"], impl="scaled_mm")
    assert [row["ratio"] for row in without_baseline["rows"]] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shapes": []}, "shapes: got none"),
        ({"shapes": [(1, 2)]}, r"shapes: got \(1, 2\); must be three sizes"),
        ({"shapes": [(1, 2, 0)]}, r"shapes: got \(1, 2, 0\)"),
        ({"rounds": 0}, "rounds: got 0"),
        ({"recipes": []}, "recipes: got none"),
        ({"device": "tpu"}, "device: got 'tpu'"),
        ({"impl": "fast"}, "impl: got 'fast'"),
    ],
)
def test_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**arguments)
