"""What a configuration consists of: frozen dataclasses, whose fields say what values they take."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, PlainValidator

from mixprec.formats import lookup
from mixprec.gemm.api import IMPLS
from mixprec.train.data import DATASETS
from mixprec.train.models import MODELS, check_model_name
from mixprec.train.recipe_choice import RecipeTable, resolve_recipe

OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = MappingProxyType(
    {
        "adadelta": torch.optim.Adadelta,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
    }
)
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")


def _checked_recipe(value: Any) -> Any:
    if not isinstance(value, str | dict) or not value:
        raise ValueError(f"recipe: got {value!r}; a recipe is a name or a table; name one")
    try:
        resolve_recipe(value)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"recipe: got {value!r}; {error}") from error
    return value


def _one_of(path: str, table: Mapping[str, Any]) -> PlainValidator:
    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError(f"{path}: got {value!r}; a name is text; use {', '.join(table)}")
        lookup(path, value, table, {})
        return value.lower()

    return PlainValidator(check)


def _checked_model(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"model: got {value!r}; a name is text; use {', '.join(MODELS)}")
    return check_model_name(value)


def _checked_device(value: Any) -> str:
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise ValueError(f"train.device: got {value!r}; use auto, cpu, mps, cuda or cuda:N")
    return value


def _checked_compile(value: Any) -> bool | str:
    if isinstance(value, bool) or value in COMPILE_MODES:
        return value
    modes = ", ".join(COMPILE_MODES)
    raise ValueError(f"train.compile: got {value!r}; use true, false or a mode: {modes}")


class _Section:
    __slots__ = ()
    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)


Count = Annotated[int, Field(ge=1, lt=2**31)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertConfig(_Section):
    """Which layers the recipe reaches, and how; the arguments of `mixprec.convert`.

    keep_first, keep_last_share: layers that multiply in bf16 instead, as
    `mixprec.nn.keep_sensitive` chooses them.
    """

    skip: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    multiple_of: Count | None = None
    keep_last: Annotated[int, Field(ge=0)] = 0
    keep_first: Annotated[int, Field(ge=0)] = 0
    keep_last_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    impl: Annotated[str, _one_of("convert.impl", dict.fromkeys(("auto", *IMPLS)))] = "auto"
    cache_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(_Section):
    """name: an entry of DATASETS, by default the model's; path: a file or folder instead of the
    built-in source; sizes in rows.

    workers: processes that make the rows of a data set that is not held in memory, 0 for none;
    None is one a core. options: arguments of the data set's function; those that it shares with the
    model's follow the model's.
    """

    name: Annotated[str, _one_of("data.name", DATASETS)] = "mnist"
    path: str | None = None
    batch_size: Count = 64
    eval_batch_size: Count = 1000
    workers: Annotated[int, Field(ge=0, le=1024)] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig(_Section):
    """The learning rate's schedule and the optimizer's own arguments, `options`.

    lr is multiplied by gamma after each epoch, whatever steps of it an overflow skipped.
    """

    name: Annotated[str, _one_of("optimizer.name", OPTIMIZERS)] = "adadelta"
    lr: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    gamma: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.7
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(_Section):
    """How long, from which seed and where.

    steps: optimizer steps at which to stop, before the epochs are over; accumulate: batches summed
    into one optimizer step; clip_norm: the largest L2 norm of the gradient; compile: true or a mode
    of torch.compile, which draws other dropout masks than eager code from the same seed; dry_run:
    one optimizer step and one evaluation batch, nothing written.

    on_nonfinite: what a loss or gradient that is not finite does, as `mixprec.train.faults` has it:
    the run stops, the step is skipped, or the run goes back to its newest checkpoint;
    nonfinite_limit: such steps in a row, or ways back in all, at which it stops nevertheless.
    """

    epochs: Count = 14
    steps: Count | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 1
    device: Annotated[str, PlainValidator(_checked_device)] = "auto"
    compile: Annotated[bool | str, PlainValidator(_checked_compile)] = False
    accumulate: Count = 1
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    log_every: Count = 10
    dry_run: bool = False
    save_model: bool = False
    on_nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    nonfinite_limit: Count = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerConfig(_Section):
    """How a dynamic loss scale moves; the arguments of `mixprec.amp.GradScaler`."""

    init_scale: Positive = 65536.0
    growth_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    growth_interval: Count = 2000
    min_scale: Positive = 1.0
    max_scale: Annotated[float, Field(gt=0)] = math.inf
    hysteresis: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig(_Section):
    """every: optimizer steps between checkpoints, None for each epoch's end; keep: newest kept."""

    every: Count | None = None
    keep: Count = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedConfig(_Section):
    """strategy: how several ranks hold the model: `ddp`, whole on each, or `fsdp`, in shards; None
    is `ddp` where torchrun started several, else `none`.

    timeout: seconds that a rank waits for the others before it gives up with an error; what only
    one of them does, such as writing a checkpoint, has to be done by then. gather: how `fsdp`
    brings a weight's shards together: in `codes` of the recipe's format where that gives the same
    numbers (`mixprec.gather_codes`), or as `parameters`.
    """

    strategy: Literal["none", "ddp", "fsdp"] | None = None
    timeout: Annotated[float, Field(gt=0, le=1e6)] = 1800.0
    gather: Literal["codes", "parameters"] = "codes"


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectConfig(_Section):
    """every: optimizer steps from one whose statistics are recorded to the next, as `mixprec.watch`
    takes it, None for no such step; tensorboard: record them as TensorBoard's events too.
    """

    every: Count | None = None
    tensorboard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(_Section):
    """One run: a model, its recipe and base, and how it is trained.

    model, model_options: as `mixprec.train.models.build_model` takes them; base: in place of the
    recipe's own, fp32, bf16 or fp16; recipe_source: where the recipe's name came from, which `load`
    writes.
    """

    model: Annotated[str, PlainValidator(_checked_model)] = "mnist_cnn"
    recipe: Annotated[RecipeTable, PlainValidator(_checked_recipe)] = "fp32"
    base: Literal["fp32", "bf16", "fp16"] | None = None
    recipe_source: Literal["default", "configuration", "AMPLITE_LEVEL"] = "default"
    model_options: dict[str, Any] = field(default_factory=dict)
    convert: ConvertConfig = ConvertConfig()
    scaler: ScalerConfig = ScalerConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    distributed: DistributedConfig = DistributedConfig()
    inspect: InspectConfig = InspectConfig()
