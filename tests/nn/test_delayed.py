"""Delayed scaling: when amaxes are recorded, when histories roll, and which scale is used."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.recipes import RECIPES

E4M3_MAX, E5M2_MAX = 448.0, 57344.0
OPERANDS = ("output_a", "output_b", "grad_input_a")


def delayed(**changes: Any) -> mixprec.Recipe:
    """``fp8_delayed`` with fields of every operand changed."""
    base = RECIPES["fp8_delayed"]

    def gemm(spec: mixprec.GemmSpec) -> mixprec.GemmSpec:
        return mixprec.GemmSpec(a=replace(spec.a, **changes), b=replace(spec.b, **changes))

    return mixprec.Recipe(
        output=gemm(base.output),
        grad_input=gemm(base.grad_input),
        grad_weight=gemm(base.grad_weight),
    )


class Expected:
    """The state of one operand in plain Python numbers."""

    def __init__(self, length: int, most_recent: bool) -> None:
        self.history = [0.0] * length
        self.pending = 0.0
        self.most_recent = most_recent

    def record(self, amax: float) -> None:
        if math.isfinite(amax):
            self.pending = max(self.pending, amax)

    def roll(self) -> None:
        if self.pending > 0:
            self.history = [self.pending, *self.history[:-1]]
        self.pending = 0.0

    def scale(self, own: float, largest: float) -> float:
        past = self.history[0] if self.most_recent else max(self.history)
        encode = np.float32(largest) / np.float32(past or own)
        return float(np.float32(1) / encode)


def layer(recipe: str | mixprec.Recipe = "fp8_delayed", bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(16, 8, bias=bias)
    mixprec.convert(linear, recipe)
    return linear


def state(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in mixprec.state_dict(model).items()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = mixprec.state_dict(model)
    return all(torch.equal(now[key], value) for key, value in before.items())


def entries(model: nn.Linear, operand: str = "output_a") -> list[float]:
    """The history of an operand without its empty places."""
    history = getattr(model, f"mixprec_amax_{operand}")[:-2].tolist()
    return [value for value in history if value]


def amax(x: Tensor) -> float:
    return float(x.detach().abs().max())


@pytest.mark.parametrize("length", [1, 3, 16])
@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_states_and_scales_follow_the_definition(length: int, algo: str) -> None:
    recipe = delayed(amax_history_len=length, amax_compute_algo=algo)
    model = layer(recipe)
    expected = {name: Expected(length, algo == "most_recent") for name in OPERANDS}
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        for _ in range(1 + step % 3):
            size = 10.0 ** float(torch.randn((), generator=generator))
            x = size * torch.randn(4, 16, generator=generator)
            g = size * torch.randn(4, 8, generator=generator)
            tensors = dict(zip(OPERANDS, (x, model.weight, g), strict=True))
            shown = model.quantized_operands(x, g)
            for (name, tensor), path in zip(
                tensors.items(), ("output.a", "output.b", "grad_input.a"), strict=True
            ):
                largest = E5M2_MAX if name.startswith("grad") else E4M3_MAX
                scale = expected[name].scale(amax(tensor), largest)
                assert shown[path][1].scale.tolist() == [[scale]]
            model(x.requires_grad_()).backward(g)
            for name, tensor in tensors.items():
                expected[name].record(amax(tensor))
        with torch.no_grad():
            model.weight.mul_(0.9)
        mixprec.sync_scales(model)
        for entry in expected.values():
            entry.roll()
        for name, entry in expected.items():
            packed = getattr(model, f"mixprec_amax_{name}")
            assert packed.tolist() == [*entry.history, entry.pending, 0.0]


def test_only_operands_with_values_of_their_own_keep_a_history() -> None:
    assert list(mixprec.state_dict(layer())) == [f"mixprec_amax_{name}" for name in OPERANDS]


def test_first_use_takes_its_scale_from_the_data_and_does_not_clip() -> None:
    model, x = layer(), 1e4 * torch.randn(4, 16)
    dynamic = mixprec.linear(x, model.weight, model.bias, recipe="fp8_tensorwise")
    assert torch.equal(model(x), dynamic)


def test_a_small_batch_after_a_large_one_is_scaled_by_the_large_one_until_it_leaves() -> None:
    algos = {"max": [1e4] * 16 + [2.0**-13], "most_recent": [1e4] + [2.0**-13] * 16}
    for algo, scaled_by in algos.items():
        model = layer(delayed(amax_compute_algo=algo))
        model(torch.full((1, 16), 1e4))
        mixprec.sync_scales(model)
        for past in scaled_by:
            x = torch.full((1, 16), 2.0**-13)
            scale = model.quantized_operands(x, torch.zeros(1, 8))["output.a"][1].scale
            encode = np.float32(E4M3_MAX) / np.float32(past)
            assert float(scale) == float(np.float32(1) / encode)
            model(x)
            mixprec.sync_scales(model)


def test_values_beyond_the_history_saturate() -> None:
    model = layer(bias=False)
    model(torch.ones(1, 16))
    mixprec.sync_scales(model)
    x = torch.tensor([[1000.0, -1000.0, 1.0, 0.5] * 4])
    quantised = model.quantized_operands(x, torch.zeros(1, 8))["output.a"][1]
    assert quantised.values[0, :4].tolist() == [448, -448, 448, 224]


def test_histories_roll_only_in_sync_scales() -> None:
    model = layer()
    for size in (1.0, 3.0, 2.0):
        model(torch.full((2, 16), size)).sum().backward()
        assert entries(model) == []
    mixprec.sync_scales(model)
    assert entries(model) == [3.0]
    before = state(model)
    mixprec.sync_scales(model)
    assert unchanged(model, before)


def test_more_steps_than_places_push_the_oldest_out() -> None:
    model = layer(delayed(amax_history_len=3))
    for size in range(1, 6):
        model(torch.full((1, 16), float(size)))
        mixprec.sync_scales(model)
    assert entries(model) == [5, 4, 3]


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_evaluation_never_touches_the_state(context: Callable[[], Any]) -> None:
    model, x = layer(), torch.randn(4, 16)
    empty = state(model)
    model.eval()
    with context():
        first = model(x)
        assert not torch.equal(model(100 * x), first)
    assert unchanged(model, empty)
    model.train()
    model(x).sum().backward()
    mixprec.sync_scales(model)
    before = state(model)
    model.eval()
    with context():
        y = model(3 * x)
    if y.requires_grad:
        y.sum().backward()
    assert unchanged(model, before)


def test_zero_batch_and_zero_values_leave_the_history() -> None:
    model = layer()
    model(torch.ones(2, 16)).sum().backward()
    mixprec.sync_scales(model)
    assert entries(model) == [1.0]
    for x in (torch.zeros(0, 16), torch.zeros(2, 16), torch.zeros(2, 0, 16)):
        y = model(x)
        (0 * y).sum().backward()
        mixprec.sync_scales(model)
        assert (entries(model), entries(model, "grad_input_a")) == ([1.0], [1.0])
        assert y.shape == (*x.shape[:-1], 8)


def test_unused_layer_keeps_its_history() -> None:
    model = nn.ModuleList([layer(), layer()])
    mixprec.convert(model, "fp8_delayed")
    for used in ([0, 1], [0]):
        for index in used:
            model[index](torch.full((1, 16), 2.0))
        mixprec.sync_scales(model)
    assert [entries(module) for module in model] == [[2.0, 2.0], [2.0]]


def test_missing_sync_is_an_error_that_names_both_ways() -> None:
    model = nn.Sequential(layer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 16)
    for _ in range(2):
        model(x).sum().backward()
    optimizer.step()
    model.eval()(x)
    model.train()
    with pytest.raises(ValueError, match=r"mixprec\.sync_scales.*mixprec\.attach"):
        model(x)
    mixprec.sync_scales(model)
    model(x).sum().backward()


def test_missing_sync_stays_an_error_until_there_is_one() -> None:
    model, x = layer(), torch.randn(4, 16)
    model(x).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"mixprec\.sync_scales"):
            model(x)


def test_weights_of_functional_calls_are_not_taken_for_one_that_changed() -> None:
    model, x = layer(), torch.randn(4, 16)
    for changes in range(40):
        weight = torch.randn(8, 16)
        for _ in range(changes % 3):
            weight.mul_(0.5)
        torch.func.functional_call(model, {"weight": weight}, (x,))
        del weight


def test_micro_batches_and_frozen_layers_need_no_sync() -> None:
    model = layer()
    model.weight.requires_grad_(False)
    optimizer = torch.optim.SGD([model.bias], lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()


def test_skipped_step_is_forgotten() -> None:
    model = layer()
    model(torch.ones(1, 16)).sum().backward()
    mixprec.sync_scales(model)
    before = state(model)
    model(torch.full((1, 16), 9.0)).sum().backward()
    assert not unchanged(model, before)
    mixprec.sync_scales(model, skipped=True)
    assert unchanged(model, before)


def test_failed_forward_can_be_discarded_and_training_goes_on() -> None:
    model = nn.Sequential(layer(), nn.Linear(8, 4))
    mixprec.convert(model, "fp8_delayed")
    model(torch.ones(1, 16)).sum().backward()
    mixprec.sync_scales(model)
    before = state(model)
    handle = model[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.full((1, 16), 5.0))
    handle.remove()
    with pytest.raises(ValueError, match=r"x: got shape \(1, 15\)"):
        model(torch.ones(1, 15))
    mixprec.sync_scales(model, skipped=True)
    assert unchanged(model, before)
    model(torch.ones(1, 16)).sum().backward()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["x", "g"])
@pytest.mark.parametrize("skipped", [True, False])
def test_non_finite_amax_is_reported_and_not_entered(bad: float, where: str, skipped: bool) -> None:
    model = nn.Sequential(layer())
    linear, operand = model[0], {"x": "output_a", "g": "grad_input_a"}[where]
    x, g = torch.ones(4, 16), torch.ones(4, 8)
    model(x).backward(g)
    mixprec.sync_scales(model)
    before = state(model)
    linear.zero_grad()
    x, g = 2 * x, 2 * g
    (x if where == "x" else g)[1, 2] = bad
    model(x).backward(g)
    gradient = linear.weight.grad
    # the bad element alone is lost: its column of x, or its row of g
    lost = gradient[:, 2] if where == "x" else gradient[2]
    assert not lost.isfinite().any()
    assert gradient.isfinite().sum() == gradient.numel() - lost.numel()
    with pytest.warns(UserWarning, match=rf"^amax: got NaN or inf in 0\.mixprec_amax_{operand};"):
        mixprec.sync_scales(model, skipped=skipped)
    if skipped:
        assert unchanged(model, before)
    assert entries(linear, operand) == [1.0]
    linear.zero_grad()
    model(torch.full((4, 16), 4.0)).backward(torch.full((4, 8), 4.0))
    mixprec.sync_scales(model)
    assert entries(linear, operand) == [4.0, 1.0]
    assert linear.weight.grad.isfinite().all()


Forward = Callable[[nn.Module], Callable[[Tensor], Tensor]]


def run(forward: Forward, recipe: mixprec.Recipe) -> list[Tensor]:
    """Three steps of two micro-batches: losses, gradients and states after each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    mixprec.convert(model, recipe)
    call, seen = forward(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixprec.attach(model, optimizer)
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(8, 16, generator=generator).requires_grad_()
            loss = call(x).square().mean()
            loss.backward()
            seen += [loss.detach(), x.grad, *state(model).values()]
        seen += [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        seen += state(model).values()
    return seen


WAYS: dict[str, Forward] = {
    "reentrant": lambda model: lambda x: checkpoint(model, x, use_reentrant=True),
    "not reentrant": lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
    "each layer": lambda model: (
        lambda x: checkpoint(
            model[2], checkpoint(model[:2], x, use_reentrant=True), use_reentrant=False
        )
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_recomputation_changes_no_loss_gradient_or_state(way: str) -> None:
    recipe = RECIPES["fp8_delayed"]
    plain, other = run(lambda model: model, recipe), run(WAYS[way], recipe)
    assert len(plain) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


def compile_(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


# Dynamo's own, when it traces an autograd.Function
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_compiled_run_equals_the_eager_one() -> None:
    torch.compiler.reset()
    # scales that multiply exactly, wherever they are applied
    recipe = delayed(scale_rule="pow2")
    plain, compiled = run(lambda model: model, recipe), run(compile_, recipe)
    assert len(plain) == len(compiled)
    assert all(torch.equal(a, b) for a, b in zip(plain, compiled, strict=True))


def test_equal_inputs_give_equal_outputs_in_evaluation_whatever_came_before() -> None:
    model, a, b = layer(), torch.randn(4, 16), 5 * torch.randn(4, 16)
    model(a)
    mixprec.sync_scales(model)
    model.eval()
    first = [model(x) for x in (a, b)]
    again = [model(x) for x in (b, a)]
    assert torch.equal(first[0], again[1])
    assert torch.equal(first[1], again[0])
