"""Casts between 16 bits and FP32 whose rounding a compiler keeps.

    widen(x)  = float32(x)          its gradient: narrow
    narrow(x) = round(x)            its gradient: widen

Inductor carries what a graph makes in 16 bits in FP32 and leaves the rounding out. These operators
of torch become arithmetic on bits when a graph is traced, below autograd: the graph then fuses them
and recomputes them as it does torch's own, and their gradients are rounded as well.

Exactness: the values of torch's casts, bit for bit; also for 16 bits that a graph left unrounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

from mixprec.rounding import LAYOUTS, SOURCE_FORMATS
from mixprec.torch_operators import LIBRARY, define


def _define(
    name: str,
    cast: Callable[..., Tensor],
    traced: Callable[..., Tensor],
    backward: Callable[[Any, Tensor], Any],
) -> Any:
    """An operator that runs as ``cast``, and that a graph has as ``traced``."""

    def keep_dtype(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    def rule(mode: Any, _: Any, types: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor:
        with mode:
            return traced(*args, **(kwargs or {}))

    operator = define(name, cast, fake=cast, backward=backward, setup_context=keep_dtype)
    torch.library.register_torch_dispatch(
        f"mixprec::{name}", ProxyTorchDispatchMode, rule, lib=LIBRARY
    )
    return operator


def _widen(x: Tensor) -> Tensor:
    # never x itself, which an operator must not return
    return x.to(torch.float32, copy=True)


def _narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype, copy=True)


def nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 numbers rounded to a 16-bit type as its cast does, in float32, nothing in place."""
    fmt, layout = SOURCE_FORMATS[dtype], LAYOUTS[torch.float32]
    dropped = layout.mantissa - fmt.mantissa
    if dtype == torch.bfloat16:
        bits = x.view(layout.integer)
        carry = (bits >> dropped & 1) + ((1 << (dropped - 1)) - 1)
        # a carry would take NaN into the sign
        return torch.where(x.isnan(), x, (bits + carry & -(1 << dropped)).view(x.dtype))
    magnitude = x.abs().clamp(max=2.0 ** (fmt.max_exponent + 1))
    exponents = layout.magnitude_mask ^ ((1 << layout.mantissa) - 1)
    power = magnitude.view(layout.integer) & exponents
    power = power.clamp(min=layout.bits_of_power(fmt.min_exponent))
    # beside 1.5 * 2^23 steps a float32 has no digits below a step
    large = power.view(x.dtype) * (1.5 * 2.0**dropped)
    rounded = magnitude + large - large
    return torch.where(rounded > fmt.max, torch.inf, rounded).copysign(x)


def _widen_traced(x: Tensor) -> Tensor:
    return nearest(x.to(torch.float32), x.dtype)


def _narrow_traced(x: Tensor, dtype: torch.dtype) -> Tensor:
    return nearest(x, dtype).to(dtype)


def _widen_backward(ctx: Any, gradient: Tensor) -> Tensor:
    return narrow(gradient, ctx.dtype)


def _narrow_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return widen(gradient), None


widen = _define("widen", _widen, _widen_traced, _widen_backward)
"""16-bit x in float32."""
narrow = _define("narrow", _narrow, _narrow_traced, _narrow_backward)
"""float32 x rounded to a 16-bit type."""
