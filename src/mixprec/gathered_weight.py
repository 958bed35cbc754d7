"""A weight that came over the network in codes: what FSDP2 hands to a layer in place of numbers.

    w[N, K] ~= codes * scale

It has a weight's shape and type, and no elements of its own: products ask for the operand that they
need, and for anything else it says that there is nothing to compute with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from mixprec.quantization import QuantizedTensor

_aten = torch.ops.aten
# what nn.Parameter and FSDP2 make of a weight that they are given
_SAME = {_aten.detach.default, _aten.alias.default}
# what FSDP2 makes for a weight that got no gradient
_NEW = {_aten.zeros_like.default, _aten.ones_like.default, _aten.empty_like.default}


class WeightSource(Protocol):
    """Where a gathered weight's operands come from."""

    def operand(self, position: int) -> QuantizedTensor:
        """The weight as the operand at this position of ``Recipe.specs``."""

    def decoded(self) -> Tensor:
        """The weight as the codes that are here have it; asks no other rank."""

    def high_precision(self) -> Tensor:
        """The weight itself; all ranks have to ask."""


class GatheredWeight(Tensor):
    """A weight [N, K] of which only codes are here; made by ``mixprec.gather_codes``.

    Attributes:
        source: Gives its operands.

    Raises:
        ValueError: An operation other than a converted layer's products is made with it.
    """

    source: WeightSource

    @staticmethod
    def __new__(
        cls, source: WeightSource, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> Self:
        """A weight of this shape, type and place, contiguous."""
        weight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        weight.source = source
        return weight

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Itself under another name, or an empty tensor of its shape; no arithmetic."""
        weight = args[0]
        is_whole = func is _aten.as_strided.default and tuple(args[1]) == tuple(weight.shape)
        if func in _SAME or is_whole:
            return cls(weight.source, weight.shape, weight.dtype, weight.device)
        if func in _NEW:
            own = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            return func(own, **(kwargs or {}))
        # binary operators of Python would hide a TypeError
        raise ValueError(
            f"weight: got {func}; of a weight gathered in codes there is nothing but its layer's "
            "products; read weights outside of forward and backward, where they are sharded, or "
            "shard the model without mixprec.gather_codes"
        )

    def isfinite(self) -> Tensor:
        """Where it is neither infinite nor NaN, as far as its codes tell."""
        return self.source.decoded().isfinite()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight(shape={tuple(self.shape)}, dtype={self.dtype})"


def high_precision(weight: Tensor) -> Tensor:
    """The weight itself; of one that was gathered in codes all ranks have to ask."""
    return weight.source.high_precision() if isinstance(weight, GatheredWeight) else weight
