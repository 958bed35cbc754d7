"""What activation checkpointing runs again in backward, run where it ran in forward.

A checkpoint drops what a function keeps for backward, and calls the function a second time there.
By then the region it ran in may have been left, and torch brings back its own state alone. Of the
two kinds, one asks for what it dropped through the hooks of saved tensors; the other, the reentrant
one, is an autograd function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What saved_tensors_hooks take: how a tensor is kept for backward, and how it comes back."""
Around = Callable[[], AbstractContextManager[Any]]
"""Makes what a recomputation runs in."""


def surrounding_hooks() -> Hooks | None:
    """The innermost saved_tensors_hooks around this call: activation checkpointing, offloading.

    torch asks only the innermost, so that whoever adds a pair has to hand on to this one.
    """
    # the argument: as a saved tensor itself would ask
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def hooks_around(hooks: Hooks, around: Around) -> AbstractContextManager[None]:
    """Hooks that do what ``hooks`` do, and what these recompute within ``around``.

    A checkpoint recomputes when the first tensor that it kept is asked for, so that every tensor
    has to be kept this way.
    """
    pack, unpack = hooks

    def unpack_around(packed: Any) -> Tensor:
        with around():
            return unpack(packed)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack_around)


@dataclass(frozen=True, slots=True)
class _Around:
    """A function within something of its own at each call."""

    run: Callable[..., Any]
    around: Around

    def __call__(self, *args: Any) -> Any:
        with self.around():
            return self.run(*args)


def let_reentrant_recompute(around: Around) -> None:
    """Let the reentrant checkpoints in whose forward this is called recompute within ``around``.

    Nothing but its context tells such an autograd function in backward what to run. torch,
    DeepSpeed and Megatron give both the same names.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_qualname == "CheckpointFunction.forward":
            context = frame.f_locals["ctx"]
            # what the checkpoint asks of its inputs comes before it keeps the function
            run = getattr(context, "run_function", None)
            if run is not None and not isinstance(run, _Around):
                context.run_function = _Around(run, around)
        frame = frame.f_back
