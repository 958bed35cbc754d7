"""The benchmark of kills, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "faults.py"


@pytest.mark.slow
def test_runs_that_are_killed_lose_nothing() -> None:
    words = ["--kills", "3", "--recipes", "fp8_delayed", "--json"]
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    total = json.loads(ended.stdout)["total"]
    assert (total["kills"], total["differing"]) == (3, 0)
