"""Clipping of a step's gradients by their norm, where no loss scaler does it."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from mixprec.train.faults import NonFiniteError
from mixprec.train.parallel import whole


def clip(parameters: Iterable[tuple[str, Tensor]], largest: float, step: int) -> float:
    """Scale the gradients in place so that their L2 norm is at most `largest`; the norm before.

        norm = sqrt(sum g^2), in float32 or wider;   grad *= min(1, largest / norm)

    A gradient in shards counts whole: all ranks call this.

    Raises: NonFiniteError: The norm of the step is not finite; the gradients stay.
    """
    named = [(name, p.grad) for name, p in parameters if p.grad is not None]
    norms = [
        whole(torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)))
        for _, grad in named
    ]
    norm = torch.linalg.vector_norm(torch.stack(norms)).item() if norms else 0.0
    if not math.isfinite(norm):
        bad = [name for (name, _), part in zip(named, norms, strict=True) if not part.isfinite()]
        fault = f"gradient {bad[0]}" if bad else "the sum over all gradients"
        raise NonFiniteError(step, "the gradient's norm", fault)
    if norm > largest:
        torch._foreach_mul_([grad for _, grad in named], largest / norm)
    return norm
