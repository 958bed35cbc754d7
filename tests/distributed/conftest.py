"""One spawn of ranks for each number of them, for all jobs about sharded operands."""

from __future__ import annotations

import pytest
from ranks import Results, run_on_ranks


@pytest.fixture(scope="session", params=(2, 3), ids=("2 ranks", "3 ranks"))
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank found for a job."""
    from distributed import test_order, test_scales, test_tensor_parallel

    jobs = (*test_scales.JOBS, *test_tensor_parallel.JOBS, *test_order.JOBS)
    return run_on_ranks(jobs, tmp_path_factory.mktemp("sharded"), request.param)
