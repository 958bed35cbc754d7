"""Converted recurrent layers and cells in use: state, noise, copies, compiled graphs, regions."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import mixprec
import mixprec.linear_products
import mixprec.nn.layer
from mixprec.amp import autocast
from mixprec.nn import QuantizedLayer

KINDS = (nn.RNN, nn.GRU, nn.LSTM)
CELLS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)


def flat(out: Any) -> list[Tensor]:
    """The tensors of nested tuples."""
    return [out] if isinstance(out, Tensor) else [x for part in out for x in flat(part)]


def loss_of(model: nn.ModuleList) -> Tensor:
    """The loss of a layer and a cell, after backward."""
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0))
    out, hx = model[0](x)[0], None
    for row in out[..., :16]:
        hx = model[1](row, hx)
    loss = out.square().mean() + hx.square().mean()
    loss.backward()
    return loss.detach()


def test_delayed_scaling_keeps_a_history_a_weight_over_all_steps() -> None:
    layer = nn.LSTM(16, 16, bidirectional=True, proj_size=8)
    mixprec.convert(layer, "fp8_delayed")
    names = {name for name in layer.numerics_buffers() if name.endswith("output_a")}
    weights = [f"weight_{part}_l0{end}" for part in ("ih", "hh", "hr") for end in ("", "_reverse")]
    assert names == {f"mixprec_{weight}_amax_output_a" for weight in weights}
    x = torch.randn(4, 3, 16)
    out = layer(x)[0].detach()
    for name, value in (
        ("weight_ih_l0_amax_output_a", x.abs().max()),
        ("weight_hh_l0_amax_output_a", out[:-1, :, :8].abs().max()),
        ("weight_hh_l0_reverse_amax_output_a", out[1:, :, 8:].abs().max()),
        ("weight_hh_l0_amax_output_b", layer.weight_hh_l0.detach().abs().max()),
    ):
        state = layer.numerics_buffers()[f"mixprec_{name}"]
        assert state[-2] == value
        assert not state[:-2].any()
    mixprec.sync_scales(layer)
    assert layer.numerics_buffers()["mixprec_weight_ih_l0_amax_output_a"][0] == x.abs().max()
    layer.eval()
    before = {name: buffer.clone() for name, buffer in layer.numerics_buffers().items()}
    layer(1000 * x)
    assert all(torch.equal(before[name], b) for name, b in layer.numerics_buffers().items())


def test_a_weight_that_changes_unsynced_is_refused() -> None:
    layer, x = nn.GRU(16, 16), torch.randn(2, 3, 16)
    mixprec.convert(layer, "fp8_delayed")
    layer(x)
    with torch.no_grad():
        layer.weight_hh_l0.mul_(2)
    with pytest.raises(ValueError, match=r"call mixprec\.sync_scales"):
        layer(x)


def test_every_product_and_step_draws_from_a_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.ModuleList([nn.LSTM(16, 16, 2, bidirectional=True), nn.GRUCell(16, 16)])
    mixprec.convert(model, "nvfp4")
    draws, product = [], mixprec.nn.layer.product

    def recorded(*args: Any, noise: Any, **kwargs: Any) -> Tensor:
        draws.append((int(noise.step), noise.stream))
        return product(*args, noise=noise, **kwargs)

    monkeypatch.setattr(mixprec.nn.layer, "product", recorded)
    loss_of(model)
    # two layers of two directions with one product and four steps, then four calls of two products,
    # which draw in backward alone, where each counts
    assert len(draws) == 2 * 2 * (1 + 4) + 4 * 2
    assert len(set(draws)) == 2 * 2 * (1 + 4) + 2

    def steps() -> list[set[int]]:
        return [{int(layer.noise(name).step) for name in layer.product_names()} for layer in model]

    assert steps() == [{1}, {4}]
    model.eval()
    loss_of(model)
    assert steps() == [{1}, {4}]


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_training_repeats_and_learns(recipe: str) -> None:
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.GRU(16, 16), nn.GRUCell(16, 16)])
        mixprec.convert(model, recipe)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
        mixprec.attach(model, optimizer)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(loss_of(model))
            optimizer.step()
        runs.append(torch.stack(losses))
    assert torch.equal(*runs)
    assert runs[0][-1] < 0.9 * runs[0][0]


def quantised_weights(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """A list that grows by the shape of each operand with 64 rows, as only weights have here."""
    shapes: list[torch.Size] = []
    original = mixprec.linear_products.quantize

    def counted(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if len(x) == 64:
            shapes.append(x.shape)
        return original(x, *args, **kwargs)

    monkeypatch.setattr(mixprec.linear_products, "quantize", counted)
    return shapes


@pytest.mark.parametrize(("cached", "counts"), [(False, [2, 4]), (True, [2, 2])])
def test_a_weight_is_quantised_once_a_pass(
    cached: bool, counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = nn.LSTM(8, 16), torch.randn(5, 3, 8)
    mixprec.convert(layer, "fp8_rowwise", cache_weights=cached)
    shapes = quantised_weights(monkeypatch)
    for count in counts:
        layer(x)
        assert len(shapes) == count
    assert bool(layer._held) == cached
    with torch.no_grad():
        before = layer(x)[0]
        layer.weight_hh_l0.mul_(2)
        assert not torch.equal(layer(x)[0], before)


def test_weights_quantised_in_inference_mode_are_not_kept_for_training() -> None:
    layer, x = nn.GRU(16, 16), torch.randn(2, 3, 16)
    mixprec.convert(layer, "fp8_tensorwise", cache_weights=True)
    with torch.inference_mode():
        expected = layer(x)[0]
    out = layer(x)[0]
    out.sum().backward()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_layer_keeps_its_identity(kind: Any) -> None:
    layer, x = kind(16, 16), torch.randn(3, 16)
    keys, expected = list(layer.state_dict()), flat(layer(x))
    weights = vars(layer).get("_flat_weights")
    mixprec.convert(layer, "nvfp4")
    assert list(layer.state_dict()) == keys
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    copies = (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved)
    for each in (layer, *copies):
        assert isinstance(each, QuantizedLayer)
        assert all(map(torch.equal, flat(each(x)), flat(layer(x))))
        names = vars(each).get("_flat_weights_names", ())
        held = [id(weight) for weight in vars(each).get("_flat_weights", ())]
        assert held == [id(getattr(each, name)) for name in names]
    assert vars(layer).get("_flat_weights") is weights
    mixprec.revert(layer)
    assert type(layer) is kind
    assert all(map(torch.equal, flat(layer(x)), expected))


def test_moved_and_loaded_layers_multiply_by_their_new_weights() -> None:
    layer, x = nn.GRU(16, 16), torch.randn(3, 2, 16)
    mixprec.convert(layer, "fp8_delayed")
    state = {name: 2 * value for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    other = nn.GRU(16, 16)
    other.load_state_dict(state)
    mixprec.convert(other, "fp8_delayed")
    assert torch.equal(layer(x)[0], other(x)[0])
    out = layer.double()(x.double())[0]
    assert out.dtype == torch.float64
    called = torch.func.functional_call(
        layer, {"weight_hh_l0": torch.zeros(48, 16, dtype=torch.float64)}, (x.double(),)
    )[0]
    assert not torch.equal(called, out)
    assert torch.equal(layer(x.double())[0], out)


class Doubled(nn.LSTM):
    """A subclass, to be included."""

    def forward(self, x: Tensor) -> Any:
        return 2 * super().forward(x)[0]


def test_subclasses_follow_the_recipe() -> None:
    layer, x = Doubled(16, 16), torch.randn(3, 2, 16)
    mixprec.convert(layer, "fp8_rowwise", include=(Doubled,))
    plain = nn.LSTM(16, 16)
    plain.load_state_dict(layer.state_dict())
    mixprec.convert(plain, "fp8_rowwise")
    assert torch.equal(layer(x), 2 * plain(x)[0])
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))


def test_parametrised_weights_follow_the_recipe() -> None:
    layer, x = nn.GRU(16, 16), torch.randn(3, 2, 16)
    expected = layer(x)[0]
    parametrizations.weight_norm(layer, "weight_hh_l0")
    mixprec.convert(layer, "fp8_rowwise")
    out = layer(x)[0]
    assert 0 < (out - expected).norm() < 0.1 * expected.norm()
    out.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_compiled_layer_is_the_eager_one() -> None:
    layer, x = nn.LSTM(16, 16), torch.randn(2, 2, 16)
    mixprec.convert(layer, "fp8_rowwise")
    with torch._dynamo.config.patch(allow_rnn=True):
        found = torch.compile(layer, fullgraph=True, backend="eager")(x)[0]
    expected = layer(x)[0]
    assert torch.equal(found, expected)
    for mine, theirs in zip(
        torch.autograd.grad(found.square().sum(), list(layer.parameters())),
        torch.autograd.grad(expected.square().sum(), list(layer.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_compiled_cell_is_the_eager_one() -> None:
    cell, x = nn.LSTMCell(16, 16), torch.randn(4, 16)
    mixprec.convert(cell, "fp8_delayed")
    twin = copy.deepcopy(cell)
    found = torch.compile(cell, fullgraph=True, backend="eager")(x)
    for mine, theirs in zip(found, twin(x), strict=True):
        torch.testing.assert_close(mine, theirs)
    for name, buffer in twin.numerics_buffers().items():
        assert torch.equal(cell.numerics_buffers()[name], buffer)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_checkpointing_changes_nothing(recipe: str) -> None:
    layer, x = nn.LSTM(16, 16), torch.randn(4, 3, 16, requires_grad=True)
    mixprec.convert(layer, recipe)
    twin = copy.deepcopy(layer)
    layer(x)[0].square().sum().backward()
    checkpoint(twin, x, use_reentrant=False)[0].square().sum().backward()
    for mine, theirs in zip(twin.parameters(), layer.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    for name, buffer in layer.numerics_buffers().items():
        assert torch.equal(twin.numerics_buffers()[name], buffer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", ["bf16", "fp8_rowwise", "fp8_delayed"])
@pytest.mark.parametrize("kind", [*KINDS, *CELLS])
def test_regions_of_16_bits(kind: Any, recipe: str, dtype: torch.dtype) -> None:
    layer = kind(16, 16)
    expected = flat(layer(torch.ones(3, 16)))[0]
    mixprec.convert(layer, recipe)
    narrow = copy.deepcopy(layer).to(dtype)
    with autocast(dtype):
        inside = layer(torch.ones(3, 16))
    with torch.autocast("cpu", dtype):
        torchs = layer(torch.ones(3, 16))
    outside = narrow(torch.ones(3, 16, dtype=dtype))
    for out in (inside, torchs, outside):
        assert {part.dtype for part in flat(out)} == {dtype}
        assert (flat(out)[0].float() - expected).norm() < 0.1 * expected.norm()
    flat(inside)[0].float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in layer.parameters())
