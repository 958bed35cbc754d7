"""Layers of torch and converted layers inside a region."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mixprec
from mixprec.amp import autocast
from mixprec.amp.autocast import region_dtype
from mixprec.measure import saved_bytes
from mixprec.recipes import RECIPES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
x = torch.randn(4, 8)
sequence = torch.randn(5, 2, 8)


def types(out: Any) -> Any:
    if isinstance(out, tuple):
        return tuple(types(item) for item in out)
    return out.dtype if isinstance(out, Tensor) else out


def attended(mask: Tensor | None, needs: bool) -> Any:
    layer = nn.MultiheadAttention(8, 2)
    return layer(sequence, sequence, sequence, attn_mask=mask, need_weights=needs)


def weight_normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))


PAIR = (BF16, BF16)
LAYERS: dict[str, tuple[Callable[[], Any], Any]] = {
    "Linear": (lambda: nn.Linear(8, 3)(x), BF16),
    "Linear in 16 bits": (lambda: nn.Linear(8, 3).bfloat16()(x), BF16),
    "Conv1d": (lambda: nn.Conv1d(4, 2, 3)(x[None]), BF16),
    "Conv2d": (lambda: nn.Conv2d(1, 2, 3, padding="same")(x[None, None]), BF16),
    "Conv3d": (lambda: nn.Conv3d(1, 2, 1)(x[None, None, None]), BF16),
    "Conv2d, circular": (
        lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular")(x[None, None]),
        BF16,
    ),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(1, 2, 3)(x[None, None]), BF16),
    "LSTM": (lambda: nn.LSTM(8, 5)(sequence), (BF16, PAIR)),
    "LSTM in 16 bits": (lambda: nn.LSTM(8, 5).bfloat16()(sequence), (BF16, PAIR)),
    "GRU": (lambda: nn.GRU(8, 5, 2, bidirectional=True)(sequence), PAIR),
    "RNN": (lambda: nn.RNN(8, 5)(sequence), PAIR),
    "RNN, relu": (lambda: nn.RNN(8, 5, nonlinearity="relu")(sequence), PAIR),
    "LSTMCell": (lambda: nn.LSTMCell(8, 5)(x), PAIR),
    "GRUCell": (lambda: nn.GRUCell(8, 5)(x), BF16),
    "RNNCell": (lambda: nn.RNNCell(8, 5)(x), BF16),
    "attention": (lambda: attended(None, True), (BF16, FP32)),
    "attention, float mask": (lambda: attended(torch.zeros(5, 5), True), (BF16, FP32)),
    "attention, bool mask": (
        lambda: attended(torch.ones(5, 5).triu(1).bool(), False),
        (BF16, None),
    ),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16)(sequence), FP32),
    "encoder layer, eval": (lambda: nn.TransformerEncoderLayer(8, 2, 16).eval()(sequence), FP32),
    "LayerNorm": (lambda: nn.LayerNorm(8)(x.bfloat16()), FP32),
    "LayerNorm in 16 bits": (lambda: nn.LayerNorm(8).bfloat16()(x), FP32),
    "RMSNorm in 16 bits": (lambda: nn.RMSNorm(8).bfloat16()(x), FP32),
    "GroupNorm in 16 bits": (lambda: nn.GroupNorm(2, 8).bfloat16()(x), FP32),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(8)(x.bfloat16()), BF16),
    "BatchNorm1d in 16 bits": (lambda: nn.BatchNorm1d(8).bfloat16()(x.bfloat16()), BF16),
    "Embedding": (lambda: nn.Embedding(5, 4)(torch.tensor([1])), FP32),
    "Embedding in 16 bits": (lambda: nn.Embedding(5, 4).bfloat16()(torch.tensor([1])), BF16),
    "Bilinear": (lambda: nn.Bilinear(8, 8, 3)(x, x.bfloat16()), FP32),
    "PReLU": (lambda: nn.PReLU()(x), BF16),
    "weight_norm": (lambda: weight_normed()(x), BF16),
    "weight_norm in 16 bits": (lambda: weight_normed().bfloat16()(x), BF16),
    "CrossEntropyLoss": (
        lambda: nn.CrossEntropyLoss()(x.bfloat16(), torch.tensor([0, 1, 2, 3])),
        FP32,
    ),
    "CTCLoss": (
        lambda: nn.CTCLoss()(
            torch.randn(5, 1, 3).bfloat16().log_softmax(-1),
            torch.tensor([[1]]),
            torch.tensor([5]),
            torch.tensor([1]),
        ),
        FP32,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_type_of_the_output(name: str) -> None:
    call, want = LAYERS[name]
    with autocast("bf16"):
        assert types(call()) == want


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_train_near_fp32(cell: type[nn.Module], dtype: str) -> None:
    layer = cell(8, 5)
    with autocast(dtype):
        out = layer(sequence)[0]
    out.float().square().sum().backward()
    got = layer.weight_hh_l0.grad.clone()
    layer.zero_grad()
    layer(sequence)[0].square().sum().backward()
    want = layer.weight_hh_l0.grad
    assert got.dtype == FP32
    assert 0 < (got - want).norm() < 0.02 * want.norm()


def stack(kind: str) -> tuple[nn.Module, Tensor]:
    if kind == "linear":
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), torch.randn(256, 64)
    if kind == "convolution":
        layers = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(3))
        return nn.Sequential(*layers), torch.randn(8, 8, 16, 16)

    class Attention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x + 0, x + 1, x + 2)

    return Attention(), torch.randn(2, 2, 64, 32)


# attention keeps its result beside its operands, in FP32 as it was before rounding
@pytest.mark.parametrize(
    ("kind", "share"), [("linear", 0.5), ("convolution", 0.5), ("attention", 0.65)]
)
def test_activations_kept_for_backward_are_about_halved(kind: str, share: float) -> None:
    model, inputs = stack(kind)
    inputs.requires_grad_()
    with saved_bytes(model.parameters()) as wide:
        model(inputs)
    # a region casts its weights, which FP32 keeps anyway
    casts = sum(2 * p.numel() for p in model.parameters() if p.dim() > 1)
    with autocast("bf16"), saved_bytes(model.parameters()) as narrow:
        model(inputs)
    assert narrow.activation_bytes - casts <= share * wide.activation_bytes


QUANTISED = [
    name
    for name, recipe in RECIPES.items()
    if any(spec is not None for spec in recipe.specs) and recipe.base == "fp32"
]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", QUANTISED)
def test_converted_layer_equals_itself_on_16_bit_tensors(name: str, dtype: torch.dtype) -> None:
    inside = nn.Sequential(nn.Linear(32, 16))
    mixprec.convert(inside, name)
    outside = copy.deepcopy(inside)
    inputs = torch.randn(8, 32)
    for _ in range(2):  # the second pass of delayed scaling uses what the first recorded
        a = inputs.clone().requires_grad_()
        b = inputs.to(dtype).requires_grad_()
        with autocast(dtype):
            got = inside(a)
        want = outside(b)
        assert got.dtype == dtype
        assert torch.equal(got, want)
        got.float().square().sum().backward()
        want.float().square().sum().backward()
        assert torch.equal(a.grad, b.grad.float())
        assert torch.equal(inside[0].weight.grad, outside[0].weight.grad)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_converted_to_16_bits_equals_the_region(dtype: str) -> None:
    layer = nn.Linear(32, 16)
    # the converted layer adds its bias as it is, the region rounds it first
    layer.bias.data.copy_(layer.bias.detach().to(region_dtype(dtype)))
    converted = nn.Sequential(copy.deepcopy(layer))
    mixprec.convert(converted, dtype)
    a = torch.randn(8, 32, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    with autocast(dtype):
        got = layer(a)
    want = converted(b)
    assert torch.equal(got.float(), want.float())
    gradient = torch.randn(8, 16).to(got.dtype)
    got.backward(gradient)
    want.backward(gradient.to(want.dtype))
    assert torch.equal(a.grad, b.grad)
    assert torch.equal(layer.weight.grad, converted[0].weight.grad)


def test_both_overflow_to_infinity_in_float16() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, 300.0)
    big = torch.full((1, 1), 300.0)
    with autocast("fp16"):
        assert layer(big).isinf().all()
    model = nn.Sequential(layer)
    mixprec.convert(model, "fp16")
    assert model(big).isinf().all()


def trained(model: nn.Module, region: Callable[[], Any], dtype: torch.dtype) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mixprec.attach(model, optimizer)
    inputs, targets = torch.randn(64, 16).to(dtype), torch.randn(64, 4)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        with region():
            out = model(inputs)
            loss = F.mse_loss(out.float(), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert out.dtype == BF16
    return losses


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("way", ["region", "torch's region", "16-bit model"])
def test_converted_models_train_on_bf16(way: str, name: str) -> None:
    model = net()
    mixprec.convert(model, name)
    if way == "16-bit model":
        losses = trained(model.bfloat16(), lambda: autocast(enabled=False), BF16)
    else:
        ours = way == "region"
        region = (lambda: autocast("bf16")) if ours else (lambda: torch.autocast("cpu", BF16))
        losses = trained(model, region, FP32)
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("outer", [None, "bf16"])
def test_converted_layer_follows_the_innermost_region(outer: str | None) -> None:
    model = nn.Sequential(nn.Linear(16, 16))
    mixprec.convert(model, "fp8_tensorwise")
    inputs = torch.randn(2, 16)
    with autocast(outer or "fp32"):
        with autocast(enabled=False):
            assert model(inputs).dtype == FP32
            with autocast("fp16"):
                assert model(inputs).dtype == FP16
        assert model(inputs).dtype == (BF16 if outer else FP32)
