"""Steps under loss scaling: what is applied or skipped, whose fault it was, what is refused."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mixprec
from mixprec.amp.grad_scaler import GradScaler
from mixprec.amp.loss_scale import CallOrderError
from mixprec.amp.scaler_state import StepOutcome

FIRST = "parameter 0 of group 0, shape (2,)"


def sgd(*values: float, lr: float = 1.0) -> tuple[nn.Parameter, torch.optim.SGD]:
    weight = nn.Parameter(torch.tensor(values))
    return weight, torch.optim.SGD([weight], lr=lr)


def test_step_applies_the_unscaled_gradient_and_returns_what_the_optimizer_does() -> None:
    weight, optimizer = sgd(1.0, 2.0)
    optimizer.step = lambda *args, **kwargs: (args, kwargs)  # type: ignore[method-assign]
    scaler = GradScaler()
    assert scaler.last_step is None
    scaler.scale((weight * 3).sum()).backward()
    assert weight.grad.tolist() == [3 * 65536.0] * 2
    assert scaler.step(optimizer, 1, key=2) == ((1,), {"key": 2})
    assert weight.grad.tolist() == [3.0, 3.0]
    assert scaler.last_step == StepOutcome(True, "", 65536.0, 65536.0, "", False)


def test_overflow_skips_drops_the_gradients_and_lowers_the_scale() -> None:
    weight, optimizer = sgd(1.0, 2.0)
    scaler = GradScaler(init_scale=8.0)
    scaler.scale(weight.sum()).backward()
    weight.grad[1] = math.inf
    assert scaler.step(optimizer) is None
    assert weight.tolist() == [1.0, 2.0]
    assert weight.grad is None
    assert scaler.last_step == StepOutcome(False, "overflow", 8.0, 8.0, FIRST, False)
    scaler.update()
    assert scaler.last_step == StepOutcome(False, "overflow", 8.0, 4.0, FIRST, False)
    assert scaler.skipped_steps == 1


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_storm_of_overflows_ends_at_the_floor_and_training_goes_on(hysteresis: int) -> None:
    weight, optimizer = sgd(1.0, 2.0)
    scaler = GradScaler(hysteresis=hysteresis)
    for _ in range(200):
        loss = (weight * weight).sum()
        scaler.scale(loss).backward()
        weight.grad.fill_(math.nan)
        scaler.step(optimizer)
        scaler.update()
        assert loss.isfinite()
    assert scaler.last_step == StepOutcome(False, "overflow", 1.0, 1.0, FIRST, True)
    assert scaler.skipped_steps == 200
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, 1.0]
    assert scaler.last_step == StepOutcome(True, "", 1.0, 1.0, "", False)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_loss_skips_and_leaves_scale_and_tracker(bad: float) -> None:
    weight, optimizer = sgd(1.0, 2.0)
    scaler = GradScaler(hysteresis=2)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    before = scaler.state_dict()
    for _ in range(200):
        scaler.scale((weight * bad).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert weight.tolist() == [0.0, 1.0]
    assert scaler.state_dict() == {**before, "skipped": 200}
    assert scaler.last_step == StepOutcome(False, "data", 65536.0, 65536.0, FIRST, False)


def test_infinite_loss_with_finite_derivatives_is_skipped_too() -> None:
    weight, optimizer = sgd(1.0, 2.0)
    scaler = GradScaler()
    scaled = scaler.scale(weight.sum() + math.inf)
    assert scaled.item() == math.inf
    scaled.backward()
    scaler.step(optimizer)
    assert weight.tolist() == [1.0, 2.0]
    assert scaler.last_step.cause == "data"


def test_unused_non_finite_output_does_not_count() -> None:
    weight, optimizer = sgd(1.0, 2.0)
    scaler = GradScaler(init_scale=8.0)
    logits = weight.detach() - torch.tensor([0.0, math.inf])
    out = scaler.scale({"loss": weight.sum(), "logits": logits})
    assert out["logits"].tolist() == [8.0, -math.inf]
    out["loss"].backward()
    weight.grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.last_step.cause, scaler.get_scale()) == ("overflow", 4.0)


def test_many_losses_in_one_tensor_count_where_a_backward_pass_uses_them() -> None:
    weight, optimizer = sgd(1.0, 2.0)
    scaler = GradScaler()
    scaler.scale(weight * torch.tensor([1.0, math.nan])).sum().backward()
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.last_step.cause, scaler.get_scale()) == ("data", 65536.0)


def test_only_the_optimizer_with_the_overflow_skips() -> None:
    (good, good_optimizer), (bad, bad_optimizer) = sgd(1.0, 2.0), sgd(1.0, 2.0)
    scaler = GradScaler(init_scale=8.0)
    scaler.scale(good.sum()).backward()
    scaler.scale(bad.sum()).backward()
    bad.grad[0] = math.inf
    scaler.step(good_optimizer)
    assert scaler.last_step.stepped
    scaler.step(bad_optimizer)
    assert scaler.last_step.cause == "overflow"
    scaler.update()
    assert (good.tolist(), bad.tolist(), scaler.get_scale()) == ([0.0, 1.0], [1.0, 2.0], 4.0)


def test_only_the_optimizer_that_the_non_finite_loss_reaches_skips() -> None:
    (good, good_optimizer), (bad, bad_optimizer) = sgd(1.0, 2.0), sgd(1.0, 2.0)
    scaler = GradScaler(init_scale=8.0)
    scaler.scale(bad.sum() + math.inf).backward()
    scaler.scale(good.sum()).backward()
    for optimizer in (bad_optimizer, good_optimizer):
        scaler.step(optimizer)
    scaler.update()
    assert (good.tolist(), bad.tolist(), scaler.get_scale()) == ([0.0, 1.0], [1.0, 2.0], 8.0)


def test_nan_in_one_micro_batch_drops_the_whole_window_once() -> None:
    weight, optimizer = sgd(1.0, 2.0)
    scaler = GradScaler()
    for factor in (math.nan, 1.0):
        scaler.scale((weight * factor).sum() / 2).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (weight.grad, scaler.skipped_steps) == (None, 1)
    for factor in (1.0, 3.0):
        scaler.scale((weight * factor).sum() / 2).backward()
    scaler.step(optimizer)
    assert weight.tolist() == [-1.0, 0.0]


def test_window_of_micro_batches_keeps_its_scale() -> None:
    weight, _ = sgd(1.0, 2.0)
    scaler = GradScaler(init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(CallOrderError, match=r"(?s)may not change between.*skip\(opt"):
        scaler.update(new_scale=8)
    scaler.scale(weight.sum()).backward()
    assert weight.grad.tolist() == [8.0, 8.0]


def test_parameter_at_fault_is_named_by_model_optimizer_or_place() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def fault(optimizer: torch.optim.Optimizer) -> str:
        scaler = GradScaler()
        scaler.scale(model(torch.ones(2)).sum()).backward()
        model[1].weight.grad[0, 1] = math.nan
        model[1].bias.grad[0] = math.inf
        scaler.step(optimizer)
        return scaler.last_step.fault

    assert fault(torch.optim.SGD(model.parameters())) == "parameter 2 of group 0, shape (2, 2)"
    named = torch.optim.SGD([(f"net.{n}", p) for n, p in model.named_parameters()])
    assert fault(named) == "net.1.weight"
    groups = torch.optim.SGD([{"params": part.parameters()} for part in model])
    assert fault(groups) == "parameter 0 of group 1, shape (2, 2)"
    mixprec.attach(model, groups)
    assert fault(groups) == "1.weight"


def test_skipped_step_forgets_the_amaxes_recorded_for_it() -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    mixprec.convert(model, "fp8_delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    mixprec.attach(model, optimizer)
    scaler = GradScaler()
    for size, overflow in ((1.0, False), (4.0, True), (2.0, False)):
        scaler.scale(model(torch.full((4, 16), size)).sum()).backward()
        if overflow:
            model[0].bias.grad[3] = math.inf
        scaler.step(optimizer)
        scaler.update()
    assert mixprec.state_dict(model)["0.mixprec_amax_output_a"][:3].tolist() == [2.0, 1.0, 0.0]


def test_step_without_a_gradient_warns_and_moves_nothing() -> None:
    _, optimizer = sgd(1.0, 2.0)
    scaler = GradScaler(init_scale=8.0, growth_interval=1)
    for unscales in (False, True):
        scaler.scale(torch.ones((), requires_grad=True)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        with pytest.warns(UserWarning, match="optimizer: got no parameter with a gradient") as told:
            assert scaler.step(optimizer) is None
        assert len(told) == 1
        assert told[0].filename == __file__
        scaler.update()
        assert scaler.last_step == StepOutcome(False, "no gradients", 8.0, 8.0, "", False)
    assert (scaler.get_scale(), scaler._get_growth_tracker(), scaler.skipped_steps) == (8.0, 0, 0)


def test_optimizer_without_gradients_leaves_the_decision_to_the_others() -> None:
    (_, idle), (_, busy) = sgd(1.0, 2.0), sgd(1.0, 2.0)
    scaler = GradScaler(init_scale=8.0, growth_interval=1)
    scaler.scale(busy.param_groups[0]["params"][0].sum()).backward()
    with pytest.warns(UserWarning, match="no parameter with a gradient"):
        scaler.step(idle)
    scaler.step(busy)
    scaler.update()
    assert scaler.get_scale() == 16.0


def test_schedule_follows_the_steps_that_were_applied() -> None:
    weight, optimizer = sgd(1.0, 2.0, lr=1.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
    scaler = GradScaler()
    for step in range(10):
        scaler.scale(weight.sum()).backward()
        if step < 3:
            weight.grad[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        if scaler.last_step.stepped:
            schedule.step()
        optimizer.zero_grad()
    assert (schedule.last_epoch, scaler.skipped_steps) == (7, 3)


def penalty(init_scale: float) -> tuple[Tensor, Tensor]:
    """A penalty on the norm of a gradient, 3-4-5, and the gradient of both together."""
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer, scaler = torch.optim.SGD([weight]), GradScaler(init_scale=init_scale)
    loss = weight.square().sum() / 2
    (scaled,) = torch.autograd.grad(scaler.scale(loss), weight, create_graph=True)
    value = ((scaled / scaler.get_scale()).norm() - 1) ** 2
    scaler.scale(loss + value).backward()
    scaler.unscale_(optimizer)
    return value.detach(), weight.grad


@pytest.mark.parametrize("scale", [1.0, 2.0, 1024.0, 65536.0])
def test_gradient_penalty_does_not_depend_on_the_scale(scale: float) -> None:
    value, grad = penalty(scale)
    assert value.item() == 16.0
    # w + 2 (|w| - 1) w / |w|
    torch.testing.assert_close(grad, torch.tensor([7.8, 10.4]), rtol=1e-6, atol=0)


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        self.count += func in waits
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reads]:
    """A mode that is on, and that counts ``tolist`` too, which is not dispatched."""
    mode, tolist = Reads(), Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        mode.count += 1
        return tolist(tensor)

    monkeypatch.setattr(Tensor, "tolist", counted)
    with mode:
        yield mode


def test_only_step_waits_for_the_device_and_once(reads: Reads) -> None:
    weight, optimizer = sgd(1.0, 2.0)
    scaler, counts = GradScaler(), []
    for overflow in (False, True):
        scaler.scale(weight.sum()).backward()
        if overflow:
            weight.grad.fill_(math.inf)
        scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.clip_grad_value_(optimizer, 0.5)
        counts.append(reads.count)
        scaler.step(optimizer)
        counts.append(reads.count)
        scaler.update()
    assert counts == [0, 1, 1, 2]
    assert reads.count == 2
    assert scaler.last_step.cause == "overflow"
    assert reads.count > 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_scaling_unscaling_clipping_and_updating_do_not_wait_on_a_gpu() -> None:
    weight = nn.Parameter(torch.ones(2, device="cuda"))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), GradScaler()
    for _ in range(2):
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.scale(weight.sum()).backward()
            scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.clip_grad_value_(optimizer, 0.5)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        scaler.step(optimizer)
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert scaler.last_step.stepped


def test_training_step_of_the_tutorials_runs_without_a_warning() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler, x, losses = GradScaler("cuda"), torch.randn(32, 4), []
    y = x.sum(1, keepdim=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(100):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
    assert losses[-1] < 0.01 * losses[0]


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_rowwise"])
def test_infinite_gradient_is_seen_behind_layers_whose_formats_saturate(recipe: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    mixprec.convert(model, recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixprec.attach(model, optimizer)
    scaler = GradScaler()
    y = model(torch.ones(4, 16))
    y.register_hook(lambda grad: torch.where(torch.arange(16) == 3, math.inf, grad))
    scaler.scale(y.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.last_step.cause, scaler.last_step.fault) == ("overflow", "0.weight")
    assert scaler.get_scale() == 32768.0
