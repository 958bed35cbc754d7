"""Multi-head attention, encoders and attention by a recipe."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mixprec
from mixprec.attention import attention
from mixprec.nn import QuantizedLayer
from mixprec.recipes import RECIPES

ENCODER = {"d_model": 32, "nhead": 4, "dim_feedforward": 48, "dropout": 0.0, "batch_first": True}
LAYERS = {
    "packed": {},
    "no bias": {"bias": False},
    "separate": {"kdim": 24, "vdim": 40},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True},
    "sequence first": {"batch_first": False},
}
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"attn_mask": torch.ones(5, 5).triu(1).bool()},
    "padding": {"key_padding_mask": torch.arange(5).expand(2, 5) > 3},
    "no weights": {"need_weights": False},
    "weights of heads": {"average_attn_weights": False},
}


def inputs(options: dict[str, Any], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    shape = (2, 5) if options.get("batch_first", True) else (5, 2)
    sizes = (32, options.get("kdim", 32), options.get("vdim", 32))
    return [torch.randn(*shape, size, dtype=dtype, requires_grad=True) for size in sizes]


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("call", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("same", ["self", "memory", "three"])
@pytest.mark.parametrize("training", [True, False])
def test_exact_products_are_torchs_attention(
    options: dict[str, Any], call: dict[str, Any], same: str, training: bool
) -> None:
    torch.manual_seed(0)
    if same != "three" and "kdim" in options:
        pytest.skip("one tensor cannot have three widths")
    plain = nn.MultiheadAttention(32, 4, **{"batch_first": True, **options}).double()
    plain.train(training)
    mine = copy.deepcopy(plain)
    mixprec.convert(mine, "fp64_emulated")
    q, k, v = inputs({"batch_first": True, **options})
    q, k, v = {"self": (q, q, q), "memory": (q, k, k), "three": (q, k, v)}[same]
    results = []
    for layer in (plain, mine):
        layer.zero_grad()
        out, weights = layer(q, k, v, **call)
        wanted = [q, *layer.parameters()]
        grads = torch.autograd.grad(out.square().sum(), wanted, allow_unused=True)
        results.append([out, weights, *grads])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_projections_are_three_products_whatever_the_inputs_share() -> None:
    torch.manual_seed(0)
    layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 5, 32)
    plain = copy.deepcopy(layer)
    mixprec.convert(layer, "fp8_tensorwise")
    with torch.no_grad():
        # a value projection of another size: one scale for all three would spoil it
        for each in (layer, plain):
            each.in_proj_weight[64:] *= 1e-4
    parts = [
        mixprec.linear(x, w, b, recipe="fp8_tensorwise")
        for w, b in zip(plain.in_proj_weight.chunk(3), plain.in_proj_bias.chunk(3), strict=True)
    ]
    heads = [part.unflatten(-1, (4, 8)).transpose(1, 2) for part in parts]
    seen = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
    expected = mixprec.linear(
        seen, plain.out_proj.weight, plain.out_proj.bias, recipe="fp8_tensorwise"
    )
    for call in ((x, x, x), (x, x.clone(), x), (x, x.clone(), x.clone())):
        assert torch.equal(layer(*call, need_weights=False)[0], expected)


# of the plain encoder, which takes torch's fast path
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("mask", [None, torch.arange(5).expand(2, 5) > 3], ids=["none", "padding"])
def test_evaluation_of_an_encoder_calls_its_layers(mask: Tensor | None) -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**ENCODER), 2)
    kinds = [type(module) for module in encoder.modules()]
    x, plain = torch.randn(2, 5, 32), copy.deepcopy(encoder).eval()
    report = mixprec.convert(encoder.eval(), "fp8_rowwise")
    assert {row.name for row in report.converted} == {
        f"layers.{i}.{name}"
        for i in range(2)
        for name in ("self_attn", "self_attn.out_proj", "linear1", "linear2")
    }
    with torch.no_grad():
        quiet = encoder(x, src_key_padding_mask=mask)
        assert not torch.equal(quiet, plain(x, src_key_padding_mask=mask))
    assert torch.equal(quiet, encoder(x, src_key_padding_mask=mask))
    mixprec.revert(encoder)
    assert [type(module) for module in encoder.modules()] == kinds
    with torch.no_grad():
        found, expected = (m(x, src_key_padding_mask=mask) for m in (encoder, plain))
        assert torch.equal(found, expected)


def test_histories_are_one_a_projection_and_roll() -> None:
    layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 5, 32)
    mixprec.convert(layer, "fp8_delayed")
    layer(x, 2 * x, 4 * x)[0].sum().backward()
    mixprec.sync_scales(layer)
    state = mixprec.state_dict(layer)
    assert len(state) == 3 * 4
    amaxes = [state[f"mixprec_{name}_amax_output_a"][0] for name in ("query", "key", "value")]
    assert amaxes == [x.abs().amax(), 2 * x.abs().amax(), 4 * x.abs().amax()]


def test_a_step_without_sync_is_an_error() -> None:
    layer, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 5, 32)
    mixprec.convert(layer, "fp8_delayed")
    layer(x, x, x)
    with torch.no_grad():
        layer.in_proj_weight.add_(1)
    with pytest.raises(ValueError, match=r"^weight: got a new value .* mixprec\.attach"):
        layer(x, x, x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_copies_pickles_and_compiled_graphs_compute_the_same() -> None:
    layer, x = nn.TransformerEncoderLayer(**ENCODER), torch.randn(2, 5, 32)
    mixprec.convert(layer, "fp8_rowwise")
    expected = layer(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), expected)


class Block(nn.Module):
    """Attention as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2)


def test_attention_follows_a_recipe_that_asks_for_it() -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(2, 5, 16), Block()
    rows, outs = {}, {}
    for asked in (False, True):
        model = nn.Sequential(copy.deepcopy(plain))
        recipe = replace(RECIPES["fp8_rowwise"], attention=asked)
        rows[asked] = mixprec.convert(model, recipe).rows[0]
        outs[asked] = model(x)
        model(x).sum().backward()
    assert (rows[False].status, rows[True].status) == ("left", "converted")
    assert "attention=True" in rows[False].reason
    assert not torch.equal(outs[False], outs[True])
    qkv = mixprec.linear(x, plain.qkv.weight, plain.qkv.bias, recipe="fp8_rowwise")
    q, k, v = qkv.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    expected = attention(q, k, v, is_causal=True, recipe="fp8_rowwise")
    assert torch.equal(outs[True], expected.transpose(1, 2).flatten(2))


def test_attention_with_its_own_noise_trains_and_repeats() -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model, x = Block(), torch.randn(2, 16, 16)
        mixprec.convert(model, replace(RECIPES["nvfp4"], attention=True))
        grads = []
        for _ in range(2):
            model.zero_grad()
            model(x).square().sum().backward()
            grads.append(model.qkv.weight.grad.clone())
        return grads

    first, again = run(), run()
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])
    assert not torch.equal(first[0], first[1])


SHAPES = [(2, 3, 5, 8), (1, 2, 1, 4)]
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": torch.tensor([[True, False, True, True, False]])},
    "float mask": {"attn_mask": torch.linspace(-2, 2, 25).reshape(5, 5)},
    "a query that sees nothing": {"attn_mask": torch.arange(25).reshape(5, 5) > 4},
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_exact_attention_is_torchs(call: dict[str, Any]) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in "qkv")
    call = (
        {
            name: value.double() if name == "attn_mask" and value.is_floating_point() else value
            for name, value in call.items()
        }
        if "attn_mask" in call
        else call
    )
    expected = F.scaled_dot_product_attention(q, k, v, **call)
    found = attention(q, k, v, **call, recipe="fp64_emulated")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    g = torch.randn_like(found)
    for a, b in zip(
        torch.autograd.grad(found, (q, k, v), g),
        torch.autograd.grad(expected, (q, k, v), g),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_shared_heads_and_dropout() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 4, 3, 8, dtype=torch.float64)
    k, v = (torch.randn(1, 2, 3, 8, dtype=torch.float64) for _ in "kv")
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    found = attention(q, k, v, enable_gqa=True, recipe="fp64_emulated")
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    dropped = attention(q, q, q, dropout_p=1.0, recipe="fp8_rowwise")
    assert dropped.count_nonzero() == 0


def test_products_of_attention_written_out() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 7, 32) for _ in "qkv")
    found = attention(q, k, v, recipe="mxfp8")
    spec = RECIPES["mxfp8"].output.a
    for i in range(2):
        scaled = q[i] / math.sqrt(32)
        a, b = (mixprec.quantize(x, spec).dequantize() for x in (scaled, k[i]))
        p = (a @ b.t()).softmax(-1)
        a, b = (mixprec.quantize(x, spec).dequantize() for x in (p, v[i].t()))
        torch.testing.assert_close(found[i], a @ b.t(), rtol=1e-4, atol=1e-5)


def test_refusals_name_the_argument() -> None:
    q = torch.randn(1, 3, 8)
    mask = torch.ones(3, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^attn_mask: got one with is_causal=True; "):
        attention(q, q, q, mask, is_causal=True, recipe="fp8_rowwise")
    with pytest.raises(ValueError, match=r"^key: got shapes \(1, 3, 8\), \(1, 3, 1\) and"):
        attention(q, q[..., :1], q, recipe="fp8_rowwise")
    with pytest.raises(ValueError, match=r"^attention: got True with delayed scaling; "):
        replace(RECIPES["fp8_delayed"], attention=True)
    with pytest.raises(ValueError, match=r"^attention: got 1; must be True or False"):
        replace(RECIPES["fp8_rowwise"], attention=1)


def test_the_field_is_data() -> None:
    recipe = mixprec.Recipe.from_dict({"variant_of": "fp8_rowwise", "attention": True})
    assert recipe == replace(RECIPES["fp8_rowwise"], attention=True)
    assert str(recipe) == "fp8_rowwise with attention"
    assert mixprec.Recipe.from_dict(recipe.to_dict()) == recipe


def test_a_converted_attention_is_a_converted_layer() -> None:
    layer = nn.MultiheadAttention(8, 2)
    mixprec.convert(layer, "fp8_rowwise")
    assert isinstance(layer, QuantizedLayer)
    assert isinstance(layer, nn.MultiheadAttention)


def outside(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


class Indirect(Block):
    """Attention in a function that the module's own code does not name, as libraries have it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return {"sdpa": outside}["sdpa"](q, k, v).transpose(1, 2).flatten(2)


class Named(Indirect):
    """Calls its attention as the shipped transformers do."""

    def _attention(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return self._attention(x)


class Noisy(Indirect):
    """Has a method whose name a converted layer uses."""

    def noise(self) -> Tensor:
        return torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.noise()


def test_methods_of_a_users_module_stay_its_own() -> None:
    recipe = replace(RECIPES["fp8_rowwise"], attention=True)
    torch.manual_seed(0)
    model, same, x = Named(), Indirect(), torch.randn(2, 4, 16)
    same.load_state_dict(model.state_dict())
    for each in (model, same):
        mixprec.convert(each, recipe, include=[type(each).__name__])
        assert isinstance(each, QuantizedLayer)
    assert torch.equal(model(x), same(x))
    noisy = Noisy()
    report = mixprec.convert(noisy, recipe, include=["Noisy"])
    reasons = [row.reason for row in report.left if row.name == ""]
    assert reasons == ["it has attributes of its own named noise"]
    assert noisy(x).isfinite().all()


def test_attention_called_elsewhere_is_included_by_name() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(Indirect()), torch.randn(2, 5, 16)
    recipe = replace(RECIPES["fp8_rowwise"], attention=True)
    report = mixprec.convert(model, recipe, include=("Indirect",))
    assert [row.name for row in report.converted] == ["0", "0.qkv"]
    q, k, v = model[0].qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    expected = attention(q, k, v, recipe="fp8_rowwise").transpose(1, 2).flatten(2)
    assert torch.equal(model(x), expected)
    again = mixprec.convert(model, recipe, include=("Indirect",))
    assert [row.name for row in again.converted] == ["0", "0.qkv"]
    mixprec.revert(model)
    assert type(model[0]) is Indirect


def test_a_query_that_sees_nothing_has_no_gradient_of_nan() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    mixprec.convert(layer, replace(RECIPES["fp8_tensorwise"], attention=True))
    x = torch.randn(2, 3, 8, requires_grad=True)
    hidden = torch.tensor([[False, False, True], [True, True, True]])
    layer(x, x, x, key_padding_mask=hidden, need_weights=False)[0].square().sum().backward()
    assert x.grad.isfinite().all()
    assert layer.in_proj_weight.grad.isfinite().all()


def test_large_scores_of_16_bits_stay_finite() -> None:
    q = torch.full((1, 1, 2, 64), 40.0, dtype=torch.float16)
    assert torch.equal(attention(q, q, q, recipe="fp16"), F.scaled_dot_product_attention(q, q, q))


class OwnEncoderLayer(nn.TransformerEncoderLayer):
    """A user's subclass, which torch's fast path takes too."""


class OwnEncoder(nn.TransformerEncoder):
    """Another."""


def test_subclasses_of_encoders_call_their_layers_too() -> None:
    torch.manual_seed(0)
    model = OwnEncoder(OwnEncoderLayer(**ENCODER), 2).eval()
    mixprec.convert(model, "mxfp4")
    x, mask = torch.randn(2, 5, 32), torch.arange(5).expand(2, 5) > 3
    with torch.no_grad():
        quiet = model(x, src_key_padding_mask=mask)
    assert torch.equal(quiet, model(x, src_key_padding_mask=mask))
    assert torch.equal(copy.deepcopy(model)(x), pickle.loads(pickle.dumps(model))(x))
    mixprec.revert(model)
    assert [type(model), type(model.layers[0])] == [OwnEncoder, OwnEncoderLayer]
