"""A weight of which only codes are there: its layer's products, and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mixprec
from mixprec.gathered_weight import GatheredWeight, high_precision
from mixprec.linear_products import W_OUTPUT, state_position
from mixprec.nn import QuantizedLinear
from mixprec.quantization import QuantizedTensor, quantize

N, K = 5, 16


class Source:
    """Quantises a weight that it has, by the recipe and the histories of a layer."""

    def __init__(self, layer: QuantizedLinear, weight: Tensor) -> None:
        self._layer, self._weight = layer, weight.detach()

    def operand(self, position: int) -> QuantizedTensor:
        recipe, x = self._layer.recipe, self._weight
        spec = recipe.specs[position]
        assert spec is not None
        state = self._layer.delayed_states()[state_position(recipe, position)]
        return quantize(x if position == W_OUTPUT else x.t(), spec, state=state)

    def decoded(self) -> Tensor:
        return self.operand(W_OUTPUT).dequantize()

    def high_precision(self) -> Tensor:
        return self._weight


def layer(recipe: str) -> QuantizedLinear:
    torch.manual_seed(0)
    net = nn.Linear(K, N)
    mixprec.convert(net, recipe)
    assert isinstance(net, QuantizedLinear)
    return net


def with_gathered_weight(net: QuantizedLinear) -> QuantizedLinear:
    own = net.weight
    weight = GatheredWeight(Source(net, own), own.shape, own.dtype, own.device)
    net.weight = nn.Parameter(weight, requires_grad=own.requires_grad)
    return net


def step(net: QuantizedLinear) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, K, generator=generator).requires_grad_()
    y = net(x)
    y.backward(torch.randn(3, N, generator=generator))
    return {"y": y.detach(), "x": x.grad, "weight": net.weight.grad, **mixprec.state_dict(net)}


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    "recipe", ["fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_rowwise_hp_grad_weight"]
)
def test_layer_computes_and_records_what_it_does_with_the_weight(recipe: str, trains: bool) -> None:
    plain = layer(recipe)
    plain.weight.requires_grad_(trains)
    gathered = with_gathered_weight(copy.deepcopy(plain))
    for _ in range(2):
        expected, found = step(plain), step(gathered)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert value is found[name] is None or torch.equal(value, found[name]), name
        for net in (plain, gathered):
            mixprec.sync_scales(net)


def test_weight_is_itself_under_the_names_that_sharding_gives_it() -> None:
    weight = with_gathered_weight(layer("fp8_rowwise")).weight
    strided = torch.as_strided(weight, (N, K), (K, 1))
    for same in (weight.detach(), strided):
        assert isinstance(same, GatheredWeight)
        assert same.source is weight.source
        assert same.shape == (N, K)
    assert type(torch.zeros_like(weight)) is Tensor
    assert torch.equal(torch.zeros_like(weight), torch.zeros(N, K))
    assert repr(weight) == "GatheredWeight(shape=(5, 16), dtype=torch.float32)"


@pytest.mark.parametrize(
    "read",
    [
        lambda weight: weight + 1,
        lambda weight: weight.sum(),
        lambda weight: weight.t(),
        lambda weight: weight[:2],
        lambda weight: weight.clone(),
        lambda weight: torch.as_strided(weight, (K, N), (N, 1)),
        lambda weight: torch.nn.functional.linear(torch.ones(2, K), weight),
        lambda weight: torch.ones(N, K).add_(weight),
    ],
)
def test_anything_else_is_refused(read: Callable[[Tensor], Any]) -> None:
    weight = with_gathered_weight(layer("fp8_rowwise")).weight
    with torch.no_grad(), pytest.raises(ValueError, match="where they are sharded"):
        read(weight)


def test_it_is_finite_where_its_codes_are() -> None:
    net = layer("fp8_rowwise")
    with torch.no_grad():
        net.weight[2, 3] = torch.nan
    found = with_gathered_weight(net).weight.isfinite()
    assert torch.equal(found, torch.arange(N)[:, None].expand(N, K) != 2)


def test_high_precision_is_that_of_the_source() -> None:
    net = layer("fp8_rowwise")
    own = net.weight
    assert high_precision(own) is own
    assert torch.equal(high_precision(with_gathered_weight(net).weight), own)
