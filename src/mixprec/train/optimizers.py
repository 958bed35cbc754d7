"""Optimizers as a configuration asks for them, tried on one number before they train a model."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from mixprec.train.config_fields import OPTIMIZERS, OptimizerConfig
from mixprec.train.toml_text import ConfigError


def make(
    config: OptimizerConfig, parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]]
) -> torch.optim.Optimizer:
    """The optimizer of a configuration, over the parameters, which may have names."""
    return OPTIMIZERS[config.name](parameters, lr=config.lr, **config.options)  # type: ignore[call-arg]


def rehearse(config: OptimizerConfig, device: torch.device) -> None:
    """Take steps with one number, so that options that do not work are found before training.

    Raises: ConfigError: Names the option without which it works, or else all of them.
    """
    fault = _fault(config, device)
    if fault is None:
        return
    without = [
        key
        for key in config.options
        if _fault(
            replace(config, options={k: v for k, v in config.options.items() if k != key}), device
        )
        is None
    ]
    path, value = "optimizer.options", config.options
    if len(without) == 1:
        path, value = f"{path}.{without[0]}", value[without[0]]
    raise ConfigError(f"{path}: got {value!r}; {config.name}: {fault}; correct or leave it out")


def _fault(config: OptimizerConfig, device: torch.device) -> str | None:
    """What the optimizer says against its options, in a line; None where it works."""
    parameter = nn.Parameter(torch.zeros(1, device=device))
    parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer = make(config, [parameter])
        # Some options, SGD's dampening for one, are not read before the second step.
        for _ in range(2):
            optimizer.step()
    except Exception as error:  # An optimizer checks by errors of every kind, asserts among them.
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None
