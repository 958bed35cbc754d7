"""`mixprec explain`: the operations of a configuration's forward and backward pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from train.conftest import write_idx_folder

from mixprec import explain
from mixprec.cli.explain import _counted, _joined


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    file = folder / "small.toml"
    data = f'[data]\npath = "{write_idx_folder(folder)}"\nbatch_size = 4\n'
    file.write_text(f'recipe = "fp8_rowwise"\n{data}')
    return file


def test_the_table(cli: Callable, config: Path) -> None:
    code, out, err = cli("explain", str(config), "--base", "bf16")
    assert (code, err) == (0, "")
    assert out.startswith("mnist_cnn, recipe fp8_rowwise on bf16 (configuration)")
    rows = [line.split() for line in out.splitlines()]
    assert ["conv1", "conv2d", "fp32", "e4m3", "bf16", "recipe"] in [row[:6] for row in rows]
    assert ["(model)", "log_softmax", "bf16", "fp32", "fp32", "fp32", "result"] in rows
    assert ["(loss)", "nll_loss_nd", "fp32", "fp32", "fp32", "fp32"] in rows
    fc1, *_ = (row for row in rows if row[:1] == ["fc1"])
    assert fc1[:7] == ["fc1", "linear", "bf16,", "fp32", "e4m3", "bf16", "recipe"]
    assert max(map(len, out.splitlines())) <= 80


def test_backward_and_operands_have_tables_of_their_own(cli: Callable, config: Path) -> None:
    out = cli("explain", str(config), "--set", "recipe=nvfp4", "--base", "bf16").out
    forward, backward = out.split("backward ")
    assert "grad_input" not in forward
    rows = [line.split() for line in backward.splitlines()]
    assert ["conv2", "grad_weight", "bf16", "e2m1", "fp32", "recipe"] in [row[:6] for row in rows]
    assert ["(model)", "relu", "x3", "bf16", "bf16", "bf16"] in [row[:6] for row in rows]
    counts = {row[3]: row[-1] for row in rows if row[:3] == ["nvfp4", "on", "bf16"]}
    # the first layer's input has no gradient
    assert counts == {"output": "4", "grad_input": "3", "grad_weight": "4"}


@pytest.mark.parametrize(
    ("modules", "joined"),
    [
        (["fc"], "fc"),
        (["blocks.2.qkv"], "blocks.2.qkv"),
        (["blocks.3.qkv", "blocks.2.qkv"], "blocks.2-3.qkv"),
        (["blocks.9.qkv", "blocks.10.qkv", "blocks.11.qkv"], "blocks.9-11.qkv"),
        (["blocks.0.qkv", "blocks.2.qkv"], "blocks.*.qkv"),
        (["a.0.1", "a.0.2", "a.1.1", "a.1.2"], "a.0-1.1-2"),
        (["a.0.1", "a.1.2"], "a.*.*"),
    ],
)
def test_numbered_modules_are_joined(modules: list[str], joined: str) -> None:
    assert _joined(modules) == joined


def test_what_numbered_modules_do_alike_is_one_row() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Sequential(nn.ReLU()))
    rows = [row for row in explain(model, torch.ones(1, 4), "bf16") if row.phase == "forward"]
    cells = [row[:3] for row in _counted(rows)]
    # the first layer's input is of another type
    assert cells == [
        ("0", "linear", "fp32"),
        ("1", "relu", "bf16"),
        ("2", "linear", "bf16, fp32"),
        ("3.0", "relu", "bf16"),
    ]
    twice = [replace(row, module=f"4.{row.module}") for row in rows[:2]]
    again = [replace(row, module=f"5.{row.module}") for row in rows[:2]]
    assert [row[0] for row in _counted([*twice, *again])] == ["4-5.0", "4-5.1"]


def test_views_are_left_out_unless_asked_for(cli: Callable, config: Path) -> None:
    brief, whole = cli("explain", str(config)).out, cli("explain", str(config), "--all").out
    assert "left out: 2 that compute nothing (--all shows them)" in brief
    assert ("flatten" in brief, "flatten" in whole) == (False, True)
    assert "left out" not in whole


def test_json(cli: Callable, config: Path) -> None:
    out = cli("explain", str(config), "--set", "recipe=fp16", "--all", "--json").out
    data = json.loads(out)
    assert (data["model"], data["recipe"]) == ("mnist_cnn", "recipe fp16 on fp16 (configuration)")
    first = next(row for row in data["operations"] if row["module"] == "conv1")
    assert [operand["format"] for operand in first.pop("operands")] == ["fp16", "fp16"]
    assert first == {
        "module": "conv1",
        "operation": "conv2d",
        "inputs": ["fp32", "fp32"],
        "compute": ["fp16", "fp16"],
        "outputs": ["fp16"],
        "rule": "recipe fp16",
        "impl": "emulated",
        "is_view": False,
        "phase": "forward",
    }
    assert any(row["is_view"] for row in data["operations"])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--base", "int8"], "base: got 'int8'; input should be 'fp32', 'bf16' or 'fp16'"),
        (["--set", "recipe=fp9"], "recipe: got 'fp9'; unknown"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    cli: Callable, config: Path, words: list[str], line: str
) -> None:
    code, out, err = cli("explain", str(config), *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"mixprec: {line}")
