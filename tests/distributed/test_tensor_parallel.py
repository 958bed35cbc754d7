"""Column and row parallel linears, by torch's own parallelize_module, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Job, Outcome, Results
from torch import Tensor, nn

import mixprec
from distributed.recording import Used, differences, part, recorded
from distributed.test_scales import QUANTISED

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not built in"),
]

M, K, N = 40, 32, 16
# hidden features: equal parts; unequal ones, each beginning at a multiple of every block
HIDDEN = {2: 256, 3: 382}


class Mlp(nn.Module):
    """Two layers of which the first spreads its outputs and the second its inputs."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.a = nn.Linear(K, hidden)
        self.b = nn.Linear(hidden, N)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x).relu())
        return out


def mlp(recipe: str, hidden: int) -> Mlp:
    torch.manual_seed(0)
    net = Mlp(hidden)
    mixprec.convert(net, recipe, seed=5)
    return net


def parallel(net: nn.Module, mesh: Any = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    # of parts of unequal sizes only a DTensor knows the whole's
    styles = {"a": ColwiseParallel(use_local_output=False), "b": RowwiseParallel()}
    return parallelize_module(net, mesh, styles)


def layer(recipe: str, inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Linear(inputs, outputs)
    mixprec.convert(net, recipe, seed=5)
    return net


def passes(net: nn.Module, sizes: tuple[int, int]) -> tuple[list[Tensor], list[Used]]:
    """Output and gradients, whole, and all operands of a forward and a backward pass."""
    generator = torch.Generator().manual_seed(1)
    x, g = (torch.randn(M, size, generator=generator) for size in sizes)
    x.requires_grad_()
    with recorded() as used:
        out = net(x)
        out.backward(g)
    found = [out.detach(), x.grad, *(parameter.grad for parameter in net.parameters())]
    return [getattr(each, "full_tensor", lambda each=each: each)() for each in found], used


def share(hidden: int) -> tuple[float, float]:
    size = -(-hidden // dist.get_world_size())
    ends = (min(hidden, size * dist.get_rank()), min(hidden, size * (dist.get_rank() + 1)))
    return ends[0] / hidden, ends[1] / hidden


def operands(rank: int) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    hidden, found = HIDDEN[dist.get_world_size()], {}
    for name in QUANTISED:
        for axis, style, sizes in (
            ("N", ColwiseParallel(output_layouts=Replicate()), (K, hidden)),
            ("K", RowwiseParallel(input_layouts=Replicate()), (hidden, N)),
        ):
            values, used = passes(parallelize_module(layer(name, *sizes), mesh, style), sizes)
            others, whole = passes(layer(name, *sizes), sizes)
            errors = [
                float((a - b).abs().max() / b.abs().max())
                for a, b in zip(values, others, strict=True)
            ]
            expected = [part(use, axis, *share(hidden)) for use in whole]
            found[f"{name} {axis}"] = [differences(used, expected), max(errors)]
    return found


def placements(rank: int) -> Outcome:
    before = parallel(mlp("nvfp4", HIDDEN[dist.get_world_size()]))
    after = Mlp(HIDDEN[dist.get_world_size()])
    after.load_state_dict(mlp("fp32", HIDDEN[dist.get_world_size()]).state_dict())
    parallel(after)
    mixprec.convert(after, "nvfp4", seed=5)
    same = [
        torch.equal(a, b)
        for a, b in zip(passes(before, (K, N))[0], passes(after, (K, N))[0], strict=True)
    ]
    names = [str(parameter.grad.placements) for parameter in before.parameters()]  # type: ignore
    mixprec.sync_scales(before)
    plain = [type(value) is Tensor for value in mixprec.state_dict(before).values()]
    optimizer = torch.optim.SGD(before.parameters(), lr=0.1)
    optimizer.step()
    return {"same": same, "names": names, "plain": plain}


def parts_in_shards(rank: int) -> Outcome:
    """FSDP2 over one axis of a mesh, parts over the other."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("rows", "parts"))
    hidden = 32 * dist.get_world_size()
    net = parallel(mlp("nvfp4", hidden), mesh["parts"])
    for module in (net.a, net.b, net):
        fully_shard(module, mesh=mesh["rows"])
    mixprec.distribute(net, mesh["rows"].get_group())
    pairs = zip(
        passes(net, (K, N))[0], passes(parallel(mlp("nvfp4", hidden)), (K, N))[0], strict=True
    )
    return {"same": [torch.equal(a, b) for a, b in pairs]}


def empty_parts(rank: int) -> Outcome:
    """Four features of three ranks are two, two and none."""
    values, _ = passes(parallel(mlp("fp8_tensorwise", 4)), (K, N))
    others, _ = passes(mlp("fp8_tensorwise", 4), (K, N))
    return {"close": [torch.allclose(a, b, rtol=1e-5) for a, b in zip(values, others, strict=True)]}


def delayed_steps(rank: int) -> Outcome:
    hidden = HIDDEN[dist.get_world_size()]
    nets = [parallel(mlp("fp8_delayed", hidden)), mlp("fp8_delayed", hidden)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-3) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        mixprec.attach(net, optimizer)
    found = []
    for _ in range(3):
        results = []
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            results.append(passes(net, (K, N))[1])
            optimizer.step()
        scales = [(u.scale, v.scale) for u, v in zip(*results, strict=True)]
        found.append(all(abs(float(a / b) - 1) < 1e-5 for a, b in scales))  # type: ignore
    return {"close": found}


def refusals(rank: int) -> Outcome:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    net = parallel(mlp("mxfp8", HIDDEN[dist.get_world_size()]))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = torch.randn(M, K)
    column = mlp("mxfp8", 6).a
    column.weight = nn.Parameter(distribute_tensor(column.weight.detach(), mesh, [Shard(0)]))
    column.bias = nn.Parameter(distribute_tensor(column.bias.detach(), mesh, [Replicate()]))
    plain = mlp("mxfp8", 6).a
    spread = distribute_tensor(x, mesh, [Replicate()])
    calls: dict[str, Callable[[], object]] = {
        "plain x": lambda: nn.Module.__call__(column, x),
        "placements": lambda: column(spread),
        "plain weight": lambda: plain(spread),
    }
    found = {"class": type(net).__name__}
    for name, call in calls.items():
        try:
            call()
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


JOBS: tuple[Job, ...] = (
    operands,
    placements,
    parts_in_shards,
    empty_parts,
    delayed_steps,
    refusals,
)


def test_parts_are_quantised_as_one_process_quantises_the_whole(sharded: Results) -> None:
    for outcome in sharded(operands):
        assert {name: found for name, (found, _) in outcome.items() if found} == {}


def test_results_are_within_the_bound(sharded: Results) -> None:
    for outcome in sharded(operands):
        longest = max(HIDDEN.values())
        limits = {n: 2.0**-8 if "16" in n else (longest + 3) * 2.0**-24 for n in outcome}
        assert {n: error for n, (_, error) in outcome.items() if error > limits[n]} == {}


def test_gradients_lie_as_parameters_do_whenever_converted(sharded: Results) -> None:
    for outcome in sharded(placements):
        column, row, whole = "(Shard(dim=0),)", "(Shard(dim=1),)", "(Replicate(),)"
        assert outcome["names"] == [column, column, row, whole]
        assert all(outcome["same"])
        assert all(outcome["plain"])


def test_parts_may_be_kept_in_shards(sharded: Results) -> None:
    assert all(all(outcome["same"]) for outcome in sharded(parts_in_shards))


def test_a_rank_may_have_no_part(sharded: Results) -> None:
    for outcome in sharded(empty_parts):
        assert all(outcome["close"])


def test_histories_are_those_of_one_process(sharded: Results) -> None:
    assert all(outcome == {"close": [True] * 3} for outcome in sharded(delayed_steps))


def test_what_is_not_covered_is_refused(sharded: Results) -> None:
    for outcome in sharded(refusals):
        assert outcome["plain x"].startswith("TypeError: x: got Tensor with a weight that is a")
        assert outcome["placements"].startswith("ValueError: weight: got placements (Shard(dim=0)")
        assert outcome["plain weight"].startswith("TypeError: x: got a DTensor; only linear")
