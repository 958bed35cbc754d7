"""A recipe's training step: parameters in its type, its updates, its region, its loss scale."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import swap_tensors
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mixprec.amp.autocast import DTYPES, region_dtype
from mixprec.amp.grad_scaler import GradScaler
from mixprec.optim import MixedPrecision
from mixprec.policy import Operation, Region
from mixprec.recipes import DYNAMIC, NARROW, Recipe


def region(
    recipe: Recipe, record: Callable[[Operation], None] | None = None
) -> AbstractContextManager[Any]:
    """The region of the recipe's base; nothing for a base of 32 or 64 bits.

    record: Called with each operation that has floating-point results.
    """
    dtype = region_dtype(recipe)
    return nullcontext() if dtype is None else Region(dtype, record=record)


def cast_parameters(model: nn.Module, recipe: Recipe) -> None:
    """Hold the floating-point parameters in ``recipe.parameters``; they stay the same objects.

    Make the optimizer's wrapper first (``with_update``), so that its masters keep the FP32 values.
    Buffers stay as they are where the type is narrower, since counts and statistics would be
    rounded; for fp64 the whole model is widened.

    Edge cases: with ``keep_batchnorm_fp32`` modules with running statistics are left alone.
    """
    dtype = DTYPES[recipe.parameters]
    if dtype == torch.float64:
        model.double()
        return
    for module in model.modules():
        if stays_wide(module, recipe):
            continue
        for parameter in module.parameters(recurse=False):
            if not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            if is_traceable_wrapper_subclass(parameter):
                # such as shards, whose tensors .data would not reach
                swap_tensors(parameter, nn.Parameter(parameter.to(dtype), parameter.requires_grad))
            else:
                parameter.data = parameter.data.to(dtype)


def stays_wide(module: nn.Module, recipe: Recipe) -> bool:
    """Whether the recipe leaves a module's own parameters in float32 among those of 16 bits."""
    has_statistics = hasattr(module, "running_mean") and hasattr(module, "running_var")
    own = next(module.parameters(recurse=False), None)
    return has_statistics and recipe.keep_batchnorm_fp32 and own is not None


def with_update(
    optimizer: Optimizer, recipe: Recipe, seed: int = 0, *, float32_gradients: bool = True
) -> Optimizer:
    """The optimizer, wrapped where the recipe holds parameters in 16 bits.

    float32_gradients: As `MixedPrecision` takes it.
    """
    if recipe.parameters not in NARROW:
        return optimizer
    return MixedPrecision(
        optimizer, update=recipe.update, seed=seed, float32_gradients=float32_gradients
    )


def scaler_for(recipe: Recipe, *, checks: bool = False, **options: Any) -> GradScaler:
    """The gradient scaler that the recipe asks for; a disabled one where it asks for none.

    Args:
        recipe: Its loss_scale is ``dynamic``, a constant or None.
        checks: Where it asks for none, one of scale 1, which changes no bit of finite gradients and
            skips the step of others.
        options: Of ``GradScaler``; for a constant scale those that say how it moves are unused.
    """
    scale = 1.0 if checks and recipe.loss_scale is None else recipe.loss_scale
    if scale == DYNAMIC or scale is None:
        return GradScaler(enabled=scale is not None, **options)
    return GradScaler(init_scale=float(scale), min_scale=min(1.0, float(scale)), dynamic=False)
