"""Recurrent layers and cells by a recipe: against torch's own, products written out, themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import mixprec
import mixprec.linear_products
import mixprec.nn.layer
from mixprec.quantization import quantize
from mixprec.recipes import RECIPES

KINDS = (nn.RNN, nn.GRU, nn.LSTM)
CELLS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
LAYERS = [
    nn.RNN(5, 6, nonlinearity="relu", num_layers=2),
    nn.RNN(5, 6, bidirectional=True, bias=False),
    nn.GRU(5, 6, 3, batch_first=True, dropout=0.4),
    nn.GRU(5, 6, 2, bidirectional=True, dropout=0.2),
    nn.LSTM(5, 6, bias=False, batch_first=True),
    nn.LSTM(5, 6, 2, bidirectional=True, dropout=0.3),
    nn.LSTM(5, 6, 2, bidirectional=True, proj_size=4),
    nn.LSTM(5, 6, proj_size=2, bias=False),
]


def parts(hx: Any) -> tuple[Tensor, ...]:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


def first_state(layer: Any, *batch: int) -> Any:
    """A state for the layer, of double precision and with gradients."""
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    widths = [layer.proj_size or layer.hidden_size, layer.hidden_size]
    state = [torch.randn(count, *batch, width).double().requires_grad_() for width in widths]
    return tuple(state) if isinstance(layer, nn.LSTM) else state[0]


def padded(layer: Any, x: Tensor) -> tuple[Any, tuple[int, ...]]:
    return (x.transpose(0, 1) if layer.batch_first else x), (x.shape[1],)


def unbatched(layer: Any, x: Tensor) -> tuple[Any, tuple[int, ...]]:
    return x[:, 0], ()


def packed(layer: Any, x: Tensor) -> tuple[Any, tuple[int, ...]]:
    return pack_padded_sequence(x, torch.tensor([5, 3, 3, 1])), (4,)


def unsorted(layer: Any, x: Tensor) -> tuple[Any, tuple[int, ...]]:
    sequences = [x[:length, i] for i, length in enumerate([2, 5, 1, 4])]
    return pack_sequence(sequences, enforce_sorted=False), (4,)


def empty(layer: Any, x: Tensor) -> tuple[Any, tuple[int, ...]]:
    return padded(layer, x[:, :0])


def run(layer: Any, form: Callable[..., Any], given: bool) -> list[Tensor]:
    """Output, last states, and gradients of input, first states and parameters."""
    torch.manual_seed(1)
    x = torch.randn(5, 4, 5).double().requires_grad_()
    inputs, batch = form(layer, x)
    hx = first_state(layer, *batch) if given else None
    torch.manual_seed(2)  # of dropout
    out, last = layer(inputs, hx)
    if isinstance(out, PackedSequence):
        assert isinstance(inputs, PackedSequence)
        for mine, theirs in zip(out[1:], inputs[1:], strict=True):
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)
        out = out.data
    sum((k * part).square().sum() for k, part in enumerate((out, *parts(last)), 1)).backward()
    leaves = [x, *(parts(hx) if given else ()), *layer.parameters()]
    return [out.detach(), *[p.detach() for p in parts(last)], *[leaf.grad for leaf in leaves]]


FORMS = [
    *((layer, padded, True) for layer in LAYERS),
    *(
        (layer, form, given)
        for layer in (LAYERS[1], LAYERS[2], LAYERS[6])
        for form, given in ((unbatched, True), (packed, False), (unsorted, True))
    ),
    (LAYERS[3], unbatched, False),
    (LAYERS[3], unsorted, False),
    (LAYERS[5], empty, True),
]


@pytest.mark.parametrize(
    ("layer", "form", "given"), FORMS, ids=lambda v: getattr(v, "__name__", str(v))
)
def test_exact_products_are_torchs_layer(
    layer: nn.Module, form: Callable[..., Any], given: bool
) -> None:
    layer = copy.deepcopy(layer).double()
    mine = copy.deepcopy(layer)
    mixprec.convert(mine, "fp64_emulated")
    found, expected = run(mine, form, given), run(layer, form, given)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (5,), (0, 5)])
@pytest.mark.parametrize("kind", [*CELLS, "relu"])
def test_exact_products_are_torchs_cell(kind: Any, shape: tuple[int, ...], bias: bool) -> None:
    cell = nn.RNNCell(5, 6, bias, "relu") if kind == "relu" else kind(5, 6, bias)
    cell = cell.double()
    mine = copy.deepcopy(cell)
    mixprec.convert(mine, "fp64_emulated")
    x = torch.randn(2, *shape).double()
    found = []
    for each in (mine, cell):
        hx = None
        for step in x:
            hx = each(step, hx)
        sum(part.square().sum() for part in parts(hx)).backward()
        found.append([*parts(hx), *[p.grad for p in each.parameters()]])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_tf32_is_near_fp32(kind: type[nn.RNNBase]) -> None:
    layer, x = kind(32, 32, 2), torch.randn(6, 3, 32)
    expected = layer(x)[0]
    mixprec.convert(layer, "tf32")
    error = (layer(x)[0] - expected).norm() / expected.norm()
    assert 0 < error < 1e-3


def written_out(layer: Any, x: Tensor, recipe: str) -> Tensor:
    """One layer of one direction, its products by ``mixprec.linear``."""
    steps, batch, _ = x.shape
    rows = x.reshape(steps * batch, -1)
    a = mixprec.linear(rows, layer.weight_ih_l0, layer.bias_ih_l0, recipe=recipe)
    h = c = torch.zeros(batch, layer.hidden_size)
    out = []
    for a_t in a.reshape(steps, batch, -1):
        b = mixprec.linear(h, layer.weight_hh_l0, layer.bias_hh_l0, recipe=recipe)
        if isinstance(layer, nn.RNN):
            h = torch.tanh(a_t + b)
        elif isinstance(layer, nn.GRU):
            r, z = ((a_t + b)[:, i * 32 : i * 32 + 32].sigmoid() for i in (0, 1))
            n = torch.tanh(a_t[:, 64:] + r * b[:, 64:])
            h = n + z * (h - n)
        else:
            i, f, g, o = (a_t + b).split(32, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        out.append(h)
    return torch.stack(out)


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "mxfp8", "fp8_tensorwise", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_layer_is_its_products_written_out(kind: type[nn.RNNBase], recipe: str) -> None:
    layer, x = kind(32, 32), torch.randn(4, 6, 32)
    mixprec.convert(layer, recipe)
    found, expected = layer(x)[0], written_out(layer, x, recipe)
    assert torch.equal(found, expected)
    weights = torch.randn_like(found)
    for mine, theirs in zip(
        torch.autograd.grad((found * weights).sum(), list(layer.parameters())),
        torch.autograd.grad((expected * weights).sum(), list(layer.parameters())),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def product(a: Tensor, spec_a: Any, b: Tensor, spec_b: Any) -> Tensor:
    """The product of dequantised operands, in float64."""
    wide = [quantize(x, spec).dequantize().double() for x, spec in ((a, spec_a), (b, spec_b))]
    return wide[0] @ wide[1].t()


@pytest.mark.parametrize("name", ["fp8_rowwise", "mxfp8", "fp8_tensorwise"])
def test_products_of_dequantised_operands(name: str) -> None:
    recipe, layer = RECIPES[name], nn.RNN(64, 32, nonlinearity="relu")
    mixprec.convert(layer, name)
    x, first = torch.randn(3, 5, 64, requires_grad=True), torch.randn(1, 5, 32)
    out, _ = layer(x, first)
    rows, w_ih, w_hh = x.detach().flatten(0, 1), layer.weight_ih_l0, layer.weight_hh_l0
    states = torch.cat([first, out.detach()])
    a = product(rows, recipe.output.a, w_ih.detach(), recipe.output.b) + layer.bias_ih_l0
    pre = [
        a_t + product(h, recipe.output.a, w_hh.detach(), recipe.output.b) + layer.bias_hh_l0
        for h, a_t in zip(states[:-1], a.reshape(3, 5, 32), strict=True)
    ]
    torch.testing.assert_close(out.double(), torch.stack(pre).relu(), rtol=1e-5, atol=1e-5)
    out[-1].sum().backward()
    # the last step's state has one gradient; earlier ones have what the product gives back
    g, grads, grad_hh = torch.ones(5, 32), [], torch.zeros(32, 32).double()
    for step in (2, 1, 0):
        g = g * (out[step] > 0)
        grads.insert(0, g)
        h = states[step].t()
        grad_hh += product(g.t(), recipe.grad_weight.a, h, recipe.grad_weight.b)
        back = product(g, recipe.grad_input.a, w_hh.detach().t(), recipe.grad_input.b)
        g = back.float()
    every = torch.cat(grads)
    grad_ih = product(every.t(), recipe.grad_weight.a, rows.t(), recipe.grad_weight.b)
    grad_x = product(every, recipe.grad_input.a, w_ih.detach().t(), recipe.grad_input.b)
    for mine, theirs in ((w_hh.grad, grad_hh), (w_ih.grad, grad_ih), (x.grad, grad_x)):
        torch.testing.assert_close(
            mine.double().reshape(theirs.shape), theirs, rtol=1e-5, atol=1e-5
        )


def step(model: nn.ModuleList, index: int = 0) -> Tensor:
    """The loss of both layers, after backward."""
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(index))
    out = model[0](x)[0]
    hx = None
    for row in out[..., :16]:
        hx = model[1](row, hx)
    loss = out.square().mean() + hx.square().mean()
    loss.backward()
    return loss.detach()


def test_what_is_refused() -> None:
    layer, cell = nn.LSTM(8, 8), nn.GRUCell(8, 8)
    mixprec.convert(nn.ModuleList([layer, cell]), "fp8_rowwise")
    with pytest.raises(ValueError, match="input: got no steps"):
        layer(torch.zeros(0, 2, 8))
    with pytest.raises(RuntimeError, match="Expected hidden"):
        layer(torch.zeros(3, 2, 8), (torch.zeros(1, 3, 8), torch.zeros(1, 2, 8)))
    with pytest.raises(TypeError, match="input: got"):
        layer(torch.zeros(3, 2, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"must be \(B, 8\) and \(B, 8\)"):
        cell(torch.zeros(4, 8), torch.zeros(1, 8))
    with pytest.raises(ValueError, match="input: got shapes"):
        cell(torch.zeros(4, 7))
    with pytest.raises(TypeError, match="input: got"):
        cell(torch.zeros(4, 8, dtype=torch.int64))


def test_reasons_in_the_report() -> None:
    model = nn.ModuleList(
        [nn.RNNCell(16, 16, nonlinearity="gelu"), nn.LSTM(16, 24), nn.GRU(16, 16)]
    )
    rows = mixprec.convert(model, "fp8_rowwise", multiple_of=16).rows
    assert [(row.status, row.reason) for row in rows] == [
        ("left", "nonlinearity 'gelu' is neither 'tanh' nor 'relu'"),
        ("left", "sizes 16 and 24 are not multiples of 16"),
        ("converted", ""),
    ]
