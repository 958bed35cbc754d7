"""Replicas of shards (HSDP): two by two ranks, and averages of what they hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import Outcome, run_on_ranks
from torch import nn

import mixprec
from distributed.small_runs import Net, data, weight_operands
from mixprec.optim import ExponentialMovingAverage
from mixprec.train.parallel import whole

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not built in"),
]
# the first two gather codes
RECIPES = ("fp8_delayed", "fp8_rowwise", "nvfp4")
ROWS = 64


def trained(net: nn.Module, rank: int, size: int) -> Outcome:
    """Two steps of all ranks: digests of the weights' operands, gradients, averages."""
    rows = data(ROWS).train
    inputs, targets = (x.tensor_split(size)[rank] for x in (rows.inputs, rows.targets))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mixprec.attach(net, optimizer)
    averages = ExponentialMovingAverage(net, 0.5)
    weights: list[str] = []
    for _ in range(2):
        optimizer.zero_grad()
        with weight_operands(weights):
            (F.cross_entropy(net(inputs), targets, reduction="sum") / ROWS).backward()
        optimizer.step()
        averages.update()
    with averages.applied():
        applied = [whole(parameter.detach()).clone() for parameter in net.parameters()]
    return {
        "weights": weights[:3],
        "gradients": [whole(parameter.grad) for parameter in net.parameters()],
        "averages": applied,
    }


def net_of(recipe: str) -> Net:
    torch.manual_seed(0)
    net = Net()
    mixprec.convert(net, recipe, seed=5)
    return net


def replicas_of_shards(rank: int) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    found = {}
    for recipe in RECIPES:
        net = net_of(recipe)
        mixprec.distribute(net)
        for module in (*net.blocks, net):
            sharded = fully_shard(module, mesh=mesh)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        mixprec.gather_codes(net)
        found[recipe] = trained(net, rank, dist.get_world_size())
    return found


def test_replicas_of_shards_train_as_one_process(tmp_path: Path) -> None:
    of_ranks = run_on_ranks((replicas_of_shards,), tmp_path, 4)(replicas_of_shards)
    for recipe in RECIPES:
        alone = trained(net_of(recipe), 0, 1)
        for found in (of_rank[recipe] for of_rank in of_ranks):
            assert found["weights"] == alone["weights"]
            for kind in ("gradients", "averages"):
                for mine, expected in zip(found[kind], alone[kind], strict=True):
                    assert (mine - expected).norm() <= 1e-4 * expected.norm()
