"""`mixprec plan`: the tables, the document and the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mixprec.cli.plan import size

WORDS = ("plan", "--set", "recipe=fp8_rowwise", "--batch", "8")


def test_the_tables(cli: Callable) -> None:
    code, out, err = cli(*WORDS, "--target", "a100", "--memory", "40GB")
    assert (code, err) == (0, "")
    title, *lines = out.splitlines()
    assert title.strip() == "mnist_cnn, 1,199,882 parameters, on a100 with 40 GB, batch 8"
    rows = [line.split() for line in lines]
    assert ["fp8_rowwise", "4.8", "MB", "4.8", "MB", "0", "B", "9.6", "MB"] in [
        row[:9] for row in rows
    ]
    assert "no units in Ampere" in " ".join(out.split())
    assert "conv1, conv2, fc1, fc2" in " ".join(out.split())
    assert "no forecast" in out
    assert max(map(len, out.splitlines())) <= 80


def test_json_and_a_file_hold_the_same_plan(cli: Callable, tmp_path: Path) -> None:
    code, out, err = cli(*WORDS, "--recipes", "fp32, bf16", "--gpus", "2", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert [entry["recipe"] for entry in data["recipes"]] == ["fp32", "bf16"]
    assert (data["target"], data["gpus"], data["batch"]) == ("h100", 2, 8)
    cli(*WORDS, "--recipes", "fp32, bf16", "--gpus", "2", "--out", str(tmp_path))
    assert json.loads((tmp_path / "plan.json").read_text()) == data


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--target", "h99"], "target: got 'h99'; unknown"),
        (["--memory", "much"], "memory: got 'much'; must be a number of bytes"),
        (["--set", "recipe=fp9"], "recipe: got 'fp9'; unknown"),
        (["--out", "nowhere/plan.json"], "out: got nowhere/plan.json; its folder is not there;"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(cli: Callable, words: list[str], line: str) -> None:
    code, out, err = cli("plan", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"mixprec: {line}")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (4_799_528, "4.8 MB"), (141 * 10**9, "141 GB"), (10**12, "1 TB")],
)
def test_sizes_in_words(count: int, text: str) -> None:
    assert size(count) == text
