"""Loss scaling on two ranks: every rank takes or skips a step alike, and keeps one scale."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from ranks import Job, Outcome, Results, run_on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mixprec.amp.grad_scaler import GradScaler

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not built in"),
]
SCALE = 8.0


def seen(scaler: GradScaler) -> Outcome:
    scaler.update()
    last = scaler.last_step
    tracker = scaler._get_growth_tracker()
    return {"cause": last.cause, "scale": scaler.get_scale(), "tracker": tracker}


def shard() -> tuple[nn.Parameter, torch.optim.SGD]:
    weight = nn.Parameter(torch.ones(2))
    return weight, torch.optim.SGD([weight], lr=1.0)


def overflow_in_one_shard(rank: int) -> Outcome:
    weight, optimizer = shard()
    scaler = GradScaler(init_scale=SCALE)
    scaler.scale(weight.sum()).backward()
    if rank == 0:
        weight.grad[1] = math.inf
    scaler.step(optimizer)
    return {**seen(scaler), "fault": scaler.last_step.fault, "weight": weight.tolist()}


def overflow_of_a_fused_optimizer(rank: int) -> Outcome:
    weight, _ = shard()
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    scaler = GradScaler(init_scale=SCALE)
    scaler.scale(weight.sum()).backward()
    if rank == 1:
        weight.grad[1] = math.nan
    scaler.step(optimizer)
    return {**seen(scaler), "weight": weight.tolist()}


def non_finite_loss_of_one_rank(rank: int) -> Outcome:
    weight, optimizer = shard()
    scaler = GradScaler(init_scale=SCALE)
    scaler.scale(weight.sum() * (math.nan if rank else 1.0)).backward()
    scaler.step(optimizer)
    return {**seen(scaler), "weight": weight.tolist()}


def one_rank_without_gradients(rank: int) -> Outcome:
    weight, optimizer = shard()
    scaler = GradScaler(init_scale=SCALE)
    scaler.scale(weight.sum() if rank else torch.ones((), requires_grad=True)).backward()
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    return {**seen(scaler), "norm": norm.item()}


def no_rank_with_gradients(rank: int) -> Outcome:
    _, optimizer = shard()
    scaler = GradScaler(init_scale=SCALE)
    scaler.scale(torch.ones(()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler.step(optimizer)
    return {**seen(scaler), "told": len(caught)}


def norm_overflows_on_one_rank(rank: int) -> Outcome:
    weight, optimizer = shard()
    scaler = GradScaler(init_scale=SCALE)
    scaler.scale(weight.sum()).backward()
    if rank == 0:
        weight.grad.fill_(1e30)
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.step(optimizer)
    return {**seen(scaler), "weight": weight.tolist()}


def alone(rank: int) -> Outcome:
    groups = [dist.new_group([member]) for member in range(2)]
    weight, optimizer = shard()
    scaler = copy.deepcopy(GradScaler(init_scale=SCALE, process_group=groups[rank]))
    assert scaler._process_group is groups[rank]
    scaler.scale(weight.sum()).backward()
    if rank == 0:
        weight.grad[1] = math.inf
    scaler.step(optimizer)
    return seen(scaler)


def data_parallel(rank: int) -> Outcome:
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler, seen_steps = GradScaler(init_scale=SCALE), []
    for step in range(4):
        optimizer.zero_grad()
        x = torch.full((3, 4), 1.0 + rank)
        if (rank, step) == (1, 1):
            x[0, 0] = math.nan
        scaler.scale(net(x).square().mean()).backward()
        if (rank, step) == (0, 2):
            net.module.bias.grad[0] = math.inf
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        seen_steps.append(seen(scaler))
    return {"steps": seen_steps, "weights": net.module.state_dict()}


def fully_sharded(rank: int) -> Outcome:
    torch.manual_seed(0)
    net = nn.Linear(4, 4, bias=False)
    expected = torch.full((4, 4), 3.0).norm().item()
    fully_shard(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler, seen_steps, norms = GradScaler(init_scale=SCALE), [], []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(net(torch.full((3, 4), 1.0)).sum()).backward()
        if (rank, step) == (0, 1):
            net.weight.grad.to_local()[0, 0] = math.inf
        norms.append(scaler.clip_grad_norm_(optimizer, 1.0).item())
        left = net.weight.grad.full_tensor().norm().item()
        scaler.step(optimizer)
        seen_steps.append({**seen(scaler), "fault": scaler.last_step.fault, "left": left})
    return {"steps": seen_steps, "norms": norms, "expected": expected}


JOBS: tuple[Job, ...] = (
    overflow_in_one_shard,
    overflow_of_a_fused_optimizer,
    non_finite_loss_of_one_rank,
    one_rank_without_gradients,
    no_rank_with_gradients,
    norm_overflows_on_one_rank,
    alone,
    data_parallel,
    fully_sharded,
)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank found for a job."""
    return run_on_ranks(JOBS, tmp_path_factory.mktemp("ranks"))


OVERFLOW = {"cause": "overflow", "scale": 4.0, "tracker": 0}
STEPPED = {"cause": "", "scale": 8.0, "tracker": 1}


def test_overflow_in_one_shard_skips_everywhere(both: Results) -> None:
    first, second = both(overflow_in_one_shard)
    assert first == {**OVERFLOW, "fault": "parameter 0 of group 0, shape (2,)", "weight": [1, 1]}
    assert second == {**first, "fault": ""}
    assert both(overflow_of_a_fused_optimizer) == [{**OVERFLOW, "weight": [1, 1]}] * 2


def test_non_finite_loss_of_one_rank_is_the_data_s_fault_everywhere(both: Results) -> None:
    outcome = {"cause": "data", "scale": 8.0, "tracker": 0, "weight": [1, 1]}
    assert both(non_finite_loss_of_one_rank) == [outcome] * 2


def test_rank_without_gradients_goes_along(both: Results) -> None:
    first, second = both(one_rank_without_gradients)
    assert first == {**STEPPED, "norm": 0.0}
    assert second == {**STEPPED, "norm": pytest.approx(math.sqrt(2))}


def test_no_gradients_on_any_rank_warn_everywhere(both: Results) -> None:
    outcome = {"cause": "no gradients", "scale": 8.0, "tracker": 0, "told": 1}
    assert both(no_rank_with_gradients) == [outcome] * 2


def test_norm_that_overflows_on_one_rank_skips_everywhere(both: Results) -> None:
    assert both(norm_overflows_on_one_rank) == [{**OVERFLOW, "weight": [1, 1]}] * 2


def test_group_of_one_rank_decides_alone(both: Results) -> None:
    assert both(alone) == [OVERFLOW, STEPPED]


def test_data_parallel_ranks_stay_equal(both: Results) -> None:
    first, second = both(data_parallel)
    assert first["steps"] == second["steps"]
    assert [step["cause"] for step in first["steps"]] == ["", "data", "overflow", ""]
    assert [step["scale"] for step in first["steps"]] == [8.0, 8.0, 4.0, 4.0]
    assert all(
        torch.equal(value, second["weights"][key]) for key, value in first["weights"].items()
    )


def test_fully_sharded_gradients_are_unscaled_clipped_and_judged_whole(both: Results) -> None:
    first, second = both(fully_sharded)
    assert first == second
    assert [step["cause"] for step in first["steps"]] == ["", "overflow", ""]
    assert [step["scale"] for step in first["steps"]] == [8.0, 4.0, 4.0]
    assert first["steps"][1]["fault"] == "parameter 0 of group 0, shape (4, 4)"
    expected = pytest.approx(first["expected"])
    assert first["norms"] == [expected, math.inf, expected]
    assert [first["steps"][step]["left"] for step in (0, 2)] == pytest.approx([1.0, 1.0])
