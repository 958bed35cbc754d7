"""Batches in the shapes that a configuration's data set gives, without its data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from mixprec.train.config import Config
from mixprec.train.data import DATASETS, option_names
from mixprec.train.models import model_arguments

META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a batch: the shapes of its input and target, and the input's type."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


def _digits(_: Mapping[str, Any]) -> Row:
    return Row(inputs=(1, 28, 28))


def _images(options: Mapping[str, Any]) -> Row:
    return Row(inputs=(options["channels"], options["size"], options["size"]))


def _text(options: Mapping[str, Any]) -> Row:
    context = (options["context"],)
    return Row(inputs=context, targets=context, dtype=torch.int64)


ROWS: Mapping[str, Callable[[Mapping[str, Any]], Row]] = MappingProxyType(
    {"mnist": _digits, "random_images": _images, "text": _text}
)
"""What a row of each data set is, by the options of its function."""


def row_of(config: Config) -> Row:
    """A row of the configuration's data, which are not opened; what is open follows the model."""
    name = config.data.name
    defaults = inspect.signature(DATASETS[name]).parameters
    arguments = model_arguments(config.model, config.model_options) | config.data.options
    options = {key: arguments.get(key, defaults[key].default) for key in option_names(name)}
    return ROWS[name](options)


def batch_of(row: Row, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Inputs and targets of so many rows."""
    inputs = torch.zeros(rows, *row.inputs, dtype=row.dtype, device=device)
    return inputs, torch.zeros(rows, *row.targets, dtype=torch.int64, device=device)
