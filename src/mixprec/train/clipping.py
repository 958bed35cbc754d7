"""Clipping of a step's gradients by their norm, where no loss scaler does it."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from mixprec.amp.gradients import total_norm
from mixprec.train.faults import NonFiniteError


def clip(parameters: Iterable[tuple[str, Tensor]], largest: float, step: int) -> float:
    """Scale the gradients in place so that their L2 norm is at most `largest`; the norm before.

        norm = sqrt(sum g^2), in float32 or wider;   grad *= min(1, largest / norm)

    A gradient in shards counts whole: all ranks call this.

    Raises: NonFiniteError: The norm of the step is not finite; the gradients stay.
    """
    named = [(name, p.grad) for name, p in parameters if p.grad is not None]
    norm = total_norm([grad for _, grad in named], 2.0).item()
    if not math.isfinite(norm):
        bad = (name for name, grad in named if not total_norm([grad], 2.0).isfinite())
        name = next(bad, None)
        fault = "the sum over all gradients" if name is None else f"gradient {name}"
        raise NonFiniteError(step, "the gradient's norm", fault)
    if norm > largest:
        torch._foreach_mul_([grad for _, grad in named], largest / norm)
    return norm
