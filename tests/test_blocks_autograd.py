"""The block-scaled recipes in a layer: error of each product, noise, token counts, kept bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from quant_oracles import assert_product
from torch import Tensor

from mixprec import RECIPES, Recipe, linear, quantize
from mixprec.linear_products import shared_positions
from mixprec.measure import saved_bytes, sqnr_db
from mixprec.noise import Noise
from mixprec.recipes import operands

BLOCKS = ("fp8_blockwise", "mxfp8", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4")
NOISE = Noise(seed=1234, step=17, stream=16)
M, K, N = 512, 256, 256


def nearest(recipe: Recipe) -> Recipe:
    """The recipe with every operand rounded to nearest."""
    changed = {}
    for product in ("output", "grad_input", "grad_weight"):
        spec = getattr(recipe, product)
        sides = {side: replace(getattr(spec, side), rounding="nearest_even") for side in "ab"}
        changed[product] = replace(spec, **sides)
    return replace(recipe, **changed)


def products(recipe: Recipe, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Output, gradient of the input, gradient of the weight."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    out = linear(x, w, recipe=recipe, noise=NOISE)
    out.backward(g)
    return out.detach(), x.grad, w.grad


def ratios(recipe: Recipe) -> list[float]:
    """SQNR of the three products of standard normal operands, dB."""
    x, w, g = torch.randn(M, K), torch.randn(N, K), torch.randn(M, N)
    x64, w64, g64 = x.double(), w.double(), g.double()
    exact = (x64 @ w64.t(), g64 @ w64, g64.t() @ x64)
    found = products(recipe, x, w, g)
    return [sqnr_db(good, bad) for good, bad in zip(exact, found, strict=True)]


@pytest.mark.parametrize(
    ("recipe", "least"),
    [
        (RECIPES["mxfp8"], (28.3, 28.3, 28.3)),
        (RECIPES["fp8_blockwise"], (28.3, 28.3, 28.3)),
        (RECIPES["mxfp6_e2m3"], (27.5, 27.5, 27.5)),
        (RECIPES["mxfp6_e3m2"], (22.2, 22.2, 22.2)),
        (RECIPES["mxfp4"], (15.5, 13.6, 13.6)),
        (RECIPES["nvfp4"], (16.4, 14.8, 15.2)),
        (nearest(RECIPES["nvfp4"]), (16.4, 16.4, 17.1)),
    ],
    ids=[*("mxfp8", "fp8_blockwise", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4"), "nearest"],
)
def test_error_of_normal_operands(recipe: Recipe, least: tuple[float, ...]) -> None:
    found = ratios(recipe)
    print(f"{recipe}: " + " / ".join(f"{ratio:.2f}" for ratio in found))
    assert all(ratio >= bar for ratio, bar in zip(found, least, strict=True)), found
    # not better than the format can be: an operand was left in high precision then
    assert all(ratio < bar + 3 for ratio, bar in zip(found, least, strict=True)), found


@pytest.mark.parametrize("tokens", [1, 8, 15, 16, 17, 31, 33, 45])
@pytest.mark.parametrize("name", BLOCKS)
def test_any_number_of_tokens(name: str, tokens: int) -> None:
    x, w, g = torch.randn(tokens, 64), torch.randn(48, 64), torch.randn(tokens, 48)
    recipe = RECIPES[name]
    found = products(recipe, x, w, g)
    tensors = (x, w, g, w.t(), g.t(), x.t())
    quantized = [
        quantize(tensor, spec, noise=replace(NOISE, stream=NOISE.stream + position))
        for position, (tensor, spec) in enumerate(zip(tensors, recipe.specs, strict=True))
        if spec is not None
    ]
    for product, result in enumerate(found):
        assert_product(result, quantized[2 * product], quantized[2 * product + 1])


@pytest.mark.parametrize("name", BLOCKS)
def test_kept_bytes_of_the_layers_input(name: str) -> None:
    share = {"mxfp4": 0.16, "nvfp4": 0.16}.get(name, 0.27)
    for dtype in (torch.float32, torch.bfloat16):
        w = torch.randn(N, K, dtype=dtype, requires_grad=True)
        x = torch.randn(M, K, dtype=dtype, requires_grad=True)
        with saved_bytes([w]) as saved:
            linear(x, w, recipe=name, noise=NOISE)
        kept = sum(tensor.bytes for tensor in saved.tensors if not tensor.is_parameter)
        bits = operands(RECIPES[name])["grad_weight.b"].format.bits
        assert M * K * min(bits, 8) // 8 - M * K // 4 * (bits == 6) <= kept <= share * 4 * M * K


def test_weight_of_square_blocks_is_the_same_in_both_products() -> None:
    shared = {name: shared_positions(RECIPES[name]) for name in BLOCKS}
    assert shared["nvfp4"] == shared["fp8_blockwise"] == frozenset({3})
    assert not any(shared[name] for name in BLOCKS if name not in ("nvfp4", "fp8_blockwise"))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_same_key_gives_the_same_gradients_and_the_next_step_others(name: str) -> None:
    x, w, g = torch.randn(33, 48), torch.randn(40, 48), torch.randn(33, 40)

    def gradients(step: int) -> tuple[Tensor, ...]:
        tensors = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = linear(*tensors, recipe=name, noise=replace(NOISE, step=step))
        out.backward(g)
        return out.detach(), tensors[0].grad, tensors[1].grad

    first, again, later = (gradients(step) for step in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(first[0], later[0])
    assert not torch.equal(first[1], later[1])
    assert not torch.equal(first[2], later[2])


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_gradients_are_right_on_average(name: str) -> None:
    recipe = RECIPES[name]
    x, w, g = torch.randn(32, 32), torch.randn(32, 32), torch.randn(32, 32).clamp(-4, 4)
    # every block has the largest number: no block scale is rounded down, which would saturate it
    g[:, ::16] = 4.0
    w_back = quantize(w.t(), recipe.grad_input.b).dequantize()
    exact = g.double() @ w_back.double().t()
    total = torch.zeros(32, 32, dtype=torch.float64)
    draws = 200
    for step in range(draws):
        leaf = x.clone().requires_grad_()
        linear(leaf, w, recipe=recipe, noise=replace(NOISE, step=step)).backward(g)
        total += leaf.grad
    one = leaf.grad.double() - exact
    spread = one.square().mean().sqrt()
    error = (total / draws - exact).square().mean().sqrt()
    assert error < 1.3 * spread / math.sqrt(draws)


@pytest.mark.parametrize("name", BLOCKS)
def test_nan_reaches_what_shares_its_block_and_nothing_else(name: str) -> None:
    x, w, g = torch.randn(40, 64), torch.randn(16, 64), torch.randn(40, 16)
    clean = products(RECIPES[name], x, w, g)
    x[2, 3] = math.nan
    out, grad_x, grad_w = products(RECIPES[name], x, w, g)
    assert out[2].isnan().all()
    kept = torch.arange(40) != 2
    assert torch.equal(out[kept], clean[0][kept])
    assert torch.equal(grad_x, clean[1])
    assert grad_w[:, 3].isnan().all()
    others = torch.arange(64) != 3
    assert torch.equal(grad_w[:, others], clean[2][:, others])


@pytest.mark.parametrize("name", BLOCKS)
def test_variants_by_replacing_fields(name: str) -> None:
    recipe = RECIPES[name]
    rule = "e8m0_even" if recipe.output.a.scale_rule.startswith("e8m0") else "real"
    swapped = replace(recipe.output, a=replace(recipe.output.a, scale_rule=rule))
    for variant in (
        replace(recipe, name="", output=swapped),
        nearest(replace(recipe, name="")),
        replace(recipe, name="", grad_weight=RECIPES["fp32"].grad_weight),
        replace(recipe, name="", grad_weight=replace(recipe.grad_input, b=recipe.output.a)),
    ):
        x, w, g = torch.randn(20, 64), torch.randn(48, 64), torch.randn(20, 48)
        out, grad_x, grad_w = products(variant, x, w, g)
        assert sqnr_db(x.double() @ w.double().t(), out) > 12
        assert sqnr_db(g.double() @ w.double(), grad_x) > 10
        assert sqnr_db(g.double().t() @ x.double(), grad_w) > 10
