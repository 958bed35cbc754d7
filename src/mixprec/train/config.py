"""The configuration of a training run: the one edge where it is read and checked.

A file is TOML; `load` reads it, applies `section.key=value` settings over it, and either returns a
whole `Config` or raises one `ConfigError` that lists every mistake, a line each.
"""

import dataclasses
import difflib
import functools
import inspect
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from mixprec.amp.grad_scaler import GradScaler
from mixprec.recipes import OPT_LEVELS
from mixprec.train.config_fields import OPTIMIZERS, Config, OptimizerConfig
from mixprec.train.data import option_names
from mixprec.train.models import MODELS, is_user_model
from mixprec.train.recipe_choice import recipe_label, step_recipe
from mixprec.train.toml_text import (
    ConfigError,
    apply_setting,
    document,
    read_document,
    require_shallow,
)

LEVEL_VARIABLE = "AMPLITE_LEVEL"
_RECIPE_KEYS = {"recipe", "opt_level"}


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
    require_shallow(table)
    table, faults = _with_level(_with_data(table))
    # Through JSON, so that strict checks accept a list for a tuple and a table for a section.
    text = json.dumps(_without_none(table), default=str)
    try:
        config = _adapter().validate_json(text)
    except ValidationError as error:
        faults += [_line(entry) for entry in error.errors()]
        raise ConfigError("\n".join(faults)) from error
    faults += [*_model_faults(config), *_option_faults(config.optimizer), *_step_faults(config)]
    if faults:
        raise ConfigError("\n".join(faults))
    return config


@functools.cache
def _adapter() -> TypeAdapter[Config]:
    return TypeAdapter(Config)


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
