"""Numerics state and checkpoints: what is saved, how it is loaded, that training resumes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from quant_oracles import with_distinct_products
from torch import Tensor, nn

import mixprec
from mixprec.recipes import RECIPES

QUANTISING = [
    name for name, each in with_distinct_products(RECIPES).items() if not each.is_high_precision
]
STATEFUL = ("fp8_delayed", "mxfp4", "nvfp4")
STOCHASTIC = mixprec.Recipe.from_dict(
    {"variant_of": "fp8_delayed", "grad_input": {"a": {"rounding": "stochastic"}}}
)


class Net(nn.Module):
    """A tied head and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


def converted(recipe: Any = STOCHASTIC) -> Net:
    torch.manual_seed(0)
    net = Net()
    mixprec.convert(net, recipe)
    return net


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    losses = []
    for step in steps:
        tokens = torch.randint(20, (12,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        optimizer.step()
        mixprec.sync_scales(model)
        losses.append(loss.detach())
    return losses


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize("recipe", [*QUANTISING, STOCHASTIC], ids=str)
def test_plain_checkpoints_load_strictly_both_ways(recipe: str | mixprec.Recipe) -> None:
    plain, low = Net(), converted(recipe)
    train(low, adam(low), range(2))
    assert list(low.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(low.state_dict(), strict=True)
    fresh = converted(recipe)
    fresh.load_state_dict(plain.state_dict(), strict=True)
    for key, value in low.state_dict().items():
        assert torch.equal(plain.state_dict()[key], value)
        assert torch.equal(fresh.state_dict()[key], value)
    assert fresh.head.weight is fresh.embed.weight


def test_assigning_checkpoint_leaves_histories_and_trains_on() -> None:
    net = converted()
    train(net, adam(net), range(3))
    before = {key: state.clone() for key, state in mixprec.state_dict(net).items()}
    net.load_state_dict(Net().state_dict(), assign=True)
    assert all(torch.equal(state, before[key]) for key, state in mixprec.state_dict(net).items())
    assert train(net, adam(net), range(1))[0].isfinite()


@pytest.mark.parametrize("recipe", ["mxfp4", "nvfp4"])
def test_four_bit_recipes_have_the_step_of_their_noise_alone(recipe: str) -> None:
    net = converted(recipe)
    train(net, adam(net), range(3))
    state = mixprec.state_dict(net)
    assert {key.rpartition(".")[2] for key in state} == {"mixprec_noise_step"}
    assert [step.item() for step in state.values()] == [3] * len(state)


@pytest.mark.parametrize("recipe", [name for name in QUANTISING if name not in STATEFUL])
def test_recipes_without_state_have_none(recipe: str) -> None:
    assert mixprec.state_dict(converted(recipe)) == {}
    mixprec.load_state_dict(converted(recipe), {})


def test_unconverted_model_has_no_state() -> None:
    assert mixprec.state_dict(Net()) == {}
    mixprec.sync_scales(Net())


def test_state_is_plain_named_tensors_shared_with_the_layers() -> None:
    state = mixprec.state_dict(converted())
    layers = ("body.0", "body.2", "head")
    # the rounded gradient of grad_input and the one of grad_weight are other values now
    paths = ("output_a", "output_b", "grad_input_a", "grad_weight_a")
    names = [f"mixprec_amax_{path}" for path in paths] + ["mixprec_noise_step"]
    assert list(state) == [f"{layer}.{name}" for layer in layers for name in names]
    assert {type(tensor) for tensor in state.values()} == {Tensor}
    net = converted()
    key = "head.mixprec_amax_output_a"
    assert mixprec.state_dict(net)[key].data_ptr() == net.head.mixprec_amax_output_a.data_ptr()


def test_keys_of_a_model_that_is_one_layer_have_no_prefix() -> None:
    layer = nn.Linear(4, 4)
    mixprec.convert(layer, "fp8_delayed")
    assert "mixprec_amax_output_a" in mixprec.state_dict(layer)
    mixprec.load_state_dict(layer, mixprec.state_dict(layer))


@pytest.mark.parametrize("recipe", ["fp8_delayed", STOCHASTIC], ids=str)
def test_resumed_run_equals_the_uninterrupted_one(
    recipe: str | mixprec.Recipe, tmp_path: Path
) -> None:
    straight = converted(recipe)
    expected = train(straight, adam(straight), range(10))
    stopped = converted(recipe)
    optimizer = adam(stopped)
    losses = train(stopped, optimizer, range(5))
    saved = (stopped.state_dict(), optimizer.state_dict(), mixprec.state_dict(stopped))
    torch.save(saved, tmp_path / "run.pt")
    model_state, optimizer_state, numerics = torch.load(tmp_path / "run.pt", weights_only=True)
    resumed = converted(recipe)
    resumed.load_state_dict(model_state)
    mixprec.load_state_dict(resumed, numerics)
    optimizer = adam(resumed)
    optimizer.load_state_dict(optimizer_state)
    losses += train(resumed, optimizer, range(5, 10))
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    for key, state in mixprec.state_dict(straight).items():
        assert torch.equal(mixprec.state_dict(resumed)[key], state)


def test_scales_follow_from_the_loaded_history() -> None:
    first, second, x = converted(), converted(), torch.randn(4, 16)
    train(first, adam(first), range(3))
    second.load_state_dict(first.state_dict())
    mixprec.load_state_dict(second, mixprec.state_dict(first))
    layers = first.body[0], second.body[0]
    mine, theirs = (layer.quantized_operands(100 * x, x)["output.a"][1] for layer in layers)
    assert torch.equal(mine.scale, theirs.scale)
    assert torch.equal(first.eval()(torch.arange(9)), second.eval()(torch.arange(9)))


def without(key: str) -> Any:
    return lambda state: {name: tensor for name, tensor in state.items() if name != key}


KEY = "body.2.mixprec_amax_output_b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(KEY), rf"missing keys \['{KEY}'\] and unknown keys \[\]; .*same recipes"),
        (lambda state: {**state, "x.amax": torch.zeros(18)}, r"unknown keys \['x.amax'\]"),
        (
            lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
            rf"missing keys .*'{KEY}'.* unknown keys .*'module.{KEY}'",
        ),
        (
            lambda state: {**state, KEY: torch.zeros(6)},
            rf"got shape \(6,\) for {KEY}; must be \(18,\); convert with the same amax_history_len",
        ),
        (lambda state: {}, "missing keys"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_is_loaded(
    change: Any, message: str
) -> None:
    net = converted()
    train(net, adam(net), range(2))
    before = {key: state.clone() for key, state in mixprec.state_dict(net).items()}
    other = {key: torch.full_like(state, 3) for key, state in before.items()}
    with pytest.raises(ValueError, match=f"^state: .*{message}"):
        mixprec.load_state_dict(net, change(other))
    assert all(torch.equal(state, before[key]) for key, state in mixprec.state_dict(net).items())


def test_state_for_an_unconverted_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown keys .*; convert the model first"):
        mixprec.load_state_dict(Net(), mixprec.state_dict(converted()))


READER = """
import sys, torch
model, numerics = (torch.load(path, weights_only=True) for path in sys.argv[1:])
assert not any(name.split(".")[0] == "mixprec" for name in sys.modules)
print(len(model), sum(type(value) is torch.Tensor for value in model.values()), len(numerics))
"""


def test_checkpoints_load_where_mixprec_was_never_imported(tmp_path: Path) -> None:
    net = converted()
    train(net, adam(net), range(1))
    paths = [str(tmp_path / name) for name in ("model.pt", "numerics.pt")]
    torch.save(net.state_dict(), paths[0])
    torch.save(mixprec.state_dict(net), paths[1])
    run = subprocess.run(
        [sys.executable, "-c", READER, *paths], capture_output=True, text=True, check=True
    )
    tensors = len(net.state_dict())
    assert run.stdout.split() == [str(tensors), str(tensors), str(len(mixprec.state_dict(net)))]


def test_attach_rolls_after_each_step_until_it_is_removed() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4)), torch.ones(2, 4)
    mixprec.convert(net, "fp8_delayed")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    handle = mixprec.attach(net, optimizer)
    history = net[0].mixprec_amax_output_a
    for count in (1, 2, 3):
        net(count * x).sum().backward()
        optimizer.step()
        assert history[:3].tolist() == [float(value) for value in (*range(count, 0, -1), 0, 0)[:3]]
    handle.remove()
    net(x).sum().backward()
    optimizer.step()
    assert history[0] == 3
    with pytest.raises(ValueError, match=r"mixprec\.sync_scales.*mixprec\.attach"):
        net(x)


def test_attaching_twice_rolls_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4))
    mixprec.convert(net, "fp8_delayed")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mixprec.attach(net, optimizer)
    mixprec.attach(net, optimizer)
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert net[0].mixprec_amax_output_a[:2].tolist() == [1, 0]
