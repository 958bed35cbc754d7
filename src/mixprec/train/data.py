"""Data sets that a configuration can name."""

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mixprec.train.digits import mnist
from mixprec.train.random_images import random_images
from mixprec.train.splits import Dataset
from mixprec.train.text import text

DATASETS: Mapping[str, Callable[..., Dataset]] = MappingProxyType(
    {"mnist": mnist, "random_images": random_images, "text": text}
)


def option_names(name: str) -> list[str]:
    """Names that the options of a data set may have."""
    return list(inspect.signature(DATASETS[name]).parameters)[1:]


def open_dataset(
    name: str, path: str | None, options: Mapping[str, Any], model_arguments: Mapping[str, Any]
) -> Dataset:
    """The data set of a name; what the options leave open follows the model's arguments.

    Args:
        options, model_arguments: Only those named in `option_names` matter: the size of a model's
            images, its classes, its context.

    Raises: ImportError, ValueError: As the data set's own function.
    """
    names = option_names(name)
    chosen = {key: model_arguments[key] for key in names if key in model_arguments}
    return DATASETS[name](path, **chosen | dict(options))
