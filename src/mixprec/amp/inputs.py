"""Inputs in a model's type: a nested batch, its floating-point tensors cast, the rest as it was."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from mixprec.formats import FloatFormat, get_format
from mixprec.quantization import QuantizedTensor
from mixprec.rounding import SOURCE_FORMATS

Batch = TypeVar("Batch")


def cast_inputs(batch: Batch, dtype: str | torch.dtype | FloatFormat) -> Batch:
    """The batch with its floating-point tensors in a type, as a model in 16 bits expects it.

    Args:
        batch: Tensors in any nest of lists, tuples, named tuples, dictionaries, dataclasses and
            whatever is registered with torch's pytrees.
        dtype: fp16, bf16, fp32 or fp64: a name, a format or a torch.dtype.

    Returns:
        The same containers around tensors of the new type, on their devices and in the graph of
        gradients. What has the type already is the same object, containers included, as with
        ``Tensor.to``; no argument is changed.

    Raises:
        ValueError: Another format.
        TypeError: A dtype that is none of these kinds.

    Edge cases: integers, booleans, complex numbers, codes of narrow formats, ``QuantizedTensor``,
    arrays of other libraries and any other object pass through, for which a model has its own use.
    Dictionaries of a type that torch does not know, and dataclasses, are copied shallowly.

    Exactness: rounded to nearest, ties to even; past a narrower type's range to infinity.
    """
    return _cast(batch, _target(dtype))


def _target(dtype: str | torch.dtype | FloatFormat) -> torch.dtype:
    """The torch type of a name, a format or a type."""
    if isinstance(dtype, torch.dtype):
        found = dtype if dtype in SOURCE_FORMATS else None
    else:
        fmt = get_format(dtype)
        found = next((known for known, own in SOURCE_FORMATS.items() if own == fmt), None)
    if found is None:
        names = ", ".join(map(str, SOURCE_FORMATS.values()))
        raise ValueError(
            f"dtype: got {dtype}; inputs are whole tensors of {names}; pass one of these, and let "
            "a recipe round further"
        )
    return found


def _cast(node: Any, dtype: torch.dtype) -> Any:
    """One level at a time, so that every part without a change stays the object that it was."""
    children, structure = tree_flatten(node, is_leaf=lambda inner: inner is not node)
    if len(children) == 1 and children[0] is node:
        return _cast_leaf(node, dtype)
    found = [_cast(child, dtype) for child in children]
    if all(new is old for new, old in zip(found, children, strict=True)):
        return node
    return tree_unflatten(found, structure)


def _cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    """What pytrees take for a leaf: a tensor, or a container that they do not know."""
    if isinstance(leaf, Tensor):
        return leaf.to(dtype) if leaf.dtype in SOURCE_FORMATS else leaf
    if isinstance(leaf, MutableMapping):
        entries = {key: _cast(value, dtype) for key, value in leaf.items()}
        changed = {key: value for key, value in entries.items() if value is not leaf[key]}
        result = copy.copy(leaf) if changed else leaf
        for key, value in changed.items():
            result[key] = value
        return result
    if _is_record(leaf):
        names = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
        new = {name: _cast(getattr(leaf, name), dtype) for name in names}
        changed = {name: value for name, value in new.items() if value is not getattr(leaf, name)}
        result = copy.copy(leaf) if changed else leaf
        for name, value in changed.items():
            object.__setattr__(result, name, value)  # a frozen one refuses setattr
        return result
    return leaf


def _is_record(leaf: Any) -> bool:
    """Whether it is an instance of a dataclass that holds inputs."""
    is_class = isinstance(leaf, type | QuantizedTensor)
    return dataclasses.is_dataclass(leaf) and not is_class
