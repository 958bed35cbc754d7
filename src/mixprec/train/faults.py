"""Values that are not finite: the first tensor that has one, and what a run does about them.

`train.on_nonfinite` says what becomes of a step whose loss or gradient is not finite:

- `stop`: the run ends; its checkpoints are those of before. Without a loss scale and without
  clipping, the gradient is seen by what it does to the next loss.
- `skip`: parameters, buffers, optimizer and numerics stay as they were before the step, pending
  amaxes included. The step counts among those done, so that data and learning rate go on.
- `rollback`: everything is that of the newest checkpoint again, but the place in the data and the
  learning rate's schedule, which go on after the step at fault. So the batches since that
  checkpoint are passed by; the steps that took them count among those done. What comes of it is a
  checkpoint in its turn. The way back never leads to a checkpoint that is only there because the
  run was asked to stop, so that a resumed run equals the uninterrupted one here too.

What lowers a dynamic loss scale is no fault: such a step is skipped whatever the policy, until the
scale is at its floor.
"""

import signal
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mixprec.amp.grad_scaler import GradScaler
from mixprec.amp.scaler_state import StepOutcome

EXIT_CODES = {"finished": 0, "error": 1, "wrong input": 2, "nonfinite": 3, "preempted": 75}
"""How a run ends, as `result.json` has it, and the exit code of the command line."""
WRONG_INPUT = (
    ValueError,
    TypeError,
    ImportError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""Errors for which the input is to blame; any other is the program's fault or the system's."""
# the last one is not on Windows
STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)
)
"""What asks a run to save a checkpoint and end."""


class NonFiniteError(ArithmeticError):
    """Training met a NaN or an infinity: at `step`, first in the tensor that `tensor` names."""

    def __init__(self, step: int, what: str, tensor: str) -> None:
        super().__init__(
            f"step {step}: {what} is not finite; the first tensor at fault is {tensor}"
        )
        self.step = step
        self.tensor = tensor


_COUNTS = ("in_a_row", "rollbacks", "way_back")


class FaultPolicy:
    """What `train.on_nonfinite` does in one run, and counts.

    Args:
        name: As the module describes it.
        limit: Steps skipped in a row, or ways back in all, at which the run stops nevertheless.

    Attributes:
        in_a_row: Steps skipped since the last one that was taken, for what the loss scale is not
            to blame for.
        rollbacks: Ways back so far.
        way_back: The step of the checkpoint that the next one leads to.
        skipped_for: Why the last step was skipped; None where it was not, or for an overflow that
            lowers a loss scale.
    """

    def __init__(self, name: Literal["stop", "skip", "rollback"], limit: int) -> None:
        self.skips = name == "skip"
        self.goes_back = name == "rollback"
        self._limit = limit
        self.in_a_row = 0
        self.rollbacks = 0
        self.way_back = 0
        self.skipped_for: NonFiniteError | None = None
        self._buffers: list[tuple[Tensor, Tensor]] = []

    @property
    def checks_gradients(self) -> bool:
        """Whether gradients are looked at in recipes without a loss scale too."""
        return self.skips or self.goes_back

    def before_step(self, model: nn.Module) -> None:
        """Keep what a step changes before it is known whether it is taken."""
        if self.skips:
            self._buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def after_step(
        self,
        step: int,
        scaler: GradScaler,
        *,
        is_dynamic: bool,
        named: Callable[[], str | None],
    ) -> None:
        """Judge what became of a step.

        Args:
            step: Its number, from 1.
            scaler: What took or skipped it.
            is_dynamic: Whether the scaler's scale moves.
            named: Finds the first tensor that makes the loss not finite.

        Raises: NonFiniteError: The step was skipped for a fault, and the policy is to stop or to go
            back, or the limit is reached.
        """
        outcome = scaler.last_step
        is_skipped = outcome is not None and outcome.cause in ("data", "overflow")
        self.skipped_for = None
        if outcome is None or not is_skipped:
            self.in_a_row = 0
            return
        error = self._fault(step, outcome, is_dynamic, scaler.skipped_steps, named)
        if error is not None and not self.skips:
            raise error
        if error is not None:
            self.in_a_row += 1
            if self.in_a_row >= self._limit:
                raise _at_limit(error, f"{self.in_a_row} steps in a row were skipped")
            self.skipped_for = error
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)

    def _fault(
        self,
        step: int,
        outcome: StepOutcome,
        is_dynamic: bool,
        skipped: int,
        named: Callable[[], str | None],
    ) -> NonFiniteError | None:
        """What a skipped step is to blame for; None where a lower loss scale may help."""
        if outcome.cause == "data":
            return NonFiniteError(step, "the loss", named() or "the loss itself")
        fault = f"gradient {outcome.fault}" if outcome.fault else "a gradient of another rank"
        if not is_dynamic:
            is_looked_at = self.checks_gradients
            return NonFiniteError(step, "the gradient", fault) if is_looked_at else None
        if not outcome.at_floor:
            return None
        # no later step would go better
        return NonFiniteError(
            step,
            f"the gradient at the smallest loss scale, {outcome.scale_before:g} "
            f"(scaler.min_scale), after {skipped} skipped steps,",
            f"{fault}; lower the learning rate, or train in bf16, which has FP32's range",
        )

    def roll_back(self, error: NonFiniteError) -> None:
        """Count a way back.

        Raises: NonFiniteError: The given one, where there may be no more.
        """
        if self.rollbacks >= self._limit:
            raise _at_limit(error, f"the run went back {self.rollbacks} times")
        self.rollbacks += 1

    def state_dict(self) -> dict[str, int]:
        """The counts, for a checkpoint."""
        return {name: getattr(self, name) for name in _COUNTS}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Take over what `state_dict` returned; counts that it lacks are 0."""
        for name in _COUNTS:
            setattr(self, name, state.get(name, 0))


def _at_limit(error: NonFiniteError, count: str) -> NonFiniteError:
    error.args = (f"{error}; {count}, as often as train.nonfinite_limit allows",)
    return error


def first_fault(
    model: nn.Module, inputs: Tensor, forward: Callable[[Tensor], object]
) -> str | None:
    """Name the first tensor of a forward pass that is not finite: input, parameter or output.

    Runs the model once more, as `forward` does; modules are taken in the order in which they
    finish. Where several ranks train the model, all of them call this.
    """
    found: list[str] = [] if inputs.isfinite().all() else ["the input batch"]

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            if found or not isinstance(output, Tensor) or output.isfinite().all():
                return
            own = module.named_parameters(recurse=False)
            bad = [key for key, parameter in own if not parameter.isfinite().all()]
            path = f"{name}." if name else ""
            found.append(f"parameter {path}{bad[0]}" if bad else f"output of {name or 'the model'}")

        return hook

    handles = [module.register_forward_hook(look(n)) for n, module in model.named_modules()]
    try:
        with torch.no_grad():
            forward(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None
