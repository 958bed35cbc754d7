"""Quantised weights kept from micro-batch to micro-batch, until the weight changes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import mixprec
import mixprec.linear_products
from mixprec.recipes import RECIPES

QUANTISING = [name for name, recipe in RECIPES.items() if not recipe.is_high_precision]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of everything that is quantised."""
    shapes: list[tuple[int, ...]] = []
    for name in ("quantize", "requantize"):
        inner = getattr(mixprec.linear_products, name)

        def count(x, *args, inner=inner, **kwargs):
            shapes.append(tuple(x.shape))
            return inner(x, *args, **kwargs)

        monkeypatch.setattr(mixprec.linear_products, name, count)
    return shapes


@pytest.mark.parametrize("recipe", QUANTISING)
def test_cached_runs_are_the_uncached_ones_to_the_bit(recipe: str) -> None:
    def run(cached: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        dtype = torch.float64 if recipe.startswith("fp64") else torch.float32
        model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).to(dtype)
        mixprec.convert(model, recipe, cache_weights=cached)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        mixprec.attach(model, optimizer)
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(8, 32, dtype=dtype)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4"])
def test_a_weight_is_quantised_once_a_step(recipe: str, counted: list[tuple[int, ...]]) -> None:
    layer = nn.Linear(32, 48)
    mixprec.convert(layer, recipe, cache_weights=True)
    x = torch.randn(8, 32, requires_grad=True)

    def weights(count: int) -> int:
        counted.clear()
        for _ in range(count):
            layer(x).sum().backward()
        return sum(shape in ((48, 32), (32, 48)) for shape in counted)

    first = weights(3)
    assert first == 2
    assert weights(2) == 0
    with torch.no_grad():
        layer.weight.add_(1)
    assert weights(3) == first


def test_a_changed_or_another_weight_is_never_served_stale() -> None:
    layer, x = nn.Linear(16, 16), torch.randn(4, 16)
    mixprec.convert(layer, "fp8_rowwise", cache_weights=True)

    def check() -> None:
        expected = mixprec.linear(x, layer.weight, layer.bias, recipe="fp8_rowwise")
        assert torch.equal(layer(x), expected)

    check()
    with torch.no_grad():
        layer.weight.mul_(1.7)
    check()
    layer.load_state_dict({name: torch.randn_like(p) for name, p in layer.state_dict().items()})
    check()
    layer.weight = nn.Parameter(torch.randn(16, 16))
    check()
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.add_(1)
    assert torch.equal(twin(x), mixprec.linear(x, twin.weight, twin.bias, recipe="fp8_rowwise"))
    replaced = {"weight": torch.randn(16, 16), "bias": torch.zeros(16)}
    found = torch.func.functional_call(layer, replaced, (x,))
    assert torch.equal(
        found, mixprec.linear(x, replaced["weight"], replaced["bias"], recipe="fp8_rowwise")
    )
    check()


def test_conversion_turns_it_off_again() -> None:
    layer = nn.Linear(8, 8)
    mixprec.convert(layer, "fp8_rowwise", cache_weights=True)
    layer(torch.randn(2, 8))
    assert (layer.cache_weights, len(layer._held)) == (True, 1)
    mixprec.convert(layer, "fp8_rowwise")
    assert (layer.cache_weights, len(layer._held)) == (False, 0)


def test_parts_of_one_parameter_are_kept_apart() -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(2, 3, 16)
    conv, image = nn.Conv1d(4, 4, 1, groups=2), torch.randn(1, 4, 3)
    expected = []
    for cached in (False, True):
        for module in (layer, conv):
            mixprec.convert(module, "fp8_rowwise", cache_weights=cached)
        expected.append((layer(x, x, x)[0], layer(x, x, x)[0], conv(image), conv(image)))
    for a, b in zip(*expected, strict=True):
        assert torch.equal(a, b)


def test_nothing_of_inference_mode_or_of_a_map_is_kept() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 16), torch.randn(4, 16)
    mixprec.convert(layer, "fp8_rowwise", cache_weights=True)
    with torch.inference_mode():
        quiet = layer(x)
    y = layer(x.requires_grad_())
    y.sum().backward()
    assert torch.equal(y, quiet)
    weights = torch.randn(3, 16, 16)
    found = torch.func.vmap(
        lambda w: torch.func.functional_call(layer, {"weight": w}, (x.detach(),))
    )(weights)
    for out, weight in zip(found, weights, strict=True):
        expected = mixprec.linear(x.detach(), weight, layer.bias.detach(), recipe="fp8_rowwise")
        assert torch.equal(out, expected)
