"""What every test starts from: fixed seeds, one thread, one profile of hypothesis."""

from __future__ import annotations

import gc
import random
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# The same examples in every run, and no deadline: two busy cores make any one of them slow.
settings.register_profile(
    "mixprec",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("mixprec")
# numbers in the source are examples too, those of modules imported by then: by the tests before
providers._get_local_constants = lambda: providers._local_constants
# the CPU's generator alone where there is no other: torch keeps the stack of each call for them
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    # what collecting made stays; every later collection of garbage would walk over it
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _nothing_compiled() -> None:
    # compiled code is kept by function, a few of them each: those of another file would count
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _fixed_start() -> None:
    torch.set_num_threads(1)
    _seed(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and under the marker ``gpu`` a CUDA device; skips where there is none."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)
