"""A converted layer in use: types, devices, copies, frozen parts."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from quant_oracles import with_distinct_products
from torch import Tensor, nn

import mixprec
import mixprec.linear_products
from mixprec.hadamard import hadamard
from mixprec.nn import QuantizedLinear
from mixprec.recipes import RECIPES

QUANTISING = [
    name for name, each in with_distinct_products(RECIPES).items() if not each.is_high_precision
]
STOCHASTIC = mixprec.Recipe.from_dict(
    {
        "variant_of": "fp8_tensorwise",
        "grad_input": {"a": {"rounding": "stochastic"}},
        "grad_weight": {"a": {"rounding": "stochastic"}},
    }
)
STOCHASTIC_DELAYED = mixprec.Recipe.from_dict(
    {"variant_of": "fp8_delayed", "grad_input": {"a": {"rounding": "stochastic"}}}
)


class Scaled(nn.Linear):
    """A subclass with an attribute of its own, to be included."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


def mlp(recipe: str | mixprec.Recipe, seed: int = 0) -> nn.Sequential:
    """Two plain layers and an included subclass, converted."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), Scaled(16, 8))
    model[3].factor = 3.0
    mixprec.convert(model, recipe, include=(Scaled,), seed=seed)
    return model


def batch(index: int, width: int = 16) -> Tensor:
    return torch.randn(8, width, generator=torch.Generator().manual_seed(index))


def train(model: nn.Module, steps: range) -> list[Tensor]:
    """Plain SGD on squares; the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    mixprec.attach(model, optimizer)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("recipe", QUANTISING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_layer_computes_what_the_function_does(recipe: str, dtype: torch.dtype, bias: bool) -> None:
    layer, x = nn.Linear(32, 16, bias=bias, dtype=dtype), torch.randn(2, 4, 32).to(dtype)
    mixprec.convert(layer, recipe)
    # the first use of delayed scaling takes the data's own amax, as tensorwise does
    same = "fp8_tensorwise" if recipe == "fp8_delayed" else recipe
    noise = mixprec.Noise(seed=0)
    expected = mixprec.linear(x, layer.weight, layer.bias, recipe=same, noise=noise)
    found = layer(x)
    assert (found.dtype, found.shape) == (dtype, (2, 4, 16))
    assert torch.equal(found, expected)
    params = list(layer.parameters())
    for mine, theirs in zip(
        torch.autograd.grad(found.square().sum(), params),
        torch.autograd.grad(expected.square().sum(), params),
        strict=True,
    ):
        assert mine.dtype == dtype
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("recipe", QUANTISING)
@pytest.mark.parametrize("needs", [(x, w, b) for x in (0, 1) for w in (0, 1) for b in (0, 1)])
def test_nothing_is_multiplied_for_a_gradient_nobody_needs(
    recipe: str, needs: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[int] = []
    multiply = mixprec.linear_products.multiply
    monkeypatch.setattr(
        mixprec.linear_products, "multiply", lambda *a, **k: products.append(1) or multiply(*a, **k)
    )
    layer, x = nn.Linear(16, 16), batch(0).requires_grad_(bool(needs[0]))
    layer.weight.requires_grad_(bool(needs[1]))
    layer.bias.requires_grad_(bool(needs[2]))
    weight = layer.weight.detach().clone()
    mixprec.convert(layer, recipe)
    y = layer(x)
    assert y.requires_grad == any(needs)
    if any(needs):
        y.square().sum().backward()
    assert len(products) == 1 + needs[0] + needs[1]
    found = tuple(int(t.grad is not None) for t in (x, layer.weight, layer.bias))
    assert found == needs
    assert torch.equal(layer.weight, weight)


@pytest.mark.parametrize("recipe", QUANTISING)
def test_nothing_is_quantised_for_a_bias_alone(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = nn.Linear(16, 16)
    layer.weight.requires_grad_(False)
    mixprec.convert(layer, recipe)
    y = layer(batch(0))
    monkeypatch.setattr(
        mixprec.linear_products, "quantize", lambda *_, **__: pytest.fail("quantised")
    )
    y.sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((16,), 8.0))


@pytest.mark.parametrize(
    "recipe",
    [
        "fp8_tensorwise",
        "fp8_rowwise",
    ],
)
def test_nothing_is_quantised_for_backward_without_grad_mode(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, calls, quantize = nn.Linear(16, 16).eval(), [], mixprec.linear_products.quantize
    monkeypatch.setattr(
        mixprec.linear_products, "quantize", lambda *a, **k: calls.append(1) or quantize(*a, **k)
    )
    mixprec.convert(layer, recipe)
    with torch.no_grad():
        layer(batch(0))
    assert len(calls) == 2


@pytest.mark.parametrize("recipe", QUANTISING)
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
def test_layers_without_inputs_or_outputs(recipe: str, sizes: tuple[int, int]) -> None:
    layer, x = nn.Linear(*sizes), torch.randn(2, 3, sizes[0]).requires_grad_()
    mixprec.convert(layer, recipe)
    y = layer(x)
    assert torch.equal(y, layer.bias.expand(2, 3, sizes[1]))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert layer.weight.grad.shape == layer.weight.shape


@pytest.mark.parametrize("recipe", ["fp8_delayed", STOCHASTIC_DELAYED], ids=str)
def test_meta_model_comes_to_life_with_empty_state(recipe: str | mixprec.Recipe) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    weights = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)).state_dict()
    mixprec.convert(model, recipe)
    assert all(state.is_meta for state in mixprec.state_dict(model).values())
    # memory that is taken over holds something other than zeros
    stale = [torch.full((18,), torch.nan) for _ in range(64)]
    del stale
    model.to_empty(device="cpu")
    model.load_state_dict(weights)
    states = mixprec.state_dict(model)
    assert all(not state.is_meta and not state.any() for state in states.values())
    assert {s.dtype for key, s in states.items() if "amax" in key} == {torch.float32}
    assert train(model, range(3))[-1].isfinite()


def test_conversion_inside_a_meta_device_context() -> None:
    with torch.device("meta"):
        layer = nn.Linear(16, 16)
        mixprec.convert(layer, "fp8_delayed")
    assert type(layer) is QuantizedLinear


CASTS: dict[str, Any] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "half, float": lambda model: model.half().float(),
    "double": lambda model: model.double(),
    "to cpu float16": lambda model: model.to("cpu", torch.float16),
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casting_a_model_keeps_the_bits_of_its_state(cast: Any) -> None:
    model = mlp(STOCHASTIC_DELAYED)
    train(model, range(3))
    # no 16-bit format holds these: 448 / 3, a value above float16's range, one below it
    values = torch.tensor([448 / 3, 89600.0, 1e-30, 2.0**-149])
    for state in mixprec.state_dict(model).values():
        if state.ndim:
            state[:4] = values
    before = {key: state.clone() for key, state in mixprec.state_dict(model).items()}
    cast(model)
    after = mixprec.state_dict(model)
    assert same_bits(after, before)
    assert {key: s.dtype for key, s in after.items()} == {key: s.dtype for key, s in before.items()}
    x = batch(0).to(model[0].weight.dtype)
    model(x).sum().backward()
    assert model[0].weight.grad.dtype == x.dtype


def test_state_is_float32_whatever_the_default_dtype() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = nn.Linear(16, 16)
        mixprec.convert(layer, "fp8_delayed")
    finally:
        torch.set_default_dtype(torch.float32)
    assert {state.dtype for state in mixprec.state_dict(layer).values()} == {torch.float32}


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("recipe", [*QUANTISING, STOCHASTIC_DELAYED], ids=str)
def test_a_copy_is_equal_and_independent(copied: Any, recipe: str | mixprec.Recipe) -> None:
    model = mlp(recipe, seed=5)
    train(model, range(2))
    clone = copied(model)
    assert [type(layer) for layer in clone] == [type(layer) for layer in model]
    assert [repr(layer) for layer in clone] == [repr(layer) for layer in model]
    assert clone[3].factor == 3.0
    assert same_bits(clone.state_dict(), model.state_dict())
    assert same_bits(mixprec.state_dict(clone), mixprec.state_dict(model))
    before = {key: value.clone() for key, value in mixprec.state_dict(model).items()}
    losses = train(clone, range(2, 5))
    assert same_bits(mixprec.state_dict(model), before)
    assert torch.equal(torch.stack(losses), torch.stack(train(model, range(2, 5))))
    assert same_bits(mixprec.state_dict(clone), mixprec.state_dict(model))
    mixprec.revert(clone)
    assert [type(layer) for layer in clone] == [nn.Linear, nn.ReLU, nn.Linear, Scaled]


@pytest.mark.parametrize("recipe", [*QUANTISING, STOCHASTIC_DELAYED], ids=str)
def test_inference_equals_grad_mode_and_training_goes_on(recipe: str | mixprec.Recipe) -> None:
    model = mlp(recipe).eval()
    x = batch(0)
    with torch.no_grad():
        quiet = model(x)
    with torch.inference_mode():
        inferred = model(x).clone()
    assert torch.equal(model(x), quiet)
    assert torch.equal(inferred, quiet)
    model.train()
    with torch.inference_mode():
        model(x)
    assert train(model, range(3))[-1].isfinite()


@pytest.mark.parametrize("recipe", [*QUANTISING, STOCHASTIC_DELAYED], ids=str)
def test_functional_call_uses_the_parameters_it_is_given(recipe: str | mixprec.Recipe) -> None:
    model, other = mlp(recipe).eval(), mlp(recipe).eval()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(-1.5)
    params = {key: p.detach().clone().requires_grad_() for key, p in other.named_parameters()}
    found = torch.func.functional_call(model, params, (batch(0),))
    assert torch.equal(found, other(batch(0)))
    found.sum().backward()
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in params.values())


@pytest.mark.parametrize("recipe", [*QUANTISING, STOCHASTIC_DELAYED], ids=str)
def test_operands_are_shown_as_the_layer_would_quantise_them(
    recipe: str | mixprec.Recipe,
) -> None:
    layer, x, g = mlp(recipe)[2], batch(0, 32), batch(1)
    layer(x).backward(g)
    before = {key: state.clone() for key, state in mixprec.state_dict(layer).items()}
    operands = layer.quantized_operands(x, g)
    w = layer.weight.detach()
    tensors = [x, w, g, w.t(), g.t(), x.t()]
    assert list(operands) == list(mixprec.recipes.OPERANDS)
    for (path, (tensor, quantised)), expected in zip(operands.items(), tensors, strict=True):
        spec = mixprec.recipes.operands(layer.recipe)[path]
        if spec is not None and spec.hadamard:
            expected = hadamard(expected)
        assert torch.equal(tensor, expected)
        if spec is None:
            assert quantised is tensor
        else:
            assert (quantised.spec, tuple(quantised.shape)) == (spec, tuple(expected.shape))
    assert same_bits(mixprec.state_dict(layer), before)
