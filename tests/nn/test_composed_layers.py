"""Layers made of layers: low-rank adapters around a frozen one, and a head tied to an embedding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import mixprec
import mixprec.linear_products

RECIPES = ["fp8_rowwise", "fp8_tensorwise", "mxfp8"]


class Adapted(nn.Module):
    """A frozen layer and a low-rank one beside it, as adapters have it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Adapter(nn.Linear):
    """The same in a subclass whose forward calls the layer's."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__(size, size)
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, size) * 0.1)
        self.up = nn.Parameter(torch.randn(size, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.t() @ self.up.t()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_frozen_base_makes_no_weight_gradient(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layer, x = Adapted(nn.Linear(32, 32), 4), torch.randn(8, 32, requires_grad=True)
    report = mixprec.convert(layer, recipe)
    assert [row.name for row in report.converted] == ["base", "down", "up"]
    products: list[int] = []
    multiply = mixprec.linear_products.multiply
    monkeypatch.setattr(
        mixprec.linear_products, "multiply", lambda *a, **k: products.append(1) or multiply(*a, **k)
    )
    layer(x).sum().backward()
    assert len(products) == 2 + 3 + 3
    assert layer.base.weight.grad is None
    assert layer.down.weight.grad is not None
    assert layer.up.weight.grad is not None
    expected = mixprec.linear(x, layer.base.weight, layer.base.bias, recipe=recipe)
    low = mixprec.linear(x, layer.down.weight, recipe=recipe)
    assert torch.equal(layer(x), expected + mixprec.linear(low, layer.up.weight, recipe=recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_adapter_that_calls_the_layer_s_forward_is_included_by_name(recipe: str) -> None:
    torch.manual_seed(0)
    layer, x = Adapter(32, 4), torch.randn(8, 32)
    assert mixprec.convert(layer, recipe, include=(Adapter,)).converted
    base = mixprec.linear(x, layer.weight, layer.bias, recipe=recipe)
    assert torch.equal(layer(x), base + x @ layer.down.t() @ layer.up.t())
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.down.grad is not None


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_tied_head_adds_both_gradients(recipe: str) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embedding": nn.Embedding(40, 32), "head": nn.Linear(32, 40)})
    model["head"].weight = model["embedding"].weight
    rows = {row.name: row for row in mixprec.convert(model, recipe).rows}
    assert rows["head"].status == "converted"
    assert rows["head"].reason.startswith("weight shared with embedding")
    assert rows["embedding"].status == "left"
    weight = model["embedding"].weight
    assert model["head"].weight is weight
    assert len(list(model.parameters())) == 2
    index = torch.tensor([3, 5, 3])
    model["head"](model["embedding"](index)).square().sum().backward()
    apart = weight.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    hidden = nn.functional.embedding(index, apart[0])
    out = mixprec.linear(hidden, apart[1], model["head"].bias.detach(), recipe=recipe)
    first, second = torch.autograd.grad(out.square().sum(), apart)
    assert torch.equal(weight.grad, first + second)
