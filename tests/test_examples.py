"""The examples run as written, train, and the README shows the first of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_trains(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    losses = [
        float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)$", result.stdout, re.M)
    ]
    assert len(losses) >= 2
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path: Path) -> None:
    assert len(EXAMPLES) <= 5
    assert len(path.read_text().splitlines()) <= 60


def test_readme_shows_the_example_of_15_lines() -> None:
    shown = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    docstring, _, code = (ROOT / "examples" / "readme.py").read_text().partition("\n\n")
    assert docstring.startswith('"""')
    assert shown[1] == code
    assert len(code.splitlines()) == 15
