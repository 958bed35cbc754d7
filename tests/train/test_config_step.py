"""Configuration of what is around the layers: base, level, loss scale, and where it came from."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mixprec.recipes import OPT_LEVELS, RECIPES, with_base
from mixprec.train import run
from mixprec.train.config import (
    Config,
    ConfigError,
    from_dict,
    load,
    recipe_line,
    to_dict,
    to_toml,
)
from mixprec.train.config_fields import ScalerConfig
from mixprec.train.recipe_choice import recipe_label, resolve_recipe, step_recipe
from train.small_models import SMALL_NET, use

Small = Callable[..., Config]


@pytest.fixture(autouse=True)
def _no_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMPLITE_LEVEL", raising=False)


def lines(table: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_dict(table)
    return str(caught.value).splitlines()


def test_a_base_takes_the_place_of_the_recipe_s_own() -> None:
    config = load(None, ["recipe=fp8_rowwise", "base=bf16"])
    recipe = step_recipe(config.recipe, config.base)
    assert (recipe.base, recipe.parameters, recipe.loss_scale) == ("bf16", "fp32", None)
    assert recipe.output == RECIPES["fp8_rowwise"].output
    assert recipe_label(config.recipe, config.base) == "fp8_rowwise on bf16"
    half = step_recipe("fp8_rowwise", "fp16")
    assert (half.base, half.loss_scale) == ("fp16", "dynamic")


@pytest.mark.parametrize("base", ["fp8", "fp64", "bfloat16", "", 16, True])
def test_a_wrong_base_is_one_line(base: Any) -> None:
    (line,) = lines({"base": base})
    assert line.startswith(f"base: got {base!r}; ")


def test_recipes_by_layer_share_a_base_or_are_given_one() -> None:
    choice = {"*.head": "fp8_rowwise", "*": "bf16"}
    (line,) = lines({"recipe": choice})
    assert line.startswith("recipe: got fp8_rowwise (base fp32, parameters fp32) and bf16 (base bf")
    assert line.endswith("set base, or choose recipes that agree")
    config = from_dict({"recipe": choice, "base": "bf16"})
    assert step_recipe(config.recipe, config.base).base == "bf16"
    assert resolve_recipe(choice, "bf16") == {
        "*.head": with_base(RECIPES["fp8_rowwise"], "bf16"),
        "*": RECIPES["bf16"],
    }


def test_recipes_by_layer_hold_their_parameters_alike() -> None:
    (line,) = lines({"recipe": {"*.head": "bf16", "*": "bf16_pure"}, "base": "bf16"})
    assert "bf16 (base bf16, parameters fp32) and bf16_pure (base bf16, parameters bf16)" in line


def test_every_mistake_around_the_layers_is_listed_at_once() -> None:
    found = lines(
        {
            "opt_level": "O7",
            "base": "fp8",
            "scaler": {
                "init_scale": 0,
                "growth_factor": 1.0,
                "backoff_factor": 1.0,
                "growth_interval": 0,
                "min_scale": -1.0,
                "max_scale": float("nan"),
                "hysteresis": 1.5,
                "initscale": 1.0,
            },
            "optimizer": {"lr": -1},
        }
    )
    paths = [line.split(":")[0] for line in found]
    assert sorted(paths) == sorted(
        [
            "opt_level",
            "base",
            "scaler.init_scale",
            "scaler.growth_factor",
            "scaler.backoff_factor",
            "scaler.growth_interval",
            "scaler.min_scale",
            "scaler.max_scale",
            "scaler.hysteresis",
            "scaler.initscale",
            "optimizer.lr",
        ]
    )
    assert "scaler.initscale: got an unknown key; did you mean init_scale?" in found


def test_mistakes_that_only_show_together_are_listed_at_once() -> None:
    found = lines(
        {
            "opt_level": "o2",
            "recipe": {"*.head": "fp32", "*": "bf16"},
            "scaler": {"min_scale": 8.0, "max_scale": 4.0},
            "optimizer": {"options": {"roh": 0.8}},
        }
    )
    assert [line.split(";")[0] for line in found] == [
        "opt_level: got 'o2'",
        "optimizer.options.roh: got an unknown key",
        "recipe: got fp32 (base fp32, parameters fp32) and bf16 (base bf16, parameters fp32)",
        "scaler.min_scale: got 8.0 above max_scale 4.0",
    ]


@pytest.mark.parametrize(
    ("scaler", "start"),
    [
        ({"init_scale": 0.5}, "scaler.init_scale: got 0.5; a loss scale is a finite number from 1"),
        ({"max_scale": 1024.0}, "scaler.init_scale: got 65536.0; a loss scale is a finite"),
        ({"init_scale": 1e39}, "scaler.init_scale: got 1e+39; a loss scale is a finite number"),
        ({"init_scale": math.inf}, "scaler.init_scale: got inf; "),
        ({"min_scale": 1e-50}, "scaler.min_scale: got 1e-50; the lowest scale is finite, above 0"),
    ],
)
def test_a_scale_out_of_its_limits_is_one_line(scaler: dict[str, float], start: str) -> None:
    (line,) = lines({"recipe": "fp16", "scaler": scaler})
    assert line.startswith(start)


def test_scaler_settings() -> None:
    config = load(None, ["scaler.init_scale=1024", "scaler.max_scale=4096", "scaler.hysteresis=2"])
    assert config.scaler == ScalerConfig(init_scale=1024.0, max_scale=4096.0, hysteresis=2)


@pytest.mark.parametrize("level", OPT_LEVELS)
def test_a_level_is_a_recipe(level: str) -> None:
    config = load(None, [f"opt_level={level}"])
    assert resolve_recipe(config.recipe) == OPT_LEVELS[level]
    assert config.recipe_source == "configuration"


@pytest.mark.parametrize("level", ["o1", "O4", "01", "", "1", "[1]", "{a = 1}", "2"])
def test_a_wrong_level_is_one_line(level: str) -> None:
    with pytest.raises(ConfigError, match=r"^opt_level: got .*; must be one of O0, O1, O2") as e:
        load(None, [f"opt_level={level}"])
    assert len(str(e.value).splitlines()) == 1


def test_a_level_beside_a_recipe_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^opt_level: got 'O1' beside recipe 'bf16'; both say"):
        load(None, ["opt_level=O1", "recipe=bf16"])


def test_the_environment_gives_the_level_where_the_configuration_gives_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert recipe_line(load()) == "recipe fp32 on fp32 (default)"
    monkeypatch.setenv("AMPLITE_LEVEL", "O2")
    config = load(None, ["train.seed=3"])
    assert (config.recipe, config.recipe_source) == ("O2", "AMPLITE_LEVEL")
    assert recipe_line(config) == "recipe O2 on fp16 (AMPLITE_LEVEL)"


@pytest.mark.parametrize("setting", ["recipe=bf16", "opt_level=O0"])
def test_the_configuration_wins_over_the_environment_and_says_so(
    monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    monkeypatch.setenv("AMPLITE_LEVEL", "O2")
    config = load(None, [setting])
    assert config == load(None, [setting])
    assert config.recipe_source == "configuration"
    assert recipe_line(config).endswith(
        "(configuration; AMPLITE_LEVEL=O2 has no effect: the configuration names a recipe)"
    )


@pytest.mark.parametrize("level", ["O7", "", "fp16"])
def test_a_wrong_level_of_the_environment_is_named_as_such(
    monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    monkeypatch.setenv("AMPLITE_LEVEL", level)
    with pytest.raises(ConfigError, match=f"^AMPLITE_LEVEL: got '{level}'; must be one of O0, O1"):
        load()
    assert load(None, ["recipe=fp32"]).recipe == "fp32"


def test_a_file_s_level_is_the_configuration_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPLITE_LEVEL", "O0")
    (tmp_path / "run.toml").write_text('opt_level = "O3"\n')
    config = load(tmp_path / "run.toml")
    assert (config.recipe, config.recipe_source) == ("O3", "configuration")


def test_a_setting_over_a_run_s_own_file_is_where_the_recipe_came_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AMPLITE_LEVEL", "O2")
    (tmp_path / "config.toml").write_text(to_toml(load()))
    assert load(tmp_path / "config.toml").recipe_source == "AMPLITE_LEVEL"
    config = load(tmp_path / "config.toml", ["recipe=bf16"])
    assert (config.recipe, config.recipe_source) == ("bf16", "configuration")
    with pytest.raises(ConfigError, match=r"^opt_level: got 'O1' beside recipe 'O2'"):
        load(tmp_path / "config.toml", ["opt_level=O1"])


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("bf16-mixed", "bf16"),
        ("16-mixed", "fp16"),
        ("16-true", "16-true"),
        ("bf16-true", "bf16-true"),
        ("32-true", "fp32"),
        ("64-true", "fp64"),
        ("no", "fp32"),
        ("fp16", "fp16"),
        ("bf16", "bf16"),
        ("fp8", "fp8_tensorwise on bf16"),
    ],
)
def test_precision_names_of_other_tools(small: Small, name: str, label: str) -> None:
    config = small(f'recipe="{name}"')
    assert recipe_label(config.recipe) == label
    assert recipe_line(config).startswith(f"recipe {label.removesuffix(' on bf16')} on ")
    assert from_dict(to_dict(config)) == config


WRITTEN = [
    ["recipe=fp8_delayed", "base=bf16"],
    ["opt_level=O2", "scaler.init_scale=1024.0", "scaler.growth_interval=7"],
    ["recipe=16-mixed", "scaler.max_scale=65536.0"],
    ['recipe={variant_of = "bf16_pure", update = "compensated"}'],
    ['recipe={"fc2" = "bf16", "*" = "fp8_rowwise"}', "base=bf16"],
]


@pytest.mark.parametrize("settings", WRITTEN, ids=str)
def test_the_file_that_a_run_writes_is_its_configuration(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    use(monkeypatch, SMALL_NET)
    config = small(*settings, "train.steps=1")
    console = Console(file=io.StringIO(), width=200)
    result = run(config, out=tmp_path, console=console)
    assert load(tmp_path / "config.toml") == config
    assert recipe_line(config) in console.file.getvalue()
    assert result["base"] == step_recipe(config.recipe, config.base).base
    monkeypatch.setenv("AMPLITE_LEVEL", "O0")
    assert load(tmp_path / "config.toml") == config


def test_a_run_by_the_environment_writes_a_file_that_needs_none(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, SMALL_NET)
    monkeypatch.setenv("AMPLITE_LEVEL", "O1")
    config = small("train.steps=1")
    console = Console(file=io.StringIO(), width=200)
    assert run(config, out=tmp_path, console=console)["recipe"] == "fp16"
    assert "recipe fp16 on fp16 (AMPLITE_LEVEL)" in console.file.getvalue()
    monkeypatch.delenv("AMPLITE_LEVEL")
    assert load(tmp_path / "config.toml") == config
