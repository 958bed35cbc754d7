"""Products of 16-bit tensors in FP32, where a device has no fast units for them.

    out = round(f(float32(a), float32(b), ...))        each gradient rounded alike

Widening is exact, products of 11-bit mantissas are exact in FP32, so that only the sums round, as
on units of 16 bits, and the result once. Backward is that of f in FP32 with the rounding of each
cast: the gradient arrives in 16 bits and leaves in 16 bits.

Exactness: within half an ulp of the 16-bit type plus K * 2^-24 * sum|a||b| of the exact product.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixprec.gemm.kept_rounding import narrow, widen
from mixprec.recomputation import Hooks, surrounding_hooks

NARROW = (torch.bfloat16, torch.float16)
"""The types whose arithmetic is left to float32."""


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
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
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
        f's results. Backward keeps the 16-bit tensors, not their float32 copies; in compiled code
        what the compiler chooses.
    """
    if torch.compiler.is_compiling():
        args, kwargs = mapped((args, kwargs), widen, NARROW)
        return mapped(f(*args, **kwargs), lambda x: narrow(x, dtype), (torch.float32,))
    kept = _Originals(surrounding_hooks())
    args, kwargs = mapped((args, kwargs), kept.widen, NARROW)
    with kept.hooks():
        out = f(*args, **kwargs)
    kept.forget()
    return mapped(out, lambda x: x.to(dtype), (torch.float32,))


class _Kept(NamedTuple):
    """A tensor kept for backward.

    packed: What the surrounding hooks made of it; the 16-bit tensor in place of its wide copy.
    version: The tensor's then; None where it cannot change unseen or hooks answer for it.
    wide: Shape and strides of the wide copy; None for a tensor that is kept itself.
    view: Shape, strides and offset of what was kept, within the wide copy.
    """

    packed: Any
    version: int | None = None
    wide: tuple[torch.Size, tuple[int, ...]] | None = None
    view: tuple[torch.Size, tuple[int, ...], Any] | None = None


class _Originals:
    """The 16-bit tensors of one operation, kept for backward in place of their wide copies."""

    def __init__(self, outer: Hooks | None) -> None:
        self._outer = outer
        self._sources: dict[int, tuple[Tensor, Tensor]] = {}
        # transforms of torch.func allow no hooks, and their tensors have no storage to tell them by
        self._is_off = torch._C._are_functorch_transforms_active() or not torch.is_grad_enabled()

    def widen(self, x: Tensor) -> Tensor:
        wide = x.float()
        if not self._is_off and x.layout == torch.strided and wide.numel():
            self._sources[wide.untyped_storage()._cdata] = x.detach(), wide.detach()
        return wide

    def hooks(self) -> AbstractContextManager[None]:
        if self._is_off:
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._pack, _unpacker(self._outer))

    def forget(self) -> None:
        """Let go of the tensors that backward does not keep, though the graph keeps the hooks."""
        self._sources.clear()

    def _pack(self, saved: Tensor) -> _Kept:
        pack = self._outer[0] if self._outer is not None else lambda x: x
        if saved.layout != torch.strided or saved.dtype != torch.float32 or not saved.numel():
            return _Kept(pack(saved))
        known = self._sources.get(saved.untyped_storage()._cdata)
        if known is None:
            return _Kept(pack(saved))
        source, wide = known
        return _Kept(
            packed=pack(source),
            version=None if self._outer or source.is_inference() else source._version,
            wide=(wide.shape, wide.stride()),
            view=(saved.shape, saved.stride(), saved.storage_offset()),
        )


def _unpacker(outer: Hooks | None) -> Callable[[_Kept], Tensor]:
    """The way back from ``_Kept``; it holds no tensor of the operation."""

    def unpack(kept: _Kept) -> Tensor:
        x = kept.packed if outer is None else outer[1](kept.packed)
        if kept.wide is None or kept.view is None:
            return x
        if kept.version is not None and x._version != kept.version:
            raise RuntimeError(
                f"backward: got a tensor of shape {tuple(x.shape)} that was modified in place "
                "after a product kept it for its gradient; clone it before the change"
            )
        # hooks may give back other strides than they were given
        wide = torch.empty_strided(*kept.wide, dtype=torch.float32, device=x.device).copy_(x)
        return wide.as_strided(*kept.view)

    return unpack
