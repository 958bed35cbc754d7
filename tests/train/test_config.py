"""Configuration: defaults, every mistake in one answer, settings, and TOML there and back."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from mixprec.formats import FloatFormat
from mixprec.recipes import RECIPES, Recipe
from mixprec.train.config import (
    Config,
    ConfigError,
    from_dict,
    load,
    to_dict,
    to_toml,
)
from mixprec.train.recipe_choice import recipe_label, resolve_recipe

E4M2 = {"exponent": 4, "mantissa": 2}


def lines(table: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_dict(table)
    return str(caught.value).splitlines()


def test_defaults_are_those_of_the_mnist_example() -> None:
    config = load()
    assert (config.model, config.data.name, config.recipe) == ("mnist_cnn", "mnist", "fp32")
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.gamma) == (
        "adadelta",
        1.0,
        0.7,
    )
    assert (config.train.epochs, config.train.seed, config.train.log_every) == (14, 1, 10)
    assert (config.data.batch_size, config.data.eval_batch_size) == (64, 1000)


def test_every_mistake_is_listed_at_once() -> None:
    found = lines(
        {
            "modle": "mnist_cnn",
            "recipe": "fp8_tensorwize",
            "data": {"batchsize": 3, "eval_batch_size": 0},
            "optimizer": {"lr": -1.0, "name": "adadelt"},
            "train": {"seed": "one", "compile": "fast", "device": "gpu"},
        }
    )
    expected = [
        "modle: got an unknown key; did you mean model?",
        "recipe: got 'fp8_tensorwize'; unknown, did you mean fp8_tensorwise",
        "data.batchsize: got an unknown key; did you mean batch_size?",
        "data.eval_batch_size: got 0; input should be greater than or equal to 1",
        "optimizer.lr: got -1.0; input should be greater than or equal to 0",
        "optimizer.name: got 'adadelt'; unknown, did you mean adadelta",
        "train.seed: got 'one'; input should be a valid integer",
        "train.compile: got 'fast'; use true, false or a mode: default",
        "train.device: got 'gpu'; use auto, cpu, mps, cuda or cuda:N",
    ]
    assert len(found) == len(expected)
    for start in expected:
        assert any(line.startswith(start) for line in found), start


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("data", "batch_size", True),
        ("data", "batch_size", 1.5),
        ("data", "batch_size", "64"),
        ("data", "path", 3),
        ("data", "name", 3),
        ("optimizer", "lr", "fast"),
        ("optimizer", "lr", float("nan")),
        ("optimizer", "lr", float("inf")),
        ("optimizer", "gamma", 0),
        ("train", "seed", -1),
        ("train", "clip_norm", 0),
        ("train", "dry_run", 1),
        ("train", "compile", 1),
        ("train", "device", "cuda:"),
        ("convert", "skip", "fc1"),
        ("convert", "keep_last", -1),
        ("convert", "multiple_of", 0),
        ("convert", "impl", "triton"),
        ("checkpoint", "keep", 0),
    ],
)
def test_a_wrong_value_is_named_in_one_line(section: str, key: str, value: Any) -> None:
    (line,) = lines({section: {key: value}})
    assert line.startswith(f"{section}.{key}")
    assert repr(value) in line


def test_a_whole_number_is_a_learning_rate() -> None:
    assert from_dict({"optimizer": {"lr": 1}}).optimizer.lr == 1.0


def test_none_is_the_default() -> None:
    assert from_dict({"train": {"device": None, "seed": None}, "data": {"path": None}}) == load()


def test_unknown_optimizer_options_name_the_nearest() -> None:
    assert lines({"optimizer": {"options": {"roh": 0.8, "rho": 0.9}}}) == [
        "optimizer.options.roh: got an unknown key; did you mean rho?"
    ]


@pytest.mark.parametrize(
    ("setting", "path", "expected"),
    [
        ("train.seed=7", ("train", "seed"), 7),
        ("train.device=cpu", ("train", "device"), "cpu"),
        ("train.dry_run = true", ("train", "dry_run"), True),
        ("optimizer.lr=1e-3", ("optimizer", "lr"), 1e-3),
        ("recipe=tensorwise", ("recipe",), "tensorwise"),
        ('convert.skip=["fc2"]', ("convert", "skip"), ("fc2",)),
        ("data.path=/a=b c", ("data", "path"), "/a=b c"),
    ],
)
def test_settings(setting: str, path: tuple[str, ...], expected: Any) -> None:
    value: Any = load(None, [setting])
    for part in path:
        value = getattr(value, part)
    assert value == expected


def test_a_setting_wins_over_the_file_and_the_last_one_over_all(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[train]\nseed = 3\nepochs = 4\n")
    config = load(tmp_path / "run.toml", ["train.seed=5", "train.seed=6"])
    assert (config.train.seed, config.train.epochs) == (6, 4)


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ("train.seed", "a setting reads section.key=value"),
        ("=3", "a setting reads section.key=value"),
        ("recipe=fp32;recipe.output.a=none", "recipe is a value, not a table"),
        ("train.seed=3;train.seed.a=4", "seed is a value, not a table"),
        ("train.sed=3", "train.sed: got an unknown key; did you mean seed"),
        ("trian.seed=3", "trian: got an unknown key; did you mean train"),
    ],
)
def test_settings_that_cannot_be_used(setting: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load(None, setting.split(";"))


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml; cannot be read"):
        load(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("model = \n")
    with pytest.raises(ConfigError, match=r"broken\.toml; is not TOML: .*line 1"):
        load(tmp_path / "broken.toml")


CONFIGS = [
    {},
    {"recipe": {"variant_of": "fp8_rowwise", "output": {"a": {"format": E4M2}}}},
    {"recipe": {"*.head": "fp32", 'a "b" [c]\n': "tf32", "*": {"variant_of": "fp8_delayed"}}},
    {"convert": {"skip": ["fc1", "x.*"], "keep_last": 1, "multiple_of": 16}},
    {"optimizer": {"name": "adamw", "lr": 1e-05, "options": {"betas": [0.9, 0.99]}}},
    {"data": {"path": 'C:\\digits "ü"'}, "train": {"steps": 5, "compile": "max-autotune"}},
    {"train": {"clip_norm": 0.1, "accumulate": 2, "seed": 2**63 - 1, "compile": True}},
]


@pytest.mark.parametrize("table", CONFIGS, ids=range(len(CONFIGS)))
def test_toml_there_and_back(table: dict[str, Any], tmp_path: Path) -> None:
    config = from_dict(table)
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    assert load(tmp_path / "config.toml") == config
    assert from_dict(to_dict(config)) == config
    assert tomllib.loads(to_toml(config)) == to_dict(config)


def test_a_name_is_a_recipe_of_the_table() -> None:
    assert resolve_recipe("tensorwise") == RECIPES["fp8_tensorwise"]
    assert recipe_label("tensorwise") == "fp8_tensorwise"


def test_a_table_changes_a_recipe() -> None:
    table = {"variant_of": "fp8_tensorwise", "name": "mine", "output": {"a": {"format": E4M2}}}
    recipe = resolve_recipe(table)
    assert isinstance(recipe, Recipe)
    base = RECIPES["fp8_tensorwise"]
    assert recipe.output.a is not None
    assert recipe.output.a.format == FloatFormat(exponent=4, mantissa=2)
    assert (recipe.output.b, recipe.grad_input) == (base.output.b, base.grad_input)
    assert recipe_label(table) == "mine"
    del table["name"]
    assert recipe_label(table) == "custom"


def test_a_table_of_patterns_is_a_recipe_for_each() -> None:
    table = {"*.head": "fp32", "*": {"variant_of": "fp8_rowwise"}}
    recipes = resolve_recipe(table)
    assert recipes == {"*.head": RECIPES["fp32"], "*": RECIPES["fp8_rowwise"]}
    assert recipe_label(table) == "by layer: fp32, fp8_rowwise"


@pytest.mark.parametrize(
    "recipe",
    [
        3,
        {},
        "",
        ["fp32"],
        {"variant_of": "fp9"},
        {"variant_of": "fp8_rowwise", "outptu": {}},
        {"*": "fp9"},
        {"*": 3},
        {"variant_of": "fp8_rowwise", "output": {"a": {"format": {"exponent": 40, "mantissa": 2}}}},
    ],
    ids=str,
)
def test_a_wrong_recipe_is_one_line(recipe: Any) -> None:
    assert len(lines({"recipe": recipe})) == 1


def test_a_config_is_frozen() -> None:
    with pytest.raises(AttributeError):
        Config().model = "other"  # type: ignore[misc]


def test_a_count_has_a_limit() -> None:
    with pytest.raises(ConfigError, match=r"data\.batch_size: got 10+; input should be less than"):
        load(None, [f"data.batch_size={10**30}"])


def test_a_section_that_is_a_value_is_the_one_at_fault() -> None:
    with pytest.raises(ConfigError, match=r"^train: got 3, of which train\.dry_run cannot be set"):
        load(None, ["train=3", "train.dry_run=true"])
