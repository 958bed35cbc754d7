"""Which gradients are checked every day, and which only by the slow tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch


def gradient_cases(*choices: Sequence[Any]) -> list[Any]:
    """Combinations of the choices with a dtype, and whether a check of one direction is enough.

    Each day: one random direction for all combinations in float64 and for the first in complex128.
    All directions of both dtypes, and second derivatives of complex ones, take long: slow. Of
    those, in solves and factors, one direction is enough: all of them take minutes.
    """
    combinations = list(itertools.product(*choices))
    everyday = [(*case, torch.float64, True) for case in combinations]
    everyday.append((*combinations[0], torch.complex128, True))
    full = itertools.product(combinations, (torch.float64, torch.complex128))
    slow = [pytest.param(*case, dtype, False, marks=pytest.mark.slow) for case, dtype in full]
    return [*everyday, *slow]
