"""Functions of torch that multiply inside a module's forward, taken over by its recipe.

Attention and grouped products belong to no module of torch's: users call the functions. A module
whose own forward does so is given a class whose forward runs with those calls taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mixprec.attention import attention
from mixprec.grouped import grouped_mm
from mixprec.linear_products import LinearState
from mixprec.nn.layer import QuantizedLayer
from mixprec.policy import BODIES
from mixprec.recipes import Recipe
from mixprec.sharding import WHOLE, Sharding

Handlers = Mapping[Callable[..., Any], Callable[..., Any]]
ATTENTION = "scaled_dot_product_attention"
GROUPED = "grouped_mm"
_NAMES = frozenset({ATTENTION, GROUPED, f"_{GROUPED}"})
_GROUPED_FUNCTIONS = tuple(
    getattr(place, name)
    for place, name in ((nn.functional, GROUPED), (torch, f"_{GROUPED}"))
    if hasattr(place, name)
)


class TakenOver(TorchFunctionMode):
    """A stretch in which functions of torch are handled by others; entered once."""

    def __init__(self, handlers: Handlers) -> None:
        super().__init__()
        self._handlers = handlers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        body = BODIES.get(func)
        if body is None and getattr(func, "__name__", "") == "unflatten":
            # Dynamo cannot call the method from inside a mode, nor tell it by itself
            return torch.unflatten(*args, **(kwargs or {}))
        if body is None:
            return func(*args, **(kwargs or {}))
        # an operation written in Python: it may call what is taken over
        with TakenOver(self._handlers):
            return body(*args, **(kwargs or {}))


def called_names(kind: type[nn.Module]) -> frozenset[str]:
    """Which of the functions a class' own forward names."""
    code = getattr(kind.forward, "__code__", None)
    return _NAMES & set(code.co_names if code is not None else ())


class QuantizedCalls(QuantizedLayer):
    """A module whose calls of attention and grouped products follow a recipe.

    Attention is taken over where ``recipe.attention`` is set.
    """

    @staticmethod
    def sizes(layer: Any) -> tuple[int, ...]:
        return ()

    @staticmethod
    def why_not(layer: Any, recipe: Recipe) -> str | None:
        if any(spec is not None and spec.is_delayed for spec in recipe.specs):
            return f"recipe {recipe} has delayed scaling, whose histories belong to one product"
        kinds: list[type[nn.Module]] = type(layer).mro()
        own = next(kind for kind in kinds if not issubclass(kind, QuantizedLayer))
        if called_names(own) <= {ATTENTION} and not recipe.attention:
            return "its attention is in high precision; set the recipe's attention=True"
        return None

    def product_names(self) -> tuple[str, ...]:
        return (ATTENTION, GROUPED)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, its products by the recipe."""
        with TakenOver(self._functions_taken_over()):
            return super().forward(*args, **kwargs)

    def _functions_taken_over(self) -> Handlers:
        handlers: dict[Callable[..., Any], Callable[..., Any]] = {}
        if self.recipe.attention:
            handlers[nn.functional.scaled_dot_product_attention] = self._own_attention
        handlers |= dict.fromkeys(_GROUPED_FUNCTIONS, self._own_grouped)
        return handlers

    def _own_attention(self, *args: Any, **kwargs: Any) -> Tensor:
        return attention(
            *args,
            **kwargs,
            recipe=self.recipe,
            noise=self.noise(ATTENTION),
            impl=self.impl,
            state=self._counting("scores"),
            values_state=self._counting("values").later(),
        )

    def _own_grouped(self, *args: Any, **kwargs: Any) -> Tensor:
        return grouped_mm(
            *args,
            **kwargs,
            recipe=self.recipe,
            noise=self.noise(GROUPED),
            impl=self.impl,
            state=self._counting(GROUPED, self.active_sharding()),
        )

    def _counting(self, name: str, sharding: Sharding = WHOLE) -> LinearState:
        """Of the first product of a name, as observers are told it."""
        return LinearState(
            records_forward=self._is_recording(),
            records_backward=self.training,
            observers=self._told(name),
            sharding=sharding,
        )
