"""Models that a configuration can name: those of `MODELS`, or a function of the user's.

`mnist_cnn` is the network of PyTorch's MNIST example, layer for layer; `vit` and `gpt` are in
`transformers.py`. `model_options` are the arguments of the model's function; where a model has
presets, `preset` names one whose arguments the others change. A name with a colon,
`package.module:function`, is the user's own function.
"""

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from mixprec.formats import lookup
from mixprec.train.transformers import (
    GPT,
    GPT_PRESETS,
    VIT_PRESETS,
    VisionTransformer,
    check_gpt,
    check_vision,
)

Loss = Callable[[Tensor, Tensor], Tensor]
_USER_MODEL = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class MnistCNN(nn.Module):
    """Two 3x3 convolutions, max pool, two linear layers; inputs [N, 1, 28, 28].

    Returns log-probabilities [N, 10], so its loss is the negative log-likelihood. 1,199,882
    parameters, 1,179,776 of them in `fc1`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of logits [..., classes] against int64 targets [...]."""
    try:
        return F.cross_entropy(output.flatten(0, -2), targets.flatten())
    except IndexError as error:
        raise ValueError(
            f"model_options.classes: got {output.shape[-1]}, the outputs; the data has "
            f"targets from {targets.min()} to {targets.max()}; give more classes"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """How to make a model and what it minimises.

    build: called with the options as keywords and the global generator seeded; returns the model
        on the CPU.
    loss: (output, targets [N] or [N, T]) -> the mean loss over the targets, a scalar tensor.
    data: the data set it trains on where a configuration names none.
    presets: arguments of `build` by name, the default first.
    check: called as `build` is; raises ValueError for arguments that `build` would not take.
    """

    build: Callable[..., nn.Module]
    loss: Loss
    data: str = "mnist"
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    check: Callable[..., None] = lambda **_: None

    @property
    def options(self) -> list[str]:
        """Names that `model_options` may have."""
        names = list(inspect.signature(self.build).parameters)
        return (["preset"] if self.presets else []) + names

    def arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `build`: the preset's, the options over them.

        Raises: ValueError: An unknown preset, or arguments that cannot be.
        """
        arguments = dict(options)
        if self.presets:
            preset = arguments.pop("preset", next(iter(self.presets)))
            if not isinstance(preset, str):
                raise ValueError(f"preset: got {preset!r}; use {', '.join(self.presets)}")
            arguments = {**lookup("preset", preset, self.presets, {}), **arguments}
        self.check(**arguments)
        return arguments


MODELS: Mapping[str, ModelEntry] = MappingProxyType(
    {
        "mnist_cnn": ModelEntry(build=MnistCNN, loss=F.nll_loss),
        "vit": ModelEntry(
            build=VisionTransformer,
            loss=cross_entropy,
            data="random_images",
            presets=VIT_PRESETS,
            check=check_vision,
        ),
        "gpt": ModelEntry(
            build=GPT, loss=cross_entropy, data="text", presets=GPT_PRESETS, check=check_gpt
        ),
    }
)


class BuiltModel(NamedTuple):
    """A model on the CPU, and its loss as in `ModelEntry`."""

    model: nn.Module
    loss: Loss


def build_model(name: str, options: Mapping[str, Any]) -> BuiltModel:
    """The model of a name with options, initialised from the global generator.

    Args:
        name: An entry of `MODELS`, or `package.module:function`: a function, found from the
            current directory too, that takes the options as keywords and returns a module, or a
            pair of a module and its loss; without one the loss is `cross_entropy`.

    Raises:
        ValueError: Options that do not fit, or a function that cannot be found or called.
        TypeError: It returned something else.
        ImportError: Its module needs another one that is not installed.
    """
    if not is_user_model(name):
        entry = lookup("model", name, MODELS, {})
        return BuiltModel(entry.build(**entry.arguments(options)), entry.loss)
    # Imports that the function does when called are found as well.
    with _current_directory_importable():
        built = _called(name, _user_function(name), options)
    model, loss = built if isinstance(built, tuple) and len(built) == 2 else (built, cross_entropy)
    if not isinstance(model, nn.Module) or not callable(loss):
        raise TypeError(
            f"model: got {name}, which returned {type(built).__name__}; it must return a "
            "torch.nn.Module, or a pair of one and its loss(output, targets); return that"
        )
    return BuiltModel(model, loss)


def model_arguments(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that `build_model` calls a model's function with, its own defaults apart."""
    return dict(options) if is_user_model(name) else MODELS[name].arguments(options)


def is_user_model(name: str) -> bool:
    """Whether a model's name is `package.module:function` rather than an entry of `MODELS`."""
    return ":" in name


def check_model_name(name: str) -> str:
    """The name, if a model can have it.

    Raises: ValueError: It is no entry of `MODELS` and does not read `package.module:function`.
    """
    if not is_user_model(name):
        lookup("model", name, MODELS, {})
        return name.lower()
    if not _USER_MODEL.fullmatch(name):
        raise ValueError(
            f"model: got {name!r}; a model of one's own reads package.module:function; write it so"
        )
    return name


def _user_function(name: str) -> Callable[..., Any]:
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # One that the module itself imports is another fault, with its own message.
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"model: got {name!r}; there is no module {error.name} in {os.getcwd()} or among the "
            "installed ones; run where it can be imported, or correct the name"
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"model: got {name!r}; {module_name} ({getattr(found, '__file__', found)}) has no "
                f"{part}; correct the name"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(
            f"model: got {name!r}; it is a {type(found).__name__}, which cannot be called; name a "
            "function that returns a model"
        )
    return found


def _called(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise ValueError(
            f"model_options: got {dict(options)}; {name}{inspect.signature(function)}: {error}; "
            "change either"
        ) from error
    return function(**options)


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    """Imports look in the current directory first, as under `python -m`; sys.path is put back."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(folder)
