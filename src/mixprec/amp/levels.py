"""Optimisation levels as apex had them: each is a recipe, applied to a model and its optimizer.

    O0   fp32: nothing changes
    O1   fp16: parameters in FP32, operations by the policy, dynamic loss scale
    O2   parameters in fp16 but batch normalisations, FP32 masters, dynamic loss scale
    O3   everything in fp16, plain updates

Source: NVIDIA apex (amp.initialize, scale_loss, master_params), which removed them in May 2025.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mixprec.amp.autocast import DTYPES, autocast
from mixprec.amp.grad_scaler import GradScaler
from mixprec.amp.inputs import cast_inputs
from mixprec.amp.setup import cast_parameters, scaler_for, with_update
from mixprec.optim import MixedPrecision
from mixprec.recipes import DYNAMIC, NARROW, OPT_LEVELS, Recipe

_SCALERS: WeakKeyDictionary[Optimizer, list[GradScaler]] = WeakKeyDictionary()


def initialize(
    models: nn.Module | list[nn.Module],
    optimizers: Optimizer | list[Optimizer] | None = None,
    enabled: bool = True,
    opt_level: str = "O1",
    *,
    keep_batchnorm_fp32: bool | str | None = None,
    master_weights: bool | str | None = None,
    loss_scale: float | str | None = None,
    cast_model_outputs: torch.dtype | None = None,
    num_losses: int = 1,
    verbosity: int = 1,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> Any:
    """A model and its optimizer at one of apex's optimisation levels.

    Each forward pass runs in a region of the policy (``autocast``), with floating-point inputs cast
    to the parameters' type; its floating-point outputs are float32, so that losses are. The model
    is changed in place by two hooks, and by the parameters' type at O2 and O3.

    Args:
        models: One or a list, on any device, in FP32.
        optimizers: One, a list, or None, made from the models' parameters; wrapped at O2 and O3,
            so use what is returned.
        enabled: False returns the arguments as they are; ``scale_loss`` takes them too.
        opt_level: O0 to O3, as in the module's table.
        keep_batchnorm_fp32: Of O2 and O3, in place of the level's; "True" and "False" are taken.
        master_weights: FP32 masters at O2 and O3, in place of the level's.
        loss_scale: A constant or "dynamic", in place of the level's; "128.0" is taken.
        cast_model_outputs: Type of the outputs in place of float32.
        num_losses: How many losses have a scale of their own, by ``scale_loss``'s loss_id.
        verbosity: 0 does not say on standard error what was chosen.
        min_loss_scale: Floor of a dynamic scale; None: 1.
        max_loss_scale: Its ceiling.

    Returns:
        (models, optimizers), each as one, a list or a tuple, as it was given; models alone
        without optimizers.

    Edge cases: an overflow under a constant scale is skipped too; a ``state_dict`` at O2 and O3
    holds fp16. A forward pass that is interrupted from the keyboard leaves its region active.

    Raises:
        ValueError: An unknown level, an option the level has no place for, a model that is not in
            FP32 or was initialised before.
    """
    model_list, optimizer_list = _as_list(models), _as_list(optimizers)
    if not enabled:
        _SCALERS.update(dict.fromkeys(optimizer_list, [GradScaler(enabled=False)] * num_losses))
        return models if optimizers is None else (models, optimizers)
    recipe = _level(opt_level, keep_batchnorm_fp32, master_weights, loss_scale)
    for model in model_list:
        _check_model(model)
    wrapped = [with_update(optimizer, recipe) for optimizer in optimizer_list]
    floor = 1.0 if min_loss_scale is None else min_loss_scale
    start = min(max(2.0**16, floor), max_loss_scale)
    options: dict[str, Any] = {"init_scale": start, "min_scale": floor, "max_scale": max_loss_scale}
    scalers = [scaler_for(recipe, **options) for _ in range(num_losses)]
    for model in model_list:
        cast_parameters(model, recipe)
        _hook(model, recipe, cast_model_outputs or torch.float32)
    for optimizer in wrapped:
        _SCALERS[optimizer] = scalers
    if verbosity:
        print(f"mixprec: {opt_level}: {_summary(recipe)}", file=sys.stderr)
    if optimizers is None:
        return models
    kind: Any = type(optimizers)
    return models, kind(wrapped) if isinstance(optimizers, list | tuple) else wrapped[0]


@contextmanager
def scale_loss(
    loss: Tensor,
    optimizers: Optimizer | Sequence[Optimizer],
    loss_id: int = 0,
    *,
    delay_unscale: bool = False,
) -> Iterator[Tensor]:
    """``with scale_loss(loss, optimizer) as scaled: scaled.backward()``, then ``optimizer.step()``.

    On leaving, the gradients are unscaled and added to those that were there, and the scale is
    updated; after an overflow they are dropped and the next call of each optimizer's ``step`` does
    nothing.

    Args:
        loss: A scalar, in any floating-point type; it is scaled in float32.
        optimizers: Those whose parameters it reaches, as ``initialize`` returned them.
        loss_id: Which of ``num_losses`` scales.
        delay_unscale: For all but the last backward pass of an accumulation window, in which the
            scale does not change and an overflow anywhere drops the whole. (The gradients are
            unscaled at once nevertheless, so that those of several losses add up.)

    Yields:
        loss * scale.

    Raises:
        ValueError: An optimizer that was not initialised, or another loss_id.
    """
    chosen = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    scaler = _scaler(chosen, loss_id)
    if not scaler.is_enabled():
        yield loss.float()
        return
    earlier = _take_gradients(chosen)
    yield scaler.scale(loss.float())
    found = [optimizer for optimizer in chosen if _has_gradient(optimizer)]
    for optimizer in found:
        scaler.unscale_(optimizer)
        # the next pass of the window unscales again; what was found counts until update()
        scaler._forget(optimizer)
    _add_gradients(earlier)
    if not delay_unscale:
        _end_window(scaler, chosen)


def _end_window(scaler: GradScaler, optimizers: list[Optimizer]) -> None:
    """Move the scale, and after an overflow drop gradients and the next steps."""
    if not scaler._checks_of_skipped:
        # no gradient at all: nothing happened
        return
    if any(bool(flag) for flag in scaler._checks_of_skipped):
        for optimizer in optimizers:
            scaler.skip(optimizer)
            _skip_next_step(optimizer)
    # what update() asks for before it moves the scale
    scaler._window_open, scaler._skip_asked = False, True
    scaler.update()


def master_params(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that the optimizer updates, in FP32, with their gradients: what to clip."""
    if isinstance(optimizer, MixedPrecision):
        yield from optimizer.masters()
    else:
        yield from (parameter for group in optimizer.param_groups for parameter in group["params"])


def loss_scalers(optimizer: Optimizer) -> list[GradScaler]:
    """The scalers of an initialised optimizer, by loss_id; save and load their ``state_dict``."""
    if optimizer not in _SCALERS:
        raise ValueError(
            f"optimizers: got a {type(optimizer).__name__} without a loss scale; it must come from "
            "mixprec.amp.initialize; use what that returned"
        )
    return _SCALERS[optimizer]


def _scaler(optimizers: list[Optimizer], loss_id: int) -> GradScaler:
    shared = [loss_scalers(optimizer) for optimizer in optimizers]
    if not shared or any(scalers is not shared[0] for scalers in shared):
        raise ValueError(
            f"optimizers: got {len(optimizers)} that share no loss scale; they must come from one "
            "call of mixprec.amp.initialize; pass it all of them"
        )
    if not 0 <= loss_id < len(shared[0]):
        raise ValueError(
            f"loss_id: got {loss_id}; there are {len(shared[0])} losses, from 0; pass num_losses "
            "to mixprec.amp.initialize"
        )
    return shared[0][loss_id]


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _level(
    opt_level: str,
    keep_batchnorm_fp32: bool | str | None,
    master_weights: bool | str | None,
    loss_scale: float | str | None,
) -> Recipe:
    """The recipe of a level, with the options in its fields."""
    if opt_level not in OPT_LEVELS:
        raise ValueError(
            f"opt_level: got {opt_level!r}; must be one of {', '.join(OPT_LEVELS)}, with the "
            "letter O"
        )
    recipe = OPT_LEVELS[opt_level]
    for name, value in (
        ("keep_batchnorm_fp32", keep_batchnorm_fp32),
        ("master_weights", master_weights),
    ):
        if value is not None and recipe.parameters not in NARROW:
            raise ValueError(
                f"{name}: got {value!r} at {opt_level}, which keeps all parameters in FP32; only "
                "O2 and O3 have a use for it; leave it out"
            )
    keep = _truth("keep_batchnorm_fp32", keep_batchnorm_fp32, recipe.keep_batchnorm_fp32)
    masters = _truth("master_weights", master_weights, recipe.update == "masters")
    return replace(
        recipe,
        keep_batchnorm_fp32=keep,
        update="masters" if masters else "plain",
        loss_scale=recipe.loss_scale if loss_scale is None else _scale(loss_scale),
    )


def _truth(name: str, value: bool | str | None, default: bool) -> bool:
    """A truth value, or what scripts pass on from their command line."""
    known = {None: default, True: True, False: False, "True": True, "False": False}
    if value not in known or isinstance(value, float):
        raise ValueError(f"{name}: got {value!r}; must be True, False or None; leave it out")
    return known[value]


def _scale(value: float | str) -> Any:
    if not isinstance(value, str) or value == DYNAMIC:
        return value
    try:
        return float(value)
    except ValueError:
        raise ValueError(
            f"loss_scale: got {value!r}; must be a number or 'dynamic'; leave it out for the "
            "level's"
        ) from None


def _check_model(model: nn.Module) -> None:
    if any(isinstance(hook, _Enter) for hook in model._forward_pre_hooks.values()):
        raise ValueError(
            "models: got one that has a level already; initialize is called once for all models; "
            "make the model anew"
        )
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float32:
            raise ValueError(
                f"models: got {parameter.dtype} for {name}; the level casts parameters itself, "
                "from FP32; call model.float() first"
            )


class _Enter:
    """Before a model's forward: the region, and inputs in the parameters' type."""

    def __init__(self, region: autocast, dtype: torch.dtype) -> None:
        self.region = region
        self.dtype = dtype

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.region.__enter__()
        return (cast_inputs(args, self.dtype), cast_inputs(kwargs, self.dtype))


class _Leave:
    """After it, also where it raised: outside the region, outputs in the type that losses want."""

    def __init__(self, region: autocast, dtype: torch.dtype) -> None:
        self.region = region
        self.dtype = dtype

    def __call__(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        self.region.__exit__(None, None, None)
        return cast_inputs(output, self.dtype)


def _hook(model: nn.Module, recipe: Recipe, output_dtype: torch.dtype) -> None:
    if recipe.base not in NARROW:
        return
    region = autocast(recipe)
    enter = _Enter(region, DTYPES[recipe.parameters])
    model.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
    model.register_forward_hook(_Leave(region, output_dtype), always_call=True)


def _summary(recipe: Recipe) -> str:
    norms = ", batch norms in fp32" if recipe.keep_batchnorm_fp32 else ""
    return (
        f"operations {recipe.base}, parameters {recipe.parameters}{norms}, updates "
        f"{recipe.update}, loss scale {recipe.loss_scale or 1.0}"
    )


def _has_gradient(optimizer: Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _take_gradients(optimizers: Iterable[Optimizer]) -> dict[Tensor, Tensor]:
    """The gradients of the optimizers' parameters, which have none afterwards."""
    taken = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    taken[parameter] = parameter.grad
                    parameter.grad = None
    return taken


def _add_gradients(earlier: dict[Tensor, Tensor]) -> None:
    for parameter, gradient in earlier.items():
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


class _SkippedStep:
    """In place of an optimizer's ``step`` for one call, which does nothing."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.own = vars(optimizer).get("step")

    def __call__(self, *_: Any, **__: Any) -> None:
        if self.own is None:
            del self.optimizer.step
        else:
            self.optimizer.step = self.own
        # a scheduler of either warns if it steps before the optimizer was called; it was
        inner = getattr(self.optimizer, "inner", self.optimizer)
        self.optimizer._opt_called = inner._opt_called = True


def _skip_next_step(optimizer: Any) -> None:
    """Let one call of ``optimizer.step`` do nothing, as code written for apex expects."""
    if not isinstance(vars(optimizer).get("step"), _SkippedStep):
        optimizer.step = _SkippedStep(optimizer)
