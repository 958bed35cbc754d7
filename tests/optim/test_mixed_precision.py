"""mixed_precision.py: steps of narrow parameters are float32 steps, however they are held."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

from mixprec.gemm.widening import NARROW
from mixprec.optim import MixedPrecision
from mixprec.optim.updates import UPDATES

Factory = Callable[[Any], optim.Optimizer]
OPTIMIZERS: dict[str, Factory] = {
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam for-loop": partial(optim.Adam, lr=0.01, foreach=False),
    "Adam foreach": partial(optim.Adam, lr=0.01, amsgrad=True, foreach=True),
    "AdamW fused": partial(optim.AdamW, lr=0.01, fused=True),
    "AdamW tensor lr": partial(optim.AdamW, lr=torch.tensor(0.01), weight_decay=0.1),
    "Adagrad": partial(optim.Adagrad, lr=0.1, initial_accumulator_value=0.25),
    "Adadelta": optim.Adadelta,
    "Adafactor": optim.Adafactor,
    "RMSprop": partial(optim.RMSprop, lr=0.01, momentum=0.9, centered=True),
    "Rprop": optim.Rprop,
    "ASGD": optim.ASGD,
    "NAdam": optim.NAdam,
}
narrow = pytest.mark.parametrize("dtype", NARROW, ids=str)
every_update = pytest.mark.parametrize("update", UPDATES)


def shapes() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=generator) for shape in ((5, 3), (4,), ())]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(value.to(dtype)) for value in shapes()]


def gradients(steps: int, seed: int = 0) -> Iterator[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield [torch.randn(value.shape, generator=generator) for value in shapes()]


def narrowed(tensors: list[nn.Parameter], dtype: torch.dtype) -> None:
    for tensor in tensors:
        tensor.data = tensor.data.to(dtype)


def one(value: float, dtype: torch.dtype, count: int = 1) -> nn.Parameter:
    return nn.Parameter(torch.full((count,), value, dtype=dtype))


def train(tensors: list[nn.Parameter], optimizer: optim.Optimizer, steps: int) -> None:
    for grads in gradients(steps):
        optimizer.zero_grad()
        for tensor, grad in zip(tensors, grads, strict=True):
            tensor.grad = grad
        optimizer.step()


def repeat(parameter: nn.Parameter, optimizer: optim.Optimizer, grad: float, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        parameter.grad = torch.full_like(parameter, grad, dtype=torch.float32)
        optimizer.step()


@narrow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("is_narrowed_first", [False, True])
def test_masters_equal_a_float32_model_bit_for_bit(
    name: str, dtype: torch.dtype, is_narrowed_first: bool
) -> None:
    mine, theirs = parameters(), parameters()
    if is_narrowed_first:
        narrowed(mine, dtype)
        for tensor in theirs:
            tensor.data = tensor.data.to(dtype).float()
    optimizer = MixedPrecision(OPTIMIZERS[name](mine))
    if not is_narrowed_first:
        narrowed(mine, dtype)
    plain = OPTIMIZERS[name](theirs)
    train(mine, optimizer, 5)
    train(theirs, plain, 5)
    assert all(map(torch.equal, optimizer.masters(), theirs))
    assert all(torch.equal(p, q.to(dtype)) for p, q in zip(mine, theirs, strict=True))
    assert {tensor.dtype for tensor in mine} == {dtype}
    for tensor, other in zip(mine, theirs, strict=True):
        for key, value in plain.state[other].items():
            got = optimizer.state[tensor][key]
            assert not isinstance(value, Tensor) or (torch.equal(got, value), got.dtype) == (
                True,
                value.dtype,
            )


@every_update
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_wider_parameters_are_the_optimizers_own(update: str, dtype: torch.dtype) -> None:
    mine, theirs = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    optimizer = MixedPrecision(optim.Adam([mine], lr=0.1), update=update)
    plain = optim.Adam([theirs], lr=0.1)
    for parameter, each in ((mine, optimizer), (theirs, plain)):
        for _ in range(3):
            each.zero_grad()
            (parameter.abs() ** 2 / 3).sum().backward()
            each.step()
    assert torch.equal(mine, theirs)
    assert mine.grad.dtype == dtype
    assert optimizer.masters()[0] is mine
    assert optimizer.state[mine]["exp_avg"].dtype == dtype


def test_masters_made_before_narrowing_take_the_float32_memory_itself() -> None:
    tensors = parameters()
    values = [tensor.data for tensor in tensors]
    optimizer = MixedPrecision(optim.SGD(tensors, lr=0.1))
    narrowed(tensors, torch.bfloat16)
    for master, value in zip(optimizer.masters(), values, strict=True):
        assert torch.equal(master, value)
        assert master.data_ptr() == value.data_ptr()


def test_a_model_that_is_widened_and_narrowed_again_starts_from_its_values() -> None:
    tensors = parameters()
    optimizer = MixedPrecision(optim.SGD(tensors, lr=0.1))
    narrowed(tensors, torch.bfloat16)
    train(tensors, optimizer, 2)
    narrowed(tensors, torch.float32)
    assert all(map(torch.equal, optimizer.masters(), tensors))
    before = [tensor.detach() + 0.001 for tensor in tensors]
    for tensor, value in zip(tensors, before, strict=True):
        tensor.data = value.clone()
    optimizer.refresh()
    narrowed(tensors, torch.float16)
    assert all(map(torch.equal, optimizer.masters(), before))


# SGD with a rate of 1e-3 from 1.0, 1000 gradients of one: 0.0 is right.
@pytest.mark.parametrize(
    ("update", "bound"), [("masters", 1000 * 2.0**-25), ("compensated", 1000 * 2.0**-17)]
)
def test_small_steps_add_up(update: str, bound: float) -> None:
    parameter = one(1.0, torch.bfloat16)
    repeat(parameter, MixedPrecision(optim.SGD([parameter], lr=1e-3), update=update), 1.0, 1000)
    assert abs(parameter.item()) < bound


def test_small_steps_of_plain_updates_are_lost() -> None:
    parameter = one(1.0, torch.bfloat16)
    repeat(parameter, MixedPrecision(optim.SGD([parameter], lr=1e-3), update="plain"), 1.0, 100)
    assert parameter.item() == 1.0


def test_small_steps_of_stochastic_updates_add_up_in_the_mean() -> None:
    parameter = one(1.0, torch.bfloat16, 10_000)
    optimizer = MixedPrecision(optim.SGD([parameter], lr=1e-3), update="stochastic")
    repeat(parameter, optimizer, 1.0, 100)
    # Below 1 a step of bfloat16 is s = 2^-8. A rounding errs by s with probability 1e-3 / s (or
    # the rest), so its variance is at most s * 1e-3; errors of steps and elements are independent.
    sigma = math.sqrt(100 * 2.0**-8 * 1e-3 / 10_000)
    assert abs(parameter.double().mean().item() - 0.9) < 4 * sigma
    assert parameter.unique().numel() > 10


def test_weight_decay_of_bfloat16_has_its_effect() -> None:
    parameter = one(1.0, torch.bfloat16)
    optimizer = MixedPrecision(optim.AdamW([parameter], lr=1e-3, weight_decay=0.01))
    repeat(parameter, optimizer, 0.0, 1000)
    # Each of 1000 products and the factor itself round by 2^-25 at most, below 1.
    assert abs(optimizer.masters()[0].item() - (1 - 1e-5) ** 1000) < 2000 * 2.0**-25
    assert optimizer.masters()[0].item() == pytest.approx(0.99005, abs=6e-5)


@every_update
@narrow
@pytest.mark.parametrize("foreach", [False, True])
def test_adam_makes_no_nan_of_a_zero_gradient(
    update: str, dtype: torch.dtype, foreach: bool
) -> None:
    parameter = one(1.0, dtype, 4)
    inner = optim.Adam([parameter], lr=1e-3, foreach=foreach)
    optimizer = MixedPrecision(inner, update=update)
    repeat(parameter, optimizer, 0.0, 3)
    assert parameter.tolist() == [1.0] * 4
    repeat(parameter, optimizer, 1e-4, 1)
    assert parameter.isfinite().all()


@narrow
@pytest.mark.parametrize("is_narrowed_first", [False, True])
def test_micro_batches_are_summed_in_float32(dtype: torch.dtype, is_narrowed_first: bool) -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=dtype if is_narrowed_first else torch.float32))
    optimizer = MixedPrecision(optim.SGD([parameter], lr=1.0))
    parameter.data = parameter.data.to(dtype)
    for _ in range(1000):
        (parameter * 1.0).sum().backward()
    assert parameter.grad.dtype == torch.float32
    assert parameter.grad.tolist() == [1000.0] * 3
    optimizer.step()
    assert parameter.tolist() == torch.full((3,), -999.0).to(dtype).tolist()


def test_gradients_of_a_model_that_is_narrowed_between_batches_go_on_in_float32() -> None:
    net = nn.Linear(3, 2)
    optimizer = MixedPrecision(optim.SGD(net.parameters(), lr=1.0))
    net(torch.ones(1, 3)).sum().backward()
    net.half()
    optimizer.refresh()
    assert net.bias.grad.dtype == torch.float32
    net(torch.ones(1, 3).half()).sum().backward()
    assert (net.bias.grad.dtype, net.bias.grad.tolist()) == (torch.float32, [2.0, 2.0])
    optimizer.zero_grad(set_to_none=False)
    assert net.bias.grad.tolist() == [0.0, 0.0]


def test_gradients_may_stay_in_the_parameters_type() -> None:
    parameter = one(1.0, torch.bfloat16)
    optimizer = MixedPrecision(optim.SGD([parameter], lr=1e-3), float32_gradients=False)
    parameter.sum().backward()
    assert parameter.grad.dtype == torch.bfloat16
    optimizer.step()
    assert optimizer.masters()[0].item() == np.float32(1) - np.float32(1e-3)


def test_float64_parameters_that_are_narrowed() -> None:
    parameter = nn.Parameter(torch.tensor([0.1], dtype=torch.float64))
    optimizer = MixedPrecision(optim.SGD([parameter], lr=0.5))
    parameter.data = parameter.data.bfloat16()
    optimizer.refresh()
    parameter.sum().backward()
    assert parameter.grad.dtype == torch.float32
    assert optimizer.masters()[0].item() == np.float32(0.1)
    parameter.data = parameter.data.double()
    optimizer.zero_grad()
    parameter.sum().backward()
    assert parameter.grad.dtype == torch.float64


def test_clipping_the_masters_clips_the_parameters() -> None:
    parameter = one(0.0, torch.float16, 4)
    optimizer = MixedPrecision(optim.SGD([parameter], lr=1.0))
    parameter.grad = torch.full((4,), 1.0)
    assert torch.nn.utils.clip_grad_norm_(optimizer.masters(), 1.0).item() == 2.0
    assert parameter.grad.tolist() == pytest.approx([0.5] * 4, rel=1e-5)
    optimizer.step()
    assert parameter.tolist() == [-0.5] * 4


@every_update
@narrow
def test_parameters_without_gradient_are_untouched(update: str, dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    frozen, trained = one(1 + step, dtype), one(1.0, dtype)
    inner = optim.AdamW([frozen, trained], lr=0.1, weight_decay=0.5)
    optimizer = MixedPrecision(inner, update=update)
    # For compensated: a value just under the middle, from which a store would move.
    frozen.grad = torch.tensor([1e-30])
    inner.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    inner.param_groups[0]["lr"] = 0.1
    version = frozen._version
    for _ in range(3):
        trained.grad = torch.ones(1)
        optimizer.step()
        optimizer.step(lambda: torch.zeros(()))
    assert frozen.item() == 1 + step
    assert frozen._version == version
    assert trained.item() < 0.9


def test_replicas_of_stochastic_updates_stay_equal_and_leave_the_global_generator() -> None:
    finals = []
    for seed in (0, 1):
        tensors = parameters(torch.bfloat16)
        optimizer = MixedPrecision(optim.SGD(tensors, lr=0.01), update="stochastic", seed=5)
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        train(tensors, optimizer, 50)
        assert torch.equal(torch.get_rng_state(), before)
        finals.append(tensors)
    assert all(map(torch.equal, *finals))
    other = parameters(torch.bfloat16)
    train(other, MixedPrecision(optim.SGD(other, lr=0.01), update="stochastic", seed=6), 50)
    assert not torch.equal(other[0], finals[0][0])


def test_stochastic_noise_differs_between_steps_and_parameters() -> None:
    tensors = [one(1.0, torch.bfloat16, 1000) for _ in range(2)]
    optimizer = MixedPrecision(optim.SGD(tensors, lr=1.0), update="stochastic")
    results = []
    for _ in range(2):
        for tensor in tensors:
            tensor.data.fill_(1.0)
            tensor.grad = torch.full((1000,), -(2.0**-9))
        optimizer.step()
        results += [tensor.detach().clone() for tensor in tensors]
    for i in range(4):
        for j in range(i):
            assert not torch.equal(results[i], results[j])


@every_update
def test_parameters_of_no_elements(update: str) -> None:
    parameter = nn.Parameter(torch.zeros(0, 3, dtype=torch.bfloat16))
    optimizer = MixedPrecision(optim.Adam([parameter]), update=update)
    parameter.grad = torch.zeros(0, 3)
    optimizer.step()
    assert (optimizer.steps, parameter.shape) == (1, (0, 3))


@every_update
def test_a_parameter_that_is_changed_from_outside_counts(update: str) -> None:
    parameter = one(1.0, torch.bfloat16, 2)
    optimizer = MixedPrecision(optim.SGD([parameter], lr=2.0**-12), update=update)
    repeat(parameter, optimizer, 1.0, 1)
    parameter.data[1] = 0.25
    value = optimizer.masters()[0]
    kept = 2.0**-12 if update in ("masters", "compensated") else 0.0
    if update != "stochastic":
        assert value[0].item() == 1 - kept
    # What a compensation still adds is less than half a step of the parameter.
    assert abs(value[1].item() - 0.25) <= (2.0**-12 if update == "compensated" else 0.0)


@every_update
def test_no_float32_copies_remain_but_masters(update: str) -> None:
    tensors = parameters(torch.bfloat16)
    optimizer = MixedPrecision(optim.SGD(tensors, lr=0.1), update=update)
    train(tensors, optimizer, 2)
    types = {kept.dtype for kept in optimizer._kept.values() if kept is not None}
    want = {"masters": {torch.float32}, "compensated": {torch.bfloat16}}
    assert types == want.get(update, set())
    held = [*optimizer.param_groups[0]["params"], *optimizer.state]
    assert {tensor.dtype for tensor in held} == {torch.bfloat16}
    assert optimizer._exact == {}


def test_copies_of_model_and_optimizer_go_on_alike() -> None:
    net = nn.Linear(3, 2)
    optimizer = MixedPrecision(optim.Adam(net.parameters(), lr=0.01))
    net.bfloat16()

    def batch(model: nn.Module, each: optim.Optimizer) -> None:
        each.zero_grad()
        model(torch.ones(2, 3).bfloat16()).float().square().sum().backward()
        each.step()

    batch(net, optimizer)
    other, its_optimizer = copy.deepcopy((net, optimizer))
    assert other.weight.grad_dtype == torch.float32
    for _ in range(3):
        batch(net, optimizer)
        batch(other, its_optimizer)
    assert torch.equal(other.weight, net.weight)
    assert all(map(torch.equal, its_optimizer.masters(), optimizer.masters()))
    assert its_optimizer.masters()[0] is not optimizer.masters()[0]
    assert its_optimizer.steps == 4
