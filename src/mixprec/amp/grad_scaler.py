"""Loss scaling: torch's gradient scaler with a floor, a ceiling, hysteresis and visible skips.

    scaled = loss * scale;   grad = scaled_grad / scale;   skip the step unless all are finite

After Micikevicius et al., Mixed Precision Training (2018), section 3.2, and ``torch.amp``.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from mixprec.amp import gradients, scaler_state
from mixprec.amp.loss_scale import CallOrderError, LossScale
from mixprec.amp.scaler_state import StepOutcome, StepRecord
from mixprec.nn import attached_models, forget_amaxes


class GradScaler(LossScale):
    """Scales losses so that small FP16 gradients survive, and skips steps that overflowed.

        for x, y in batches:
            optimizer.zero_grad()
            scaler.scale(loss_of(model(x), y)).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)         # optional
            scaler.step(optimizer)
            scaler.update()
            if scaler.last_step.stepped: schedule.step()

    A non-finite gradient of a finite loss is an overflow: the step is skipped and the scale falls,
    to ``min_scale`` at the lowest. A non-finite loss is the data's fault: the gradients that it
    reaches become NaN, their optimizers skip, and the scale stays for this iteration, whatever
    other losses did. A skipped step drops the whole accumulation window: the gradients become
    None, and models attached to the optimizer forget the amaxes they recorded. A fused optimizer
    is asked too whether to step: one read of the device a step, as with any other.

    A gradient penalty takes gradients of the scaled loss and divides them: ``[g /
    scaler.get_scale() for g in torch.autograd.grad(scaler.scale(loss), p, create_graph=True)]``.

    Args:
        device: As torch takes it; no value disables the scaler. None: from the first loss.
        init_scale: From min_scale to max_scale.
        growth_factor, backoff_factor, growth_interval: As in torch.
        enabled: False passes everything through.
        min_scale, max_scale: Floor and ceiling of the scale.
        hysteresis: Overflows until the scale falls; a clean step counts anew from here (the rule of
            apex's ``update_scale_hysteresis``).
        dynamic: False keeps the scale; overflows are skipped nevertheless.
        process_group: Ranks that decide alike, each calling step, skip and update alike. None: the
            default group where it has several ranks. A group of this rank alone decides alone.

    Raises:
        TypeError, ValueError: An argument of another type or out of its range.

    Exactness: scale and growth tracker equal torch's for any sequence of clean and overflowed steps
    between floor and ceiling, with hysteresis=1.
    """

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        """What torch keeps under the optimizer's address, unless that was another's before."""
        state = self._per_optimizer_states[id(optimizer)]
        if state.setdefault("optimizer", weakref.ref(optimizer))() is not optimizer:
            self._forget(optimizer)
            return self._state_of(optimizer)
        return state

    def _forget(self, optimizer: Optimizer) -> None:
        # what was found still counts in update()
        state = self._per_optimizer_states.pop(id(optimizer))
        self._checks_of_skipped += state["found_inf_per_device"].values()

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients by the scale, once, and note whether they are finite.

        Sparse gradients are coalesced, expanded ones copied; one that two parameters or two
        optimizers share is divided once.

        Raises:
            CallOrderError: Called twice, after ``step``, or before anything was scaled.
            ValueError: A gradient in FP16, by the parameter's name.
        """
        if not self._enabled:
            return
        scale = self._ready_scale("unscale_", optimizer)
        state = self._state_of(optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise CallOrderError(
                "unscale_() has already been called on this optimizer since the last update(). "
                "Call step(optimizer) or skip(optimizer), and update(), in between"
            )
        if state["stage"] is OptState.STEPPED:
            raise CallOrderError(
                "unscale_() is being called after step(). Call update() in between"
            )
        # torch's arithmetic: the reciprocal in float64 where the device has it
        wide = scale if scale.device.type == "mps" else scale.double()
        found = torch.zeros_like(scale)
        state["found_inf_per_device"] = self._unscale_grads_(
            optimizer, wide.reciprocal().float(), found, False
        )
        state["stage"] = OptState.UNSCALED
        self._window_open = False

    @torch.no_grad()
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        fresh: dict[Hashable, Tensor] = {}
        checked: dict[Hashable, Tensor] = {}
        for position, parameter in gradients.parameters_with_gradient(optimizer):
            assert parameter.grad is not None
            if parameter.grad.dtype is torch.float16 and not allow_fp16:
                raise ValueError(
                    f"{gradients.parameter_labels(optimizer)[position]}: got a float16 gradient; "
                    "dividing it would lose what scaling saved (Attempting to unscale FP16 "
                    "gradients.); wrap the optimizer: mixprec.optim.MixedPrecision(optimizer)"
                )
            values = gradients.own_values(parameter)
            known = gradients.region(values) in self._unscaled
            (checked if known else fresh)[gradients.region(values)] = values
        found: dict[torch.device, Tensor] = {}
        for values_by_region, factor in ((fresh, inv_scale), (checked, torch.ones_like(inv_scale))):
            for kind in gradients.by_kind(map(gradients.as_real, values_by_region.values())):
                device = kind[0].device
                own = found.setdefault(device, found_inf.to(device, copy=True))
                torch._amp_foreach_non_finite_check_and_unscale_(kind, own, factor.to(device))
        self._unscaled |= fresh
        if self._lost_gradients(optimizer):
            found[inv_scale.device] = torch.ones_like(inv_scale)
        return self._decide_alike(found)

    def _lost_gradients(self, optimizer: Optimizer) -> bool:
        """Whether another optimizer's skipped step took gradients of shared parameters away."""
        return bool(self._dropped) and any(
            parameter.grad is None and id(parameter) in self._dropped
            for group in optimizer.param_groups
            for parameter in group["params"]
        )

    def _decide_alike(self, found: dict[torch.device, Tensor]) -> dict[torch.device, Tensor]:
        """The maximum over ranks; empty where no rank has a gradient."""
        ready = dist.is_available() and dist.is_initialized()
        if not ready or dist.get_world_size(self._process_group) < 2:
            return found
        assert self._loss_nonfinite is not None
        own = gradients.sum_on(self._loss_nonfinite.device, found.values())
        flags = torch.stack([own, self._loss_nonfinite, torch.full_like(own, bool(found))])
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._process_group)
        self._loss_nonfinite.copy_(flags[1])
        # a rank without gradients asks whether another has some
        return {flags.device: flags[0]} if found or flags[2].item() else {}

    def clip_grad_norm_(
        self, optimizer: Optimizer, max_norm: float, norm_type: float = 2.0
    ) -> Tensor:
        """Unscale the optimizer's gradients if they are not yet, and limit their total norm.

            grad *= min(1, max_norm / norm)

        Returns:
            The norm before, unscaled, 0-d, in float32 or wider.

        Raises:
            TypeError, ValueError: max_norm or norm_type is no number above 0 (inf is allowed).

        Edge cases: with a norm that is not finite the gradients stay, and ``step`` will skip.
        """
        rule, fix = "must be a number above 0", "1.0 is common"
        limit = scaler_state.check_number("max_norm", max_norm, rule, fix)
        power = scaler_state.check_number("norm_type", norm_type, rule, "2.0 is the default")
        self._unscale_once(optimizer)
        norm = gradients.clip_norm(optimizer, limit, power)
        if self._enabled:
            state = self._state_of(optimizer)
            if found := state["found_inf_per_device"]:
                # a norm can overflow though each gradient is finite
                device, flag = next(iter(found.items()))
                found[device] = torch.maximum(flag, (~norm.isfinite()).to(device, flag.dtype))
                state["found_inf_per_device"] = self._decide_alike(found)
        return norm

    def clip_grad_value_(self, optimizer: Optimizer, clip_value: float) -> None:
        """Unscale the optimizer's gradients if they are not yet, and limit each element.

            grad = min(max(grad, -clip_value), clip_value)

        Raises:
            TypeError, ValueError: clip_value is no number above 0.

        Edge cases: with an element that is not finite the gradients stay, and ``step`` will skip.
        """
        rule, fix = "must be a number above 0", "1.0 is common"
        limit = scaler_state.check_number("clip_value", clip_value, rule, fix)
        self._unscale_once(optimizer)
        found = self._state_of(optimizer)["found_inf_per_device"].values()
        device = self._scale.device if self._scale is not None else torch.device("cpu")
        gradients.clip_value(optimizer, limit, gradients.sum_on(device, found))

    def _unscale_once(self, optimizer: Optimizer) -> None:
        if self._state_of(optimizer)["stage"] is not OptState.UNSCALED:
            self.unscale_(optimizer)

    # ---- stepping

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """``optimizer.step(*args, **kwargs)`` on unscaled gradients, if they are finite.

        Returns:
            What the optimizer's step returns; None if it was skipped. ``last_step`` tells more.

        Raises:
            CallOrderError: Called twice without ``update``, or before anything was scaled.
            RuntimeError: A closure, by keyword or position.

        Warns:
            UserWarning: No parameter has a gradient; nothing is done and the scale will not move.
        """
        if not self._enabled:
            self._record = StepRecord(True, "", 1.0, 1.0)
            return optimizer.step(*args, **kwargs)
        if callable(kwargs.get("closure")) or any(map(callable, args[:1])):
            raise RuntimeError(
                "closure: got a function; it would run on scaled gradients (Closure use is not "
                "currently supported if GradScaler is enabled.); train this optimizer without a "
                "scaler, as in bfloat16, or call it once a backward pass"
            )
        self._ready_scale("step", optimizer)
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise CallOrderError(
                "step() has already been called since the last update(). Call update() in between"
            )
        scales_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        if scales_itself and "grad_scaler" in inspect.signature(optimizer.step).parameters:
            return self._step_by_contract(optimizer, state, *args, **kwargs)
        if state["stage"] is OptState.READY:
            # a gradient that another optimizer unscaled would be divided again in the kernel
            check = self._check_inf_per_device if scales_itself else self.unscale_
            (self.unscale_ if self._unscaled else check)(optimizer)
        if not self._takes_step(optimizer, state):
            return None
        call = functools.partial(optimizer.step, *args, **kwargs)
        result = (
            gradients.call_fused(self._scale, optimizer, state, call) if scales_itself else call()
        )
        state["stage"] = OptState.STEPPED
        return result

    def _step_by_contract(
        self, optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """torch's old way: the optimizer is handed the scaler and does everything itself."""
        assert self._scale is not None
        before = self._scale.clone()
        result = super().step(optimizer, *args, **kwargs)
        self._window_open = False
        found = gradients.sum_on(before.device, state["found_inf_per_device"].values()).item()
        self._record = StepRecord(not found, "overflow" if found else "", before)
        self._skipped += bool(found)
        return result

    def _takes_step(self, optimizer: Optimizer, state: dict[str, Any]) -> bool:
        """Whether to step; if not, everything that a skipped step entails."""
        assert self._scale is not None
        assert self._loss_nonfinite is not None
        self._window_open = False
        found = state["found_inf_per_device"].values()
        if not found:
            state["stage"] = OptState.STEPPED
            self._record = StepRecord(False, "no gradients", self._scale.clone())
            warnings.warn(
                "optimizer: got no parameter with a gradient; the step does nothing and the scale "
                "does not move; check requires_grad and that the loss reaches its parameters",
                stacklevel=3,
            )
            return False
        numbers = [gradients.sum_on(self._scale.device, found), self._loss_nonfinite, self._scale]
        nonfinite, by_data, before = torch.stack(numbers).tolist()
        if not nonfinite:
            self._record = StepRecord(True, "", before)
            return True
        state["stage"] = OptState.STEPPED
        places, flags = gradients.nonfinite_flags(optimizer)
        labels = gradients.parameter_labels(optimizer)
        names = tuple(labels[place] for place in places)
        cause = "data" if by_data else "overflow"
        self._record = StepRecord(False, cause, before, labels=names, flags=flags)
        with_gradient = gradients.parameters_with_gradient(optimizer)
        self._dropped |= {id(parameter) for _, parameter in with_gradient}
        self._drop(optimizer)
        return False

    def _drop(self, optimizer: Optimizer) -> None:
        for _, parameter in gradients.parameters_with_gradient(optimizer):
            parameter.grad = None
        for model in attached_models(optimizer):
            forget_amaxes(model)
        self._skipped += 1

    def skip(self, optimizer: Optimizer) -> None:
        """Drop this optimizer's step on purpose: its norm is too large, the epoch ends mid-window.

        The gradients become None, and ``unscale_`` works again. An overflow that ``unscale_`` found
        still lowers the scale in the next ``update()``; without one nothing has to follow.
        """
        if self._enabled:
            state = self._state_of(optimizer)
            if state["stage"] is OptState.STEPPED:
                raise CallOrderError(
                    "skip() is being called after step(). Call skip(optimizer) instead of step"
                )
            self._forget(optimizer)
            before = self._init_scale if self._scale is None else self._scale.clone()
            self._record = StepRecord(False, "", before)
            self._window_open, self._skip_asked = False, True
        self._drop(optimizer)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale by what the optimizers found, or set it; call it once an iteration.

        Args:
            new_scale: The scale to set, a number or a tensor of one element. A tensor is limited to
                min_scale and max_scale without being read.

        Raises:
            CallOrderError: Inside an accumulation window, between a ``scale`` and the ``step`` or
                ``skip`` that ends it; or without anything stepped or skipped before.
            TypeError, ValueError: A new_scale that the constructor would refuse.
        """
        if not self._enabled:
            return
        checks = list(self._checks_of_skipped)
        ended = self._skip_asked
        for state in self._per_optimizer_states.values():
            checks += state["found_inf_per_device"].values()
            ended |= state["stage"] is not OptState.READY
        if self._window_open or not (ended or new_scale is not None):
            self._ready_scale("update")
            raise CallOrderError(
                "No inf checks were recorded prior to update. The scale may not change between "
                "scale() and the step it leads to; call scaler.step(optimizer) first, or "
                "scaler.skip(optimizer) to drop the step"
            )
        if new_scale is not None:
            self._set_scale(new_scale)
        elif checks and self._dynamic:
            self._move_scale(gradients.sum_on(self._ready_scale("update").device, checks))
        if self._record is not None and self._record.after is None:
            after = self._init_scale if self._scale is None else self._scale.clone()
            self._record = self._record._replace(after=after)
        self._begin_iteration()

    @property
    def last_step(self) -> StepOutcome | None:
        """What became of the last ``step`` or ``skip``; None before the first.

        Reading it waits for the device; ``step`` does not.
        """
        return self._record and self._record.outcome(self._min_scale)

    @property
    def skipped_steps(self) -> int:
        """How many steps were skipped so far, by overflow, data or ``skip``; needs no device."""
        return self._skipped
