"""Tensors that are alive, and which of them a test has made."""

from __future__ import annotations

import gc
import weakref

from torch import Tensor


def live_tensors() -> list[weakref.ref[Tensor]]:
    """All that there are once the garbage is collected; none is kept by it."""
    gc.collect()
    # not isinstance: it asks every lazy module that torch holds for its class
    return [weakref.ref(entry) for entry in gc.get_objects() if issubclass(type(entry), Tensor)]


def new_tensors(before: list[weakref.ref[Tensor]]) -> int:
    """How many there are beside those that other tests left behind and may free meanwhile."""
    old = {id(tensor) for ref in before if (tensor := ref()) is not None}
    return sum(id(ref()) not in old for ref in live_tensors())
