"""The package on a machine that lacks, or has broken, everything it can do without."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mixprec

OPTIONAL = ("torchao", "transformer_engine", "ml_dtypes", "gfloat", "plotly", "tensorboard")
OPTIONAL += ("mlxtend", "triton", "torchvision", "matplotlib", "hypothesis")
# installed with the package, but not needed
DISPENSABLE = {*OPTIONAL, "numba"}

BROKEN = """
import sys

class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise {error}
        return None

sys.meta_path.insert(0, Broken())
"""

HIDDEN = """
import torch
for name in {dtypes}:
    delattr(torch, name)
"""

# what a user does first: import, convert, train a step, ask what runs here
USE = """
import contextlib, hashlib, io, json, sys, torch
import mixprec
from mixprec.cli.main import main
torch.set_num_threads(1)
torch.manual_seed(0)
x, w, g = torch.randn(8, 32), torch.randn(16, 32), torch.randn(8, 16)
codes = {}
for name in ("fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "tf32"):
    layer = torch.nn.Linear(32, 16)
    layer.weight.data.copy_(w)
    mixprec.convert(layer, name)
    layer(x).backward(g)
    for path, (_, operand) in layer.quantized_operands(x, g).items():
        codes[name + " " + path] = hashlib.sha256(operand.codes.numpy().tobytes()).hexdigest()
large = mixprec.quantize(torch.randn(256, 256), mixprec.RECIPES["fp8_rowwise"].output.a)
codes["large"] = hashlib.sha256(large.codes.numpy().tobytes()).hexdigest()
values = torch.linspace(-1000, 1000, 4001)
for name in mixprec.FORMATS:
    codes[name] = mixprec.round_to_format(values, name).double().sum().item()
for words in (["--help"], ["formats"], ["recipes"], ["doctor"], ["doctor", "--json"]):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            main(words)
        except SystemExit as end:
            assert not end.code, (words, end.code)
print(json.dumps({"codes": codes, "doctor": json.loads(printed.getvalue()),
                  "loaded": sorted({name.split(".")[0] for name in sys.modules})}))
"""


# once, however much is quantised
SLOWER = r".*RuntimeWarning: numba: numba cannot be imported .*; pip install numba\n.*\n"


def use(before: str = "", told: str = "") -> dict[str, Any]:
    """What the program prints in a fresh interpreter with no compiler and no tool on its path.

    told: The pattern of what it warns of.
    """
    environment = {key: os.environ[key] for key in ("HOME", "TMPDIR") if key in os.environ}
    run = subprocess.run(
        [sys.executable, "-c", before + USE],
        env={**environment, "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert re.fullmatch(told, run.stderr), run.stderr
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    return use()


ABSENT = "ModuleNotFoundError(f'No module named {name!r}', name=name)"
UNDEFINED = "OSError('libfake.so: undefined symbol: _ZN2at')"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (UNDEFINED, "broken, OSError: libfake.so: undefined symbol: _ZN2at"),
        pytest.param(ABSENT, "not installed", marks=pytest.mark.slow),
    ],
)
def test_broken_optional_modules_change_nothing_and_are_reported(
    error: str, reason: str, usual: dict[str, Any]
) -> None:
    found = use(BROKEN.format(names=DISPENSABLE, error=error), told=SLOWER)
    assert found["codes"] == usual["codes"]
    assert not DISPENSABLE & set(found["loaded"])
    assert {entry["reason"] for entry in found["doctor"]["libraries"]} == {reason}


@pytest.mark.slow
def test_types_that_an_older_torch_lacks_are_not_needed(usual: dict[str, Any]) -> None:
    names = ("float8_e8m0fnu", "float4_e2m1fn_x2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    dtypes = [name for name in names if hasattr(torch, name)]
    assert use(HIDDEN.format(dtypes=dtypes))["codes"] == usual["codes"]


def test_doctor_speaks_of_every_recipe_without_a_compiler(usual: dict[str, Any]) -> None:
    assert [entry["name"] for entry in usual["doctor"]["recipes"]] == list(mixprec.RECIPES)


def test_metadata_asks_for_the_lowest_torch_that_is_supported() -> None:
    required = importlib.metadata.requires("mixprec") or []
    plain = [line for line in required if "extra ==" not in line]
    assert "torch>=2.11" in plain
    names = {re.split(r"[^\w-]", line)[0] for line in plain}
    assert names.isdisjoint(OPTIONAL)


def test_the_typed_marker_is_installed() -> None:
    assert (Path(mixprec.__file__).parent / "py.typed").exists()
