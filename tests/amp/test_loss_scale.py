"""The loss scale: arguments, scaling, how it moves against torch's own, and saving."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mixprec.amp.grad_scaler import GradScaler
from mixprec.amp.loss_scale import CallOrderError

BAD_NUMBERS = [0, -1, -0.5, math.nan, -math.inf]


def one_step(scaler: torch.amp.GradScaler, overflow: bool) -> tuple[float, int]:
    """One iteration on one parameter; the scale and the growth tracker after it."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    if overflow:
        weight.grad[1] = math.inf
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), scaler._get_growth_tracker()


@pytest.mark.parametrize("name", ["init_scale", "min_scale", "max_scale"])
@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_scales_have_to_be_positive_numbers(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^(init|min|max)_scale: got {value!r}"):
        GradScaler(**{name: value})


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"init_scale": math.inf}, "init_scale: got inf"),
        ({"init_scale": 1e39}, "init_scale: got 1e\\+39"),
        ({"init_scale": 0.5}, "init_scale: got 0.5; .* from 1.0"),
        ({"init_scale": 8.0, "max_scale": 4.0}, "init_scale: got 8.0; .* to 4.0"),
        ({"min_scale": math.inf}, "min_scale: got inf"),
        ({"min_scale": 1e-60}, "min_scale: got 1e-60"),
        ({"min_scale": 8.0, "max_scale": 4.0}, "min_scale: got 8.0 above max_scale 4.0"),
        ({"growth_factor": 1.0}, "growth_factor: got 1.0"),
        ({"growth_factor": math.inf}, "growth_factor: got inf"),
        ({"growth_factor": math.nan}, "growth_factor: got nan"),
        ({"backoff_factor": 1.0}, "backoff_factor: got 1.0"),
        ({"backoff_factor": 0.0}, "backoff_factor: got 0.0"),
        ({"backoff_factor": math.nan}, "backoff_factor: got nan"),
        ({"growth_interval": 0}, "growth_interval: got 0"),
        ({"growth_interval": 2**31}, "growth_interval: got 2147483648"),
        ({"hysteresis": 0}, "hysteresis: got 0"),
        ({"device": "laptop"}, "device: got 'laptop'"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}.*;.*;"):
        GradScaler(**arguments)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, True) for name in ("init_scale", "min_scale", "max_scale", "growth_factor")),
        *((name, "2") for name in ("init_scale", "backoff_factor", "growth_interval")),
        ("backoff_factor", None),
        ("growth_interval", 2.0),
        ("growth_interval", True),
        ("hysteresis", 1.0),
        ("dynamic", 1),
        ("enabled", "no"),
    ],
)
def test_arguments_of_another_type_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"^{name}: got {value!r}"):
        GradScaler(**{name: value})


def test_setters_check_as_the_constructor_does() -> None:
    scaler = GradScaler()
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    got = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    assert got == (3.0, 0.25, 7)
    with pytest.raises(ValueError, match=r"growth_factor: got 0\.5"):
        scaler.set_growth_factor(0.5)
    with pytest.raises(ValueError, match=r"backoff_factor: got 2\.0"):
        scaler.set_backoff_factor(2.0)
    with pytest.raises(ValueError, match="growth_interval: got 0"):
        scaler.set_growth_interval(0)


@pytest.mark.parametrize("device", [None, "cpu", "cuda", "cuda:0", torch.device("cuda")])
def test_device_named_never_disables(device: Any) -> None:
    scaler = GradScaler(device, init_scale=4.0)
    assert scaler.is_enabled()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert one_step(scaler, overflow=True) == (2.0, 0)


Out = namedtuple("Out", "loss aux")


def test_scale_keeps_the_structure() -> None:
    scaler = GradScaler(init_scale=4.0)
    loss = torch.tensor(1.5)
    scaled = scaler.scale({"out": Out(loss, [torch.ones(2), 0.25]), "t": (loss,), "n": 3})
    assert isinstance(scaled["out"], Out)
    assert scaled["out"].loss.item() == scaled["t"][0].item() == 6.0
    assert scaled["out"].aux[0].tolist() == [4.0, 4.0]
    assert scaled["out"].aux[1].item() == 1.0
    assert scaled["n"].item() == 12.0
    assert [t.item() for t in scaler.scale(iter([loss, loss]))] == [6.0, 6.0]
    assert GradScaler("cuda", init_scale=4.0).scale(2.0).item() == 8.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (3, 2), (0,)])
def test_scale_gives_the_type_and_values_of_torch(dtype: torch.dtype, shape: Any) -> None:
    loss = torch.rand(shape).to(dtype)
    own = GradScaler(init_scale=1024.0).scale(loss)
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0).scale(loss)
    assert own.dtype is theirs.dtype
    assert torch.equal(own, theirs)


@pytest.mark.parametrize(
    ("leaf", "kind"), [("x", "str"), (None, "NoneType"), (True, "bool"), (1j, "complex")]
)
def test_scale_names_the_type_of_a_leaf_it_cannot_scale(leaf: Any, kind: str) -> None:
    scaler, loss = GradScaler(), torch.ones(())
    with pytest.raises(TypeError, match=f"outputs: got a leaf of type {kind}"):
        scaler.scale({"loss": loss, "other": [leaf]})


@given(
    st.lists(st.booleans(), max_size=25),
    st.sampled_from([1.5, 2.0, 3.0, 1e30]),
    st.sampled_from([0.1, 0.5, 0.75]),
    st.integers(1, 4),
)
def test_trace_equals_torch_s_between_floor_and_ceiling(
    overflows: list[bool], growth: float, backoff: float, interval: int
) -> None:
    settings = {"growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    own = GradScaler(init_scale=2.0**16, min_scale=1e-30, **settings)
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, **settings)
    for overflow in overflows:
        assert one_step(own, overflow) == one_step(theirs, overflow)


def hysteresis_trace(overflows: list[bool], hysteresis: int, interval: int) -> list[Any]:
    """The rule in integers: scale as a power of two, 0 the floor and 6 the ceiling."""
    power, tracker, left, trace = 3, 0, hysteresis, []
    for overflow in overflows:
        if overflow:
            left, tracker = left - 1, 0
            power = max(power - 1, 0) if left <= 0 else power
        else:
            left, tracker = hysteresis, tracker + 1
            if tracker == interval:
                power, tracker = min(power + 1, 6), 0
        trace.append((2.0**power, tracker))
    return trace


@given(st.lists(st.booleans(), max_size=25), st.integers(1, 3), st.integers(1, 3))
def test_trace_with_hysteresis_floor_and_ceiling(
    overflows: list[bool], hysteresis: int, interval: int
) -> None:
    scaler = GradScaler(
        init_scale=8.0, max_scale=64.0, growth_interval=interval, hysteresis=hysteresis
    )
    trace = [one_step(scaler, overflow) for overflow in overflows]
    assert trace == hysteresis_trace(overflows, hysteresis, interval)


def test_steps_across_the_floor_and_the_ceiling_end_on_them() -> None:
    scaler = GradScaler(init_scale=5.0, min_scale=3.0, max_scale=7.0, growth_interval=1)
    assert one_step(scaler, overflow=True) == (3.0, 0)
    assert [one_step(scaler, overflow=False) for _ in range(3)] == [(6.0, 0), (7.0, 0), (7.0, 0)]


def test_count_beyond_a_shortened_interval_grows_at_once() -> None:
    scaler = GradScaler(init_scale=4.0)
    for _ in range(3):
        one_step(scaler, overflow=False)
    scaler.set_growth_interval(2)
    assert one_step(scaler, overflow=False) == (8.0, 0)


def test_scale_grows_no_further_than_a_finite_float32() -> None:
    scaler = GradScaler(init_scale=2.0**127, growth_interval=1)
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum() * 2.0**-100).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**127


def test_static_scale_stays_and_still_skips() -> None:
    scaler = GradScaler(init_scale=128.0, growth_interval=1, dynamic=False)
    for overflow in (True, False, False, True):
        assert one_step(scaler, overflow) == (128.0, 0)
        assert scaler.last_step.stepped is not overflow
    assert scaler.skipped_steps == 2
    scaler.update(64)
    assert scaler.get_scale() == 64.0


@pytest.mark.parametrize("new_scale", [8, 8.0, torch.tensor(8.0), torch.tensor([8])])
@pytest.mark.parametrize("begun", [False, True])
def test_update_sets_a_scale(new_scale: Any, begun: bool) -> None:
    scaler = GradScaler(init_scale=4.0)
    if begun:
        one_step(scaler, overflow=False)
    scaler.update(new_scale)
    assert scaler.get_scale() == 8.0
    assert scaler.scale(torch.ones(())).item() == 8.0


@pytest.mark.parametrize("value", [True, "8", [8.0]])
def test_update_refuses_other_types(value: Any) -> None:
    with pytest.raises(TypeError, match="new_scale: got"):
        GradScaler().update(value)


@pytest.mark.parametrize(
    "value", [0, 0.5, math.inf, math.nan, torch.ones(2), torch.ones((), requires_grad=True)]
)
def test_update_refuses_scales_out_of_range(value: Any) -> None:
    scaler = GradScaler(init_scale=4.0)
    with pytest.raises(ValueError, match="new_scale: got"):
        scaler.update(value)
    assert scaler.get_scale() == 4.0


def test_update_limits_a_tensor_without_reading_it() -> None:
    scaler = GradScaler(min_scale=2.0, max_scale=2.0**20)
    scaler.update(torch.tensor(0.0))
    assert scaler.get_scale() == 2.0
    scaler.update(torch.tensor(math.inf))
    assert scaler.get_scale() == 2.0**20


def through_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


PATTERN = [False, True, False, False, True, True, False, False, False, False]


@pytest.mark.parametrize("at", range(len(PATTERN)))
@pytest.mark.parametrize("used", [False, True])
def test_resumed_trace_equals_the_uninterrupted_one(at: int, used: bool) -> None:
    settings = {"init_scale": 64.0, "growth_interval": 2, "hysteresis": 2, "max_scale": 2.0**10}
    whole = GradScaler(**settings)
    expected = [one_step(whole, overflow) for overflow in PATTERN]
    first = GradScaler(**settings)
    for overflow in PATTERN[:at]:
        one_step(first, overflow)
    resumed = GradScaler()
    if used:
        one_step(resumed, overflow=False)
    resumed.load_state_dict(through_file(first.state_dict()))
    assert resumed.state_dict() == first.state_dict()
    assert [one_step(resumed, overflow) for overflow in PATTERN[at:]] == expected[at:]
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.skipped_steps == sum(PATTERN)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_copies_between_iterations_go_on_alike(copied: Any) -> None:
    scaler = GradScaler(init_scale=64.0, growth_interval=2, hysteresis=2)
    twins = [copied(scaler)]
    for overflow in PATTERN:
        one_step(scaler, overflow)
        twins.append(copied(scaler))
        assert twins[-1].last_step == scaler.last_step
        assert twins[-1].state_dict() == scaler.state_dict()
    for done, twin in enumerate(twins):
        for overflow in PATTERN[done:]:
            one_step(twin, overflow)
        assert twin.state_dict() == scaler.state_dict()


def test_copy_within_an_iteration_is_refused() -> None:
    scaler, weight = GradScaler(), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    with pytest.raises(CallOrderError, match=r"only be pickled at the beginning .* update"):
        copy.deepcopy(scaler)
    scaler.update()
    assert copy.deepcopy(scaler).state_dict() == scaler.state_dict()


def test_first_call_after_a_load_may_be_unscale() -> None:
    saved = GradScaler(init_scale=2048.0, growth_interval=2000)
    state = {**saved.state_dict(), "_growth_tracker": 1500}
    scaler, weight = GradScaler(), nn.Parameter(torch.zeros(2))
    scaler.load_state_dict(state)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.full((2,), 4096.0)
    scaler.unscale_(optimizer)
    assert weight.grad.tolist() == [2.0, 2.0]
    scaler.step(optimizer)
    scaler.update()
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (2048.0, 1501)
    for _ in range(498):
        one_step(scaler, overflow=False)
    assert one_step(scaler, overflow=False) == (4096.0, 0)


def test_disabled_scaler_passes_everything_through() -> None:
    scaler, weight = GradScaler(enabled=False), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    outputs: Any = {"loss": weight.sum(), "name": "x"}
    assert scaler.scale(outputs) is outputs
    outputs["loss"].backward()
    weight.grad[0] = math.inf
    scaler.unscale_(optimizer)
    closure: Any = lambda: weight.sum()  # noqa: E731
    assert isinstance(scaler.step(optimizer, closure), Tensor)
    scaler.update()
    assert weight.tolist() == [-math.inf, -1.0]
    assert scaler.last_step.stepped
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})
    scaler.load_state_dict({})
    scaler.skip(optimizer)
    assert weight.grad is None
