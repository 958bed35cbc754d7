"""States of loss scalers: torch's, apex's and DeepSpeed's layouts, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from mixprec.amp.grad_scaler import GradScaler
from mixprec.amp.scaler_state import OWN_KEYS, TORCH_KEYS, as_float32, read_state

TORCH = {
    "scale": 256.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "_growth_tracker": 5,
}
APEX = {"loss_scaler0": {"loss_scale": 256.0, "unskipped": 5}}
DEEPSPEED = {
    "dynamic_loss_scale": True,
    "cur_scale": 256.0,
    "cur_iter": 30,
    "last_overflow_iter": 24,
    "scale_factor": 2.0,
    "scale_window": 7,
    "optimizer_state_dict": {},
}


def loaded(state: dict[str, Any], used: bool = False, **settings: Any) -> GradScaler:
    scaler = GradScaler(**settings)
    if used:
        scaler.scale(torch.ones(()))
    scaler.load_state_dict(state)
    return scaler


@pytest.mark.parametrize("used", [False, True])
def test_torch_s_state_loads_and_is_given_back(used: bool) -> None:
    own = loaded(TORCH, used, hysteresis=3).state_dict()
    assert {key: own[key] for key in TORCH} == TORCH
    assert (own["hysteresis"], own["_hysteresis_tracker"]) == (3, 3)
    assert set(own) == {*TORCH_KEYS, *OWN_KEYS}


def test_torch_s_scaler_loads_the_own_state() -> None:
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(loaded(TORCH).state_dict())
    assert theirs.state_dict() == TORCH


@pytest.mark.parametrize("used", [False, True])
def test_apex_s_state_sets_scale_and_tracker(used: bool) -> None:
    scaler = loaded(APEX, used, growth_interval=2000)
    assert scaler.get_scale() == 256.0
    assert scaler._get_growth_tracker() == 5
    assert scaler.get_growth_interval() == 2000


class DeepSpeed:
    """Its rule: an overflow divides; a multiple of the window since the last one multiplies."""

    def __init__(self) -> None:
        self.scale, self.iteration, self.overflow = 256.0, 0, -1

    def step(self, overflow: bool) -> float:
        if overflow:
            self.scale, self.overflow = self.scale / 2, self.iteration
        elif (self.iteration - self.overflow) % 3 == 0:
            self.scale *= 2
        self.iteration += 1
        return self.scale

    def state(self) -> dict[str, Any]:
        return {
            "cur_scale": self.scale,
            "cur_iter": self.iteration,
            "last_overflow_iter": self.overflow,
            "scale_factor": 2.0,
            "scale_window": 3,
        }


PATTERN = [False, False, True, False, False, False, False, True, True, False, False, False]


@pytest.mark.parametrize("at", range(len(PATTERN)))
def test_deepspeed_s_state_goes_on_as_there(at: int) -> None:
    theirs, weight = DeepSpeed(), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight])
    for overflow in PATTERN[:at]:
        theirs.step(overflow)
    scaler = loaded(theirs.state())
    assert scaler.get_backoff_factor() == 0.5
    for overflow in PATTERN[at:]:
        scaler.scale(weight.sum()).backward()
        if overflow:
            weight.grad[0] = math.nan
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == theirs.step(overflow)


def test_deepspeed_s_static_state_makes_the_scale_static() -> None:
    scaler = loaded({"dynamic_loss_scale": False, "cur_scale": 128.0, "cur_iter": 9})
    assert scaler.state_dict()["dynamic"] is False
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize(
    ("state", "key"),
    [
        *((TORCH, key) for key in TORCH),
        *((APEX["loss_scaler0"], key) for key in ("loss_scale", "unskipped")),
        *((DEEPSPEED, key) for key in list(DEEPSPEED)[2:6]),
    ],
)
def test_missing_key_is_named(state: dict[str, Any], key: str) -> None:
    cut: dict[str, Any] = {name: value for name, value in state.items() if name != key}
    if "unskipped" in state or "loss_scale" in state:
        cut = {"loss_scaler0": cut}
    with pytest.raises(ValueError, match=f"state_dict: got keys .* without '{key}'; "):
        read_state(cut)


def test_several_scales_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got 2 loss scalers .loss_scaler0, loss_scaler1"):
        read_state({**APEX, "loss_scaler1": {"loss_scale": 1.0, "unskipped": 0}})


def test_empty_state_is_refused_as_torch_does() -> None:
    with pytest.raises(RuntimeError, match="The source state dict is empty"):
        GradScaler().load_state_dict({})


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("scale", 0.0, ValueError),
        ("scale", 0.5, ValueError),
        ("scale", math.nan, ValueError),
        ("scale", "256", TypeError),
        ("growth_factor", 1.0, ValueError),
        ("backoff_factor", 1.0, ValueError),
        ("growth_interval", 0, ValueError),
        ("_growth_tracker", -1, ValueError),
        ("_growth_tracker", 1.5, TypeError),
    ],
)
def test_values_that_make_no_sense_are_refused_and_nothing_is_loaded(
    key: str, value: Any, error: type[Exception]
) -> None:
    scaler = loaded(TORCH)
    before = scaler.state_dict()
    with pytest.raises(error, match=f"^{key}: got {value!r}"):
        scaler.load_state_dict({**before, "scale": 512.0, key: value})
    assert scaler.state_dict() == before


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.1, 13421773 / 2**27), (1.0, 1.0), (math.inf, math.inf), (1e39, math.inf), (1e-60, 0.0)],
)
def test_as_float32_rounds_once(value: float, expected: float) -> None:
    assert as_float32(value) == expected
