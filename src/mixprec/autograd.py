"""A linear layer with gradients: three products, each by its part of the recipe.

    output      = gemm(x[M, K],   w[N, K])
    grad_input  = gemm(g[M, N],   w.T[K, N])
    grad_weight = gemm(g.T[N, M], x.T[K, M])

The only file with an ``autograd.Function``. Kept for backward: codes and scales of the operands
that backward multiplies; high-precision copies only for high-precision products; of the weight the
parameter itself, quantised again by the same scale or along its other axis.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mixprec.gemm.api import GemmSpec, Operand, check_impl, multiply, prepare
from mixprec.hadamard import padded_length
from mixprec.modes import without_modes
from mixprec.noise import Noise
from mixprec.policy import active_dtype, recomputed_alike
from mixprec.quantization import QuantizedTensor, QuantSpec, quantize, requantize
from mixprec.recipes import PRODUCTS, Recipe, get_recipe
from mixprec.rounding import check_floating
from mixprec.scaling import DelayedState, record_amax

# position of each operand in Recipe.specs, and the offset of its noise stream
X_OUTPUT, W_OUTPUT, G_GRAD_INPUT, W_GRAD_INPUT, G_GRAD_WEIGHT, X_GRAD_WEIGHT = range(6)
OUTPUT, GRAD_INPUT, GRAD_WEIGHT = range(3)
_FIRST_USE = {W_GRAD_INPUT: W_OUTPUT, G_GRAD_WEIGHT: G_GRAD_INPUT, X_GRAD_WEIGHT: X_OUTPUT}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearState:
    """Numerics state of one layer: read in forward and backward, updated in place.

    Args:
        delayed: A state for each operand with delayed scaling, by its position; else None.
        records_forward: Whether forward records amaxes (not in evaluation or recomputation).
        records_backward: Whether backward records amaxes and counts the noise step.
    """

    delayed: tuple[DelayedState | None, ...] = (None,) * 6
    records_forward: bool = False
    records_backward: bool = False


def shared_positions(recipe: Recipe) -> frozenset[int]:
    """Operands of later products that are the transpose of their first use, value for value."""
    specs = recipe.specs
    shared = []
    for position, first in _FIRST_USE.items():
        spec = specs[position]
        if spec is not None and spec.is_symmetric and spec == specs[first]:
            shared.append(position)
    return frozenset(shared)


def delayed_positions(recipe: Recipe) -> tuple[int, ...]:
    """The operands that keep a history of their own."""
    shared = shared_positions(recipe)
    return tuple(
        position
        for position, spec in enumerate(recipe.specs)
        if spec is not None and spec.is_delayed and position not in shared
    )


def state_position(recipe: Recipe, position: int) -> int:
    """Where the history of an operand is kept: with the operand whose values it shares."""
    return _FIRST_USE[position] if position in shared_positions(recipe) else position


def quantize_operand(
    x: Tensor,
    spec: QuantSpec | None,
    position: int,
    noise: Noise | None,
    delayed: DelayedState | None,
) -> Operand:
    """One of the six operands, drawing from its own stream of noise; x itself in high precision."""
    if spec is None:
        return x
    if noise is not None:
        noise = replace(noise, stream=noise.stream + position)
    return quantize(x, spec, noise=noise, state=delayed if spec.is_delayed else None, packed=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Everything about a call that is no tensor to save."""

    specs: tuple[QuantSpec | None, ...]
    gemms: tuple[GemmSpec, ...]
    shared: frozenset[int]
    impl: str
    noise: Noise | None
    state: LinearState
    dtype: torch.dtype
    keeps: bool

    def quantize(self, x: Tensor, position: int, records: bool) -> Operand:
        """The operand at a position, its amax recorded."""
        delayed = self.state.delayed[position]
        spec = self.specs[position]
        operand = quantize_operand(
            x.to(self.dtype) if spec is None else x, spec, position, self.noise, delayed
        )
        if records and delayed is not None and isinstance(operand, QuantizedTensor):
            assert operand.amax is not None
            for old, new in zip(delayed, record_amax(delayed, operand.amax), strict=True):
                if new is not old:
                    old.copy_(new)
        return operand

    def transposed(self, x: Tensor, first: Operand, position: int, records: bool) -> Operand:
        """The operand of a later product: the first one's values, or x.T quantised anew."""
        if position in self.shared and isinstance(first, QuantizedTensor):
            return first.t()
        return self.quantize(x.t(), position, records)

    def weight_again(self, saved: tuple[Tensor, ...], records: bool) -> Operand:
        """w.T for grad_input: the parameter is kept anyway, so codes are made anew."""
        w_NK, scale, encode, amax, tensor_amax = saved
        spec = self.specs[W_GRAD_INPUT]
        if W_GRAD_INPUT in self.shared and spec is not None and encode is not None:
            # transposed first: packed codes would have to be packed anew
            return requantize(
                w_NK.t(),
                spec,
                scale=scale.t(),
                encode=encode.t(),
                amax=amax,
                tensor_amax=tensor_amax,
            )
        return self.quantize(w_NK.t(), W_GRAD_INPUT, records)

    def multiply(
        self, product: int, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """One of the three products, its result rounded as the recipe says."""
        gemm = self.gemms[product]
        return multiply(
            a,
            b,
            bias=bias,
            out_dtype=dtype,
            impl=self.impl,
            out=gemm.out,
            accumulate=gemm.accumulate,
        )


def _kept(operand: Operand) -> tuple[Tensor | None, ...]:
    """What backward needs of an operand that it multiplies."""
    if not isinstance(operand, QuantizedTensor):
        return operand, None, None, None
    return operand.packed().codes, operand.scale, _kept_amax(operand), operand.tensor_amax


def _kept_amax(operand: QuantizedTensor) -> Tensor | None:
    """Of many blocks' amaxes their sum: only whether they are finite is asked again."""
    return operand.amax if operand.amax is None else operand.amax.sum().reshape(1, 1)


def _operand(kept: tuple[Tensor, ...], spec: QuantSpec | None, shape: tuple[int, int]) -> Operand:
    codes, scale, amax, tensor_amax = kept
    if spec is None:
        return codes
    free, contraction = shape
    return QuantizedTensor(
        codes=codes,
        scale=scale,
        amax=amax,
        tensor_amax=tensor_amax,
        spec=spec,
        shape=torch.Size((free, padded_length(contraction) if spec.hadamard else contraction)),
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, plan: _Plan) -> Tensor:
        records = plan.state.records_forward
        x = plan.quantize(x_MK, X_OUTPUT, records)
        w = plan.quantize(w_NK, W_OUTPUT, records)
        needs_x, needs_w, _, _ = ctx.needs_input_grad
        kept_x: tuple[Tensor | None, ...] = (None,) * 4
        kept_w: tuple[Tensor | None, ...] = (None,) * 5
        if needs_w and plan.keeps:
            kept_x = _kept(plan.transposed(x_MK, x, X_GRAD_WEIGHT, records))
        if needs_x and plan.keeps:
            kept_w = (w_NK, None, None, None, None)
            if W_GRAD_INPUT in plan.shared and isinstance(w, QuantizedTensor):
                kept_w = (w_NK, w.scale, w.encode, _kept_amax(w), w.tensor_amax)
        ctx.save_for_backward(*kept_x, *kept_w)
        ctx.plan = plan
        ctx.weight_dtype = w_NK.dtype
        ctx.bias_dtype = bias_N.dtype if bias_N is not None else None
        ctx.sizes = x_MK.shape
        return plan.multiply(OUTPUT, x, w, bias_N, plan.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
        with without_modes():
            return _Linear._gradients(ctx, g_MN)

    @staticmethod
    def _gradients(ctx: Any, g_MN: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        records = plan.state.records_backward
        needs_x, needs_w, needs_bias, _ = ctx.needs_input_grad
        (rows, inner), saved = ctx.sizes, ctx.saved_tensors
        grad_x = grad_w = grad_bias = None
        g: Operand = g_MN
        if needs_x or (needs_w and G_GRAD_WEIGHT in plan.shared):
            g = plan.quantize(g_MN, G_GRAD_INPUT, records)
        if needs_x:
            w = plan.weight_again(saved[4:], records)
            if needs_w and G_GRAD_WEIGHT in plan.shared:
                g = prepare(g, w, plan.dtype, plan.impl, plan.gemms[GRAD_INPUT].accumulate)
            grad_x = plan.multiply(GRAD_INPUT, g, w, None, plan.dtype)
        if needs_w:
            x = _operand(saved[:4], plan.specs[X_GRAD_WEIGHT], (inner, rows))
            g_T = plan.transposed(g_MN, g, G_GRAD_WEIGHT, records)
            grad_w = plan.multiply(GRAD_WEIGHT, g_T, x, None, ctx.weight_dtype)
        if needs_bias:
            grad_bias = g_MN.sum(0, dtype=_sum_dtype(g_MN)).to(ctx.bias_dtype)
        if records and plan.noise is not None and isinstance(plan.noise.step, Tensor):
            plan.noise.step.add_(1)
        return grad_x, grad_w, grad_bias, None


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_floating(name, tensor)
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x: got shape {tuple(x.shape)} with weight {tuple(weight.shape)}; x is [..., K] and "
            "weight is [N, K]; reshape or transpose one"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(
            f"bias: got shape {tuple(bias.shape)}; must be ({weight.shape[0]},); reshape it"
        )


def _check_state(recipe: Recipe, plan: _Plan) -> None:
    for position, spec in enumerate(plan.specs):
        if spec is None:
            continue
        if spec.is_stochastic and plan.noise is None:
            raise ValueError(
                f"noise: got None; recipe {recipe} rounds stochastically; pass "
                "noise=Noise(seed=..., step=...)"
            )
        if spec.is_delayed and position not in plan.shared and not plan.state.delayed[position]:
            raise ValueError(
                f"state: got None; recipe {recipe} has delayed scaling, whose histories live in a "
                "converted layer; use mixprec.convert, or a recipe without a history"
            )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    recipe: str | Recipe,
    noise: Noise | None = None,
    impl: str = "auto",
    state: LinearState | None = None,
) -> Tensor:
    """x @ weight.T + bias by a recipe, with gradients.

    The three products of the module docstring, each operand quantised by ``recipe.specs``.

    Args:
        x: [..., K], float16, bfloat16, float32 or float64 (exact sums widen the others, which
            loses nothing); inside a region of 16
            bits, ours or ``torch.autocast``, it is cast to its type first (float64 is not).
        weight: [N, K], of any of these types; quantised from its own values.
        bias: [N]; added in FP32 before the output is rounded.
        recipe: Name or value.
        noise: For stochastic rounding; the operand at position p draws from stream
            noise.stream + p.
        impl: ``auto`` or one of ``gemm.IMPLS``, for products with a quantised operand.
        state: Histories of delayed scaling; converted layers pass theirs, which are written in
            place as amaxes are recorded.

    Returns:
        [..., N] in x's type (or autocast's). grad_input has that type too; the gradients of weight
        and bias have theirs.

    Raises:
        TypeError: A tensor that is not floating-point.
        ValueError: Shapes that do not match; delayed scaling without state; stochastic rounding
            without noise; an impl that cannot run.

    Edge cases: zero rows, any strides, expanded tensors; no product is computed for a gradient that
    nobody needs. Not twice differentiable: a second backward pass through the gradient is an error.

    Exactness: quantised operands bit for bit in every impl; sums within (K + 3) * 2^-24 * scale *
    sum|a||b| plus half an ulp of the output type.
    """
    recipe = get_recipe(recipe)
    state = state or LinearState()
    _check(x, weight, bias)
    region_dtype = active_dtype(x)
    if region_dtype is not None and x.dtype != torch.float64:
        x = x.to(region_dtype)
    plan = _Plan(
        specs=recipe.specs,
        gemms=tuple(getattr(recipe, product) for product in PRODUCTS),
        shared=shared_positions(recipe),
        impl=check_impl(impl),
        noise=noise,
        state=state,
        dtype=x.dtype,
        # a recording forward quantises every operand, with gradients or without
        keeps=torch.is_grad_enabled() or state.records_forward,
    )
    _check_state(recipe, plan)
    x_MK = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    with recomputed_alike(), without_modes():
        out = _Linear.apply(x_MK, weight, bias, plan)
    return out.reshape(*x.shape[:-1], weight.shape[0])
