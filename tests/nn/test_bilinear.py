"""Bilinear layers by a recipe: against torch's own, products written out, themselves."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mixprec
from mixprec.amp import autocast
from mixprec.quantization import quantize
from mixprec.recipes import RECIPES


def run(layer: nn.Module, shape: tuple[int, ...]) -> list[Tensor]:
    """Output, and the gradients of inputs and parameters."""
    torch.manual_seed(1)
    x1, x2 = (torch.randn(*shape, n).double().requires_grad_() for n in (5, 6))
    y = layer(x1, x2)
    y.square().sum().backward()
    return [y.detach(), *[leaf.grad for leaf in (x1, x2, *layer.parameters())]]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,), (2, 0, 3)])
def test_exact_products_are_torchs_layer(shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Bilinear(5, 6, 7, bias=bias).double()
    mine = copy.deepcopy(layer)
    mixprec.convert(mine, "fp64_emulated")
    for a, b in zip(run(mine, shape), run(layer, shape), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def product(a: Tensor, spec_a: Any, b: Tensor, spec_b: Any) -> Tensor:
    """The product of dequantised operands, in float64."""
    wide = [quantize(x, spec).dequantize().double() for x, spec in ((a, spec_a), (b, spec_b))]
    return wide[0] @ wide[1].t()


@pytest.mark.parametrize("name", ["fp8_rowwise", "mxfp8", "fp8_tensorwise", "tf32"])
def test_products_of_dequantised_operands(name: str) -> None:
    recipe, layer = RECIPES[name], nn.Bilinear(8, 12, 32)
    mixprec.convert(layer, name)
    x1, x2 = (torch.randn(2, 3, n, requires_grad=True) for n in (8, 12))
    y, g = layer(x1, x2), torch.randn(2, 3, 32)
    y.backward(g)
    rows = torch.stack(
        [
            torch.stack([a * b for a in one for b in other])
            for one, other in zip(
                x1.detach().reshape(6, 8), x2.detach().reshape(6, 12), strict=True
            )
        ]
    )
    w, g = layer.weight.detach().reshape(32, 96), g.reshape(6, 32)
    expected = product(rows, recipe.output.a, w, recipe.output.b) + layer.bias.detach()
    grad_w = product(g.t(), recipe.grad_weight.a, rows.t(), recipe.grad_weight.b)
    back = product(g, recipe.grad_input.a, w.t(), recipe.grad_input.b).reshape(6, 8, 12)
    grad_1 = (back * x2.detach().reshape(6, 1, 12)).sum(2)
    grad_2 = (back * x1.detach().reshape(6, 8, 1)).sum(1)
    pairs = ((y, expected), (layer.weight.grad, grad_w), (x1.grad, grad_1), (x2.grad, grad_2))
    for mine, theirs in pairs:
        torch.testing.assert_close(
            mine.double().reshape(theirs.shape), theirs, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_layer_keeps_its_identity_and_trains(recipe: str) -> None:
    layer, x1, x2 = nn.Bilinear(8, 8, 16), torch.randn(16, 8), torch.randn(16, 8)
    keys, plain, target = list(layer.state_dict()), layer(x1, x2), torch.randn(16, 16)
    mixprec.convert(layer, recipe)
    assert list(layer.state_dict()) == keys
    twin = pickle.loads(pickle.dumps(copy.deepcopy(layer)))
    losses = []
    for each in (layer, twin):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.3)
        mixprec.attach(each, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            loss = (each(x1, x2) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]
    assert losses[2] < 0.95 * losses[0]
    mixprec.revert(layer)
    assert type(layer) is nn.Bilinear
    assert not torch.equal(layer(x1, x2), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_regions_of_16_bits(dtype: torch.dtype) -> None:
    layer, x = nn.Bilinear(8, 8, 16), torch.randn(16, 8)
    expected = layer(x, x)
    mixprec.convert(layer, "bf16")
    with autocast(dtype):
        out = layer(x, x)
    assert out.dtype == dtype
    assert 0 < (out.float() - expected).norm() < 0.02 * expected.norm()


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_compiled_layer_is_the_eager_one() -> None:
    layer, x1, x2 = nn.Bilinear(8, 4, 16), torch.randn(2, 8), torch.randn(2, 4)
    mixprec.convert(layer, "fp8_rowwise")
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x1, x2), layer(x1, x2))


def test_what_is_refused_and_reported() -> None:
    layer = nn.Bilinear(4, 5, 16)
    row = mixprec.convert(layer, "fp8_rowwise", multiple_of=4).rows[0]
    assert (row.type, row.status) == ("Bilinear", "converted")
    with pytest.raises(ValueError, match="input1: got shape"):
        layer(torch.zeros(3, 5), torch.zeros(3, 5))
    with pytest.raises(ValueError, match="input2: got shape"):
        layer(torch.zeros(3, 4), torch.zeros(2, 5))
    with pytest.raises(TypeError, match="input2: got"):
        layer(torch.zeros(3, 4), torch.zeros(3, 5, dtype=torch.int64))
