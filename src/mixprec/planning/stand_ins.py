"""Tensors that stand for a target's own: shapes and types, and bytes that are not there.

A GPU's are on torch's meta device. A CPU looks at values, and works in compiled loops or in pieces
that stay in its cache: its own are torch's fake tensors, which say that they are there, so that
code takes the passes that it takes on a CPU. A value that is asked for is 1, and tensors that are
compared are equal: as of healthy numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mixprec.modes import EagerMode
from mixprec.planning.batches import META
from mixprec.planning.remembered import Remembering

CPU = torch.device("cpu")


@contextmanager
def stand_ins(model: nn.Module, device: torch.device) -> Iterator[None]:
    """A stretch in which new tensors on a device have no bytes, nor has the model, made on meta.

    Args:
        model: What becomes of it is of use in the stretch only.
        device: meta, or the CPU.
    """
    if device == META:
        with Remembering():
            yield
        return
    # it takes seconds to import
    from torch._subclasses.fake_tensor import FakeTensorMode

    # some operands are tables of numbers
    with FakeTensorMode(allow_non_fake_inputs=True), _Answers():
        _put(model, device)
        yield


def _put(model: nn.Module, device: torch.device) -> None:
    """Every tensor replaced by one on the device: ``nn.Module.to`` cannot do it with fake ones."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        places: tuple[dict[str, Any], ...] = module._parameters, module._buffers, vars(module)
        for held in places:
            for name, tensor in held.items():
                if isinstance(tensor, Tensor):
                    if id(tensor) not in made:
                        made[id(tensor)] = _on(tensor, device)
                    held[name] = made[id(tensor)]


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    new = torch.empty_like(tensor, device=device)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(new, tensor.requires_grad) if is_parameter else new


class _Answers(EagerMode):
    """Answers what is asked of values that are not there."""

    # compiled loops allocate what they write to, and write nothing there
    sees_memory_only = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1
        return func is torch.ops.aten.equal.default or func(*args, **(kwargs or {}))
