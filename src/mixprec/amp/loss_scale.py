"""The loss scale: settings, values on the device, how it moves, and how it is saved.

overflow: scale *= backoff_factor, not below min_scale
growth_interval steps without one: scale *= growth_factor, not above max_scale
"""

from __future__ import annotations

import copy
import functools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from mixprec.amp import scaler_state
from mixprec.amp.scaler_state import StepRecord


class CallOrderError(RuntimeError, AssertionError):
    """A scaler's methods were called in an order that has no meaning.

    Also an AssertionError, since torch's scaler raises one or the other.
    """


class LossScale(torch.amp.GradScaler):
    """What ``GradScaler`` does with losses and its own state; that one documents the arguments."""

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float = 1.0,
        max_scale: float = math.inf,
        hysteresis: int = 1,
        dynamic: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._min_scale, self._max_scale = scaler_state.check_limits(min_scale, max_scale)
        # torch's own constructor turns itself off for "cuda" where there is none
        super().__init__(
            "cpu",
            scaler_state.check_scale("init_scale", init_scale, self._min_scale, self._max_scale),
            scaler_state.check_growth_factor(growth_factor),
            scaler_state.check_backoff_factor(backoff_factor),
            scaler_state.check_count("growth_interval", growth_interval, 1, 2000),
        )
        self._enabled = scaler_state.check_flag("enabled", enabled)
        self._device: str | None = _device_type(device)  # type: ignore[assignment]
        self._hysteresis = scaler_state.check_count("hysteresis", hysteresis, 1, 1)
        self._dynamic = scaler_state.check_flag("dynamic", dynamic)
        self._process_group = process_group
        self._init_hysteresis_tracker = self._hysteresis
        self._hysteresis_tracker: Tensor | None = None
        self._loss_nonfinite: Tensor | None = None
        self._resumed = False
        self._skipped = 0
        self._record: StepRecord | None = None
        self._begin_iteration()

    def _begin_iteration(self) -> None:
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._window_open = False
        self._skip_asked = False
        # checks of optimizers that were told to skip: an overflow found there still counts
        self._checks_of_skipped: list[Tensor] = []
        self._begin_backward()
        if self._loss_nonfinite is not None:
            self._loss_nonfinite.zero_()

    def _begin_backward(self) -> None:
        # The values keep their memory, so that an address stands for one gradient.
        self._unscaled: dict[Hashable, Tensor] = {}
        self._dropped: set[int] = set()

    def scale(self, outputs: Any) -> Any:
        """``outputs`` times the scale, in the same structure.

        Notes on the device, without waiting for it, whether a loss (a leaf of one element, or any
        leaf that a backward pass goes through) is not finite.

        Args:
            outputs: A tensor, a number (becomes a tensor), or a pytree of them: dict, named tuple,
                list, model output. An iterator gives an iterator.

        Raises:
            TypeError: A leaf of another type.
        """
        if not self._enabled:
            return outputs
        self._window_open = True
        self._begin_backward()
        return tree_map(self._scale_leaf, outputs)

    def _scale_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Iterator):
            return map(self.scale, leaf)
        if isinstance(leaf, int | float) and not isinstance(leaf, bool):
            leaf = torch.tensor(float(leaf), device=self._device_of_numbers())
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"outputs: got a leaf of type {type(leaf).__name__}; every leaf must be a tensor "
                "or a number; pass the loss alone, or a dict, tuple or list of losses"
            )
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(leaf.device)
        assert self._scale is not None
        assert self._loss_nonfinite is not None
        scaled = leaf * self._scale.to(leaf.device, non_blocking=True)
        finite = leaf.detach().isfinite().all()
        if leaf.numel() == 1:
            _note_nonfinite(self._loss_nonfinite, finite)
        if scaled.requires_grad:
            scaled.register_hook(functools.partial(_spread_nan, self._loss_nonfinite, finite))
        return scaled

    def _device_of_numbers(self) -> torch.device:
        if self._scale is not None:
            return self._scale.device
        usable = self._device != "cuda" or torch.cuda.is_available()
        return torch.device(self._device if self._device and usable else "cpu")

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        count = functools.partial(torch.full, (), dtype=torch.int32, device=dev)
        self._growth_tracker = count(self._init_growth_tracker)
        self._hysteresis_tracker = count(self._init_hysteresis_tracker)
        self._loss_nonfinite = torch.zeros_like(self._scale)
        self._device = self._device or dev.type

    # ---- moving the scale

    def _ready_scale(self, method: str, optimizer: Optimizer | None = None) -> Tensor:
        """The scale on its device; after a load it may have to be put there first."""
        if self._scale is None and self._resumed and optimizer is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._lazy_init_scale_growth_tracker(
                parameters[0].device if parameters else self._device_of_numbers()
            )
        if self._scale is None:
            raise CallOrderError(
                f"Attempted {method} but _scale is None.  This may indicate your script did not "
                "use scaler.scale(loss or outputs) earlier in the iteration. Call "
                f"scaler.scale(loss).backward() before {method}"
            )
        return self._scale

    def _set_scale(self, new_scale: float | Tensor) -> None:
        if isinstance(new_scale, Tensor):
            if new_scale.numel() != 1 or new_scale.requires_grad:
                raise ValueError(
                    f"new_scale: got a tensor of shape {tuple(new_scale.shape)}, requires_grad="
                    f"{new_scale.requires_grad}; must be one element without gradient; pass a float"
                )
            if self._scale is None:
                self._lazy_init_scale_growth_tracker(new_scale.device)
            assert self._scale is not None
            # not read on the host, which would wait for the device; NaN stays NaN
            limited = new_scale.detach().reshape(()).clamp(self._min_scale, self._max_scale)
            self._scale.copy_(limited)
            return
        number = scaler_state.check_scale("new_scale", new_scale, self._min_scale, self._max_scale)
        self._init_scale = number
        if self._scale is not None:
            self._scale.fill_(number)

    def _move_scale(self, nonfinite: Tensor) -> None:
        """Grow or back off, on the device; ``nonfinite``, 0-d, is above 0 after an overflow."""
        assert self._scale is not None
        assert self._growth_tracker is not None
        assert self._hysteresis_tracker is not None
        assert self._loss_nonfinite is not None
        overflow = nonfinite > 0
        scale = self._scale.clone()
        # torch compares for equality: a count beyond a shortened interval would never grow again
        tracker = self._growth_tracker.clamp(max=self._growth_interval - 1)
        torch._amp_update_scale_(
            scale,
            tracker,
            overflow.to(torch.float32),
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
        )
        left = (self._hysteresis_tracker - 1).clamp(min=0)
        spared = overflow & (left > 0)
        scale = torch.where(spared, self._scale, scale).clamp(self._min_scale, self._max_scale)
        left = torch.where(overflow, left, self._hysteresis)
        by_data = self._loss_nonfinite > 0
        values = (self._scale, self._growth_tracker, self._hysteresis_tracker)
        for old, new in zip(values, (scale, tracker, left), strict=True):
            old.copy_(torch.where(by_data, old, new))

    def set_growth_factor(self, new_factor: float) -> None:
        """As torch's, and checked as in the constructor."""
        self._growth_factor = scaler_state.check_growth_factor(new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """As torch's, and checked as in the constructor."""
        self._backoff_factor = scaler_state.check_backoff_factor(new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """As torch's, and checked as in the constructor."""
        self._growth_interval = scaler_state.check_count("growth_interval", new_interval, 1, 2000)

    # ---- saving and loading

    def _get_hysteresis_tracker(self) -> int:
        tracker = self._hysteresis_tracker
        return self._init_hysteresis_tracker if tracker is None else int(tracker.item())

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries, and the own settings and counts; empty if disabled.

        torch's scaler loads it, and this one loads torch's. Call it after ``update()``.
        """
        if not self._enabled:
            return {}
        return {
            **super().state_dict(),
            "min_scale": self._min_scale,
            "max_scale": self._max_scale,
            "hysteresis": self._hysteresis,
            "dynamic": self._dynamic,
            "_hysteresis_tracker": self._get_hysteresis_tracker(),
            "skipped": self._skipped,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state saved by this scaler, torch's, apex's or DeepSpeed's.

        What the layout holds replaces the constructor's arguments; the rest stays. Right at any
        time: before the first ``scale``, in which case ``unscale_`` may come first, or later.

        Raises:
            RuntimeError: The state is empty.
            TypeError, ValueError: A missing key, or a value that the constructor would refuse, as a
                scale below the floor; nothing is loaded then.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise RuntimeError(
                "The source state dict is empty, possibly because it was saved from a disabled "
                "instance of GradScaler. Load the state of an enabled one"
            )
        state = {**self.state_dict(), "_hysteresis_tracker": None}
        state |= scaler_state.read_state(state_dict)
        floor, ceiling = scaler_state.check_limits(state["min_scale"], state["max_scale"])
        count, hysteresis = scaler_state.check_count, state["hysteresis"]
        left = state["_hysteresis_tracker"]
        loaded = {
            "_min_scale": floor,
            "_max_scale": ceiling,
            "_init_scale": scaler_state.check_scale("scale", state["scale"], floor, ceiling),
            "_growth_factor": scaler_state.check_growth_factor(state["growth_factor"]),
            "_backoff_factor": scaler_state.check_backoff_factor(state["backoff_factor"]),
            "_growth_interval": count("growth_interval", state["growth_interval"], 1, 2000),
            "_init_growth_tracker": count("_growth_tracker", state["_growth_tracker"], 0, 0),
            "_hysteresis": count("hysteresis", hysteresis, 1, 1),
            "_init_hysteresis_tracker": count(
                "_hysteresis_tracker", hysteresis if left is None else left, 0, hysteresis
            ),
            "_dynamic": scaler_state.check_flag("dynamic", state["dynamic"]),
            "_skipped": count("skipped", state["skipped"], 0, 0),
        }
        self.__dict__.update(loaded, _resumed=True, _record=None)
        self._begin_iteration()
        if self._scale is not None:
            device, self._scale, self._growth_tracker = self._scale.device, None, None
            self._lazy_init_scale_growth_tracker(device)

    def __getstate__(self) -> dict[str, Any]:
        begun = any(s["stage"] is not OptState.READY for s in self._per_optimizer_states.values())
        if begun:
            raise CallOrderError(
                "A GradScaler instance may only be pickled at the beginning of an iteration, or at "
                "the end after scaler.update(). Call step(optimizer) and update() first"
            )
        state = self.__dict__.copy()
        state |= {
            "_init_scale": self.get_scale() if self._enabled else self._init_scale,
            "_init_growth_tracker": self._get_growth_tracker(),
            "_init_hysteresis_tracker": self._get_hysteresis_tracker(),
            "_record": self._record and self._record.on_host(),
            "_resumed": self._resumed or self._scale is not None,
            "_per_optimizer_states": defaultdict(_refresh_per_optimizer_state),
            "_unscaled": {},
            "_checks_of_skipped": [],
        }
        for on_device in ("_scale", "_growth_tracker", "_hysteresis_tracker", "_loss_nonfinite"):
            state[on_device] = None
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> LossScale:
        # a process group is a handle: the copy talks to the same ranks
        memo[id(self._process_group)] = self._process_group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin


def _device_type(device: str | torch.device | None) -> str | None:
    if device is None:
        return None
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device: got {device!r}; must be a device type that torch knows; use 'cpu', 'cuda', "
            "or None to take it from the first loss"
        ) from error


def _note_nonfinite(record: Tensor, finite: Tensor) -> None:
    """Set ``record``, 0-d, to 1 where ``finite`` is False; without waiting for the device."""
    finite = finite.full_tensor() if hasattr(finite, "full_tensor") else finite
    record.masked_fill_(~finite.to(record.device, non_blocking=True), 1.0)


def _spread_nan(record: Tensor, finite: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a scaled loss, NaN if the loss was not finite.

    So exactly the optimizers whose parameters it reaches skip, even where the derivative at an
    infinite loss happens to be finite.
    """
    _note_nonfinite(record, finite)
    return torch.where(finite, grad, math.nan)
