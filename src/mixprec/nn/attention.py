"""Converted multi-head attention: its projections, and its attention where the recipe asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mixprec.nn.calls import ATTENTION, QuantizedCalls, TakenOver
from mixprec.recipes import Recipe

_INPUTS = ("query", "key", "value")


class QuantizedMultiheadAttention(QuantizedCalls, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` whose projections follow a recipe; made by ``mixprec.convert``.

    query W_q^T, key W_k^T and value W_v^T are three products, each with its part of the weight,
    whether or not the three inputs are one tensor; ``out_proj`` is a layer of its own and is
    called. Attention is two more products where ``recipe.attention`` is set and weights are not
    asked for (``need_weights=False``).
    """

    @staticmethod
    def sizes(layer: Any) -> tuple[int, ...]:
        return layer.embed_dim, layer.kdim, layer.vdim

    @staticmethod
    def why_not(layer: Any, recipe: Recipe) -> str | None:
        return None

    def product_names(self) -> tuple[str, ...]:
        return (*_INPUTS, *([ATTENTION] if self.recipe.attention else []))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.MultiheadAttention``, without its fast path for evaluation."""
        handlers: dict[Callable[..., Any], Callable[..., Any]] = dict(self._functions_taken_over())
        handlers[nn.functional.linear] = _Projections(self)
        with TakenOver(handlers):
            return nn.MultiheadAttention.forward(self, *args, **kwargs)


class _Projections:
    """The linear calls of one forward pass, in torch's order: query, key and value, then out.

    torch asks for all three at once where the inputs are one tensor, for key and value at once
    where those are.
    """

    def __init__(self, layer: QuantizedMultiheadAttention) -> None:
        self._layer = layer
        self._done = 0

    def __call__(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        layer = self._layer
        if self._done == len(_INPUTS):
            return layer.out_proj(input)
        names = _INPUTS[self._done : self._done + weight.shape[0] // layer.embed_dim]
        biases = [None] * len(names) if bias is None else bias.chunk(len(names))
        parts = [
            self._project(name, input, part, part_bias)
            for name, part, part_bias in zip(names, weight.chunk(len(names)), biases, strict=True)
        ]
        self._done += len(names)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def _project(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        layer = self._layer
        owner = layer.in_proj_weight
        if owner is None:
            owner = getattr(layer, f"{name[0]}_proj_weight")
        return layer.multiply(x, weight, bias, name=name, owner=owner)


class CallingEncoderLayer(nn.TransformerEncoderLayer):
    """``nn.TransformerEncoderLayer`` that calls its layers in evaluation too.

    torch's fast path reads their weights and multiplies by itself, where this is not 0.
    """

    activation_relu_or_gelu: int = property(lambda self: 0)  # type: ignore[assignment]


class CallingEncoder(nn.TransformerEncoder):
    """``nn.TransformerEncoder`` that calls its layers with ordinary tensors in evaluation too."""

    use_nested_tensor: bool = property(lambda self: False)  # type: ignore[assignment]
