"""What is measured: models with batches for them, and presets that name a whole experiment."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from mixprec.formats import lookup
from mixprec.train.config_fields import OptimizerConfig
from mixprec.train.models import MODELS, Loss, build_model

AUTO = "auto"
_ADAM = OptimizerConfig(name="adam", lr=1e-3)
EAGER, COMPILED = "eager", "compiled"
MODES = (EAGER, COMPILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its loss and its batches.

    Attributes:
        name: For tables.
        build: The model on the CPU, initialised from the global generator.
        loss: (output, targets) -> the mean loss, a scalar.
        batch: (rows, generator) -> inputs and targets on the CPU, rows of each.
        unit: What throughput counts, in the plural.
        units_per_row: How many of them a row of a batch is.
    """

    name: str
    build: Callable[[], nn.Module]
    loss: Loss
    batch: Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
    unit: str = "items"
    units_per_row: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One experiment: what `mixprec.bench.run` takes unless it is told otherwise."""

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    recipes: tuple[str, ...] = ("fp32", "bf16", "fp8_tensorwise", "fp8_rowwise", "mxfp8")
    base: str | None = None
    modes: tuple[str, ...] = (EAGER,)
    batches: tuple[int, ...] = (8,)
    steps: int = 12
    warmup: int = 2
    optimizer: OptimizerConfig = _ADAM


PUBLISHED = Preset(
    model="vit",
    options=MappingProxyType({"preset": "huge"}),
    recipes=("bf16", "fp8_delayed", "fp8_tensorwise"),
    base="bf16",
    modes=MODES,
    batches=(16, 32),
    steps=50,
    warmup=11,
)
"""A ViT of 632M parameters by Adam and cross-entropy, as the published FP8 experiment had it."""

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "mnist-cnn": Preset(model="mnist_cnn", batches=(64,), steps=22),
        **{
            f"{model}-{size}": Preset(model=model, options=MappingProxyType({"preset": size}))
            for model in ("vit", "gpt")
            for size in MODELS[model].presets
        },
        "vit-huge": PUBLISHED,
    }
)


def get_preset(name: str) -> Preset:
    """The preset of a name.

    Raises: ValueError: An unknown name; the message has near ones.
    """
    return lookup("preset", name, PRESETS, {})


def workload_of(model: str, options: Mapping[str, Any]) -> Workload:
    """A model of `mixprec.train` with batches in its shape, the same for every contender.

    Images are normal noise and image i has label i modulo the classes; text is a file of Python's
    standard library, cut at random places.

    Raises: ValueError: No such model, or options that it does not take.
    """
    entry = lookup("model", model, MODELS, {})
    arguments = entry.arguments(options)
    name = "-".join(str(part) for part in (model, options.get("preset")) if part is not None)

    def build() -> nn.Module:
        return build_model(model, options).model

    if entry.data == "text":
        length = arguments["context"]
        return Workload(
            name=name,
            build=build,
            loss=entry.loss,
            batch=lambda rows, generator: _text(rows, length, generator),
            unit="tokens",
            units_per_row=length,
        )
    size, channels = arguments.get("size", 28), arguments.get("channels", 3 if arguments else 1)
    classes = arguments.get("classes", 10)
    return Workload(
        name=name,
        build=build,
        loss=entry.loss,
        batch=lambda rows, generator: _images(rows, (channels, size, size), classes, generator),
        unit="images",
    )


def _images(
    rows: int, shape: tuple[int, ...], classes: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, *shape, generator=generator), torch.arange(rows) % classes


def _text(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Bytes, and after each the next one."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)
    starts = torch.randint(len(text) - length, (rows, 1), generator=generator)
    windows = text.long()[starts + torch.arange(length + 1)]
    return windows[:, :-1], windows[:, 1:]
