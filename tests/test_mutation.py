"""Tests of the tests: what replaces a quantiser by another one has to fail them, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import test_autograd
import test_quantization
import test_torchao
import torch
from gemm import test_api
from torch import nn

import mixprec
from mixprec import RECIPES, FloatFormat, GemmSpec, QuantizedTensor, QuantSpec, Recipe, quantize
from mixprec import autograd as autograd_module
from mixprec.formats import FORMATS
from mixprec.gemm import api as gemm_module
from mixprec.recipes import get_recipe

Mutant = Callable[[QuantSpec], QuantSpec]

MUTANTS: dict[str, Mutant] = {
    "identity": lambda spec: QuantSpec(format=FORMATS["fp32"], scale_rule="none"),
    "cut instead of rounded": lambda spec: replace(spec, rounding="toward_zero"),
    "another format of 8 bits": lambda spec: replace(spec, format=FORMATS["e4m3fnuz"]),
    "one bit less": lambda spec: replace(spec, format=FloatFormat(exponent=4, mantissa=2)),
    "two scales a tensor": lambda spec: replace(spec, block=(4, -1)),
    "scale of twice the size": lambda spec: replace(spec, min_amax=8.0),
}

CHECKS: dict[str, Callable[[], None]] = {
    "codes and scales": lambda: test_quantization.check(
        torch.randn(7, 32), QuantSpec(format=FORMATS["e4m3"])
    ),
    "product of quantised operands": lambda: test_api.check(
        torch.randn(7, 32), torch.randn(6, 32), RECIPES["fp8_tensorwise"].output
    ),
    "torchao's operands": lambda: test_torchao.test_operands_equal(
        "tensorwise", "grad_input.b", (9, 16, 8), torch.float32
    ),
    "output and gradients of the layer": lambda: test_autograd.run(
        RECIPES["fp8_tensorwise"], (9, 32), has_bias=False
    ).check(),
}


def mutated_recipe(recipe: Recipe, mutant: Mutant) -> Recipe:
    """The recipe with every quantised operand mutated."""

    def gemm(spec: GemmSpec) -> GemmSpec:
        return GemmSpec(a=spec.a and mutant(spec.a), b=spec.b and mutant(spec.b))

    return replace(
        recipe,
        output=gemm(recipe.output),
        grad_input=gemm(recipe.grad_input),
        grad_weight=gemm(recipe.grad_weight),
    )


@contextmanager
def mutation(mutant: Mutant) -> Iterator[None]:
    """The package quantises by the mutant wherever the checks reach it; the oracles do not."""

    def mutated(x: torch.Tensor, spec: QuantSpec, **options: object) -> QuantizedTensor:
        return replace(quantize(x, mutant(spec), **options), spec=mutant(spec))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_quantization, "quantize", mutated)
        patch.setattr(test_torchao, "quantize", mutated)
        patch.setattr(gemm_module, "quantize", mutated)
        patch.setattr(
            autograd_module, "get_recipe", lambda name: mutated_recipe(get_recipe(name), mutant)
        )
        yield


@pytest.mark.parametrize("check", CHECKS)
def test_check_passes_as_it_is(check: str) -> None:
    CHECKS[check]()


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("check", CHECKS)
def test_check_fails_under_a_mutant(check: str, mutant: str) -> None:
    # told by its numbers, not by its spec and not by a crash on the way
    numbers = r"\d+ of \d+ differ|beyond the bound|built-in method equal"
    with mutation(MUTANTS[mutant]), pytest.raises(AssertionError, match=numbers):
        CHECKS[check]()


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name.startswith("fp8")])
def test_layer_that_does_not_quantise_fails_in_every_recipe(recipe: str) -> None:
    with mutation(MUTANTS["identity"]), pytest.raises(AssertionError, match="beyond the bound"):
        test_autograd.run(RECIPES[recipe], (9, 32), has_bias=False).check()


@pytest.mark.parametrize("product", ["output", "grad_input", "grad_weight"])
def test_one_product_in_high_precision_by_mistake_fails(product: str) -> None:
    recipe = RECIPES["fp8_rowwise"]
    layer = test_autograd.run(replace(recipe, **{product: GemmSpec()}), (9, 32), has_bias=False)
    with pytest.raises(AssertionError, match="beyond the bound"):
        replace(layer, recipe=recipe).check()


ONE_POINT = 0.01
TERNARY = QuantSpec(format=FloatFormat(exponent=1, mantissa=0))
TWO_BITS = Recipe(
    name="two_bits",
    output=GemmSpec(a=TERNARY, b=TERNARY),
    grad_input=GemmSpec(a=TERNARY, b=TERNARY),
    grad_weight=GemmSpec(a=TERNARY, b=TERNARY),
)


def trained_accuracy(recipe: str | Recipe) -> float:
    """Accuracy of a small classifier after training from the same start on the same data."""
    torch.manual_seed(0)
    centres = torch.randn(10, 32)
    labels = torch.randint(0, 10, (3000,))
    x = centres[labels] + 1.1 * torch.randn(3000, 32)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    mixprec.convert(model, recipe)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(120):
        rows = slice(step % 8 * 250, step % 8 * 250 + 250)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), labels[rows]).backward()
        optimizer.step()
    with torch.no_grad():
        return (model(x[2000:]).argmax(1) == labels[2000:]).double().mean().item()


def test_two_bits_miss_the_accuracy_that_eight_reach() -> None:
    full = trained_accuracy("fp32")
    assert full > 0.8
    for recipe in ("fp8_tensorwise", "fp8_rowwise"):
        assert abs(trained_accuracy(recipe) - full) <= ONE_POINT
    assert full - trained_accuracy(TWO_BITS) > ONE_POINT
