"""Delayed scaling on two ranks: every rank uses the maximum over ranks."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import Job, Outcome, Results, run_on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mixprec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not built in"),
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    mixprec.convert(net, "fp8_delayed")
    return net


def history(net: nn.Module, operand: str = "output_a") -> list[float]:
    return [
        value for value in mixprec.state_dict(net)[f"0.mixprec_amax_{operand}"].tolist() if value
    ]


def unequal_batches(rank: int) -> Outcome:
    net, size = model(), [1.0, 7.0][rank]
    for step in range(3):
        for micro in (1.0, 0.5):
            x = torch.full((2, 8), size * micro / (step + 1)).requires_grad_()
            net(x).backward(torch.full((2, 4), 8.0 / size))
        mixprec.sync_scales(net)
    last = mixprec.state_dict(net)["2.mixprec_amax_grad_input_a"]
    return {"state": mixprec.state_dict(net), "x": history(net), "g": last[:3].tolist()}


def one_rank_idle(rank: int) -> Outcome:
    net = model()
    net(torch.ones(2 * (1 - rank), 8)).sum().backward()
    mixprec.sync_scales(net)
    net(torch.full((2, 8), 5.0))
    mixprec.sync_scales(net, skipped=True)
    return {"x": history(net)}


def one_rank_overflows(rank: int) -> Outcome:
    net = model()
    net(torch.full((2, 8), [2.0, torch.inf][rank]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mixprec.sync_scales(net)
    return {
        "x": history(net),
        "told": ["0.mixprec_amax_output_a" in str(w.message) for w in caught],
    }


def data_parallel(rank: int) -> Outcome:
    net = model()
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    mixprec.attach(wrapped, optimizer)
    generator = torch.Generator().manual_seed(rank)
    largest = []
    for _ in range(3):
        optimizer.zero_grad()
        x = (1 + rank) * torch.randn(4, 8, generator=generator)
        largest.append(float(x.abs().max()))
        wrapped(x).square().mean().backward()
        optimizer.step()
    keys = list(mixprec.state_dict(wrapped))
    return {
        "weights": net.state_dict(),
        "state": mixprec.state_dict(net),
        "x": history(net),
        "largest": largest,
        "prefixed": all(key.startswith("module.") for key in keys),
    }


def accumulating(rank: int) -> Outcome:
    net = model()
    wrapped = DistributedDataParallel(net)
    for micro in range(2):
        largest = 9.0 if (rank, micro) == (1, 0) else 1.0
        wrapped(torch.full((2, 8), largest)).sum().backward()
    mixprec.sync_scales(net)
    return {"x": history(net)}


JOBS: tuple[Job, ...] = (
    unequal_batches,
    one_rank_idle,
    one_rank_overflows,
    data_parallel,
    accumulating,
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank found for a job."""
    return run_on_ranks(JOBS, tmp_path_factory.mktemp("ranks"))


def test_histories_hold_the_maximum_over_ranks_and_micro_batches(both: Results) -> None:
    first, second = both(unequal_batches)
    sevenths = [float(torch.tensor(7.0 / step)) for step in (3, 2, 1)]
    assert first["x"] == second["x"] == sevenths
    assert first["g"] == second["g"] == [8.0, 8.0, 8.0]
    assert all(torch.equal(value, second["state"][key]) for key, value in first["state"].items())


def test_idle_rank_takes_the_other_s_amax_and_a_skipped_step_is_forgotten(both: Results) -> None:
    assert both(one_rank_idle) == [{"x": [1.0]}] * 2


def test_every_rank_reports_a_non_finite_amax_of_any(both: Results) -> None:
    assert both(one_rank_overflows) == [{"x": [2.0], "told": [True]}] * 2


def test_data_parallel_ranks_stay_equal(both: Results) -> None:
    first, second = both(data_parallel)
    pairs = zip(first["largest"], second["largest"], strict=True)
    assert first["x"] == second["x"] == [max(pair) for pair in pairs][::-1]
    for part in ("weights", "state"):
        assert all(torch.equal(v, second[part][key]) for key, v in first[part].items())
    assert first["prefixed"]


def test_data_parallel_micro_batches_combine_by_maximum(both: Results) -> None:
    assert both(accumulating) == [{"x": [9.0]}] * 2
