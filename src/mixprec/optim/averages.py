"""Averages of parameters in float32, whatever the parameters' types."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mixprec.optim.updates import float32_at_least


class ExponentialMovingAverage:
    """Exponential moving averages of a model's parameters.

        average = average + (1 - decay) * (parameter - average),   average = parameter at first

    In the parameters' own type this stands still: with bfloat16 and a decay of 0.999 an average at
    1.0 stays there, however far the parameter is, up to 4.9.

    Args:
        model: Its parameters are averaged, each once, by name; buffers are not.
        decay: 0 (the average is the parameter) to 1 (it never moves).

    Attributes:
        averages: Name -> tensor: float32 for 16-bit parameters, else of the parameter's type.

    Raises:
        ValueError: decay out of range.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 <= decay <= 1:
            raise ValueError(f"decay: got {decay}; must be from 0 to 1; change it, 0.999 is usual")
        self.model = model
        self.decay = decay
        self.averages: dict[str, Tensor] = {
            name: parameter.detach().to(float32_at_least(parameter.dtype), copy=True)
            for name, parameter in model.named_parameters()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages; call it after each step that was taken, not after a skipped one."""
        for name, parameter in self.model.named_parameters():
            average = self.averages[name]
            average.lerp_(parameter.to(average), 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within this context the model has the averages, rounded to nearest in its types.

        At the end it has its own values again, bit for bit; ``MixedPrecision`` keeps its masters.
        """
        with torch.no_grad():
            parameters = dict(self.model.named_parameters())
            own = {name: parameter.clone() for name, parameter in parameters.items()}
            for name, parameter in parameters.items():
                parameter.copy_(self.averages[name])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.copy_(own[name])

    def state_dict(self) -> dict[str, Any]:
        """The decay and the averages, which share their memory with these."""
        return {"decay": self.decay, "averages": dict(self.averages)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave for a model of the same parameters.

        Raises:
            ValueError: Other names or shapes; nothing is loaded then.
        """
        shapes = {name: tuple(average.shape) for name, average in self.averages.items()}
        saved = {name: tuple(average.shape) for name, average in state["averages"].items()}
        if saved != shapes:
            faults = sorted(dict(saved.items() ^ shapes.items()))
            raise ValueError(
                f"state: got other names or shapes for {', '.join(faults)}; must be those of the "
                "model's parameters; load it for the same model"
            )
        self.decay = state["decay"]
        for name, average in self.averages.items():
            average.copy_(state["averages"][name])
