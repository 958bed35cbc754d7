"""Repeated blocks: runs of identical modules in a container, of which a few stand for all.

What a step costs is linear in the number of such blocks once there are two of them, a first and a
last one; so two and three of them are run, and the rest is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from mixprec.nn.layer import NUMERICS_ATTRIBUTES

FEWEST = 2
"""Blocks that are left of a run: a first and a last one."""
_PLAIN = (bool, int, float, str, tuple, type(None))
_Signature = tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """A run of identical blocks among the children of a container.

    Attributes:
        container: An ``nn.Sequential`` or ``nn.ModuleList``, which call or list their children.
        blocks: All of them, in their order.
    """

    container: nn.Module
    blocks: tuple[nn.Module, ...]


def find_repeats(model: nn.Module) -> list[Repeat]:
    """The runs of more than ``FEWEST`` + 1 identical blocks, the outermost of those inside others.

    Identical are modules of the same classes, shapes, types, recipes and plain attributes, none of
    whose parameters has a second place in the model.
    """
    shared = _shared_parameters(model)
    found: list[Repeat] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, nn.Sequential | nn.ModuleList):
            continue
        for _, run in groupby(module.children(), _signature):
            blocks = list(run)
            parameters = {id(p) for block in blocks for p in block.parameters()}
            is_own = parameters and parameters.isdisjoint(shared)
            if is_own and len(blocks) > FEWEST + 1:
                found.append(Repeat(container=module, blocks=tuple(blocks)))
                inside |= {id(inner) for block in blocks for inner in block.modules()}
    return found


@contextmanager
def shortened(repeats: Sequence[Repeat], counts: Sequence[int]) -> Iterator[None]:
    """A stretch in which each run has so many blocks; afterwards all are back."""
    whole = {id(repeat.container): repeat.container._modules for repeat in repeats}
    try:
        for repeat, count in zip(repeats, counts, strict=True):
            left_out = set(map(id, repeat.blocks[count:]))
            children = [c for c in repeat.container.children() if id(c) not in left_out]
            # a list is indexed by number
            repeat.container._modules = {str(place): c for place, c in enumerate(children)}
        yield
    finally:
        for repeat in repeats:
            repeat.container._modules = whole[id(repeat.container)]


def _shared_parameters(model: nn.Module) -> set[int]:
    """Parameters that have several places."""
    seen: set[int] = set()
    shared: set[int] = set()
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                (shared if id(parameter) in seen else seen).add(id(parameter))
    return shared


def _signature(block: nn.Module) -> _Signature:
    """What two blocks have alike that do the same."""
    return tuple((name, *_traits(module)) for name, module in block.named_modules())


def _traits(module: nn.Module) -> _Signature:
    own: Mapping[str, Any] = vars(module)
    plain = {
        key: value
        for key, value in own.items()
        if isinstance(value, _PLAIN) and key not in NUMERICS_ATTRIBUTES
    }
    tensors = {**module._parameters, **module._buffers}
    shapes = [
        (name, None if t is None else (tuple(t.shape), t.dtype, t.requires_grad))
        for name, t in tensors.items()
    ]
    return type(module), repr(plain), tuple(shapes), own.get("recipe")
