"""Order of a gradient scaler's calls: which are refused, and how a window is dropped on purpose."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mixprec.amp.grad_scaler import GradScaler
from mixprec.amp.scaler_state import StepOutcome


def sgd(*values: float) -> tuple[nn.Parameter, torch.optim.SGD]:
    weight = nn.Parameter(torch.tensor(values))
    return weight, torch.optim.SGD([weight], lr=1.0)


@pytest.mark.parametrize("by_position", [False, True])
def test_closures_are_refused_before_anything_happens(by_position: bool) -> None:
    weight, _ = sgd(1.0, 2.0)
    optimizer = torch.optim.LBFGS([weight])
    scaler = GradScaler()

    def closure() -> Tensor:
        raise AssertionError("it must not run")

    scaler.scale(weight.sum()).backward()
    args, kwargs = ((closure,), {}) if by_position else ((), {"closure": closure})
    with pytest.raises(
        RuntimeError, match=r"closure: got a function.*Closure use is not currently"
    ):
        scaler.step(optimizer, *args, **kwargs)
    assert weight.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("by_position", [False, True])
def test_none_for_a_closure_is_passed_on(by_position: bool) -> None:
    weight, optimizer = sgd(1.0, 2.0)
    scaler = GradScaler()
    scaler.scale(weight.sum()).backward()
    scaler.step(
        optimizer, *([None] if by_position else []), **({} if by_position else {"closure": None})
    )
    assert weight.tolist() == [0.0, 1.0]


def begun() -> tuple[GradScaler, torch.optim.SGD]:
    weight, optimizer = sgd(1.0, 2.0)
    scaler = GradScaler()
    scaler.scale(weight.sum()).backward()
    return scaler, optimizer


def test_unscaling_twice_names_the_calls_between() -> None:
    scaler, optimizer = begun()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"already been called on this optimizer.*skip\(opt"):
        scaler.unscale_(optimizer)


def test_unscaling_or_skipping_after_a_step_names_update() -> None:
    scaler, optimizer = begun()
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"being called after step\(\). Call update"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"skip\(\) is being called after step"):
        scaler.skip(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called.*update\(\) in"):
        scaler.step(optimizer)


@pytest.mark.parametrize("method", ["unscale_", "step", "update"])
def test_calls_before_anything_is_scaled_name_scale(method: str) -> None:
    _, optimizer = sgd(1.0)
    call, args = getattr(GradScaler(), method), [] if method == "update" else [optimizer]
    with pytest.raises(
        AssertionError, match=rf"Attempted {method} but _scale is None.*scale\(loss"
    ):
        call(*args)


@pytest.mark.parametrize("scaled", [False, True])
def test_update_before_a_step_names_step(scaled: bool) -> None:
    scaler, optimizer = begun()
    if not scaled:
        scaler.step(optimizer)
        scaler.update()
    with pytest.raises(
        AssertionError, match=r"No inf checks were recorded.*scaler.step\(optimizer"
    ):
        scaler.update()


def test_skip_on_purpose_starts_the_window_anew() -> None:
    scaler, optimizer = begun()
    scaler.clip_grad_norm_(optimizer, 1.0)
    scaler.skip(optimizer)
    (weight,) = optimizer.param_groups[0]["params"]
    assert weight.grad is None
    assert scaler.last_step == StepOutcome(False, "", 65536.0, 65536.0, "", False)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert (weight.tolist(), scaler.skipped_steps) == ([0.0, 1.0], 1)


def test_skip_before_unscaling_moves_nothing_and_after_an_overflow_lowers() -> None:
    scaler, optimizer = begun()
    (weight,) = optimizer.param_groups[0]["params"]
    scaler.skip(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (65536.0, 0)
    scaler.scale(weight.sum()).backward()
    weight.grad[0] = math.inf
    norm = scaler.clip_grad_norm_(optimizer, 1.0)
    assert norm.item() == math.inf
    scaler.skip(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32768.0
