"""Converting before and after wrapping a model for several ranks; and what copies keep."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import Job, Outcome, Results
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mixprec
from mixprec.sharding import spread_over
from mixprec.train.parallel import whole

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not built in"),
]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    return nn.Sequential(inner, nn.Linear(32, 16))


def gradients(net: nn.Module) -> list[Tensor]:
    """Those of a batch of which ranks have unequal parts, whole."""
    rank = dist.get_rank()
    x = torch.randn(8 * (rank + 1), 32, generator=torch.Generator().manual_seed(rank))
    (net(x) ** 2).sum().backward()
    found = [parameter.grad for parameter in net.parameters()]
    return [getattr(each, "full_tensor", lambda each=each: each)() for each in found]  # type: ignore


def converted(net: nn.Module) -> nn.Module:
    mixprec.convert(net, "nvfp4", seed=5)
    mixprec.distribute(net)
    return net


def sharded_fully(net: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(net[0])  # type: ignore[index]
    fully_shard(net)
    return net


def layers_sharded_fully(net: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for module in (net[0][0], net[1], net):  # type: ignore[index]
        fully_shard(module)
    return net


def orders(rank: int) -> Outcome:
    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "ddp": DistributedDataParallel,
        "fsdp": sharded_fully,
        "fsdp of layers": layers_sharded_fully,
    }
    found = {}
    for name, wrap in ways.items():
        before, after = gradients(wrap(converted(model()))), gradients(converted(wrap(model())))
        found[name] = [torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    inside = DistributedDataParallel(model())
    converted(inside.module)
    ddp = gradients(DistributedDataParallel(converted(model())))
    found["inside ddp"] = [torch.equal(a, b) for a, b in zip(ddp, gradients(inside), strict=True)]
    return found


def reverting(rank: int) -> Outcome:
    net = sharded_fully(converted(model()))
    mixprec.revert(net)
    plain = [
        torch.equal(a, b)
        for a, b in zip(gradients(net), gradients(sharded_fully(model())), strict=True)
    ]
    after = layers_sharded_fully(model())
    names = [type(module).__name__ for module in after.modules()]
    converted(after)
    mixprec.revert(after)
    back = names == [type(module).__name__ for module in after.modules()]
    told = ""
    try:
        mixprec.revert(layers_sharded_fully(converted(model())))
    except ValueError as error:
        told = str(error)
    return {"plain": plain, "back": back, "told": told}


def copies(rank: int) -> Outcome:
    net = converted(model())
    copied, pickled = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    expected = gradients(net)
    return {
        "equal": [
            torch.equal(a, b)
            for other in (copied, pickled)
            for a, b in zip(expected, gradients(other), strict=True)
        ]
    }


def compiled(rank: int) -> Outcome:
    """Converted layers traced under DDP and FSDP2; and what is sent, compiled on the first rank.

    On two ranks, to save time.
    """
    from torch.distributed.fsdp import fully_shard

    if dist.get_world_size() > 2:
        return {"close": [], "weights": [], "largest": []}
    close, weights = [], []
    for wrap in (DistributedDataParallel, fully_shard):
        eager, traced = two_steps(wrap, rank), two_steps(wrap, rank, backend="aot_eager")
        close += [torch.allclose(a, b, rtol=1e-4) for a, b in zip(eager, traced, strict=True)]
        weights += traced
    spread = spread_over()
    assert spread is not None
    values = torch.tensor([-1.0 - rank, torch.nan if rank else 3.0, -torch.inf, -0.0])
    # by the compiler that trainings have, which keeps to rules of its own for what is sent
    largest = (torch.compile(spread.largest) if rank == 0 else spread.largest)(values)
    return {"close": close, "weights": weights, "largest": largest.view(torch.int32).tolist()}


def two_steps(wrap: Callable[..., nn.Module], rank: int, backend: str = "") -> list[Tensor]:
    """The weights of a layer after two steps, whole."""
    torch.manual_seed(0)
    net = nn.Linear(32, 32)
    mixprec.convert(net, "fp8_tensorwise")
    mixprec.distribute(net)
    wrapped = wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    run = torch.compile(wrapped, backend=backend) if backend else wrapped
    for step in range(2):
        optimizer.zero_grad()
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        (run(x * (1 + rank)) ** 2).mean().backward()
        optimizer.step()
    return [whole(each.detach()) for each in net.parameters()]


JOBS: tuple[Job, ...] = (orders, reverting, copies, compiled)


def test_converting_before_or_after_wrapping_gives_the_same_gradients(sharded: Results) -> None:
    for outcome in sharded(orders):
        assert {name: found for name, found in outcome.items() if not all(found)} == {}


def test_reverting_is_done_or_refused_with_the_order(sharded: Results) -> None:
    for outcome in sharded(reverting):
        assert all(outcome["plain"])
        assert outcome["back"]
        assert "convert and revert before fully_shard is called" in outcome["told"]


def test_copies_stay_spread(sharded: Results) -> None:
    assert all(all(outcome["equal"]) for outcome in sharded(copies))


def test_compiled_models_train_as_eager_ones(sharded: Results) -> None:
    first, *others = sharded(compiled)
    if not first["weights"]:
        pytest.skip("two ranks show it")
    assert all(all(outcome["close"]) for outcome in (first, *others))
    for outcome in others:
        assert first["largest"] == outcome["largest"]
        pairs = zip(first["weights"], outcome["weights"], strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    largest = torch.tensor(first["largest"], dtype=torch.int32).view(torch.float32)
    assert largest[[0, 2, 3]].tolist() == [2.0, math.inf, 0.0]
    assert largest[1].isnan()


def test_ddp_leaves_out_numerics_state_of_any_module_that_it_wraps() -> None:
    net = model()
    net._ddp_params_and_buffers_to_ignore = ["own"]  # type: ignore[assignment]
    mixprec.convert(net, "nvfp4")
    step = "mixprec_noise_step"
    assert net._ddp_params_and_buffers_to_ignore == ["own", f"0.0.{step}", f"1.{step}"]
    assert net[0]._ddp_params_and_buffers_to_ignore == [f"0.{step}"]
    assert net[1]._ddp_params_and_buffers_to_ignore == [step]
    mixprec.revert(net)
    assert net._ddp_params_and_buffers_to_ignore == ["own"]
    assert not any(hasattr(module, "_ddp_params_and_buffers_to_ignore") for module in net)
