"""averages.py: averages move in float32, and swap in and out without a trace."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mixprec.optim import ExponentialMovingAverage, MixedPrecision


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(dtype)


def set_all(net: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_averages_of_16_bit_parameters_move(dtype: torch.dtype) -> None:
    net = nn.Linear(1, 1).to(dtype)
    set_all(net, 1.0)
    average = ExponentialMovingAverage(net, decay=0.9999)
    set_all(net, 2.0)
    for _ in range(20_000):
        average.update()
    moved = average.averages["weight"]
    assert moved.dtype == torch.float32
    # 20000 roundings of at most 2^-24; in bfloat16 the average would be 1.0 still.
    assert abs(moved.item() - (2 - 0.9999**20_000)) < 20_000 * 2.0**-24
    assert moved.item() == pytest.approx(1.865, abs=0.0015)


def test_average_stands_still_in_its_own_type_as_documented() -> None:
    one = torch.ones((), dtype=torch.bfloat16)
    assert one + torch.tensor(0.001 * (4.8 - 1), dtype=torch.bfloat16) == 1
    assert one + torch.tensor(0.001 * (5.0 - 1), dtype=torch.bfloat16) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_each_update_is_the_documented_one(dtype: torch.dtype) -> None:
    net = nn.Linear(5, 7)
    net.weight = nn.Parameter(net.weight.detach().to(dtype))
    average = ExponentialMovingAverage(net, decay=0.9)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    want = net.weight.detach().to(wide, copy=True)
    for _ in range(5):
        with torch.no_grad():
            net.weight.copy_(torch.randn(7, 5))
        average.update()
        want = 0.9 * want + 0.1 * net.weight.detach().to(wide)
    got = average.averages["weight"]
    assert got.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
    bound = 30 * torch.finfo(got.dtype).eps * 5
    assert (got.to(wide) - want).abs().max() < bound


def test_decay_of_zero_and_one() -> None:
    for decay, want in [(0, 5.0), (1, 1.0)]:
        net = nn.Linear(1, 1)
        set_all(net, 1.0)
        average = ExponentialMovingAverage(net, decay=decay)
        set_all(net, 5.0)
        average.update()
        assert average.averages["weight"].item() == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_averages_are_applied_and_taken_back_bit_for_bit(dtype: torch.dtype) -> None:
    net = model(dtype)
    average = ExponentialMovingAverage(net, decay=0.9)
    set_all(net, 1.5)
    average.update()
    before = copy.deepcopy(net.state_dict())
    with average.applied():
        for name, parameter in net.named_parameters():
            assert torch.equal(parameter, average.averages[name].to(dtype))
        assert not torch.equal(net[0].weight, before["0.weight"])
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_the_model_comes_back_after_an_error() -> None:
    net = model()
    average = ExponentialMovingAverage(net)
    set_all(net, 1.5)
    with pytest.raises(KeyError, match="evaluation"), average.applied():
        raise KeyError("evaluation")
    assert all((parameter == 1.5).all() for parameter in net.parameters())


def test_masters_survive_an_evaluation_of_the_averages() -> None:
    net = model()
    optimizer = MixedPrecision(torch.optim.SGD(net.parameters(), lr=0.1))
    net.bfloat16()
    average = ExponentialMovingAverage(net, decay=0.5)
    set_all(net, 1.5)
    average.update()
    net[0].weight.grad = torch.ones(4, 3)
    optimizer.step()
    before = [master.detach().clone() for master in optimizer.masters()]
    with average.applied():
        pass
    assert all(map(torch.equal, optimizer.masters(), before))
    assert not torch.equal(before[0], before[0].bfloat16().float())


def test_shared_parameters_are_averaged_once() -> None:
    net = model()
    net.tied = net[0]
    average = ExponentialMovingAverage(net, decay=0.5)
    assert len(average.averages) == len(list(net.parameters()))
    set_all(net, 3.0)
    average.update()
    with average.applied():
        assert net.tied.weight is net[0].weight


def test_state_is_taken_over() -> None:
    net = model(torch.bfloat16)
    average = ExponentialMovingAverage(net, decay=0.9)
    set_all(net, 1.5)
    average.update()
    other = ExponentialMovingAverage(model(torch.bfloat16))
    other.load_state_dict(copy.deepcopy(average.state_dict()))
    assert other.decay == 0.9
    for name, value in average.averages.items():
        assert torch.equal(other.averages[name], value)
        assert other.averages[name].dtype == torch.float32


def test_state_of_another_model_is_refused_and_nothing_loaded() -> None:
    average = ExponentialMovingAverage(model())
    before = copy.deepcopy(average.state_dict())
    state = {"decay": 0.5, "averages": {**before["averages"], "0.weight": torch.zeros(2, 2)}}
    with pytest.raises(ValueError, match=r"^state: got other names or shapes for 0\.weight; must"):
        average.load_state_dict(state)
    state = {"decay": 0.5, "averages": {"x": torch.zeros(2), **before["averages"]}}
    with pytest.raises(ValueError, match=r"shapes for x; must"):
        average.load_state_dict(state)
    assert average.decay == 0.999
    assert all(
        torch.equal(average.averages[name], value) for name, value in before["averages"].items()
    )


@pytest.mark.parametrize("decay", [-0.1, 1.1, float("nan")])
def test_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=rf"^decay: got {decay}; must be from 0 to 1; change it"):
        ExponentialMovingAverage(model(), decay=decay)
