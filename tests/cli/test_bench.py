"""`mixprec bench` and `mixprec bench gemm`: tables, JSON, folders, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.tiny import PARAMETERS, TINY

from mixprec.bench import plan
from mixprec.bench.presets import PRESETS
from mixprec.cli import bench as command

QUICK = ("--recipes", "fp32,fp8_rowwise", "--batch", "4", "--steps", "4", "--device", "cpu")


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """The presets' models replaced by one whose step takes a millisecond."""
    monkeypatch.setattr(plan, "workload_of", lambda *_: TINY)


def test_the_tables(cli: Callable) -> None:
    code, out, err = cli("bench", *QUICK, "--peers", "transformer_engine")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert "tiny, adam, in turns, 2 of 4 steps discarded" in out
    assert "memory of a step, MB" in out
    for word in ("speed-up", "items/s", "optimiser", "activations", "peak", "MFU %", "loss"):
        assert f" {word} " in out
    assert any(line.strip().startswith("fp8_rowwise eager") for line in lines)
    skipped = [line for line in lines if line.startswith("skipped: transformer_engine")]
    assert len(skipped) == 2
    assert "DelayedScaling eager 4: transformer_engine.pytorch cannot be imported" in skipped[0]
    assert "emulated: timing is not hardware speed" in lines
    assert max(len(line) for line in lines if line not in skipped) <= 80


def test_json_and_the_folder(cli: Callable, tmp_path: Path) -> None:
    code, out, err = cli("bench", *QUICK, "--order", "alone", "--json", "--out", str(tmp_path))
    assert code == 0
    result = json.loads(out)
    assert result == json.loads((tmp_path / "result.json").read_text())
    assert result["order"] == "one at a time"
    assert [row["param_bytes"] for row in result["rows"]] == [4 * PARAMETERS] * 2
    page = (tmp_path / "bench.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "fp8_rowwise" in page
    assert "step 4" in err


def test_without_plotly_the_folder_has_no_page_and_a_line_says_so(
    cli: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    code, out, _ = cli("bench", *QUICK, "--out", str(tmp_path))
    assert code == 0
    assert "no bench.html: plotly: got" in out
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_nothing_that_could_run_is_code_1(cli: Callable, tmp_path: Path) -> None:
    words = ("--recipes", "fp32", "--batch", "auto", "--memory-limit", "0.00001")
    code, out, _ = cli("bench", *words, "--out", str(tmp_path))
    assert code == 1
    assert "skipped: fp32 eager 1: out of memory: 3,152 weights" in out
    assert (tmp_path / "result.json").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--preset", "vit-tinny"), "preset: got 'vit-tinny'; unknown"),
        (("--batch", "4,x"), "batch: got 'x'; must be a whole number"),
        (("--mode", "jit"), "modes: got 'jit'; must be one of eager, compiled"),
        (("--order", "random"), "order: got 'random'; must be turns or alone"),
        (("--peers", "apex"), "peers: got 'apex'; must be one of torchao"),
        (("--warmup", "1"), "warmup: got 1"),
        (("--device", "tpu"), "device: got 'tpu'; must be one of auto"),
        (("gemm", "--shapes", "3x4"), "shapes: got '3x4'; a shape is N or MxKxN"),
        (("gemm", "--shapes", "-3"), "shapes: got '-3'; must be a whole number"),
        (("gemm", "--recipes", "fp9"), "recipe: got 'fp9'; unknown"),
    ],
)
def test_wrong_input_is_one_line_and_code_2(
    cli: Callable, words: tuple[str, ...], line: str
) -> None:
    code, out, err = cli("bench", *words)
    assert (code, out) == (2, "")
    assert line in err
    assert len(err.strip().splitlines()) == 1


def test_gemm(cli: Callable, tmp_path: Path) -> None:
    words = ("--shapes", "32,16x32x48", "--recipes", "fp32,mxfp8", "--rounds", "1")
    code, out, err = cli("bench", "gemm", *words, "--device", "cpu", "--out", str(tmp_path))
    assert (code, err) == (0, "")
    for text in ("16x32x48", "32x32x32", "TFLOP/s", "SQNR", "mxfp8: pays never here (emulated)"):
        assert text in out
    assert "emulated: timing is not hardware speed" in out
    page = (tmp_path / "bench.html").read_text()
    assert "mxfp8: pays never here (emulated)" in page
    assert max(map(len, out.splitlines()[:-1])) <= 80
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["shape"] for row in result["rows"]] == ["16x32x48"] * 2 + ["32x32x32"] * 2


def test_the_help_names_presets_that_there_are() -> None:
    named = ("mnist-cnn", "vit-tiny", "vit-huge", "gpt-tiny", "gpt-base")
    assert set(named) <= PRESETS.keys()
    assert command.CASE.split() == ["recipe", "mode", "batch"]
