"""Activation checkpointing in and around regions: what backward runs again runs as in forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import mixprec
from mixprec.amp import autocast
from mixprec.measure import saved_bytes
from mixprec.recomputation import hooks_around, let_reentrant_recompute, surrounding_hooks

BOTH = pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
Run = Callable[[nn.Module, Tensor], Tensor]


def block(last: nn.Module) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16), last)


def gradients(model: nn.Module, run: Run) -> list[Tensor]:
    torch.manual_seed(2)
    x = torch.randn(8, 16, requires_grad=True)
    model.zero_grad()
    run(model, x).float().square().sum().backward()
    return [x.grad, *(p.grad.clone() for p in model.parameters())]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


LASTS = {
    "product": nn.Identity,
    "relu": nn.ReLU,
    "softmax": lambda: nn.Softmax(-1),
    "dropout": nn.Dropout,
}


@BOTH
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("last", LASTS)
def test_checkpoint_in_a_region_has_the_gradients_without(
    last: str, dtype: str, reentrant: bool
) -> None:
    model = block(LASTS[last]())

    def run(module: nn.Module, x: Tensor, kept: bool) -> Tensor:
        with autocast(dtype):
            return module(x) if kept else checkpoint(module, x, use_reentrant=reentrant)

    want = gradients(model, functools.partial(run, kept=True))
    assert_same(gradients(model, functools.partial(run, kept=False)), want)
    assert not torch.equal(want[0], gradients(model, lambda module, x: module(x))[0])


@BOTH
def test_region_in_the_checkpointed_function_is_entered_again(reentrant: bool) -> None:
    model = block(nn.Tanh())
    inside = autocast("bf16")(model.forward)
    want = gradients(model, lambda _, x: inside(x))
    got = gradients(model, lambda _, x: checkpoint(inside, x, use_reentrant=reentrant))
    assert_same(got, want)


@BOTH
@pytest.mark.parametrize("outer", ["bf16", "fp32"])
def test_regions_outside_and_inside_the_function_both_hold(outer: str, reentrant: bool) -> None:
    model = block(nn.Tanh())

    def mixed(x: Tensor) -> Tensor:
        hidden = model[:3](x)
        with autocast("fp16", enabled=outer == "fp32"):
            return model[3:](hidden.float())

    def run(_: nn.Module, x: Tensor, kept: bool = False) -> Tensor:
        with autocast(outer):
            return mixed(x) if kept else checkpoint(mixed, x, use_reentrant=reentrant)

    assert_same(gradients(model, run), gradients(model, functools.partial(run, kept=True)))


@BOTH
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
def test_checkpoints_in_checkpoints(reentrant: bool) -> None:
    model = block(nn.Tanh())
    call = functools.partial(checkpoint, use_reentrant=reentrant)

    def nested(x: Tensor) -> Tensor:
        return call(model[3:], call(model[:3], x))

    def run(_: nn.Module, x: Tensor, kept: bool = False) -> Tensor:
        with autocast("bf16"):
            return model(x) if kept else call(nested, x)

    assert_same(gradients(model, run), gradients(model, functools.partial(run, kept=True)))


@BOTH
def test_checkpoint_sequential(reentrant: bool) -> None:
    model = block(nn.Tanh())

    def run(module: nn.Module, x: Tensor, kept: bool = False) -> Tensor:
        with autocast("bf16"):
            return module(x) if kept else checkpoint_sequential(module, 2, x, reentrant)

    assert_same(gradients(model, run), gradients(model, functools.partial(run, kept=True)))


@BOTH
@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "tf32"])
def test_converted_layers_recompute_from_16_bits(recipe: str, reentrant: bool) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    mixprec.convert(model, recipe)
    one = nn.Sequential(model[0])

    def run(_: nn.Module, x: Tensor, kept: bool = False) -> Tensor:
        with autocast("bf16"):
            hidden = one(x) if kept else checkpoint(one, x, use_reentrant=reentrant)
            return model[1](hidden)

    assert_same(gradients(model, run), gradients(model, functools.partial(run, kept=True)))


@BOTH
def test_backward_inside_a_region_recomputes_as_forward_ran(reentrant: bool) -> None:
    model = block(nn.Tanh())
    want = gradients(model, lambda module, x: module(x))
    torch.manual_seed(2)
    x = torch.randn(8, 16, requires_grad=True)
    model.zero_grad()
    loss = checkpoint(model, x, use_reentrant=reentrant).square().sum()
    with autocast("bf16"):
        torch.autograd.backward(loss)
    assert_same([x.grad, *(p.grad for p in model.parameters())], want)


@BOTH
def test_checkpoint_keeps_only_its_inputs(reentrant: bool) -> None:
    model = block(nn.Tanh())
    x = torch.randn(8, 16, requires_grad=True)
    with autocast("bf16"), saved_bytes(model.parameters()) as kept:
        checkpoint(model, x, use_reentrant=reentrant)
    assert kept.activation_bytes <= x.numel() * 4


@BOTH
def test_checkpoint_under_no_grad_runs(reentrant: bool) -> None:
    model = block(nn.Tanh())
    x = torch.randn(8, 16, requires_grad=True)
    with autocast("bf16"), torch.no_grad():
        out = checkpoint(model, x, use_reentrant=reentrant)
        assert torch.equal(out, model(x))


@BOTH
def test_nothing_of_a_region_remains_after_backward(reentrant: bool) -> None:
    model = block(nn.Tanh())

    def run(module: nn.Module, x: Tensor) -> Tensor:
        with autocast("bf16"):
            return checkpoint(module, x, use_reentrant=reentrant)

    gradients(model, run)
    assert model(torch.ones(1, 16)).dtype == torch.float32


def test_hooks_are_handed_on_and_run_around_what_unpacks() -> None:
    order: list[str] = []

    class Around(nullcontext):
        def __enter__(self) -> None:
            order.append("enter")

        def __exit__(self, *_: object) -> None:
            order.append("exit")

    def unpack(kept: Tensor) -> Tensor:
        order.append("unpack")
        return kept

    assert surrounding_hooks() is None
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept, unpack):
        hooks = surrounding_hooks()
        assert hooks is not None
        assert hooks[1] is unpack
        with hooks_around(hooks, Around):
            out = x.exp()
    out.sum().backward()
    assert order == ["enter", "unpack", "exit"]


def test_reentrant_checkpoints_of_other_libraries_are_known_by_name() -> None:
    entered: list[int] = []

    class CheckpointFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, run_function, x):
            ctx.run_function = run_function
            ctx.save_for_backward(x)
            let_reentrant_recompute(lambda: entered.append(1) or nullcontext())
            let_reentrant_recompute(lambda: entered.append(2) or nullcontext())
            return run_function(x)

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                out = ctx.run_function(x)
            return None, torch.autograd.grad(out, x, gradient)[0]

    CheckpointFunction.forward.__code__ = CheckpointFunction.forward.__code__.replace(
        co_qualname="CheckpointFunction.forward"
    )
    x = torch.ones(2, requires_grad=True)
    CheckpointFunction.apply(torch.exp, x).sum().backward()
    assert entered == [1]
    assert torch.equal(x.grad, x.detach().exp())
