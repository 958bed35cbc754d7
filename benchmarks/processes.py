"""The same measurement in several fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def best_of(processes: int, script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """For each contender the process with its lowest ratio.

    Args:
        processes: How many, one after the other.
        script: A benchmark that takes ``--json``.
        arguments: What else it is given; it measures one case.
    """
    command = [sys.executable, script, "--json", *arguments]
    found: dict[str, Any] = {}
    for _ in range(processes):
        run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        result = json.loads(run.stdout)["results"][0]
        found = found or result
        for name, entry in result["contenders"].items():
            if entry["ratio"] < found["contenders"][name]["ratio"]:
                found["contenders"][name] = entry
    return found
