"""Products of 16-bit tensors in FP32, where a device has no fast units for them.

    out = round(f(float32(a), float32(b), ...))        each gradient rounded alike

Widening is exact, products of 11-bit mantissas are exact in FP32, so that only the sums round, as
on units of 16 bits, and the result once. Backward is that of f in FP32 with the rounding of each
cast: the gradient arrives in 16 bits and leaves in 16 bits.

Exactness: within half an ulp of the 16-bit type plus K * 2^-24 * sum|a||b| of the exact product.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)
# an entry of saved_tensors_hooks: the tensor itself, or the 16-bit one that it was widened from
_Kept = Tensor | tuple[Tensor, int, torch.Size, tuple[int, ...], Any]


def has_fast_units(x: Tensor) -> bool:
    """Whether products of x's 16-bit type run on units of their own where x is.

    A CPU counts as one without: what torch runs there differs from one generation to the next, and
    without AVX-512 it takes 40 to 150 times as long as FP32.
    """
    return x.device.type != "cpu"


def mapped(value: Any, change: Callable[[Tensor], Tensor], dtypes: tuple[torch.dtype, ...]) -> Any:
    """Nested tuples, lists and dicts, with the tensors of some types changed."""
    if isinstance(value, Tensor):
        return change(value) if value.dtype in dtypes else value
    if isinstance(value, tuple | list):
        items = [mapped(item, change, dtypes) for item in value]
        if isinstance(value, list):
            return items
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: mapped(item, change, dtypes) for key, item in value.items()}
    return value


def widened(
    f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> Any:
    """f of the arguments in FP32, its float32 results rounded to dtype.

    Args:
        f: An operation that multiplies.
        args, kwargs: What it is called with; tensors of 16 bits are widened.
        dtype: bfloat16 or float16.

    Returns:
        f's results. Backward keeps the 16-bit tensors, not their float32 copies.
    """
    if torch.compiler.is_compiling():
        # Inductor carries 16-bit tensors in FP32, unrounded: the product has to be run as it stands
        torch._dynamo.graph_break(msg="products of 16 bits are emulated here")
    kept = _Originals()
    args, kwargs = mapped((args, kwargs), kept.widen, NARROW)
    keeps = torch.is_grad_enabled()
    hooks = torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack)
    with hooks if keeps else nullcontext():
        out = f(*args, **kwargs)
    return mapped(out, lambda x: x.to(dtype), (torch.float32,))


class _Originals:
    """The 16-bit tensors of one operation, kept for backward in place of their wide copies."""

    def __init__(self) -> None:
        self._sources: dict[int, Tensor] = {}

    def widen(self, x: Tensor) -> Tensor:
        wide = x.float()
        if wide.numel():
            self._sources[wide.untyped_storage().data_ptr()] = x.detach()
        return wide

    def pack(self, saved: Tensor) -> _Kept:
        if saved.layout != torch.strided or saved.dtype != torch.float32:
            return saved
        source = self._sources.get(saved.untyped_storage().data_ptr())
        if source is None:
            return saved
        return source, source._version, saved.shape, saved.stride(), saved.storage_offset()

    def unpack(self, kept: _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        source, version, shape, stride, offset = kept
        if source._version != version:
            raise RuntimeError(
                f"backward: got a tensor of shape {tuple(source.shape)} that was modified in place "
                "after a product kept it for its gradient; clone it before the change"
            )
        return source.float().as_strided(shape, stride, offset)
