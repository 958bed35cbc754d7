"""What a step and an evaluation of a run say of themselves."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """loss: the mean over the step's rows, before its update; grad_norm: before clipping, unscaled.

    loss_scale: the step's, None without loss scaling; skipped: steps so far that updated nothing,
    since a gradient overflowed or, where the configuration skips those, was not finite.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    grad_norm: float | None
    loss_scale: float | None
    skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """loss: the mean over the evaluation rows; accuracy: the share that is right, in [0, 1].

    An answer is right if the largest of the output's last dimension is the target's. None where the
    output [N, ..., classes] does not belong to whole-number targets [N, ...].
    """

    loss: float
    accuracy: float | None
