"""The configuration of a training run: frozen dataclasses, and the one edge where they are checked.

A file is TOML; `load` reads it, applies `section.key=value` settings over it, and either returns a
whole `Config` or raises one `ConfigError` that lists every mistake, a line each.
"""

import dataclasses
import difflib
import inspect
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from mixprec.amp.grad_scaler import GradScaler
from mixprec.formats import lookup
from mixprec.gemm.api import IMPLS
from mixprec.recipes import OPT_LEVELS
from mixprec.train.data import DATASETS, option_names
from mixprec.train.models import MODELS, check_model_name, is_user_model
from mixprec.train.recipe_choice import RecipeTable, recipe_label, resolve_recipe, step_recipe
from mixprec.train.toml_text import ConfigError, apply_setting, document, read_document

OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = MappingProxyType(
    {
        "adadelta": torch.optim.Adadelta,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "sgd": torch.optim.SGD,
    }
)
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
LEVEL_VARIABLE = "AMPLITE_LEVEL"
_RECIPE_KEYS = {"recipe", "opt_level"}
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
    inspect: InspectConfig = InspectConfig()


def load(path: str | Path | None = None, settings: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file, with `section.key=value` settings over it.

    Args:
        path: The file; None for the defaults.
        settings: Each value is TOML, or text where it is not (`train.device=cpu`).

    The recipe may be given as `opt_level`, O0 to O3. Where the configuration gives neither, the
    environment variable AMPLITE_LEVEL does; `recipe_source` says which it was.

    Raises:
        ConfigError: The file cannot be read, or some values cannot be used; all are listed.
        TypeError: path is neither None nor a path.
    """
    if path is not None and not isinstance(path, str | Path):
        raise TypeError(
            f"config: got {path!r}; it is a Config or the path of a TOML file; give one"
        )
    table = {} if path is None else read_document(Path(path))
    for setting in settings:
        if apply_setting(table, setting) in _RECIPE_KEYS:
            # a run's own file says where its recipe came from, not where this one does
            table.pop("recipe_source", None)
    level = os.environ.get(LEVEL_VARIABLE)
    source = "configuration"
    if not table.keys() & _RECIPE_KEYS:
        source = "default" if level is None else LEVEL_VARIABLE
    if source == LEVEL_VARIABLE:
        table["opt_level"] = level
    return from_dict({"recipe_source": source} | table)


def from_dict(table: Mapping[str, Any]) -> Config:
    """A checked Config from nested tables; None is a field's default.

    Raises: ConfigError: Some values cannot be used; the text lists every mistake.
    """
    table, faults = _with_level(_with_data(table))
    # Through JSON, so that strict checks accept a list for a tuple and a table for a section.
    text = json.dumps(_without_none(table), default=str)
    try:
        config: Config = TypeAdapter(Config).validate_json(text)
    except ValidationError as error:
        faults += [_line(entry) for entry in error.errors()]
        raise ConfigError("\n".join(faults)) from error
    faults += [*_model_faults(config), *_option_faults(config.optimizer), *_step_faults(config)]
    if faults:
        raise ConfigError("\n".join(faults))
    return config


def recipe_line(config: Config) -> str:
    """Recipe, base and where the choice came from, in a line."""
    level = os.environ.get(LEVEL_VARIABLE)
    ignored = ""
    if level is not None and config.recipe_source != LEVEL_VARIABLE:
        ignored = f"; {LEVEL_VARIABLE}={level} has no effect: the configuration names a recipe"
    base = step_recipe(config.recipe, config.base).base
    label = recipe_label(config.recipe, config.base).removesuffix(f" on {base}")
    return f"recipe {label} on {base} ({config.recipe_source}{ignored})"


def _with_level(table: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The table with the recipe that its opt_level stands for, and what is wrong with that."""
    values = dict(table)
    level = values.pop("opt_level", None)
    if level is None:
        return values, []
    where = LEVEL_VARIABLE if values.get("recipe_source") == LEVEL_VARIABLE else "opt_level"
    if not isinstance(level, str) or level not in OPT_LEVELS:
        levels = ", ".join(OPT_LEVELS)
        return values, [f"{where}: got {level!r}; must be one of {levels}, with the letter O"]
    if "recipe" in values:
        return values, [
            f"{where}: got {level!r} beside recipe {values['recipe']!r}; both say how to multiply; "
            "leave one out"
        ]
    return values | {"recipe": level}, []


def _with_data(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """The table with its model's data set, where it names none."""
    model, data = table.get("model"), table.get("data") or {}
    entry = MODELS.get(model.lower()) if isinstance(model, str) else None
    if entry is None or not isinstance(data, Mapping) or data.get("name") is not None:
        return table
    return {**table, "data": {**data, "name": entry.data}}


def to_dict(config: Config) -> dict[str, Any]:
    """Nested tables of every field that has a value; `from_dict` takes them back."""
    return _without_none(dataclasses.asdict(config))


def to_toml(config: Config) -> str:
    """The whole configuration, defaults included, as TOML that `load` reads back equal."""
    return document(to_dict(config))


def _line(error: ErrorDetails) -> str:
    """One mistake as `path: got value; rule`; checks of our own bring their whole line."""
    path = ".".join(map(str, error["loc"]))
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    if error["type"] == "unexpected_keyword_argument":
        return _unknown(path, _keys_beside(error["loc"]))
    return f"{path}: got {error['input']!r}; {error['msg'][:1].lower()}{error['msg'][1:]}"


def _unknown(path: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(path.rpartition(".")[2], known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
    if not known:
        hint = "there are none; leave it out"
    return f"{path}: got an unknown key; {hint}"


def _keys_beside(path: tuple[int | str, ...]) -> list[str]:
    section: Any = Config()
    for part in path[:-1]:
        section = getattr(section, str(part))
    return [entry.name for entry in dataclasses.fields(section)]


def _option_faults(optimizer: OptimizerConfig) -> list[str]:
    known = list(inspect.signature(OPTIMIZERS[optimizer.name]).parameters)[2:]
    return _unknown_keys("optimizer.options", optimizer.options, known)


def _unknown_keys(path: str, options: Mapping[str, Any], known: Sequence[str]) -> list[str]:
    return [_unknown(f"{path}.{key}", known) for key in options if key not in known]


def _model_faults(config: Config) -> list[str]:
    """What is wrong with the options; those of a user's function show when it is called."""
    data = config.data
    faults = _unknown_keys("data.options", data.options, option_names(data.name))
    if is_user_model(config.model):
        return faults
    entry = MODELS[config.model]
    unknown = _unknown_keys("model_options", config.model_options, entry.options)
    if unknown:
        return faults + unknown
    try:
        entry.arguments(config.model_options)
    except ValueError as error:
        faults.append(f"model_options.{error}")
    return faults


def _step_faults(config: Config) -> list[str]:
    """What the fields' own types cannot say: limits of each other, and recipes that differ."""
    faults = []
    try:
        step_recipe(config.recipe, config.base)
    except ValueError as error:
        faults.append(str(error))
    try:
        GradScaler(**dataclasses.asdict(config.scaler))
    except ValueError as error:
        faults.append(f"scaler.{error}")
    if config.inspect.every and config.train.compile is not False:
        faults.append(
            f"inspect.every: got {config.inspect.every} with train.compile; compiled code is not "
            "watched; leave one out"
        )
    if config.inspect.tensorboard and not config.inspect.every:
        faults.append(
            "inspect.tensorboard: got true without inspect.every; there is nothing to "
            "write; set inspect.every=100"
        )
    return faults


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return list(value) if isinstance(value, tuple) else value
