"""mixed_precision.py: the wrapper stands where the optimizer stood, for all that use one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler

import mixprec
from mixprec.optim import MixedPrecision
from mixprec.optim.updates import UPDATES

every_update = pytest.mark.parametrize("update", UPDATES)


def one(value: float = 1.0, count: int = 1) -> nn.Parameter:
    return nn.Parameter(torch.full((count,), value, dtype=torch.bfloat16))


def quadratic(point: Tensor) -> Tensor:
    target = torch.arange(1.0, 1.0 + len(point))
    return ((point.float() - target / 3).square() * target).sum()


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_lbfgs_sees_its_points_as_stored(line_search: str | None) -> None:
    options = {"lr": 0.1, "max_iter": 6, "line_search_fn": line_search}
    mine, theirs = one(1.0, 5), nn.Parameter(torch.ones(5))
    optimizer = MixedPrecision(optim.LBFGS([mine], **options))
    plain = optim.LBFGS([theirs], **options)
    seen: list[Tensor] = []

    def my_closure() -> Tensor:
        optimizer.zero_grad()
        seen.append(mine.detach().clone())
        loss = quadratic(mine)
        loss.backward()
        return loss

    def their_closure() -> Tensor:
        stored = theirs.detach().bfloat16().requires_grad_()
        stored.grad_dtype = torch.float32
        assert torch.equal(seen.pop(0), stored)
        loss = quadratic(stored)
        loss.backward()
        theirs.grad = stored.grad
        return loss

    for _ in range(2):
        my_loss = optimizer.step(my_closure)
        assert len({tuple(point.tolist()) for point in seen}) > 3
        assert torch.equal(my_loss, plain.step(their_closure))
        assert seen == []
    assert torch.equal(optimizer.masters()[0], theirs)
    assert torch.equal(mine, theirs.bfloat16())


@every_update
def test_lbfgs_trains_with_every_update_and_an_idle_parameter(update: str) -> None:
    used, idle = one(1.0, 5), one(1.0, 2)
    inner = optim.LBFGS([used, idle], lr=0.5, max_iter=8, line_search_fn="strong_wolfe")
    optimizer = MixedPrecision(inner, update=update)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = quadratic(used)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert quadratic(used) < 0.01 * first
    assert idle.tolist() == [1.0, 1.0]


def test_an_error_in_a_closure_leaves_everything_in_its_place() -> None:
    parameter = one()
    optimizer = MixedPrecision(optim.SGD([parameter], lr=0.5, momentum=0.9))
    parameter.grad = torch.ones(1)
    optimizer.step()

    def closure() -> Tensor:
        raise KeyError("loss")

    with pytest.raises(KeyError, match="loss"):
        optimizer.step(closure)
    assert optimizer.param_groups[0]["params"][0] is parameter
    assert list(optimizer.state) == [parameter]
    assert optimizer.steps == 1
    optimizer.step()
    assert parameter.item() == torch.tensor(1 - 0.5 - 0.95).bfloat16().item()


def test_an_error_of_the_optimizer_leaves_everything_in_its_place() -> None:
    parameter = one()
    optimizer = MixedPrecision(optim.SparseAdam([parameter], lr=0.5))
    parameter.grad = torch.ones(1)
    with pytest.raises(RuntimeError, match="does not support dense gradients"):
        optimizer.step()
    assert optimizer.param_groups[0]["params"][0] is parameter
    assert (parameter.item(), optimizer.steps) == (1.0, 0)


def test_hooks_run_once_with_the_parameters_stored() -> None:
    parameter = one()
    inner = optim.SGD([parameter], lr=0.5)
    calls: list[tuple[str, Any, float]] = []

    def note(name: str) -> Callable[..., None]:
        return lambda optimizer, *_: calls.append((name, optimizer, parameter.item()))

    before = inner.register_step_post_hook(note("before"))
    optimizer = MixedPrecision(inner)
    optimizer.register_step_pre_hook(note("pre"))
    after = optimizer.register_step_post_hook(note("after"))
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert calls == [("pre", optimizer, 1.0), ("before", optimizer, 0.5), ("after", optimizer, 0.5)]
    before.remove()
    after.remove()
    optimizer.step()
    assert [name for name, *_ in calls[3:]] == ["pre"]


def test_scales_roll_after_each_step() -> None:
    net = nn.Sequential(nn.Linear(4, 4)).bfloat16()
    mixprec.convert(net, "fp8_delayed")
    optimizer = MixedPrecision(optim.SGD(net.parameters(), lr=0.1))
    mixprec.attach(net, optimizer)
    for count in (1, 2, 3):
        optimizer.zero_grad()
        net(torch.full((2, 4), count, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        assert net[0].mixprec_amax_output_a[0] == count


SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "LambdaLR": lambda each: lr_scheduler.LambdaLR(each, lambda step: 0.5**step),
    "OneCycleLR": lambda each: lr_scheduler.OneCycleLR(each, max_lr=1.0, total_steps=10),
    "CyclicLR": lambda each: lr_scheduler.CyclicLR(each, base_lr=0.1, max_lr=1.0),
    "ReduceLROnPlateau": lambda each: lr_scheduler.ReduceLROnPlateau(each, patience=0),
    "SequentialLR": lambda each: lr_scheduler.SequentialLR(
        each, [lr_scheduler.ConstantLR(each), lr_scheduler.ExponentialLR(each, 0.9)], [2]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("is_tensor", [False, True])
@pytest.mark.parametrize("of_inner", [False, True])
def test_schedulers_set_the_rate(name: str, is_tensor: bool, of_inner: bool) -> None:
    rate = torch.tensor(0.5) if is_tensor else 0.5
    mine, theirs = one(), nn.Parameter(torch.ones(1))
    inner = optim.SGD([mine], lr=rate, momentum=0.9, foreach=False)
    plain = optim.SGD([theirs], lr=rate + 0, momentum=0.9, foreach=False)
    if of_inner:
        first = SCHEDULERS[name](inner)
    optimizer = MixedPrecision(inner)
    schedulers = [first if of_inner else SCHEDULERS[name](optimizer), SCHEDULERS[name](plain)]
    for _ in range(5):
        for parameter in (mine, theirs):
            parameter.grad = torch.ones(1)
        optimizer.step()
        plain.step()
        for scheduler in schedulers:
            scheduler.step(*([1.0] if name.startswith("Reduce") else []))
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert torch.equal(optimizer.masters()[0], theirs)


def test_groups_are_shared_and_added() -> None:
    first, second = one(), one()
    inner = optim.SGD([("first", first)], lr=1.0)
    optimizer = MixedPrecision(inner)
    optimizer.add_param_group({"params": [("second", second)], "lr": 0.25})
    assert inner.param_groups is optimizer.param_groups
    assert optimizer.param_groups[1]["param_names"] == ["second"]
    assert second.grad_dtype == torch.float32
    optimizer.param_groups[0]["lr"] = 0.5
    for parameter in (first, second):
        parameter.grad = torch.ones(1)
    optimizer.step()
    assert (first.item(), second.item()) == (0.5, 0.75)
    optimizer.param_groups = [optimizer.param_groups[1]]
    assert len(inner.param_groups) == 1


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_scaler_skips_and_unscales(fused: bool) -> None:
    mine, theirs = one(), nn.Parameter(torch.ones(1))
    optimizer = MixedPrecision(optim.AdamW([mine], lr=0.1, fused=fused))
    plain = optim.AdamW([theirs], lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, torch.inf, 0.5):
        optimizer.zero_grad()
        scaler.scale((mine.float() * factor).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([mine], 1e6)
        scaler.step(optimizer)
        scaler.update()
        if factor < torch.inf:
            theirs.grad = torch.full((1,), factor)
            plain.step()
    assert scaler.get_scale() == 4.0
    assert optimizer.steps == 2
    assert torch.equal(optimizer.masters()[0], theirs)


@every_update
def test_sparse_gradients(update: str) -> None:
    mine = nn.Embedding(6, 3, sparse=True).bfloat16()
    theirs = nn.Embedding(6, 3, sparse=True)
    theirs.weight.data = mine.weight.data.float()
    before = mine.weight.detach().clone()
    optimizer = MixedPrecision(optim.SparseAdam(mine.parameters(), lr=0.1), update=update)
    plain = optim.SparseAdam(theirs.parameters(), lr=0.1)
    index = torch.tensor([1, 1, 4])
    for layer, each in ((mine, optimizer), (theirs, plain)):
        each.zero_grad()
        layer(index).sum().backward()
        each.step()
    assert mine.weight.grad.is_sparse
    assert mine.weight.grad.dtype == torch.float32
    rows = torch.tensor([0, 2, 3, 5])
    assert torch.equal(mine.weight[rows], before[rows])
    if update != "stochastic":
        assert torch.equal(mine.weight, theirs.weight.bfloat16())
    assert not torch.equal(mine.weight[1], before[1])


class Watching(optim.SGD):
    """Remembers, without keeping them, the tensors that it stepped."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [weakref.ref(each) for each in self.param_groups[0]["params"]]
        self.types = [each.dtype for each in self.param_groups[0]["params"]]
        assert all(each.requires_grad for each in self.param_groups[0]["params"])
        return super().step(closure)


@every_update
def test_float32_stand_ins_live_for_a_step_only(update: str) -> None:
    parameter, wide = one(), nn.Parameter(torch.ones(1))
    inner = Watching([parameter, wide], lr=0.1)
    optimizer = MixedPrecision(inner, update=update)
    parameter.grad = wide.grad = torch.ones(1)
    optimizer.step()
    gc.collect()
    assert inner.types == [torch.float32, torch.float32]
    assert inner.seen[1]() is wide
    assert (inner.seen[0]() is None) == (update != "masters")
    if update == "masters":
        assert inner.seen[0]().grad is None


@pytest.mark.skipif(not dist.is_gloo_available(), reason="gloo is not built in")
def test_data_parallel_takes_gradients_in_the_parameters_type(tmp_path: Path) -> None:
    method = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    try:
        net = DistributedDataParallel(nn.Linear(3, 2).bfloat16())
        inner = optim.SGD(net.parameters(), lr=2.0**-12)
        optimizer = MixedPrecision(inner, float32_gradients=False)
        before = [master.detach().clone() for master in optimizer.masters()]
        net(torch.ones(1, 3).bfloat16()).sum().backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()
    for master, value in zip(optimizer.masters(), before, strict=True):
        assert torch.equal(master, value - 2.0**-12)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ([nn.Linear(1, 1)], {}, TypeError, r"^optimizer: got Linear; must be a torch\.optim\.Opti"),
        (
            [MixedPrecision(optim.SGD([one()]))],
            {},
            ValueError,
            "^optimizer: got a MixedPrecision; it is wrapped already",
        ),
        (
            [optim.SGD([one()], differentiable=True)],
            {},
            ValueError,
            "^optimizer: got differentiable=True; rounding has no gradient; use differentiable=Fa",
        ),
        (
            [optim.SGD([one()])],
            {"update": "kahan"},
            ValueError,
            "^update: got 'kahan'; must be one of masters, compensated, stochastic, plain; choose",
        ),
        ([optim.SGD([one()])], {"seed": -1}, ValueError, "^seed: got -1; must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused(
    arguments: list[Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MixedPrecision(*arguments, **options)
