"""A linear layer with gradients: three products, each by its part of the recipe.

    output      = gemm(x[M, K],   w[N, K])
    grad_input  = gemm(g[M, N],   w.T[K, N])
    grad_weight = gemm(g.T[N, M], x.T[K, M])

The only file with an ``autograd.Function``.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixprec.gathered_weight import high_precision
from mixprec.gemm.api import Operand, check_impl, prepare
from mixprec.linear_products import (
    G_GRAD_INPUT,
    G_GRAD_WEIGHT,
    GRAD_INPUT,
    GRAD_WEIGHT,
    NO_STATE,
    NOTHING,
    OUTPUT,
    X_GRAD_WEIGHT,
    X_OUTPUT,
    LinearState,
    Plan,
    Tensors,
    kept_amax,
    kept_of,
    restored,
    shared_positions,
    sum_dtype,
)
from mixprec.modes import without_modes
from mixprec.noise import Noise
from mixprec.operation import Operation, Product
from mixprec.policy import active_dtype, recomputed_alike, recorder
from mixprec.quantization import QuantizedTensor
from mixprec.recipes import PRODUCTS, Recipe, get_recipe
from mixprec.rounding import check_floating
from mixprec.windows import Windows


def _each_entry(
    function: type[torch.autograd.Function], info: Any, in_dims: tuple[Any, ...], args: Any
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    """A function of one entry, mapped over a batch: each entry has scales of its own."""
    entries = []
    for i in range(info.batch_size):
        entry = [
            x if dim is None else x.select(dim, i) for x, dim in zip(args, in_dims, strict=True)
        ]
        entries.append(function.apply(*entry))
    stacked = tuple(
        None if parts[0] is None else torch.stack(parts) for parts in zip(*entries, strict=True)
    )
    return stacked, tuple(None if out is None else 0 for out in stacked)


class _Linear(torch.autograd.Function):
    """Output, and what backward keeps of x and of the weight beside themselves."""

    @staticmethod
    def forward(x: Tensor, w_NK: Tensor, bias_N: Tensor | None, plan: Plan) -> tuple[Tensor, ...]:
        x_MK = plan.matrix(x)
        is_kept = plan.keeps_codes and X_GRAD_WEIGHT in plan.shared
        records = plan.state.records_forward
        a = plan.quantize(x_MK, X_OUTPUT, records, is_kept=is_kept, held=is_kept)
        b = plan.weight(w_NK)
        kept_x = kept_w = NOTHING
        if plan.keeps_codes:
            kept_x = kept_of(plan.transposed(x_MK, a, X_GRAD_WEIGHT, records, is_kept=True))
        if plan.needs[0] and plan.quantises_weight_again and isinstance(b, QuantizedTensor):
            kept_w = (b.scale, b.encode, kept_amax(b), b.tensor_amax)
        # Dynamo takes no None among the outputs; what is kept has two axes, and this has one
        kept = [x.new_empty(0) if part is None else part for part in (*kept_x, *kept_w)]
        return (plan.multiply(OUTPUT, a, b, bias_N, plan.dtype), *kept)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        x, w_NK, _, plan = inputs
        _, *kept = output
        needs_x, needs_w = plan.needs
        keeps_x = needs_w and not plan.keeps_codes
        ctx.save_for_backward(x if keeps_x else None, w_NK if needs_x else None, *kept)
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.shape = plan, x.shape

    @staticmethod
    def backward(ctx: Any, g_MN: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if g_MN is None:
            return None, None, None, None
        call = _Backward(plan=ctx.plan, shape=ctx.shape, needs=ctx.needs_input_grad[:3])
        # where gradients of gradients may be asked for, torch.func among these
        is_recorded = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        run = _Gradients.apply if is_recorded else _Gradients.forward
        return *run(g_MN, *ctx.saved_tensors, call), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _each_entry(_Linear, info, in_dims, args)


# torch asks for it at every call, and would read the code each time
_Linear.forward.__signature__ = inspect.signature(_Linear.forward)  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """One backward pass: the call's plan, x's shape, and whose gradients are asked for."""

    plan: Plan
    shape: torch.Size
    needs: tuple[bool, bool, bool]


class _Gradients(torch.autograd.Function):
    """The gradients of x, weight and bias; a function, so that torch.func maps it too."""

    @staticmethod
    def forward(
        g_MN: Tensor, x: Tensor | None, w_NK: Tensor | None, *rest: Any
    ) -> tuple[Tensor | None, ...]:
        *kept, call = rest
        parts = tuple(part if part.dim() > 1 else None for part in kept)
        with torch.no_grad(), without_modes():
            return _gradients(g_MN, x, w_NK, parts, call)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept: there is no gradient of these."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(
            "linear: got a gradient of its gradient; quantised products are differentiated once; "
            "leave the layers under a gradient penalty unconverted (skip=)"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return _each_entry(_Gradients, info, in_dims, args)


def _gradients(
    g_MN: Tensor, x: Tensor | None, w_NK: Tensor | None, kept: Tensors, call: _Backward
) -> tuple[Tensor | None, ...]:
    plan, records = call.plan, call.plan.state.records_backward
    needs_x, needs_w, needs_bias = call.needs
    grad_x = grad_w = grad_bias = None
    g: Operand | None = None
    if needs_x or (needs_w and G_GRAD_WEIGHT in plan.shared):
        g = plan.quantize(g_MN, G_GRAD_INPUT, records)
    if needs_x:
        assert w_NK is not None
        assert g is not None
        w = plan.weight_again(w_NK, kept[4:])
        if needs_w and G_GRAD_WEIGHT in plan.shared:
            g = prepare(g, w, plan.dtype, plan.impl, plan.gemms[GRAD_INPUT].accumulate)
        grad_x = plan.input_gradient(g, w, call.shape)
    if needs_w:
        spec = plan.specs[X_GRAD_WEIGHT]
        if x is None:
            assert spec is not None
            b: Operand = restored(kept[:4], spec, len(g_MN))
        else:
            b = plan.x_again(x, records)
        g_T = plan.transposed(g_MN, g, G_GRAD_WEIGHT, records)
        grad_w = plan.multiply(GRAD_WEIGHT, g_T, b, None, plan.weight_dtype)
    if needs_bias:
        grad_bias = g_MN.sum(0, dtype=sum_dtype(g_MN.dtype)).to(plan.bias_dtype)
    counts = records and plan.state.counts_noise
    if counts and plan.noise is not None and isinstance(plan.noise.step, Tensor):
        plan.noise.step.add_(1)
    return grad_x, grad_w, grad_bias


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuse what ``linear`` refuses of tensors and their shapes."""
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_floating(name, tensor)
            if tensor.layout != torch.strided or tensor.is_nested:
                raise TypeError(
                    f"{name}: got a nested tensor or layout {tensor.layout}; must be an ordinary "
                    "tensor; pad it, or make it dense"
                )
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x: got shape {tuple(x.shape)} with weight {tuple(weight.shape)}; x is [..., K] and "
            "weight is [N, K]; reshape or transpose one"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(
            f"bias: got shape {tuple(bias.shape)}; must be ({weight.shape[0]},); reshape it"
        )


def _check_state(recipe: Recipe, plan: Plan) -> None:
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
    check_linear(x, weight, bias)
    return product(x, weight, bias, recipe=recipe, noise=noise, impl=impl, state=state)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    recipe: str | Recipe,
    noise: Noise | None,
    impl: str,
    state: LinearState | None,
    windows: Windows | None = None,
) -> Tensor:
    """``linear`` without its checks; [M, N] of the matrix that windows, if given, make of x."""
    recipe = get_recipe(recipe)
    leading = x.shape[:-1]
    if windows is None:
        x = x.reshape(leading.numel(), x.shape[-1])
    state = state or NO_STATE
    given, region_dtype = x.dtype, active_dtype(x)
    if region_dtype is not None and x.dtype != torch.float64:
        x = x.to(region_dtype)
    # a recording forward quantises every operand, with gradients or without
    keeps = torch.is_grad_enabled() or state.records_forward
    plan = Plan(
        specs=recipe.specs,
        gemms=tuple(getattr(recipe, name) for name in PRODUCTS),
        shared=shared_positions(recipe),
        impl=check_impl(impl),
        noise=noise,
        state=state,
        dtype=x.dtype,
        weight_dtype=weight.dtype,
        bias_dtype=None if bias is None else bias.dtype,
        needs=(keeps and x.requires_grad, keeps and weight.requires_grad),
        windows=windows,
    )
    _check_state(recipe, plan)
    with recomputed_alike(), without_modes():
        out = _Linear.apply(x, weight, bias, plan)[0]
        for observer in state.observers:
            observer(plan, x, high_precision(weight), out)
        if windows is None and len(leading) != 1:
            # as torch's own result, no view: who wraps a module may warn of one
            out = torch.ops.aten._unsafe_view.default(out, [*leading, weight.shape[0]])
    _tell(given, weight, recipe, plan)
    return out


def _tell(given: torch.dtype, weight: Tensor, recipe: Recipe, plan: Plan) -> None:
    """A region that records its operations cannot see this one."""
    record = recorder()
    if record is not None:
        record(
            Operation(
                name=linear.__name__,
                inputs=(given, plan.weight_dtype),
                compute=(plan.dtype, plan.dtype),
                outputs=(plan.dtype,),
                rule=f"recipe {recipe}",
                product=Product(gemm=recipe.output, impl=plan.impl, device=weight.device),
            )
        )
