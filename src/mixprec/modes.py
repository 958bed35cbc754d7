"""What a user switches on around operations, and how our own arithmetic stays out of its reach."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


def is_autocast_on(x: Tensor) -> bool:
    """Whether an autocast region is active where x is; torch knows none for meta tensors."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_modes() -> contextlib.AbstractContextManager[None]:
    """A stretch in which torch's function modes see nothing: no policy changes our arithmetic."""
    is_any_active = torch._C._len_torch_function_stack() > 0
    return torch._C.DisableTorchFunction() if is_any_active else contextlib.nullcontext()


@contextlib.contextmanager
def plain_arithmetic(x: Tensor) -> Iterator[None]:
    """A stretch in which neither a mode nor an autocast region reaches operations on x's device."""
    with without_modes():
        if not is_autocast_on(x):
            yield
            return
        with torch.autocast(x.device.type, enabled=False):
            yield
