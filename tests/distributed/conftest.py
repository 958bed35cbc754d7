"""One start of ranks for each number of them: for a module's jobs, for all of sharded operands."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from ranks import Results, run_on_ranks


@pytest.fixture(scope="module")
def results_of(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Results]:
    """What so many ranks found for the module's JOBS, which run when they are first asked for."""

    def results(size: int) -> Results:
        return run_on_ranks(request.module.JOBS[size], tmp_path_factory.mktemp("ranks"), size)

    return cache(results)


@pytest.fixture
def on_two(results_of: Callable[[int], Results]) -> Results:
    """What each of two ranks found for a job."""
    return results_of(2)


@pytest.fixture(scope="session", params=(2, 3), ids=("2 ranks", "3 ranks"))
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank found for a job."""
    from distributed import test_order, test_scales, test_tensor_parallel

    jobs = (*test_scales.JOBS, *test_tensor_parallel.JOBS, *test_order.JOBS)
    return run_on_ranks(jobs, tmp_path_factory.mktemp("sharded"), request.param)
