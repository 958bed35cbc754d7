"""The examples run as written, train or show what they claim; the README has the first of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
TUNNELLING = ROOT / "examples" / "tunnelling.py"
TRAINING = [path for path in EXAMPLES if path != TUNNELLING]


def printed(path: Path, folder: Path) -> str:
    """What an example prints; it ends well, and without a warning."""
    command = [sys.executable, "-W", "error", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


@pytest.mark.parametrize("path", TRAINING, ids=lambda path: path.stem)
def test_example_trains(path: Path, tmp_path: Path) -> None:
    output = printed(path, tmp_path)
    losses = [float(loss) for loss in re.findall(r"^step +\d+: loss ([\d.]+)$", output, re.M)]
    assert len(losses) >= 2
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_tunnelling_needs_double_precision(tmp_path: Path) -> None:
    line = re.compile(r"^(.+): tunnelled (\S+), drift (\S+), at most (\S+)$", re.M)
    found = {
        name: tuple(map(float, rest)) for name, *rest in line.findall(printed(TUNNELLING, tmp_path))
    }
    assert list(found) == ["float32", "float64", "31 bits", "39 bits", "auto", "double_double"]
    wrong = {name for name, (share, drift, _) in found.items() if not abs(share - 1) < 1e-3}
    assert wrong == {"float32", "31 bits", "39 bits"}
    # what cannot be relied on says so, and what says that it can be keeps to it
    assert not any(found[name][2] < 1 for name in ("31 bits", "39 bits"))
    assert found["auto"][1] <= found["auto"][2] < 1e-3
    assert found["double_double"][1] < 1e-15 < found["float64"][1] < 1e-5
    page = (tmp_path / "tunnelling.html").read_text()
    assert "plotly" in page
    assert not re.search(r"<(script|link)[^>]*(src|href)=", page)


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
