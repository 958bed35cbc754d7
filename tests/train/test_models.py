"""Models by name with options, and functions of the user's own."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mixprec.train.config import ConfigError, from_dict, load, to_toml
from mixprec.train.models import MODELS, build_model
from mixprec.train.transformers import VIT_PRESETS

OWN = '''"""A model of one's own."""
import torch
from {package}.parts import make

NOT_CALLABLE = 3

def network(width=4, depth=1):
    import {package}.late
    return make(width, depth)

def with_loss(width=4):
    return make(width, 1), torch.nn.functional.mse_loss

def nothing():
    return "model"

class Nested:
    network = staticmethod(network)
'''
PARTS = """import torch

def make(width, depth):
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package in the current directory, of a name that nothing has imported."""
    name = f"own_models_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "late.py").touch()
    (folder / "parts.py").write_text(PARTS)
    (folder / "own.py").write_text(OWN.format(package=name))
    (folder / "broken.py").write_text("import a_module_that_nobody_has\n")
    monkeypatch.chdir(tmp_path)
    return name


def fault(**table: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_dict(table)
    return str(caught.value)


def test_a_preset_is_the_start_and_options_change_it() -> None:
    assert MODELS["vit"].arguments({}) == VIT_PRESETS["tiny"]
    found = MODELS["vit"].arguments({"preset": "Huge", "depth": 1, "channels": 1})
    assert found == {**VIT_PRESETS["huge"], "depth": 1, "channels": 1}


def test_options_reach_the_model() -> None:
    options = {"context": 8, "width": 12, "heads": 3, "depth": 2, "vocabulary": 7}
    torch.manual_seed(0)
    model, loss = build_model("gpt", options)
    tokens = torch.randint(0, 7, (2, 8))
    output = model(tokens)
    assert output.shape == (2, 8, 7)
    chosen = output.log_softmax(dim=2).gather(2, tokens.unsqueeze(2))
    torch.testing.assert_close(loss(output, tokens), -chosen.mean())


def test_a_configuration_with_options_is_read_back_equal(tmp_path: Path) -> None:
    config = load(None, ["model=vit", "model_options.preset=tiny", "model_options.classes=10"])
    assert config.model_options == {"preset": "tiny", "classes": 10}
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("vit", {"clases": 3}, "model_options.clases: got an unknown key; did you mean classes?"),
        ("vit", {"preset": "hugh"}, "model_options.preset: got 'hugh'; unknown, did you mean huge"),
        ("vit", {"preset": 3}, "model_options.preset: got 3; use tiny, small, base, large, huge"),
        ("vit", {"patch": 5}, "model_options.patch: got 5 with size 224; patch must divide size"),
        ("gpt", {"depth": "six"}, "model_options.depth: got 'six'; must be a whole number"),
        ("mnist_cnn", {"width": 3}, "model_options.width: got an unknown key; there are none"),
    ],
)
def test_wrong_options_are_named(model: str, options: dict[str, Any], message: str) -> None:
    assert fault(model=model, model_options=options).startswith(message)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("mnist_cn", "model: got 'mnist_cn'; unknown, did you mean mnist_cnn"),
        (3, "model: got 3; a name is text; use mnist_cnn, vit, gpt"),
        ("own.py:", "model: got 'own.py:'; a model of one's own reads package.module:function"),
        ("a:b:c", "model: got 'a:b:c'; a model of one's own reads package.module:function"),
    ],
)
def test_wrong_names_are_explained(model: Any, message: str) -> None:
    assert fault(model=model).startswith(message)


@pytest.mark.parametrize("function", ["network", "Nested.network"])
def test_a_users_function_is_called_with_the_options(package: str, function: str) -> None:
    paths = list(sys.path)
    model, loss = build_model(f"{package}.own:{function}", {"width": 6, "depth": 3})
    assert sys.path == paths
    assert [layer.in_features for layer in model] == [6, 6, 6]
    assert loss is MODELS["gpt"].loss


def test_a_users_function_may_bring_its_loss(package: str) -> None:
    _, loss = build_model(f"{package}.own:with_loss", {})
    assert loss is torch.nn.functional.mse_loss


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("absent_{0}:f", {}, ValueError, r"there is no module absent_\w+ in /.*; run where"),
        ("{0}.absent:f", {}, ValueError, r"there is no module \w+\.absent in "),
        ("{0}.own:netwrok", {}, ValueError, r"own \(.*own\.py\) has no netwrok; correct the name"),
        ("{0}.own:NOT_CALLABLE", {}, ValueError, "it is a int, which cannot be called"),
        ("{0}.own:nothing", {}, TypeError, "returned str; it must return a torch.nn.Module"),
        ("{0}.own:network", {"wide": 3}, ValueError, "model_options: got .*'wide': 3.*'wide'"),
        ("{0}.broken:f", {}, ImportError, "No module named 'a_module_that_nobody_has'"),
    ],
)
def test_what_is_wrong_with_a_users_model_is_said(
    package: str, name: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    paths = list(sys.path)
    with pytest.raises(error, match=message) as caught:
        build_model(name.format(package), options)
    assert "\n" not in str(caught.value)
    assert sys.path == paths


def test_targets_beyond_the_classes_name_the_option() -> None:
    shape = {"size": 8, "patch": 4, "channels": 1, "width": 4, "depth": 1, "heads": 1}
    model, criterion = build_model("vit", {**shape, "classes": 3})
    output, targets = model(torch.zeros(2, 1, 8, 8)), torch.tensor([7, 1])
    with pytest.raises(ValueError, match=r"model_options\.classes: got 3, .* targets from 1 to 7;"):
        criterion(output, targets)
