"""Losses of levelled models: scales of their own, accumulation, skipped steps, whole trainings."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, SparseAdam
from torch.optim.lr_scheduler import StepLR

from amp.leveled import LEVELS, backward, leveled, weighted
from mixprec.amp import GradScaler, initialize, loss_scalers, master_params, scale_loss

NARROWING = ["O1", "O2", "O3"]


def scales(optimizer: Any) -> list[float]:
    return [scaler.get_scale() for scaler in loss_scalers(optimizer)]


def overflow(model: nn.Module, optimizer: Any, *numbers: float, **options: Any) -> None:
    """A backward pass of a finite loss whose gradients are infinite."""
    with scale_loss(model(torch.tensor([numbers])).sum(), optimizer, **options) as scaled:
        (scaled * math.inf).backward()


def set_scales(optimizer: Any, *numbers: float) -> None:
    for scaler, number in zip(loss_scalers(optimizer), numbers, strict=True):
        scaler.update(number)


def dynamic(level: str, *args: Any, **options: Any) -> tuple[Any, Any]:
    """A model and its optimizer, with dynamic scales from 1024: at 65536 a gradient of 1 is inf."""
    model, optimizer = leveled(level, *args, **{"loss_scale": "dynamic"} | options)
    set_scales(optimizer, *[1024.0] * len(loss_scalers(optimizer)))
    return model, optimizer


# ---- gradients


@pytest.mark.parametrize("level", LEVELS)
def test_gradients_are_unscaled_and_float32(level: str) -> None:
    model, optimizer = dynamic(level, weighted(1.0, 2.0))
    backward(model, optimizer, 3.0, -5.0)
    assert model.weight.grad.tolist() == [[3.0, -5.0]]
    assert model.weight.grad.dtype == torch.float32
    backward(model, optimizer, 2.0**-20, 1.0)
    assert model.weight.grad.tolist() == [[3 + 2.0**-20, -4.0]]


def test_gradients_below_fp16_s_numbers_are_kept_by_the_scale() -> None:
    small = 2.0**-30
    for scale, want in ((2.0**16, small), (1.0, 0.0)):
        model, optimizer = leveled("O2", weighted(1.0), loss_scale=scale)
        with scale_loss(model(torch.ones(1, 1)).sum() * small, optimizer) as scaled:
            scaled.backward()
        assert model.weight.grad.item() == want


@pytest.mark.parametrize("shape", [(), (1,)])
def test_loss_is_scaled_in_float32(shape: tuple[int, ...]) -> None:
    _, optimizer = leveled("O1")
    with scale_loss(torch.full(shape, 60000.0).half(), optimizer) as scaled:
        assert (scaled.item(), scaled.dtype) == (60000.0 * 65536, torch.float32)


@pytest.mark.parametrize("level", NARROWING)
def test_losses_of_different_scales_add_up_in_one_optimizer(level: str) -> None:
    model, optimizer = dynamic(level, weighted(1.0, 1.0), num_losses=2)
    set_scales(optimizer, 8.0, 4096.0)
    backward(model, optimizer, 3.0, 0.25, loss_id=0)
    backward(model, optimizer, 5.0, 0.5, loss_id=1)
    backward(model, optimizer, 7.0, 1.0, loss_id=0)
    assert model.weight.grad.tolist() == [[15.0, 1.75]]


@pytest.mark.parametrize("level", NARROWING)
def test_accumulation_adds_up_and_moves_the_scale_once(level: str) -> None:
    model, optimizer = dynamic(level, weighted(1.0))
    scaler = loss_scalers(optimizer)[0]
    scaler.set_growth_interval(2)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        for place in range(4):
            backward(model, optimizer, 1.0 + place, delay_unscale=place < 3)
            found.append(scaler.get_scale())
        assert model.weight.grad.item() == 10
    assert found == [1024.0] * 7 + [2048.0]


def test_windows_of_several_losses_may_overlap() -> None:
    model, optimizer = dynamic("O2", weighted(1.0), num_losses=2)
    set_scales(optimizer, 8.0, 4096.0)
    for place in range(3):
        for loss_id in (0, 1):
            backward(model, optimizer, 1.0, loss_id=loss_id, delay_unscale=place < 2)
    assert model.weight.grad.item() == 6
    backward(model, optimizer, 1.0, loss_id=1)
    backward(model, optimizer, 1.0, loss_id=0, delay_unscale=True)
    assert model.weight.grad.item() == 8


def test_window_that_is_given_up_leaves_nothing() -> None:
    model, optimizer = dynamic("O2", weighted(1.0))
    backward(model, optimizer, 3.0, delay_unscale=True)
    optimizer.zero_grad()
    backward(model, optimizer, 1.0)
    assert model.weight.grad.item() == 1


def test_loss_without_any_gradient_moves_nothing() -> None:
    model, optimizer = dynamic("O1", weighted(1.0))
    loss_scalers(optimizer)[0].set_growth_interval(1)
    other = torch.ones((), requires_grad=True)
    with scale_loss(other * 2, optimizer) as scaled:
        scaled.backward()
    assert scales(optimizer) == [1024.0]
    backward(model, optimizer, 1.0)
    assert scales(optimizer) == [2048.0]


def test_sparse_gradients_add_up() -> None:
    table = nn.Embedding(4, 1, sparse=True)
    model, optimizer = dynamic("O1", table, SparseAdam)
    for rows in ([0, 1], [1, 1]):
        with scale_loss(model(torch.tensor(rows)).sum(), optimizer) as scaled:
            scaled.backward()
    assert table.weight.grad.to_dense().flatten().tolist() == [1.0, 3.0, 0.0, 0.0]
    optimizer.step()


# ---- overflows


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_overflow_skips_one_step_and_lowers_the_scale(level: str) -> None:
    model, optimizer = dynamic(level, weighted(1.0), lr=0.25)
    overflow(model, optimizer, 1.0)
    assert model.weight.grad is None
    assert optimizer.step() is None
    assert (model.weight.item(), scales(optimizer)) == (1.0, [512.0])
    for want in (0.75, 0.5):
        optimizer.zero_grad()
        backward(model, optimizer, 1.0)
        optimizer.step()
        assert model.weight.item() == want
    assert scales(optimizer) == [512.0]
    assert "step" not in vars(optimizer)


def test_two_overflows_before_a_step_skip_that_step_alone() -> None:
    model, optimizer = dynamic("O2", weighted(1.0), lr=0.25, num_losses=2)
    for loss_id in (0, 1):
        overflow(model, optimizer, 1.0, loss_id=loss_id)
    optimizer.step()
    assert model.weight.item() == 1
    backward(model, optimizer, 1.0)
    optimizer.step()
    assert model.weight.item() == 0.75
    assert scales(optimizer) == [512.0, 512.0]


def test_scales_of_losses_move_apart() -> None:
    model, optimizer = dynamic("O2", weighted(1.0), num_losses=3)
    for scaler in loss_scalers(optimizer):
        scaler.set_growth_interval(2)
    for _ in range(2):
        overflow(model, optimizer, 1.0, loss_id=0)
        optimizer.step()
        optimizer.zero_grad()
        backward(model, optimizer, 1.0, loss_id=1)
    assert scales(optimizer) == [256.0, 2048.0, 1024.0]


@pytest.mark.parametrize("place", range(3))
def test_overflow_anywhere_in_a_window_drops_all_of_it(place: int) -> None:
    model, optimizer = dynamic("O2", weighted(1.0), lr=0.25)
    for micro in range(3):
        run = overflow if micro == place else backward
        run(model, optimizer, 1.0, delay_unscale=micro < 2)
        if micro < 2:
            assert scales(optimizer) == [1024.0]
    assert model.weight.grad is None
    optimizer.step()
    assert (model.weight.item(), scales(optimizer)) == (1.0, [512.0])
    backward(model, optimizer, 1.0)
    optimizer.step()
    assert (model.weight.item(), scales(optimizer)) == (0.75, [512.0])


def test_overflow_of_a_loss_skips_every_optimizer_that_it_was_given() -> None:
    models = [weighted(1.0), weighted(1.0), weighted(1.0)]
    own = [SGD(model.parameters(), lr=0.25) for model in models]
    models, optimizers = initialize(models, own, opt_level="O2", verbosity=0)
    set_scales(optimizers[0], 1024.0)
    loss = sum(model(torch.ones(1, 1)).sum() for model in models[:2])
    # infinite in the first model alone
    models[0].weight.register_hook(lambda grad: grad * math.inf)
    with scale_loss(loss, optimizers[:2]) as scaled:
        scaled.backward()
    backward(models[2], optimizers[2], 1.0)
    for optimizer in optimizers:
        optimizer.step()
    assert [model.weight.item() for model in models] == [1.0, 1.0, 0.75]


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_non_finite_loss_is_skipped_and_leaves_the_scale(number: float) -> None:
    model, optimizer = dynamic("O2", weighted(1.0))
    loss = backward(model, optimizer, number)
    assert not loss.isfinite()
    optimizer.step()
    assert (model.weight.item(), scales(optimizer)) == (1.0, [1024.0])


def test_overflows_without_end_stop_at_the_floor() -> None:
    model, optimizer = dynamic("O2", weighted(1.0), lr=0.25)
    for _ in range(200):
        overflow(model, optimizer, 1.0)
        optimizer.step()
    assert (model.weight.item(), scales(optimizer)) == (1.0, [1.0])
    backward(model, optimizer, 1.0)
    optimizer.step()
    assert model.weight.item() == 0.75


def test_scale_equals_that_of_the_scaler_for_any_sequence() -> None:
    model, optimizer = dynamic("O1", weighted(1.0))
    reference = GradScaler(init_scale=1024.0, max_scale=2.0**24)
    scaler = loss_scalers(optimizer)[0]
    for each in (scaler, reference):
        each.set_growth_interval(3)
    weight = torch.ones(1, requires_grad=True)
    plain = SGD([weight], lr=0.0)
    pattern = torch.randint(0, 3, (60,)).tolist()
    for is_clean in pattern:
        run = backward if is_clean else overflow
        run(model, optimizer, 1.0)
        optimizer.step()
        reference.scale(weight.sum()).backward()
        if not is_clean:
            weight.grad.fill_(math.inf)
        reference.step(plain)
        reference.update()
        assert scaler.get_scale() == reference.get_scale()


# ---- around the step


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("order", ["schedule first", "levels first"])
@pytest.mark.parametrize("level", LEVELS)
def test_schedules_of_either_optimizer_after_a_skipped_first_step(level: str, order: str) -> None:
    model = weighted(8.0)
    own = SGD(model.parameters(), lr=1.0)
    if order == "schedule first":
        schedule = StepLR(own, 1, gamma=0.5)
    model, optimizer = initialize(model, own, opt_level=level, verbosity=0, loss_scale="dynamic")
    set_scales(optimizer, 1024.0)
    if order == "levels first":
        schedule = StepLR(optimizer, 1, gamma=0.5)
    for run in (overflow, backward, backward):
        run(model, optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    # steps of 1/2 and 1/4 after the skipped one
    assert model.weight.item() == 7.25


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_by_master_parameters_limits_the_step(level: str) -> None:
    model, optimizer = dynamic(level, weighted(8.0, 8.0), lr=1.0)
    backward(model, optimizer, 6.0, 8.0)
    assert nn.utils.clip_grad_norm_(master_params(optimizer), 5.0) == 10
    optimizer.step()
    assert torch.allclose(model.weight.float(), torch.tensor([[5.0, 4.0]]), atol=2.0**-8)


@pytest.mark.parametrize("level", NARROWING)
def test_parameters_added_later_are_trained(level: str) -> None:
    model, optimizer = dynamic(level, weighted(1.0), lr=0.5)
    later = weighted(1.0)
    optimizer.add_param_group({"params": later.parameters(), "lr": 0.25})
    loss = model(torch.ones(1, 1)).sum() + later(torch.ones(1, 1)).sum()
    with scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert (model.weight.item(), later.weight.item()) == (0.5, 0.75)


@pytest.mark.parametrize("level", NARROWING)
def test_parameters_unfrozen_later_are_trained(level: str) -> None:
    model = nn.Sequential(weighted(1.0, 1.0), weighted(1.0)).requires_grad_(False)
    model[1].requires_grad_(True)
    model, optimizer = dynamic(level, model, lr=0.5)
    backward(model, optimizer, 1.0, 0.0)
    optimizer.step()
    assert (model[0].weight.tolist(), model[1].weight.item()) == ([[1.0, 1.0]], 0.5)
    model[0].requires_grad_(True)
    optimizer.zero_grad()
    backward(model, optimizer, 1.0, 0.0)
    assert model[0].weight.grad.dtype == torch.float32
    optimizer.step()
    assert (model[0].weight.tolist(), model[1].weight.item()) == ([[0.75, 1.0]], 0.0)


# ---- whole trainings


def network(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    noise = torch.Generator().manual_seed(step)
    x = torch.randn(32, 6, generator=noise)
    return x, x[:, :1] * 2 - x[:, 1:2]


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """Losses of some steps, each of two micro-batches; the fourth step overflows."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        for half, (x, y) in enumerate((batch(step), batch(step + 1000))):
            loss = nn.functional.mse_loss(model(x), y)
            with scale_loss(loss, optimizer, delay_unscale=not half) as scaled:
                (scaled * (math.inf if step == 3 else 0.5)).backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.parametrize("level", LEVELS)
def test_loss_goes_down(level: str) -> None:
    model, optimizer = dynamic(level, network(), Adam, lr=0.02)
    losses = train(model, optimizer, range(50))
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])


def test_o2_has_the_losses_of_o1_while_no_rounding_matters() -> None:
    losses: dict[str, list[float]] = {"O1": [], "O2": []}
    for level, found in losses.items():
        model, optimizer = dynamic(level, weighted(1.0, -3.0), lr=2.0**-5)
        for step in range(20):
            optimizer.zero_grad()
            found.append(backward(model, optimizer, 2.0, step % 3 - 1.0).item())
            optimizer.step()
    assert losses["O1"] == losses["O2"]
    assert len(set(losses["O1"])) > 10


@pytest.mark.parametrize("stop", [2, 4, 7])
@pytest.mark.parametrize("level", NARROWING)
def test_resumed_training_equals_the_uninterrupted_one(level: str, stop: int) -> None:
    whole, optimizer = dynamic(level, network(), Adam, lr=0.02)
    (scaler,) = loss_scalers(optimizer)
    scaler.set_growth_interval(3)
    train(whole, optimizer, range(stop))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict(), scaler.state_dict()))
    want = train(whole, optimizer, range(stop, 10))

    resumed, other = dynamic(level, network(seed=99), Adam, lr=0.02)
    other_scaler = loss_scalers(other)[0]
    for target, state in zip((resumed, other, other_scaler), saved, strict=True):
        target.load_state_dict(state)
    assert train(resumed, other, range(stop, 10)) == want
    ends = [list(each.state_dict().values()) for each in (whole, resumed)]
    assert all(torch.equal(old, new) for old, new in zip(*ends, strict=True))
    masters = [list(master_params(each)) for each in (optimizer, other)]
    assert all(torch.equal(old, new) for old, new in zip(*masters, strict=True))
    assert other_scaler.state_dict() == scaler.state_dict()


def test_three_losses_of_two_models_as_in_adversarial_training() -> None:
    models = [weighted(1.0), weighted(1.0)]
    own = [SGD(model.parameters(), lr=0.25) for model in models]
    models, optimizers = initialize(models, own, opt_level="O1", num_losses=3, verbosity=0)
    set_scales(optimizers[0], 256.0, 512.0, 1024.0)
    (critic, maker), (critic_optimizer, maker_optimizer) = models, optimizers
    fake = maker(torch.ones(1, 1))
    for loss_id, loss in enumerate((critic(torch.full((1, 1), 3.0)), -critic(fake.detach()))):
        with scale_loss(loss.sum(), critic_optimizer, loss_id=loss_id) as scaled:
            scaled.backward()
    critic_optimizer.step()
    # the gradient 3 - 1 times 1/4
    assert critic.weight.item() == 0.5
    with scale_loss(critic(fake).sum(), maker_optimizer, loss_id=2) as scaled:
        scaled.backward()
    maker_optimizer.step()
    assert maker.weight.item() == 0.875
