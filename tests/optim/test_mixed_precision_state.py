"""mixed_precision.py: states load in the types they were saved in, runs go on bit for bit."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from mixprec.gemm.widening import NARROW
from mixprec.optim import MixedPrecision
from mixprec.optim.updates import UPDATES
from mixprec.train import checkpoint

every_update = pytest.mark.parametrize("update", UPDATES)
STEPS = 6


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def wrapped(net: nn.Module, update: str = "masters", **options: Any) -> MixedPrecision:
    return MixedPrecision(optim.AdamW(net.parameters(), lr=0.01), update=update, **options)


def train(net: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        for parameter in net.parameters():
            shape = parameter.shape
            parameter.grad = torch.randn(shape, generator=generator).to(
                parameter.device, parameter.grad_dtype
            )
        optimizer.step()


def everything(net: nn.Module, optimizer: MixedPrecision) -> list[Tensor]:
    kept = optimizer.state_dict()["mixed_precision"]["kept"].values()
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*net.parameters(), *(each for each in kept if each is not None), *moments]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@every_update
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_run_resumed_at_every_step_equals_the_uninterrupted_one(
    update: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    whole = model(dtype)
    its_optimizer = wrapped(whole, update, seed=9)
    train(whole, its_optimizer, range(STEPS))
    for stop in range(STEPS + 1):
        net = model(dtype)
        optimizer = wrapped(net, update, seed=9)
        train(net, optimizer, range(stop))
        tree = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
        tree = checkpoint.load(checkpoint.save(tmp_path, stop, tree, keep=1))
        net = model(dtype)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        optimizer = wrapped(net, update)
        if stop % 2:
            net.load_state_dict(tree["model"])
        optimizer.load_state_dict(tree["optimizer"])
        net.load_state_dict(tree["model"])
        train(net, optimizer, range(stop, STEPS))
        assert same(everything(net, optimizer), everything(whole, its_optimizer))
        assert (optimizer.steps, optimizer.seed) == (STEPS, 9)


@every_update
def test_a_state_goes_to_the_parameters_device(update: str, device: torch.device) -> None:
    net = model().to(device)
    optimizer = wrapped(net, update)
    train(net, optimizer, range(2))
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    state["mixed_precision"]["kept"] = {
        index: None if kept is None else kept.cpu()
        for index, kept in state["mixed_precision"]["kept"].items()
    }
    for each in state["state"].values():
        each.update({key: value.cpu() for key, value in each.items()})
    other = model().to(device)
    other.load_state_dict(net.state_dict())
    its_optimizer = wrapped(other, update)
    its_optimizer.load_state_dict(state)
    for each in ((net, optimizer), (other, its_optimizer)):
        train(*each, range(2, 4))
    assert same(everything(net, optimizer), everything(other, its_optimizer))


def test_masters_are_worth_saving() -> None:
    net = model()
    optimizer = wrapped(net)
    train(net, optimizer, range(3))
    state = copy.deepcopy(optimizer.state_dict())
    del state["mixed_precision"]
    other = model()
    other.load_state_dict(net.state_dict())
    its_optimizer = wrapped(other)
    its_optimizer.load_state_dict(state)
    train(net, optimizer, range(3, STEPS))
    train(other, its_optimizer, range(3, STEPS))
    assert not same(everything(net, optimizer), everything(other, its_optimizer))


@every_update
def test_loaded_tensors_are_copies(update: str) -> None:
    net, other = model(), model()
    optimizer, its_optimizer = wrapped(net, update), wrapped(other, update)
    train(net, optimizer, range(2))
    its_optimizer.load_state_dict(optimizer.state_dict())
    before = [value.detach().clone() for value in everything(net, optimizer)]
    train(other, its_optimizer, range(2, 4))
    assert same(everything(net, optimizer), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_state_of_a_plain_optimizer_is_taken_over_in_float32(dtype: torch.dtype) -> None:
    net = model(dtype)
    plain = optim.AdamW(net.parameters(), lr=0.01)
    train(net, plain, range(3))
    other = model(torch.float32)
    other.load_state_dict(net.state_dict())
    optimizer = wrapped(other)
    other.bfloat16()
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    for mine, theirs in zip(other.parameters(), net.parameters(), strict=True):
        for key, value in plain.state[theirs].items():
            assert optimizer.state[mine][key].dtype == torch.float32
            assert torch.equal(optimizer.state[mine][key], value.float())
    assert all(map(torch.equal, optimizer.masters(), (p.float() for p in net.parameters())))


def test_wrapping_a_plain_optimizer_in_mid_run_widens_its_state() -> None:
    net = model()
    plain = optim.AdamW(net.parameters(), lr=0.01)
    train(net, plain, range(2))
    moments = [state["exp_avg"] for state in plain.state.values()]
    assert {moment.dtype for moment in moments} == {torch.bfloat16}
    optimizer = MixedPrecision(plain)
    got = [state["exp_avg"] for state in optimizer.state.values()]
    assert same(got, [moment.float() for moment in moments])
    train(net, optimizer, range(2, 4))


class Counting(optim.Optimizer):
    """Keeps state of several types, in containers too."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.dtype == torch.float32
                self.state[parameter] = {
                    "codes": torch.full((3,), 200, dtype=torch.uint8),
                    "sum": torch.full((3,), 1 / 3, dtype=torch.float64),
                    "list": [torch.full((2,), 1.5, dtype=torch.float16), None, 3],
                    "map": {"tuple": (torch.ones(2, dtype=torch.bfloat16), 2.5)},
                }


def test_state_of_every_type_is_loaded_in_it() -> None:
    net = model()
    optimizer = MixedPrecision(Counting(net.parameters()))
    train(net, optimizer, range(1))
    other = model()
    its_optimizer = MixedPrecision(Counting(other.parameters()))
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = its_optimizer.state[next(other.parameters())]
    assert (state["codes"].dtype, state["codes"].tolist()) == (torch.uint8, [200] * 3)
    assert torch.equal(state["sum"], torch.full((3,), 1 / 3, dtype=torch.float64))
    assert (state["list"][0].dtype, state["list"][1:]) == (torch.float16, [None, 3])
    assert (state["map"]["tuple"][0].dtype, state["map"]["tuple"][1]) == (torch.bfloat16, 2.5)


def test_lbfgs_resumes_bit_for_bit(tmp_path: Path) -> None:
    def run(steps: int, tree: Any = None) -> tuple[nn.Parameter, MixedPrecision]:
        parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        optimizer = MixedPrecision(optim.LBFGS([parameter], lr=0.1, max_iter=3))
        if tree is not None:
            parameter.data = tree["p"]
            optimizer.load_state_dict(tree["optimizer"])

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = ((parameter.float() - torch.arange(4.0)) ** 4).sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimizer.step(closure)
        return parameter, optimizer

    whole, its_optimizer = run(4)
    half, optimizer = run(2)
    tree = {"p": half.detach(), "optimizer": optimizer.state_dict()}
    resumed, optimizer = run(2, checkpoint.load(checkpoint.save(tmp_path, 1, tree, keep=1)))
    assert torch.equal(whole, resumed)
    assert torch.equal(its_optimizer.masters()[0], optimizer.masters()[0])


def test_hooks_that_change_the_state_are_heeded() -> None:
    net, other = model(), model()
    optimizer, its_optimizer = (
        MixedPrecision(optim.SGD(each.parameters(), lr=0.1, momentum=0.9)) for each in (net, other)
    )
    train(net, optimizer, range(1))

    def rename(_: optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {k: {"extra": torch.ones(2)} for k in state["state"]}}

    its_optimizer.register_load_state_dict_pre_hook(rename)
    its_optimizer.load_state_dict(optimizer.state_dict())
    assert all(list(state) == ["extra"] for state in its_optimizer.state.values())
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 1})
    assert optimizer.state_dict()["note"] == 1


def test_a_pickled_optimizer_goes_on_alike() -> None:
    net = model()
    optimizer = wrapped(net, "compensated")
    train(net, optimizer, range(2))
    other, its_optimizer = pickle.loads(pickle.dumps((net, optimizer)))
    train(net, optimizer, range(2, 4))
    train(other, its_optimizer, range(2, 4))
    assert same(everything(net, optimizer), everything(other, its_optimizer))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"update": "stochastic"}, "got update='stochastic'; this optimizer has update='masters';"),
        (
            {"shapes": [[4, 5], [5], [3, 5], [3]]},
            r"got parameters of shapes \[\[4, 5\], .*; this optimizer's are \[\[5, 4\], .*in their",
        ),
        (
            {"kept": {0: torch.zeros(5, 4)}},
            r"got narrow parameters \[0\]; here they are \[0, 1, 2, 3\]; narrow the model as",
        ),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_is_loaded(
    change: dict[str, Any], message: str
) -> None:
    net = model()
    optimizer = wrapped(net)
    train(net, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    train(net, optimizer, range(2, 3))
    before = [value.detach().clone() for value in everything(net, optimizer)]
    state["mixed_precision"].update(change)
    with pytest.raises(ValueError, match=f"^state_dict: {message}"):
        optimizer.load_state_dict(state)
    assert same(everything(net, optimizer), before)


def test_a_float32_model_takes_no_state_of_a_narrow_one() -> None:
    state = wrapped(model()).state_dict()
    optimizer = wrapped(model(torch.float32))
    with pytest.raises(ValueError, match=r"narrow parameters \[0, 1, 2, 3\]; here they are \[\];"):
        optimizer.load_state_dict(state)
