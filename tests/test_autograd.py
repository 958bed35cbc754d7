"""The linear layer: output and gradients equal the three products written out on their operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from quant_oracles import HALF_ULP, assert_product, with_distinct_products
from torch import Tensor

from mixprec import RECIPES, FloatFormat, GemmSpec, QuantSpec, Recipe, linear, quantize
from mixprec.formats import FORMATS
from mixprec.gemm.impl import emulated
from mixprec.linear_products import LinearState, delayed_positions, state_position
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor
from mixprec.scaling import DelayedState, delayed_state, record_amax, roll_history

E4M3, E5M2, E2M1 = (FORMATS[name] for name in ("e4m3", "e5m2", "e2m1"))
TENSOR = QuantSpec(format=E4M3)
ROW = QuantSpec(format=E4M3, block=(1, -1), scale_rule="pow2")
MX = QuantSpec(format=E2M1, block=(1, 16), rounding="stochastic")
TILE = QuantSpec(format=E4M3, block=(4, 4), scale_rule="pow2")
FOUR = QuantSpec(format=FORMATS["e2m1"])
CUSTOM = {
    "stochastic": Recipe(
        output=GemmSpec(a=ROW, b=ROW),
        grad_input=GemmSpec(a=MX, b=TILE),
        grad_weight=GemmSpec(a=replace(TENSOR, rounding="stochastic"), b=MX),
    ),
    "forward only": Recipe(output=GemmSpec(a=TENSOR, b=TENSOR)),
    "gradients only": Recipe(grad_input=GemmSpec(a=ROW, b=TENSOR), grad_weight=GemmSpec(a=ROW)),
    "one side each": Recipe(
        output=GemmSpec(a=ROW), grad_input=GemmSpec(b=TILE), grad_weight=GemmSpec(b=TENSOR)
    ),
    "four bits": Recipe(
        output=GemmSpec(a=FOUR, b=FOUR),
        grad_input=GemmSpec(a=TENSOR, b=FOUR),
        grad_weight=GemmSpec(a=TENSOR, b=FOUR),
    ),
    "own format": Recipe(
        output=GemmSpec(
            a=QuantSpec(format=FloatFormat(exponent=4, mantissa=2), block=(1, 8)),
            b=QuantSpec(format=FORMATS["bf16"], scale_rule="none"),
        ),
        grad_input=GemmSpec(a=QuantSpec(format=E5M2, block=(-1, 8)), b=TILE),
        grad_weight=GemmSpec(a=TENSOR, b=replace(TENSOR, amax_history_len=4)),
    ),
}
EVERY_RECIPE = with_distinct_products({**RECIPES, **CUSTOM})
NOISE = Noise(seed=9, step=3, stream=16)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def states(recipe: Recipe, *amaxes: float) -> LinearState:
    """Histories that saw some amaxes, one a step."""
    delayed: list[DelayedState | None] = [None] * 6
    for position in delayed_positions(recipe):
        spec = recipe.specs[position]
        assert spec is not None
        state = delayed_state(spec.amax_history_len)
        for amax in amaxes:
            state = roll_history(record_amax(state, torch.tensor(amax)))
        delayed[position] = state
    return LinearState(delayed=tuple(delayed))


@dataclass(frozen=True)
class Layer:
    """One call of the layer, and everything that went into it."""

    x: Tensor
    w: Tensor
    bias: Tensor | None
    g: Tensor
    out: Tensor
    recipe: Recipe
    state: LinearState
    dtype: torch.dtype

    def operands(self) -> list[Tensor | QuantizedTensor]:
        """The six operands by the definition, each from its own high-precision tensor."""
        x = self.x.detach().to(self.dtype).reshape(self.x.shape[:-1].numel(), -1)
        w, g = self.w.detach(), self.g.reshape(x.shape[0], -1)
        found: list[Tensor | QuantizedTensor] = []
        for position, tensor in enumerate((x, w, g, w.t(), g.t(), x.t())):
            spec = self.recipe.specs[position]
            if spec is None:
                found.append(tensor.to(self.dtype))
                continue
            noise = replace(NOISE, stream=NOISE.stream + position)
            state = self.state.delayed[state_position(self.recipe, position)]
            found.append(quantize(tensor, spec, noise=noise, state=state))
        return found

    def check(self) -> None:
        """Output and gradients: their types, shapes, and values within the bound."""
        a, b, g_input, w_input, g_weight, x_weight = self.operands()
        assert self.out.dtype == self.dtype
        assert self.out.shape == (*self.x.shape[:-1], self.w.shape[0])
        bias = None if self.bias is None else self.bias.detach()
        assert_product(self.out, a, b, bias, self.recipe.output.out)
        for tensor in (self.x, self.w, self.bias):
            if tensor is not None:
                assert tensor.grad is not None
                assert (tensor.grad.dtype, tensor.grad.shape) == (tensor.dtype, tensor.shape)
        grad_x = self.x.grad.to(self.dtype)
        assert_product(grad_x, g_input, w_input, out=self.recipe.grad_input.out)
        assert_product(self.w.grad, g_weight, x_weight, out=self.recipe.grad_weight.out)
        if self.bias is not None:
            g = self.g.double().reshape(self.g.shape[:-1].numel(), self.w.shape[0])
            error = (self.bias.grad.double() - g.sum(0)).abs()
            half = HALF_ULP[self.bias.dtype] * 1.01
            assert (error <= (g.shape[0] * 2.0**-24 + half) * g.abs().sum(0) + 2.0**-25).all()


def run(
    recipe: Recipe,
    shape: tuple[int, ...] = (9, 20),
    columns: int = 12,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3,
    has_bias: bool = True,
    autocast: torch.dtype | None = None,
    amaxes: tuple[float, ...] = (),
) -> Layer:
    """A forward and a backward pass; dtypes of input, weight and bias."""
    x = torch.randn(shape).to(dtypes[0]).requires_grad_()
    w = torch.randn(columns, shape[-1]).to(dtypes[1]).requires_grad_()
    bias = torch.randn(columns).to(dtypes[2]).requires_grad_() if has_bias else None
    state = states(recipe, *amaxes)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        out = linear(x, w, bias, recipe=recipe, noise=NOISE, state=state)
    g = torch.randn(out.shape).to(out.dtype)
    out.backward(g)
    return Layer(x, w, bias, g, out.detach(), recipe, state, autocast or dtypes[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_three_products_of_every_recipe_and_type(name: str, dtype: torch.dtype) -> None:
    run(EVERY_RECIPE[name], dtypes=(dtype,) * 3).check()


@pytest.mark.parametrize("shape", [(20,), (1, 1), (33, 65), (2, 3, 20), (2, 2, 3, 7)], ids=str)
@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_any_number_of_axes(name: str, shape: tuple[int, ...]) -> None:
    run(EVERY_RECIPE[name], shape, columns=7, has_bias=len(shape) != 2).check()


@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_types_of_input_and_parameters_may_differ(name: str) -> None:
    single, half = torch.float32, torch.bfloat16
    run(EVERY_RECIPE[name], dtypes=(half, single, single)).check()
    run(EVERY_RECIPE[name], dtypes=(single, half, single)).check()


@pytest.mark.parametrize("amaxes", [(1.0,), (100.0,), (0.5, 3.0)], ids=str)
@pytest.mark.parametrize("name", ["fp8_delayed", "own format"])
def test_delayed_scales_come_from_the_history(name: str, amaxes: tuple[float, ...]) -> None:
    run(EVERY_RECIPE[name], amaxes=amaxes).check()


@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_autocast_gives_its_type_to_output_and_input_gradient(
    name: str, autocast: torch.dtype
) -> None:
    layer = run(EVERY_RECIPE[name], autocast=autocast)
    assert layer.out.dtype == autocast
    layer.check()


def test_autocast_leaves_float64() -> None:
    dtypes = (torch.float64,) * 3
    x, w, _ = (torch.randn(3, 3).to(dtype) for dtype in dtypes)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, w, recipe="fp8_tensorwise").dtype == torch.float64


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise", "tf32", "stochastic"])
def test_backward_inside_a_region_changes_no_bit(name: str) -> None:
    grads = []
    for inside in (False, True):
        torch.manual_seed(1)
        x, w = (torch.randn(6, 20).requires_grad_() for _ in range(2))
        out = linear(x, w, recipe=EVERY_RECIPE[name], noise=NOISE)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            out.backward(torch.ones(6, 6))
        grads.append((x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("disabled", ["output", "grad_input", "grad_weight"])
def test_product_in_high_precision_under_autocast_equals_that_of_torch(disabled: str) -> None:
    recipe = replace(RECIPES["fp8_rowwise"], **{disabled: GemmSpec()})
    x, w, bias = torch.randn(8, 32), torch.randn(16, 32), torch.randn(16)
    results = {}
    for native in (False, True):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, w, bias)]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            function: Callable[..., Tensor] = torch.nn.functional.linear
            out = function(*inputs) if native else linear(*inputs, recipe=recipe)
        assert out.dtype == torch.bfloat16
        out.backward(torch.ones_like(out))
        assert all(tensor.grad.dtype == torch.float32 for tensor in inputs)
        results[native] = dict(
            output=out.float(), grad_input=inputs[0].grad, grad_weight=inputs[1].grad
        )
    ours, theirs = results[False][disabled], results[True][disabled]
    assert ((ours - theirs).abs() <= 2.0**-7 * theirs.abs() + 2.0**-6).all()


def test_layers_inside_and_outside_a_region_follow_each_other() -> None:
    first, second = (torch.randn(16, 16).requires_grad_() for _ in range(2))
    x = torch.randn(4, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = linear(x, first, recipe="rowwise_with_gw_hp")
    out = linear(hidden.float(), second, recipe="rowwise_with_gw_hp")
    out.sum().backward()
    assert (hidden.dtype, out.dtype) == (torch.bfloat16, torch.float32)
    assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in (x, first, second))


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda y: y.sum(),
    "mean": lambda y: y.mean(),
    "every other": lambda y: y[..., ::2].sum(),
    "transposed": lambda y: (y.t() @ torch.ones(8, 3)).sum(),
    "expanded": lambda y: (y * y.detach()).sum(),
}


@pytest.mark.parametrize("loss", GRADIENTS)
@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_gradients_and_inputs_of_any_strides(name: str, loss: str) -> None:
    recipe, w = EVERY_RECIPE[name], torch.randn(16, 32)
    row = torch.randn(1, 32)
    grads = []
    for copied in (False, True):
        weight, x = w.clone().requires_grad_(), row.clone().requires_grad_()
        wide = x.expand(8, 32)
        y = linear(
            wide.clone() if copied else wide,
            weight,
            recipe=recipe,
            noise=NOISE,
            state=states(recipe),
        )
        if copied:
            y.register_hook(lambda g: g.clone(memory_format=torch.contiguous_format))
        GRADIENTS[loss](y).backward()
        grads.append((x.grad, weight.grad))
    for strided, contiguous in zip(*grads, strict=True):
        # the order of summation may differ, an operand's code may not: that shows in 2^-8 and more
        slack = 2.0**-18 * contiguous.abs().max()
        assert ((strided - contiguous).abs() <= slack).all()


def test_weight_gradient_of_a_sum_is_the_sum_of_the_rows() -> None:
    # powers of two are exact in both recipes
    x = torch.randint(-3, 4, (8, 32)).float().exp2() * torch.randn(8, 32).sign()
    w = torch.randn(16, 32, requires_grad=True)
    for recipe in ("fp8_tensorwise", "fp8_rowwise"):
        w.grad = None
        linear(x, w, recipe=recipe).sum().backward()
        want = x.sum(0).expand(16, 32)
        assert ((w.grad - want).abs() <= 35 * 2.0**-24 * x.abs().sum(0)).all()


@pytest.mark.parametrize("shape", [(0, 32), (2, 0, 32), (0, 2, 32)], ids=str)
@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_no_rows(name: str, shape: tuple[int, ...]) -> None:
    layer = run(EVERY_RECIPE[name], shape, columns=16)
    assert layer.out.shape == (*shape[:-1], 16)
    assert torch.equal(layer.w.grad, torch.zeros(16, 32))
    assert torch.equal(layer.bias.grad, torch.zeros(16))
    assert layer.x.grad.shape == shape


@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_no_columns(name: str) -> None:
    run(EVERY_RECIPE[name], (5, 0), columns=3).check()
    run(EVERY_RECIPE[name], (2, 5, 4), columns=0).check()


@pytest.mark.parametrize("name", ["fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "stochastic"])
@pytest.mark.parametrize("needs", list(product([False, True], repeat=3)), ids=str)
def test_no_product_for_a_gradient_that_nobody_needs(
    needs: tuple[bool, bool, bool], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, matmul, made = EVERY_RECIPE[name], emulated.matmul, []

    def counted(*args, **options) -> Tensor:
        made.append(1)
        return matmul(*args, **options)

    monkeypatch.setattr(emulated, "matmul", counted)
    tensors = [torch.randn(6, 20), torch.randn(5, 20), torch.randn(5)]
    for tensor, need in zip(tensors, needs, strict=True):
        tensor.requires_grad_(need)
    out = linear(*tensors, recipe=recipe, noise=NOISE, state=states(recipe))
    assert out.requires_grad == any(needs)
    if any(needs):
        out.sum().backward()
    assert len(made) == 1 + needs[0] + needs[1]
    assert [tensor.grad is not None for tensor in tensors] == list(needs)


@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_gradient_of_a_gradient_is_an_error(name: str) -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    recipe = EVERY_RECIPE[name]
    y = linear(x, w, recipe=recipe, noise=NOISE, state=states(recipe))
    (grad,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"^linear: got a gradient of its gradient; .*once"):
        grad.pow(2).sum().backward()


@pytest.mark.parametrize("name", EVERY_RECIPE)
def test_second_backward_through_a_kept_graph_doubles_the_gradients(name: str) -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    recipe = EVERY_RECIPE[name]
    loss = linear(x, w, recipe=recipe, noise=NOISE, state=states(recipe)).sum()
    loss.backward(retain_graph=True)
    once = x.grad.clone(), w.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * once[0])
    assert torch.equal(w.grad, 2 * once[1])


@pytest.mark.parametrize(("name", "lost"), [("fp8_rowwise", [2]), ("fp8_tensorwise", range(5))])
def test_nan_reaches_what_shares_its_scale_and_nothing_else(name: str, lost: list[int]) -> None:
    x, w = torch.randn(5, 8), torch.randn(3, 8)
    clean = linear(x, w, recipe=name)
    x[2, 3] = math.nan
    out = linear(x, w, recipe=name)
    kept = [row for row in range(5) if row not in lost]
    assert out[list(lost)].isnan().all()
    assert torch.equal(out[kept], clean[kept])


@pytest.mark.parametrize(
    ("x", "w", "bias", "options", "error", "match"),
    [
        ((4, 8), (3, 7), None, {}, ValueError, r"x: got shape \(4, 8\) with weight \(3, 7\)"),
        ((4, 8), (8,), None, {}, ValueError, r"x: got shape \(4, 8\) with weight \(8,\)"),
        ((), (3, 8), None, {}, ValueError, r"x: got shape \(\) with weight \(3, 8\)"),
        ((4, 8), (3, 8), (4,), {}, ValueError, r"bias: got shape \(4,\); must be \(3,\)"),
        ((4, 8), (3, 8), None, {"recipe": "fp9"}, ValueError, r"recipe: got 'fp9'; unknown"),
        ((4, 8), (3, 8), None, {"recipe": 8}, TypeError, r"recipe: got int; must be a name"),
        ((4, 8), (3, 8), None, {"impl": "fast"}, ValueError, r"impl: got 'fast'; must be one of"),
        ((4, 8), (3, 8), None, {"recipe": "delayed"}, ValueError, r"state: got None; recipe fp8_"),
        ((4, 8), (3, 8), None, {"recipe": CUSTOM["stochastic"]}, ValueError, r"noise: got None"),
        ((4, 8), (3, 8), None, {"impl": "bf16_mm"}, ValueError, r"impl: got 'bf16_mm'; .*cuda"),
    ],
)
def test_refusals_name_argument_value_and_rule(x, w, bias, options, error, match: str) -> None:
    tensors = [None if shape is None else torch.ones(shape) for shape in (x, w, bias)]
    with pytest.raises(error, match=match):
        linear(*tensors, **{"recipe": "fp8_rowwise"} | options)


@pytest.mark.parametrize("name", ["x", "weight", "bias"])
def test_integers_are_refused_by_name(name: str) -> None:
    tensors = {"x": torch.ones(4, 8), "weight": torch.ones(3, 8), "bias": torch.ones(3)}
    tensors[name] = tensors[name].long()
    with pytest.raises(TypeError, match=rf"{name}: got torch.int64; must be a float16, bfloat16"):
        linear(**tensors, recipe="fp8_rowwise")
