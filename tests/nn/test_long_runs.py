"""What converted models keep alive: over many steps, under checkpoints, after they are deleted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mixprec

RECIPES = ["fp8_delayed", "fp8_rowwise", "nvfp4", "bf16"]
USE_REENTRANT = [False, True]
_ROUNDED = replace(mixprec.RECIPES["fp8_rowwise"].output.a, rounding="stochastic")
STOCHASTIC_FORWARD = replace(
    mixprec.RECIPES["fp8_rowwise"],
    name="stochastic forward",
    output=mixprec.GemmSpec(a=_ROUNDED, b=_ROUNDED),
)


class Net(nn.Module):
    """Layers of every kind, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(16, 32, 3, padding=1)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).transpose(1, 2)
        return self.head(x + self.attention(x, x, x, need_weights=False)[0])


def live_tensors() -> int:
    # not isinstance: it asks every lazy module that torch holds for its class
    return sum(issubclass(type(entry), Tensor) for entry in gc.get_objects())


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_grows_from_step_to_step(recipe: str, cached: bool) -> None:
    torch.manual_seed(0)
    model = Net()
    mixprec.convert(model, recipe, cache_weights=cached)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    mixprec.attach(model, optimizer)
    counts = []
    for step in range(18):
        x = torch.randn(2, 16, 8)
        if step % 6 == 5:
            with pytest.raises(ValueError, match="input"):
                model(torch.randn(2, 15, 8))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (8, 17):
            gc.collect()
            counts.append(live_tensors())
    # tensors of others may have gone meanwhile
    assert counts[1] <= counts[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_deleted_model_is_gone_without_the_collector(recipe: str) -> None:
    def use() -> Iterator[weakref.ref[object]]:
        model, x = Net(), torch.randn(2, 16, 8)
        mixprec.convert(model, recipe, cache_weights=True)
        loss = model(x).sum()
        loss.backward()
        yield weakref.ref(model)
        yield weakref.ref(model.conv.weight)
        yield weakref.ref(loss)

    gc.collect()
    gc.disable()
    try:
        assert [reference() for reference in list(use())] == [None] * 3
    finally:
        gc.enable()


def kept_bytes(model: nn.Module, run: object) -> int:
    """Bytes that backward keeps beside the parameters, each storage once."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        assert run().requires_grad  # type: ignore[operator]
    return sum(found.values())


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "fp8_delayed", "fp8_rowwise", "nvfp4"])
def test_a_checkpoint_keeps_the_block_s_input_alone(recipe: str) -> None:
    model, x = Net(), torch.randn(2, 16, 8, requires_grad=True)
    if recipe != "fp32":
        mixprec.convert(model, recipe)
    # the generator's state is kept beside it
    kept = kept_bytes(model, lambda: checkpoint(model, x, use_reentrant=False))
    assert x.nbytes <= kept <= x.nbytes + 16


@pytest.mark.parametrize("use_reentrant", USE_REENTRANT)
@pytest.mark.parametrize(
    "recipe", ["fp8_delayed", "fp8_rowwise", "mxfp8", "bf16", "nvfp4", STOCHASTIC_FORWARD], ids=str
)
def test_checkpoints_change_no_bit(recipe: str | mixprec.Recipe, use_reentrant: bool) -> None:
    def run(is_checkpointed: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        torch.manual_seed(0)
        model = Net()
        mixprec.convert(model, recipe)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        mixprec.attach(model, optimizer)
        for _ in range(3):
            x = torch.randn(2, 16, 8, requires_grad=True)
            y = checkpoint(model, x, use_reentrant=use_reentrant) if is_checkpointed else model(x)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters()), mixprec.state_dict(model)

    (plain, state), (checkpointed, state_again) = run(False), run(True)
    for a, b in zip(plain, checkpointed, strict=True):
        assert torch.equal(a, b)
    for name, value in state.items():
        assert torch.equal(value, state_again[name])


@pytest.mark.parametrize("frozen", ["conv", "attention", "head"])
def test_a_frozen_layer_keeps_nothing_for_its_weight(frozen: str) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(2, 16, 8)
    mixprec.convert(model, "fp8_rowwise")
    whole = kept_bytes(model, lambda: model(x))
    getattr(model, frozen).requires_grad_(False)
    assert kept_bytes(model, lambda: model(x)) < whole
    model(x).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith(frozen)
