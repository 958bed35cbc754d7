"""What a gradient scaler keeps: its checked settings, the states it loads, what a step came to."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_FLT_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What became of one ``step`` or ``skip`` of a gradient scaler.

    stepped: Whether the optimizer took the step.
    cause: Why not: ``overflow`` (a gradient of a finite loss was not finite), ``data`` (the loss
        itself was not finite), ``no gradients`` (there was nothing to apply); empty after a step,
        and where the caller asked for ``skip``.
    scale_before: The loss scale of this step.
    scale_after: The one after ``update()``; until then that before.
    fault: The first parameter of the optimizer whose gradient was not finite; empty if none was,
        as where the gradients of another rank were at fault.
    at_floor: The gradients overflowed at the lowest scale allowed, so that lowering cannot help.
    """

    stepped: bool
    cause: str
    scale_before: float
    scale_after: float
    fault: str
    at_floor: bool


class StepRecord(NamedTuple):
    """A ``StepOutcome`` whose numbers may still be on the device.

    before, after: Scales; ``after`` is None until ``update()``.
    labels, flags: Names of the parameters with a gradient, and which of these were not finite.
    """

    stepped: bool
    cause: str
    before: Tensor | float
    after: Tensor | float | None = None
    labels: tuple[str, ...] = ()
    flags: Tensor | list[bool] | None = None

    def on_host(self) -> StepRecord:
        """The same without tensors; waits for the device."""
        after = None if self.after is None else float(self.after)
        flags = self.flags.tolist() if isinstance(self.flags, Tensor) else self.flags
        return self._replace(before=float(self.before), after=after, flags=flags)

    def outcome(self, floor: float) -> StepOutcome:
        """What to show; waits for the device."""
        host = self.on_host()
        before = float(host.before)
        pairs = zip(host.labels, host.flags or (), strict=bool(host.flags))
        return StepOutcome(
            stepped=host.stepped,
            cause=host.cause,
            scale_before=before,
            scale_after=before if host.after is None else float(host.after),
            fault=next((label for label, nonfinite in pairs if nonfinite), ""),
            at_floor=host.cause == "overflow" and before <= floor,
        )


def as_float32(value: float) -> float:
    """The nearest float32, which is what a scale on the device is; inf beyond its range."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.inf


def check_number(name: str, value: Any, rule: str, fix: str) -> float:
    """A positive, not NaN number; inf passes where ``rule`` is checked by the caller.

    Raises:
        TypeError: Neither int nor float; bool is neither.
        ValueError: NaN, 0 or less.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}); {rule}; {fix}")
    if not value > 0:
        raise ValueError(f"{name}: got {value!r}; {rule}; {fix}")
    return float(value)


def check_scale(name: str, value: Any, floor: float, ceiling: float) -> float:
    """A finite scale within the floor and the ceiling, as the float32 that it becomes.

    Raises:
        TypeError: Not a number.
        ValueError: Outside, or beyond float32.
    """
    rule = f"a loss scale is a finite number from {floor} (min_scale) to {ceiling} (max_scale)"
    fix = "65536.0 suits most models; min_scale and max_scale move the limits"
    number = check_number(name, value, rule, fix)
    if not floor <= number <= min(ceiling, _FLT_MAX):
        raise ValueError(f"{name}: got {value!r}; {rule}; {fix}")
    return as_float32(number)


def check_limits(min_scale: Any, max_scale: Any) -> tuple[float, float]:
    """Floor and ceiling as float32.

    Raises:
        TypeError: Not numbers.
        ValueError: Not positive, an infinite floor, or a floor above the ceiling.
    """
    rule = "the lowest scale is finite, above 0 and at most max_scale"
    floor = as_float32(check_number("min_scale", min_scale, rule, "1.0 is the default"))
    top = "the highest scale is above 0 and at least min_scale"
    ceiling = as_float32(check_number("max_scale", max_scale, top, "math.inf sets no limit"))
    if floor in (0.0, math.inf):
        raise ValueError(f"min_scale: got {min_scale!r}; {rule} in float32; 1.0 is the default")
    if floor > ceiling:
        raise ValueError(
            f"min_scale: got {min_scale!r} above max_scale {max_scale!r}; {rule}; swap them"
        )
    return floor, ceiling


def check_growth_factor(value: Any) -> float:
    """A finite number above 1; raises TypeError or ValueError otherwise."""
    rule, fix = "growth multiplies the scale by a finite number above 1", "2.0 is the default"
    number = check_number("growth_factor", value, rule, fix)
    if not 1 < number < math.inf:
        raise ValueError(f"growth_factor: got {value!r}; {rule}; {fix}, dynamic=False never grows")
    return number


def check_backoff_factor(value: Any) -> float:
    """A number between 0 and 1; raises TypeError or ValueError otherwise."""
    rule, fix = "an overflow multiplies the scale by a number between 0 and 1", "0.5 is the default"
    number = check_number("backoff_factor", value, rule, fix)
    if number >= 1:
        raise ValueError(
            f"backoff_factor: got {value!r}; {rule}; {fix}, dynamic=False never lowers"
        )
    return number


def check_count(name: str, value: Any, lowest: int, default: int) -> int:
    """A whole number of at least ``lowest``; raises TypeError or ValueError otherwise."""
    rule = f"must be a whole number of at least {lowest}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}); {rule}; use {default}")
    if not lowest <= value < 2**31:
        raise ValueError(f"{name}: got {value!r}; {rule} and below 2**31; use {default}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """True or False; raises TypeError otherwise."""
    if not isinstance(value, bool):
        raise TypeError(
            f"{name}: got {value!r} ({type(value).__name__}); a flag; use True or False"
        )
    return value


TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
OWN_KEYS = ("min_scale", "max_scale", "hysteresis", "dynamic", "_hysteresis_tracker", "skipped")
_DEEPSPEED_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_APEX_KEYS = ("loss_scale", "unskipped")


def _take(state: Mapping[str, Any], keys: tuple[str, ...], layout: str) -> list[Any]:
    missing = ", ".join(repr(key) for key in keys if key not in state)
    if missing:
        raise ValueError(
            f"state_dict: got keys {sorted(map(str, state))} without {missing}; {layout} holds "
            f"{', '.join(keys)}; save it again with state_dict()"
        )
    return [state[key] for key in keys]


def _from_deepspeed(state: Mapping[str, Any]) -> dict[str, Any]:
    # its static scaler saves the scale and no window
    if state.get("dynamic_loss_scale", True) is False:
        return {"scale": state["cur_scale"], "_growth_tracker": 0, "dynamic": False}
    layout = "the state of a DeepSpeed loss scaler"
    scale, iteration, overflow, factor, window = _take(state, _DEEPSPEED_KEYS, layout)
    factor = check_growth_factor(factor)
    window = check_count("scale_window", window, 1, 1000)
    return {
        "scale": scale,
        "growth_factor": factor,
        "backoff_factor": 1.0 / factor,
        "growth_interval": window,
        # clean steps since the last overflow: it counts iterations from 0, and from -1 overflows
        "_growth_tracker": (iteration - overflow - 1) % window,
    }


def _from_apex(state: Mapping[str, Any]) -> dict[str, Any]:
    scalers = [key for key in state if str(key).startswith("loss_scaler")]
    if len(scalers) > 1:
        raise ValueError(
            f"state_dict: got {len(scalers)} loss scalers ({', '.join(sorted(scalers))}); a scaler "
            f"keeps one scale; load one each, as in {{'loss_scaler0': state['loss_scaler0']}}"
        )
    layout = f"{scalers[0]} of apex"
    scale, unskipped = _take(state[scalers[0]], _APEX_KEYS, layout)
    return {"scale": scale, "_growth_tracker": unskipped}


def read_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A scaler's saved state, whoever saved it, under the keys of ``TORCH_KEYS`` and ``OWN_KEYS``.

    Layouts: torch's five keys, with or without the own ones; apex's
    ``{"loss_scaler0": {"loss_scale", "unskipped"}}``; DeepSpeed's ``cur_scale``, ``cur_iter``,
    ``last_overflow_iter``, ``scale_factor``, ``scale_window`` among others.

    Returns:
        ``scale``, ``_growth_tracker`` and whichever settings the layout holds.

    Raises:
        ValueError: A key that the layout needs is missing, or several scales.
    """
    if any(str(key).startswith("loss_scaler") for key in state):
        return _from_apex(state)
    if "cur_scale" in state:
        return _from_deepspeed(state)
    _take(state, TORCH_KEYS, "the state of a gradient scaler")
    return {key: state[key] for key in (*TORCH_KEYS, *OWN_KEYS) if key in state}
