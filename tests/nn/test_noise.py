"""Stochastic rounding in converted layers: what is drawn, when, and that it can be resumed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.nn import QuantizedLinear

TENSORWISE = mixprec.Recipe.from_dict(
    {
        "variant_of": "fp8_tensorwise",
        "grad_input": {"a": {"rounding": "stochastic"}},
        "grad_weight": {"a": {"rounding": "stochastic"}},
    }
)
EVERYWHERE = mixprec.Recipe.from_dict(
    {
        "variant_of": "fp8_delayed",
        **{
            product: {side: {"rounding": "stochastic"} for side in "ab"}
            for product in ("output", "grad_input", "grad_weight")
        },
    }
)


def stack(recipe: mixprec.Recipe = EVERYWHERE, seed: int = 0) -> nn.Sequential:
    """Two layers of equal weights, third and fifth of the modules."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.ReLU(), nn.Linear(16, 16))
    model = nn.Sequential(block, copy.deepcopy(block))
    mixprec.convert(model, recipe, seed=seed)
    return model


def layers(model: nn.Module) -> list[QuantizedLinear]:
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


def step(model: nn.Module, index: int) -> list[torch.Tensor]:
    """One forward and backward; loss and gradients."""
    model.zero_grad()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(index))
    loss = model(x).square().mean()
    loss.backward()
    mixprec.sync_scales(model)
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_step_counts_backward_passes_in_training() -> None:
    model = stack()
    counts = [layer.mixprec_noise_step for layer in layers(model)]
    model(torch.randn(2, 16))
    assert [int(count) for count in counts] == [0, 0]
    for index in range(3):
        step(model, index)
    assert [int(count) for count in counts] == [3, 3]
    model.eval()
    model(torch.randn(2, 16)).sum().backward()
    assert [int(count) for count in counts] == [3, 3]


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize(("layer", "index"), [(0, 3), (1, 6)])
def test_each_operand_draws_from_the_stream_of_its_layer_and_place(
    position: int, layer: int, index: int
) -> None:
    model = stack(seed=1234)
    for _ in range(2):
        model(torch.randn(4, 16)).sum().backward()
    # named_modules: the model 0, a block 1, ReLU 2, Linear 3, a block 4, ReLU 5, Linear 6
    found = layers(model)[layer].quantized_operands(torch.randn(4, 16), torch.randn(4, 16))
    tensor, quantised = list(found.values())[position]
    noise = mixprec.Noise(seed=1234, step=2, stream=8 * index + position)
    spec = mixprec.QuantSpec(format=quantised.spec.format, rounding="stochastic")
    assert torch.equal(quantised.codes, mixprec.quantize(tensor, spec, noise=noise).codes)


def test_layers_steps_and_seeds_draw_different_noise() -> None:
    model, x, g = stack(TENSORWISE), torch.randn(16, 16), torch.randn(16, 16)

    def codes(layer: QuantizedLinear) -> torch.Tensor:
        return layer.quantized_operands(x, g)["grad_input.a"][1].codes

    first, second = layers(model)
    assert torch.equal(codes(first), codes(first))
    drawn = [codes(first), codes(second), codes(layers(stack(TENSORWISE, seed=1))[0])]
    step(model, 0)
    drawn.append(codes(first))
    differ = [not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i]]
    assert all(differ)


def test_same_seed_draws_the_same_and_the_global_generator_is_untouched() -> None:
    first, second = stack(), stack()
    before = torch.get_rng_state()
    found = step(first, 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert equal(step(second, 0), found)


def test_resumed_run_draws_what_the_uninterrupted_one_draws() -> None:
    straight, stopped = stack(seed=7), stack(seed=7)
    expected = [step(straight, index) for index in range(6)]
    for index in range(3):
        step(stopped, index)
    saved = {key: state.clone() for key, state in mixprec.state_dict(stopped).items()}
    resumed = stack(seed=7)
    resumed.load_state_dict(stopped.state_dict())
    mixprec.load_state_dict(resumed, saved)
    assert all(equal(step(resumed, index), expected[index]) for index in range(3, 6))
    assert not equal(step(stack(seed=7), 3), expected[3])


def test_converting_again_with_another_seed_takes_it() -> None:
    model = stack(seed=1)
    mixprec.convert(model, EVERYWHERE, seed=2)
    assert [layer.noise_seed for layer in layers(model)] == [2, 2]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_draws_the_same_noise(reentrant: bool) -> None:
    plain, saved = stack(), stack()
    for index in range(3):
        gradients = []
        for model, forward in (
            (plain, plain),
            (saved, lambda x: checkpoint(saved, x, use_reentrant=reentrant)),
        ):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(index))
            x.requires_grad_()
            model.zero_grad()
            forward(x).square().mean().backward()
            mixprec.sync_scales(model)
            gradients.append([x.grad, *(p.grad for p in model.parameters())])
        assert equal(*gradients)
    states = [list(mixprec.state_dict(model).values()) for model in (plain, saved)]
    assert equal(*states)
