"""What the linear layer keeps, records and compiles to: bytes, histories, noise steps, graphs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from quant_oracles import assert_product, with_distinct_products
from torch import Tensor, nn

import mixprec
from mixprec import RECIPES, GemmSpec, QuantSpec, Recipe, linear, quantize
from mixprec.formats import FORMATS
from mixprec.linear_products import LinearState, delayed_positions
from mixprec.measure import SavedTensor, saved_bytes
from mixprec.noise import Noise
from mixprec.scaling import DelayedState, delayed_state, roll_history

# torch warns of its own code: Dynamo makes a Function, Inductor imports TorchScript.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]

M, K, N = 512, 256, 128
LOW = ("fp8_tensorwise", "fp8_delayed", "fp8_rowwise")
E4M3 = FORMATS["e4m3"]
NVFP4 = QuantSpec(format=FORMATS["e2m1"], block=(1, 16), scale_rule="nvfp4")
NOISY = QuantSpec(format=FORMATS["e2m1"], block=(1, 16), rounding="stochastic")
STOCHASTIC = Recipe(grad_input=GemmSpec(a=NOISY), grad_weight=GemmSpec(a=NOISY, b=NOISY))


def saved_by(layer: nn.Module, dtype: torch.dtype = torch.float32) -> list[SavedTensor]:
    """What a layer of M rows keeps, its parameters apart."""
    x = torch.randn(M, K, dtype=dtype, requires_grad=True)
    with saved_bytes(layer.parameters()) as saved:
        layer(x)
    return [tensor for tensor in saved.tensors if not tensor.is_parameter]


def split(saved: list[SavedTensor]) -> tuple[int, int]:
    """Bytes of activations, and of codes of the weight."""
    weights = sum(tensor.bytes for tensor in saved if tensor.bytes == N * K)
    return sum(tensor.bytes for tensor in saved) - weights, weights


def converted(recipe: str | Recipe, dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Sequential(nn.Linear(K, N)).to(dtype)
    mixprec.convert(model, recipe)
    return model


@pytest.mark.parametrize("recipe", LOW)
def test_activations_kept_are_about_a_quarter_of_float32(recipe: str) -> None:
    full, _ = split(saved_by(nn.Linear(K, N)))
    activations, weights = split(saved_by(converted(recipe)))
    assert full == 4 * M * K
    assert M * K <= activations <= 0.27 * full
    assert weights in (0, N * K)


@pytest.mark.parametrize("recipe", LOW)
def test_half_precision_models_keep_one_byte_an_element_too(recipe: str) -> None:
    activations, weights = split(saved_by(converted(recipe, torch.bfloat16), torch.bfloat16))
    assert M * K <= activations <= 0.27 * 4 * M * K
    assert weights in (0, N * K)


def test_high_precision_weight_gradient_keeps_the_input_once() -> None:
    activations, weights = split(saved_by(converted("fp8_rowwise_hp_grad_weight")))
    assert 4 * M * K <= activations <= 4 * M * K + 64 + 12 * N
    assert weights in (0, N * K)


def test_frozen_parts_keep_nothing_for_themselves() -> None:
    layer = converted("fp8_tensorwise")
    layer.requires_grad_(False)
    activations, weights = split(saved_by(layer))
    assert activations <= 64 + 12 * N
    assert weights in (0, N * K)
    layer.requires_grad_(True)
    with saved_bytes(layer.parameters()) as saved:
        layer(torch.randn(M, K))
    assert {tensor.bytes for tensor in saved.tensors if tensor.bytes > 64} == {M * K}


def node_of(out: Tensor) -> Any:
    """The graph node of the layer's own function."""
    nodes = [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if hasattr(node, "saved_tensors") and "_Linear" in node.name():
            return node
        nodes += [parent for parent, _ in node.next_functions if parent is not None]
    raise AssertionError("the layer left no node")


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor that plain containers and dataclasses hold."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for entry in value.values():
            yield from tensors_in(entry)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for entry in value:
            yield from tensors_in(entry)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from tensors_in(vars(value))


@pytest.mark.parametrize("recipe", [*with_distinct_products(RECIPES).values(), STOCHASTIC], ids=str)
def test_context_holds_no_tensor_outside_the_sight_of_the_hooks(recipe: Recipe) -> None:
    model = nn.Sequential(nn.Linear(K, N))
    mixprec.convert(model, recipe)
    state = {buffer.untyped_storage().data_ptr() for buffer in model.buffers()}
    if recipe.is_high_precision:
        out = linear(torch.randn(M, K), model[0].weight, recipe=recipe)
    else:
        out = model(torch.randn(M, K, requires_grad=True))
    kept = [
        tensor
        for tensor in tensors_in(vars(node_of(out)))
        if tensor.untyped_storage().data_ptr() not in state
    ]
    assert [tuple(tensor.shape) for tensor in kept] == []


def test_walk_over_the_context_sees_a_tensor_wherever_it_hides() -> None:
    state = LinearState(delayed=(delayed_state(2),) + (None,) * 5)
    hiding = {"plan": [state, {"deep": (torch.ones(1), Noise(seed=0, step=torch.tensor(1)))}]}
    assert len(list(tensors_in(hiding))) == 5


def test_graph_is_freed_by_backward() -> None:
    layer = converted("fp8_tensorwise")
    out = layer(torch.randn(M, K, requires_grad=True))
    node = node_of(out)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="saved tensors after they have already been freed"):
        _ = node.saved_tensors


def states(recipe: Recipe, forward: bool, backward: bool) -> LinearState:
    delayed: list[DelayedState | None] = [None] * 6
    for position in delayed_positions(recipe):
        delayed[position] = delayed_state(4)
    return LinearState(delayed=tuple(delayed), records_forward=forward, records_backward=backward)


def pending(state: LinearState) -> dict[int, float]:
    return {
        position: entry.pending.item()
        for position, entry in enumerate(state.delayed)
        if entry is not None
    }


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_each_pass_records_the_amax_of_its_operands_when_asked(
    forward: bool, backward: bool
) -> None:
    recipe = RECIPES["fp8_delayed"]
    state = states(recipe, forward, backward)
    x, w = torch.randn(4, 8), torch.randn(3, 8, requires_grad=True)
    out = linear(x, w, recipe=recipe, state=state)
    first = {0: x.abs().max().item(), 1: w.detach().abs().max().item(), 2: 0.0}
    assert pending(state) == (first if forward else dict.fromkeys(first, 0.0))
    out.backward(torch.full((4, 3), -5.0))
    assert pending(state)[2] == (5.0 if backward else 0.0)
    assert all(entry is None or not entry.history.any() for entry in state.delayed)


def test_operands_that_share_values_share_a_history() -> None:
    assert delayed_positions(RECIPES["fp8_delayed"]) == (0, 1, 2)
    apart = Recipe(
        output=GemmSpec(a=QuantSpec(format=E4M3, amax_history_len=4)),
        grad_weight=GemmSpec(b=QuantSpec(format=E4M3, amax_history_len=8)),
    )
    assert delayed_positions(apart) == (0, 5)


def test_micro_batches_combine_by_maximum_and_the_scale_follows_at_the_roll() -> None:
    recipe = RECIPES["fp8_delayed"]
    state = states(recipe, True, True)
    w = torch.ones(3, 8, requires_grad=True)
    for size in (2.0, 9.0, 4.0):
        linear(torch.full((4, 8), size), w, recipe=recipe, state=state).sum().backward()
    assert pending(state) == {0: 9.0, 1: 1.0, 2: 1.0}
    assert state.delayed[0] is not None
    for old, new in zip(state.delayed[0], roll_history(state.delayed[0]), strict=True):
        old.copy_(new)
    out = linear(torch.full((1, 8), 100.0), w, recipe=recipe, state=state)
    assert out.tolist() == [[pytest.approx(72.0)] * 3]


def test_nan_in_a_gradient_is_counted_and_reaches_the_gradients() -> None:
    recipe = RECIPES["fp8_delayed"]
    state = states(recipe, True, True)
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    g = torch.ones(4, 3)
    g[1, 2] = math.nan
    linear(x, w, recipe=recipe, state=state).backward(g)
    assert state.delayed[2] is not None
    assert (state.delayed[2].pending.item(), state.delayed[2].nonfinite.item()) == (0.0, 1.0)
    assert x.grad.isnan().any()
    assert w.grad.isnan().any()


@pytest.mark.parametrize("records", [False, True])
def test_noise_step_counts_recorded_backward_passes(records: bool) -> None:
    step = torch.tensor(7)
    noise = Noise(seed=1, step=step)
    x, w = torch.randn(8, 16), torch.randn(4, 16, requires_grad=True)
    state = LinearState(records_backward=records)
    grads = []
    for _ in range(3):
        w.grad = None
        linear(x, w, recipe=STOCHASTIC, noise=noise, state=state).backward(torch.ones(8, 4) / 3)
        grads.append(w.grad)
    assert step.item() == (10 if records else 7)
    assert torch.equal(grads[0], grads[1]) == (not records)


def test_noise_leaves_the_global_generator() -> None:
    before = torch.get_rng_state()
    x, w = torch.randn(8, 16), torch.randn(4, 16, requires_grad=True)
    torch.set_rng_state(before)
    linear(x, w, recipe=STOCHASTIC, noise=Noise(seed=1)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def compiled_step(backend: str, recipe: Recipe, dtype: torch.dtype) -> None:
    """A compiled forward and backward lies within the bound on operands quantised eagerly."""
    x = torch.randn(24, 48).to(dtype).requires_grad_()
    w = torch.randn(16, 48).to(dtype).requires_grad_()
    bias = torch.randn(16).to(dtype).requires_grad_()
    g = torch.randn(24, 16).to(dtype)
    state = states(recipe, False, False)
    noise = Noise(seed=5, step=2, stream=8)

    def call(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return linear(x, w, bias, recipe=recipe, state=state, noise=noise)

    out = torch.compile(call, fullgraph=True, backend=backend)(x, w, bias)
    out.backward(g)
    operands = []
    tensors = (x, w, g, w.t(), g.t(), x.t())
    firsts = (0, 1, 2, 1, 2, 0)
    for place, (spec, tensor) in enumerate(zip(recipe.specs, tensors, strict=True)):
        own, drawn = (
            state.delayed[firsts[place]],
            dataclasses.replace(noise, stream=noise.stream + place),
        )
        operands.append(tensor if spec is None else quantize(tensor, spec, state=own, noise=drawn))
    assert_product(out, operands[0], operands[1], bias.detach(), recipe.output.out)
    assert_product(x.grad, operands[2], operands[3], out=recipe.grad_input.out)
    assert_product(w.grad, operands[4], operands[5], out=recipe.grad_weight.out)


def test_whole_graph_is_captured() -> None:
    torch._dynamo.reset()
    compiled_step("aot_eager", RECIPES["fp8_delayed"], torch.float32)


# compiling C++ takes half a minute a case: bfloat16 where a scale or noise enters in its own way
COMPILED = [(recipe, torch.float32) for recipe in with_distinct_products(RECIPES).values()]
COMPILED += [(RECIPES[name], torch.bfloat16) for name in ("bf16", "fp8_delayed", "nvfp4")]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "dtype"), COMPILED, ids=str)
def test_compiled_products_lie_within_the_bound(recipe: Recipe, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    compiled_step("inductor", recipe, dtype)


SPECS = {
    "tensor": QuantSpec(format=E4M3),
    "gradient": QuantSpec(format=FORMATS["e5m2"]),
    "row": QuantSpec(format=E4M3, block=(1, -1), scale_rule="pow2"),
    "blocks": QuantSpec(format=FORMATS["e2m3"], block=(1, 16)),
    "noisy": NOISY,
    "tf32": QuantSpec(format=FORMATS["tf32"], scale_rule="none"),
    "mx": QuantSpec(format=E4M3, block=(1, 32), scale_rule="e8m0_rceil"),
    "mx6": QuantSpec(format=FORMATS["e3m2"], block=(1, 32), scale_rule="e8m0_floor"),
    "slab": QuantSpec(format=E4M3, block=(1, 128), scale_rule="pow2"),
    "nvfp4": NVFP4,
    "square": dataclasses.replace(NVFP4, block=(16, 16)),
    "transformed": dataclasses.replace(NVFP4, hadamard=True, rounding="stochastic"),
}


def same_when_compiled(backend: str, spec: QuantSpec, dtype: torch.dtype) -> None:
    """Codes and scales of a compiled quantiser equal the eager one's to the bit."""
    noise = Noise(seed=5, step=2) if spec.is_stochastic else None

    def call(x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        q = quantize(x, spec, noise=noise)
        return q.codes, q.scale, q.tensor_amax

    x = (torch.randn(40, 96) * torch.logspace(-30, 30, 40)[:, None]).to(dtype)
    x[3, 4], x[5] = math.nan, 0.0
    codes, scale, tensor_amax = torch.compile(call, fullgraph=True, backend=backend)(x)
    eager = quantize(x, spec, noise=noise)
    nan = eager.dequantize().isnan()
    both = dataclasses.replace(eager, codes=codes, scale=scale, tensor_amax=tensor_amax)
    assert tensor_amax == eager.tensor_amax
    assert torch.equal(both.values[~nan], eager.values[~nan])
    assert torch.equal(both.dequantize().isnan(), nan)
    if scale is not None:
        assert torch.equal(scale.nan_to_num(0.0), eager.scale.nan_to_num(0.0))


@pytest.mark.parametrize("spec", ["row", "transformed"])
def test_quantiser_is_captured_whole(spec: str) -> None:
    torch._dynamo.reset()
    same_when_compiled("aot_eager", SPECS[spec], torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_compiled_quantiser_gives_the_same_bits(spec: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    same_when_compiled("inductor", SPECS[spec], dtype)
