"""Rules about the source itself: sizes, names, one way in, and what an import may do."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mixprec
from mixprec.formats import FORMAT_ALIASES, FORMATS
from mixprec.recipes import RECIPES

ROOT = Path(__file__).parents[1]
SOURCE = sorted((ROOT / "src" / "mixprec").rglob("*.py"))
FOLDERS = (".ci", "benchmarks", "docs", "examples", "src/mixprec", "tests")
PYTHON = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]

PUBLIC = {
    "FORMATS",
    "RECIPES",
    "ErrorFigures",
    "FloatFormat",
    "GemmSpec",
    "Noise",
    "QuantSpec",
    "QuantizedTensor",
    "Recipe",
    "RecipeError",
    "Report",
    "attach",
    "compare",
    "convert",
    "decode",
    "distribute",
    "doctor",
    "einsum",
    "encode",
    "explain",
    "finfo",
    "gather_codes",
    "linear",
    "load_state_dict",
    "plan",
    "quantize",
    "quantize_error",
    "quantized_matmul",
    "recipe_errors",
    "resolve",
    "revert",
    "round_to_format",
    "state_dict",
    "sync_scales",
    "watch",
}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_file_has_at_most_400_lines_and_a_docstring(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400
    assert not text or ast.get_docstring(ast.parse(text)), "no module docstring"


@pytest.mark.parametrize("path", PYTHON, ids=relative)
def test_functions_have_at_most_40_lines_after_their_docstring(path: Path) -> None:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    lines = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, functions):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines[node.name] = node.end_lineno - body[0].lineno + 1 if body else 0
    assert {name: count for name, count in lines.items() if count > 40} == {}


def test_no_module_is_a_drawer_for_leftovers() -> None:
    drawers = {"utils", "util", "common", "helpers", "helper", "misc", "types"}
    assert [relative(path) for path in PYTHON if path.stem.strip("_") in drawers] == []


def compared_names(tree: ast.AST) -> set[str]:
    """Strings that the code compares something with, by ==, in, match or startswith."""
    strings: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare | ast.MatchValue):
            parts: list[ast.AST] = [node]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            parts = list(node.args) if node.func.attr in ("startswith", "endswith") else []
        else:
            continue
        constants = (inner for part in parts for inner in ast.walk(part))
        strings |= {
            c.value for c in constants if isinstance(c, ast.Constant) and isinstance(c.value, str)
        }
    return strings


@pytest.mark.parametrize("path", SOURCE, ids=relative)
def test_nothing_outside_the_tables_compares_a_name(path: Path) -> None:
    if path.name in ("formats.py", "recipes.py"):
        pytest.skip("holds a table of names")
    names = {*FORMATS, *FORMAT_ALIASES, *RECIPES}
    assert compared_names(ast.parse(path.read_text())) & names == set()


@pytest.mark.parametrize(
    "source",
    [
        "x == 'e4m3'",
        "'e4m3' != x",
        "x in ('a', 'e4m3')",
        "x.startswith('e4m3')",
        "match x:\n case 'e4m3': pass",
    ],
)
def test_compared_names_sees_every_comparison(source: str) -> None:
    assert "e4m3" in compared_names(ast.parse(source))
    assert compared_names(ast.parse("t = {'e4m3': 1}; f('e4m3')")) == set()


def test_public_names_are_exactly_the_documented_ones() -> None:
    assert set(mixprec.__all__) == PUBLIC
    assert [name for name in mixprec.__all__ if not hasattr(mixprec, name)] == []


def test_version_is_that_of_the_distribution() -> None:
    assert mixprec.__version__ == importlib.metadata.version("mixprec")


PROBE = """
import json, logging, os, sys
import torch
before = (torch.get_rng_state().tolist(), list(logging.root.handlers), logging.root.level,
          dict(os.environ), torch.get_default_dtype(), torch.get_num_threads())
import mixprec
after = (torch.get_rng_state().tolist(), list(logging.root.handlers), logging.root.level,
         dict(os.environ), torch.get_default_dtype(), torch.get_num_threads())
print(json.dumps({
    "changed": [index for index, (a, b) in enumerate(zip(before, after)) if a != b],
    "cuda": torch.cuda.is_initialized(),
    "optional": sorted({"plotly", "tensorboard", "mlxtend", "torchao", "numba"} & set(sys.modules)),
}))
"""


def test_import_changes_nothing_outside_the_package() -> None:
    command = [sys.executable, "-W", "error", "-c", PROBE]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout) == {"changed": [], "cuda": False, "optional": []}


def test_generated_tables_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate.py"), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


def test_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_no_file_points_outside_the_project() -> None:
    outside = ("../" + "shared", "/work" + "/")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    paths = [ROOT / name for name in names.splitlines() if (ROOT / name).is_file()]
    assert len(paths) > len(SOURCE)
    texts = {relative(path): path.read_bytes().decode(errors="ignore") for path in paths}
    assert [name for name, text in texts.items() if any(mark in text for mark in outside)] == []


def test_table_of_draws_in_the_documentation_is_true() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert len(rows) == 10
    for seed, step, stream, index, draw in (map(int, row) for row in rows):
        noise = mixprec.Noise(seed=seed, step=step, stream=stream, column=index, columns=index + 1)
        assert noise.draws((1, 1)).item() == draw
