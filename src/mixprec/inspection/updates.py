"""Weight updates that a weight's digits cannot hold: lost to rounding, step after step.

    lost = |{g != 0, w after == w before}| / |{g != 0}|        over a parameter's elements

with w as the optimizer keeps it from step to step. An optimizer moves an element whose gradient is
not 0, so one that rests had an update u with |u| below half an ulp of w, and nearest rounding of
w + u is w. Float32 masters and compensated updates keep what a 16-bit weight drops: there w is the
master, or the weight and its compensation. Stochastic rounding keeps it in expectation: nothing is
lost where a 16-bit weight rests.

Sources: Micikevicius et al. 2018, "Mixed Precision Training", section 3.1 (an update is lost where
the weight is 2048 times larger, in FP16); Zamirai et al. 2020, "Revisiting BFloat16 Training"
(nearest rounding cancels small updates).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mixprec.gemm.widening import NARROW
from mixprec.optim import MixedPrecision


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStatistics:
    """One parameter in one optimizer step.

    Attributes:
        parameter: Its name in the model.
        format: torch's name of the type that it is held in.
        elements: How many it has.
        moving: How many of them have a gradient other than 0.
        lost: How many of these rest although they should move.
        largest_gradient: Of all elements, as the optimizer got it.
    """

    parameter: str
    format: str
    elements: int
    moving: int
    lost: int
    largest_gradient: float

    @property
    def lost_share(self) -> float:
        """lost / moving; 0 where nothing moves."""
        return self.lost / self.moving if self.moving else 0.0


def num_lost(before: Tensor, after: Tensor, gradient: Tensor) -> int:
    """How many elements rest although their gradient is not 0.

    Args:
        before, after: A weight as it is kept from step to step, any shape and one type.
        gradient: What the optimizer got, the same shape; any type.
    """
    return int(((before == after) & (gradient != 0)).sum())


class UpdateWatch:
    """Counts lost updates in the optimizer steps that it is asked to look at.

    Args:
        model: Its parameters are named.
        optimizer: Torch's or `mixprec.optim.MixedPrecision`; looked at by its step hooks.

    Edge cases: a step that a loss scaler skips is none, and leaves what was asked for to the next
    one. Parameters without a gradient, with a sparse one, or in a group whose learning rate is 0
    are left out; of stochastic updates no 16-bit weight is lost. Costs a copy of the weights
    during a step that is looked at, else a hook's call.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._names: dict[Tensor, str] = {
            parameter: name for name, parameter in model.named_parameters()
        }
        self._is_asked = False
        self._before: dict[Tensor, Tensor] = {}
        self._found: tuple[UpdateStatistics, ...] = ()
        self._handles = (
            optimizer.register_step_pre_hook(self._start),
            optimizer.register_step_post_hook(self._finish),
        )

    def ask(self) -> None:
        """Look at the next step that is taken."""
        self._is_asked = True

    def take(self) -> tuple[UpdateStatistics, ...]:
        """What was found since the last call: one entry a parameter, or nothing."""
        found, self._found = self._found, ()
        return found

    def close(self) -> None:
        """Look at no further step."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self, optimizer: Optimizer, *_: Any) -> None:
        if self._is_asked:
            self._before = {p: value.clone() for p, value in _moved(optimizer)}

    @torch.no_grad()
    def _finish(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._is_asked:
            return
        after = dict(_moved(optimizer))
        self._found = tuple(
            self._statistics(parameter, before, after[parameter], is_kept=_is_kept(optimizer))
            for parameter, before in self._before.items()
        )
        self._is_asked, self._before = False, {}

    def _statistics(
        self, parameter: Tensor, before: Tensor, after: Tensor, is_kept: bool
    ) -> UpdateStatistics:
        gradient = parameter.grad
        assert gradient is not None
        in_expectation = is_kept and parameter.dtype in NARROW
        return UpdateStatistics(
            parameter=self._names.get(parameter, ""),
            format=str(parameter.dtype).removeprefix("torch."),
            elements=parameter.numel(),
            moving=int((gradient != 0).sum()),
            lost=0 if in_expectation else num_lost(before, after, gradient),
            largest_gradient=float(gradient.abs().amax()) if gradient.numel() else 0.0,
        )


def _is_kept(optimizer: Optimizer) -> bool:
    """Whether what 16 bits drop of an update is kept in expectation."""
    return isinstance(optimizer, MixedPrecision) and optimizer.update == "stochastic"


def _moved(optimizer: Optimizer) -> Iterator[tuple[Tensor, Tensor]]:
    """The parameters that a step moves, each as it is kept from step to step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    rates = [group.get("lr", 1.0) for group in optimizer.param_groups for _ in group["params"]]
    values = optimizer.masters() if isinstance(optimizer, MixedPrecision) else parameters
    for parameter, value, rate in zip(parameters, values, rates, strict=True):
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse and float(rate) != 0:
            yield parameter, value.detach()
