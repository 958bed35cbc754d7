"""Convolutions by a recipe: against products written out, torch's own layers, and themselves."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mixprec
from mixprec.quantization import quantize
from mixprec.recipes import RECIPES

Case = tuple[nn.Module, tuple[int, ...]]


def cases() -> list[Case]:
    torch.manual_seed(1)
    return [
        (nn.Conv1d(8, 12, 3, padding=1), (2, 8, 10)),
        (nn.Conv1d(8, 12, 4, padding="same", bias=False), (8, 9)),
        (nn.Conv2d(8, 12, 3, stride=2, padding=1, dilation=2), (2, 8, 15, 14)),
        (nn.Conv2d(8, 12, (3, 2), groups=4, padding=(1, 0), padding_mode="reflect"), (2, 8, 9, 9)),
        (nn.Conv2d(8, 12, 2, padding=1, padding_mode="circular"), (1, 8, 4, 5)),
        (nn.Conv2d(3, 16, 4, 4), (2, 3, 16, 16)),
        (nn.Conv2d(4, 6, 1), (0, 4, 3, 3)),
        (nn.Conv3d(2, 4, 2, padding=(1, 0, 1)), (1, 2, 4, 5, 4)),
        (nn.ConvTranspose1d(8, 6, 4, stride=2, padding=1), (2, 8, 7)),
        (nn.ConvTranspose1d(4, 6, 2, padding=2), (4, 7)),
        (nn.ConvTranspose2d(8, 6, 3, 2, 1, output_padding=1, groups=2), (2, 8, 5, 6)),
        (nn.ConvTranspose3d(4, 2, 3, stride=2, dilation=2, bias=False), (1, 4, 3, 2, 3)),
    ]


def run(layer: nn.Module, x: Tensor, g: Tensor | None = None) -> list[Tensor]:
    """Output, and the gradients of input and parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(torch.ones_like(y) if g is None else g)
    assert x.grad is not None
    return [y.detach(), x.grad, *[p.grad for p in layer.parameters() if p.grad is not None]]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(("layer", "shape"), cases(), ids=str)
def test_exact_products_are_torchs_convolution(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer = layer.double()
    mine, x = copy.deepcopy(layer), torch.randn(shape, dtype=torch.float64)
    mixprec.convert(mine, "fp64_emulated")
    g = torch.randn_like(layer(x))
    found, expected = run(mine, x, g), run(layer, x, g)
    assert len(found) == len(expected) == 2 + len(list(layer.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def windows_of(x: Tensor, kernel: tuple[int, int], stride: int, padding: int) -> Tensor:
    """[N P, K C], element by element."""
    n, c, height, width = x.shape
    padded = torch.zeros(n, c, height + 2 * padding, width + 2 * padding)
    padded[:, :, padding : padding + height, padding : padding + width] = x
    rows = [
        torch.cat(
            [
                padded[i, :, top + a, left + b]
                for a, b in itertools.product(range(kernel[0]), range(kernel[1]))
            ]
        )
        for i in range(n)
        for top in range(0, height + 2 * padding - kernel[0] + 1, stride)
        for left in range(0, width + 2 * padding - kernel[1] + 1, stride)
    ]
    return torch.stack(rows)


def product(a: Tensor, spec_a: Any, b: Tensor, spec_b: Any) -> Tensor:
    """The product of dequantised operands, in float64."""
    wide = [
        x.double() if spec is None else quantize(x, spec).dequantize().double()
        for x, spec in ((a, spec_a), (b, spec_b))
    ]
    return wide[0] @ wide[1].t()


@pytest.mark.parametrize(
    "name",
    [
        *("fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_hp_grad_weight", "fp8_blockwise"),
        *("mxfp8", "mxfp6_e2m3", "tf32"),
    ],
)
@pytest.mark.parametrize(("kernel", "stride", "padding"), [((3, 2), 1, 1), ((2, 2), 2, 0)])
def test_three_products_written_out(
    name: str, kernel: tuple[int, int], stride: int, padding: int
) -> None:
    torch.manual_seed(0)
    recipe = RECIPES[name]
    layer = nn.Conv2d(40, 24, kernel, stride, padding)
    mixprec.convert(layer, recipe)
    x = torch.randn(2, 40, 6, 4)
    rows = windows_of(x, kernel, stride, padding)
    w = layer.weight.detach().permute(0, 2, 3, 1).reshape(24, -1)
    g = torch.randn_like(layer(x))
    y, grad_x, grad_w, grad_bias = run(layer, x, g)
    g_rows = g.permute(0, 2, 3, 1).reshape(-1, 24)
    expected = product(rows, recipe.output.a, w, recipe.output.b) + layer.bias.detach().double()
    assert torch.allclose(y.permute(0, 2, 3, 1).reshape(-1, 24).double(), expected, 1e-5, 1e-5)
    expected_w = product(g_rows.t(), recipe.grad_weight.a, rows.t(), recipe.grad_weight.b)
    found_w = grad_w.permute(0, 2, 3, 1).reshape(24, -1)
    assert torch.allclose(found_w.double(), expected_w, 1e-5, 1e-5)
    by_window = product(g_rows, recipe.grad_input.a, w.t(), recipe.grad_input.b)
    leaf = x.double().requires_grad_()
    nn.functional.unfold(leaf, kernel, padding=padding, stride=stride).backward(
        by_window.reshape(2, -1, kernel[0] * kernel[1], 40).permute(0, 3, 2, 1).flatten(1, 2)
    )
    assert torch.allclose(grad_x.double(), leaf.grad, 1e-5, 1e-5)
    assert torch.allclose(grad_bias, g.sum((0, 2, 3)), 1e-5, 1e-5)


def test_input_gradient_of_16_bits_is_summed_over_windows_before_it_is_rounded() -> None:
    layer = nn.Conv1d(1, 1, 3, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[[1.0, 3 * 2.0**-10, 3 * 2.0**-10]]]))
    mixprec.convert(layer, "tf32")
    x = torch.zeros(1, 1, 7, dtype=torch.bfloat16, requires_grad=True)
    layer(x).backward(torch.ones(1, 1, 5, dtype=torch.bfloat16))
    # each small weight is under half an ulp of 1, both together are over it
    assert x.grad is not None
    assert x.grad.flatten()[:3].tolist() == [1.0, 1.0, 1.0 + 2.0**-7]


@pytest.mark.parametrize("name", ["fp8_delayed", "nvfp4", "fp8_rowwise"])
def test_delayed_and_stochastic_recipes_train_and_repeat(name: str) -> None:
    def train() -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(4, 32, 3, padding=1, groups=2), nn.GELU(), nn.ConvTranspose2d(32, 4, 2, 2)
        )
        mixprec.convert(model, name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        mixprec.attach(model, optimizer)
        x, target = torch.randn(8, 4, 6, 6), torch.randn(8, 4, 12, 12)
        losses = []
        for _ in range(12):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, mixprec.state_dict(model)

    (losses, state), (again, state_again) = train(), train()
    assert losses == again
    assert losses[-1] < losses[0]
    assert state.keys() == state_again.keys()
    for key, value in state.items():
        assert torch.equal(value, state_again[key])
    if name == "fp8_delayed":
        history = state["0.mixprec_amax_output_a"]
        assert history[0] == 0 or history.max() > 0


def test_one_history_covers_every_group() -> None:
    layer = nn.Conv1d(4, 4, 1, groups=2, bias=False)
    mixprec.convert(layer, "fp8_delayed")
    x = torch.ones(1, 4, 3)
    x[:, 2:] = 8.0
    layer(x)
    mixprec.sync_scales(layer)
    assert layer.mixprec_amax_output_a[0] == 8.0


def kept_bytes(layer: nn.Module, x: Tensor) -> int:
    """Bytes that backward keeps beside the parameters."""
    own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        y = layer(x)
    assert y.requires_grad
    return sum(found.values())


def test_windows_that_overlap_keep_the_input_and_others_codes() -> None:
    x = torch.randn(4, 32, 16, 16)
    overlapping, patches = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(32, 32, 4, 4)
    weights = [4 * layer.weight.numel() for layer in (overlapping, patches)]
    for layer in (overlapping, patches):
        mixprec.convert(layer, "fp8_rowwise")
    # the input itself, and the weight as a matrix
    assert kept_bytes(overlapping, x) <= x.nbytes + weights[0] + 4096
    assert kept_bytes(patches, x) <= 0.27 * x.nbytes + weights[1]


def test_depthwise_layers_are_left_alone_with_a_reason() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 8, 1))
    rows = mixprec.convert(model, "fp8_rowwise").rows
    assert [row.status for row in rows] == ["left", "converted"]
    assert rows[0].reason.startswith("depthwise: ")


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 3), r"^input: got shape \(2, 3\); must have 3 or 4 axes"),
        (torch.zeros(1, 3, 8, 8), r"^input: got 3 channels and sizes \(8, 8\); must be 4 channels"),
        (torch.zeros(1, 4, 2, 8), r"^input: got 4 channels .* at least the kernel's \(3, 3\)"),
    ],
    ids=["axes", "channels", "size"],
)
def test_inputs_that_fit_no_window_are_refused(x: Tensor, message: str) -> None:
    layer = nn.Conv2d(4, 4, 3)
    mixprec.convert(layer, "fp8_rowwise")
    with pytest.raises(ValueError, match=message):
        layer(x)


def test_an_input_that_is_no_float_is_refused() -> None:
    layer = nn.Conv2d(4, 4, 3)
    mixprec.convert(layer, "fp8_rowwise")
    with pytest.raises(TypeError, match=r"^input: got torch\.int64"):
        layer(torch.zeros(1, 4, 8, 8, dtype=torch.int64))


def test_copies_checkpoints_and_revert() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ConvTranspose2d(8, 4, 3))
    keys, x = list(model.state_dict()), torch.randn(2, 4, 8, 8)
    plain = copy.deepcopy(model)
    mixprec.convert(model, "mxfp8")
    assert list(model.state_dict()) == keys
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    plain.load_state_dict(twin.state_dict())
    mixprec.revert(model)
    assert [type(module) for module in model] == [nn.Conv2d, nn.ConvTranspose2d]
    assert torch.equal(model(x), plain(x))


def test_a_transposed_layer_takes_an_output_size() -> None:
    layer = nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1)
    x, reference = torch.randn(1, 4, 5, 5), copy.deepcopy(layer)
    mixprec.convert(layer, "tf32")
    out = layer(x, output_size=[10, 9])
    assert out.shape == (1, 4, 10, 9)
    torch.testing.assert_close(out, reference(x, output_size=[10, 9]), rtol=1e-2, atol=1e-2)
