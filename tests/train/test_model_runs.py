"""Whole runs, comparisons and explanations of the transformers and of a user's model."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from rich.console import Console

import mixprec
from mixprec.explanation import explain_run
from mixprec.train import run
from mixprec.train.config import Config, load

SMALL = {"width": 12, "depth": 1, "heads": 3}
GPT = ["model=gpt", "model_options.context=16", "data.options.max_bytes=2000"]
VIT = ["model=vit", "model_options.size=8", "model_options.patch=4", "data.workers=0"]
VIT += ["data.options.items=16", "data.options.evaluation_items=4"]
OWN = '''"""Regression: digits to a number."""
import torch

class Mean(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(784, 4)

    def forward(self, x):
        return self.fc(x.flatten(1)).mean(dim=1)

def network():
    return Mean(), lambda output, targets: (output - targets).square().mean()
'''


def small(settings: list[str], *more: str) -> Config:
    options = [f"model_options.{key}={value}" for key, value in SMALL.items()]
    return load(None, [*settings, *options, "data.batch_size=4", "optimizer.name=adamw", *more])


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.mark.parametrize("settings", [GPT, VIT], ids=["gpt", "vit"])
def test_a_comparison_of_recipes(settings: list[str]) -> None:
    config = small(settings, "optimizer.lr=0.01")
    result = mixprec.compare(
        config, recipes=["fp32", "fp8_rowwise", "bf16"], steps=3, console=quiet()
    )
    losses = [row["curve"]["loss"] for row in result["runs"]]
    assert [len(curve) for curve in losses] == [3, 3, 3]
    assert len({curve[0] for curve in losses}) == 3
    for row in result["runs"]:
        assert row["failure"] is None
        assert 0 <= row["accuracy"] <= 1
    assert result["runs"][1]["sqnr"]["w"] > 20


@pytest.mark.parametrize("settings", [GPT, VIT], ids=["gpt", "vit"])
def test_an_explanation_of_a_run(settings: list[str]) -> None:
    rows = explain_run(small(settings, "recipe=bf16"))
    attention = next(row for row in rows if row.operation == "scaled_dot_product_attention")
    assert attention.module == "blocks.0"
    assert "cross_entropy_loss" in {row.operation for row in rows}


def test_a_users_model_without_classes_has_no_accuracy(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    settings = [f"model={name}:network", f"data.path={digits}", "train.steps=3"]
    config = load(None, [*settings, "optimizer.name=sgd", "optimizer.lr=0.001"])
    console = quiet()
    result = run(config, out=tmp_path / "run", console=console)
    assert result["model"] == f"{name}:network"
    assert result["accuracy"] is None
    assert result["loss"] > 0
    assert "accuracy" not in console.file.getvalue()
    assert load(tmp_path / "run" / "config.toml") == config


def test_embedding_and_head_may_be_tied_in_a_run() -> None:
    result = run(small(GPT, "model_options.tied=true", "train.steps=2"), console=quiet())
    assert math.isfinite(result["loss"])
