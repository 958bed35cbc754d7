"""Operations by hand, and peak rates from the hardware table."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from bench.tiny import CLASSES, INNER, OUTER, PARAMETERS, TINY
from mixprec.bench.flops import model_flops, parameter_count, peak_rate, utilisation
from mixprec.bench.presets import get_preset, workload_of
from mixprec.hardware import ACCELERATORS
from mixprec.recipes import RECIPES, get_recipe, with_base

TERA = 1e12


def test_two_linear_layers_have_five_products() -> None:
    rows = 24
    first, second = 2 * rows * INNER * OUTER, 2 * rows * OUTER * CLASSES
    # nobody needs the gradient of the input
    assert model_flops(TINY, rows) == 2 * first + 3 * second
    assert parameter_count(TINY) == PARAMETERS


def test_vit_huge_has_632_million_parameters_and_the_products_of_its_layers() -> None:
    preset = get_preset("vit-huge")
    workload = workload_of(preset.model, preset.options)
    assert parameter_count(workload) == 632_304_384
    rows, tokens, width, depth, pixels, classes = 2, 256, 1280, 32, 3 * 16 * 16, 1024
    layers = depth * 12 * width**2 * tokens
    attention = depth * 2 * tokens**2 * width
    # of the patches' convolution, no gradient of the images
    patches = tokens * pixels * width
    expected = 3 * (layers + attention + width * classes) + 2 * patches
    assert model_flops(workload, rows) == 2 * rows * expected


def test_a_model_that_does_not_run_on_meta_has_no_count() -> None:
    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum().item())

    looks = dataclasses.replace(TINY, build=lambda: Looks(INNER, CLASSES))
    assert model_flops(looks, 2) is None


@pytest.mark.parametrize(
    ("device", "recipe", "base", "rate"),
    [
        ("H100", "bf16", None, 989.4),
        ("H100", "fp8_tensorwise", "bf16", 1978.9),
        ("H100", "tf32", None, 494.7),
        ("H100", "fp32", None, 67.0),
        ("H100", "fp64", None, 67.0),
        ("L4", "fp64", None, 0.47),
        # two products in fp8, one in the base
        ("H100", "fp8_rowwise_hp_grad_weight", "bf16", 3 / (2 / 1978.9 + 1 / 989.4)),
        ("B200", "mxfp4", None, 9000.0),
        ("B200", "mxfp6_e2m3", None, 4500.0),
        ("A100", "fp8_tensorwise", "bf16", None),
        ("H100", "nvfp4", None, None),
        ("MI300X", "fp8_rowwise", None, None),
        ("H100", "fp64_emulated", None, None),
    ],
)
def test_peak_rate(device: str, recipe: str, base: str | None, rate: float | None) -> None:
    chosen = get_recipe(recipe) if base is None else with_base(RECIPES[recipe], base)
    found = peak_rate(chosen, ACCELERATORS[device])
    assert found == (None if rate is None else pytest.approx(rate * TERA, rel=1e-12))


def test_utilisation_is_never_a_guess() -> None:
    assert peak_rate(RECIPES["bf16"], None) is None
    assert utilisation(10**12, 0.5, 4e12) == 0.5
    assert utilisation(None, 0.5, 4e12) is None
    assert utilisation(10**12, 0.5, None) is None
