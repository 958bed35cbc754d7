"""Which layers a conversion takes, which it leaves alone, and the reason it gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import mixprec
from mixprec.nn import QuantizedLayer, QuantizedLinear


class Doubled(nn.Linear):
    """Reaches ``nn.Linear.forward`` through super."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Renamed(nn.Linear):
    """Has no forward of its own."""


class Bypassing(nn.Linear):
    """Multiplies by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * nn.functional.linear(x, self.weight, self.bias)


class OverBypassing(Bypassing):
    """Calls super, which multiplies by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Tagged(nn.Linear):
    """Has attributes whose names a converted layer uses."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.recipe, self.impl = "soup", "spoon"


class Decoder(nn.Module):
    """Names that substring matching confuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(
            {
                name: nn.ModuleDict({"w1": nn.Linear(16, 16), "gate_proj": nn.Linear(16, 16)})
                for name in ("1", "10")
            }
        )
        self.gate = nn.Linear(16, 20)
        self.head = nn.Linear(16, 16)


NAMES = ["layers.1.w1", "layers.1.gate_proj", "layers.10.w1", "layers.10.gate_proj", "gate", "head"]


def outcome(report: mixprec.Report) -> dict[str, str]:
    """Recipe, or the reason, by module name."""
    return {row.name: row.recipe or row.reason for row in report.rows}


def only(model: nn.Module, recipe: Any = "fp8_rowwise", **arguments: Any) -> mixprec.ReportRow:
    """The report's row for a model that is one module in a Sequential."""
    rows = mixprec.convert(nn.Sequential(model), recipe, **arguments).rows
    return next(row for row in rows if row.name == "0")


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ({}, []),
        ({"skip": ("layers.1",)}, NAMES[:2]),
        ({"skip": ("layers.1.*",)}, NAMES[:2]),
        ({"skip": ("layers.1*",)}, NAMES[:4]),
        ({"skip": ("gate",)}, ["gate"]),
        ({"skip": ("*gate*",)}, ["layers.1.gate_proj", "layers.10.gate_proj", "gate"]),
        ({"skip": ("*.w1", "head")}, ["layers.1.w1", "layers.10.w1", "head"]),
        ({"skip": ("layers.[!1]*", "layers.?.w1")}, None),
        ({"multiple_of": 16}, ["gate"]),
        ({"multiple_of": 4}, []),
        ({"keep_last": 2}, ["gate", "head"]),
        ({"keep_last": 1, "multiple_of": 16}, ["gate", "head"]),
        ({"module_filter_fn": lambda module, name: "w1" in name}, [*NAMES[1:4:2], "gate", "head"]),
        ({"module_filter_fn": lambda module, name: module.out_features == 16}, ["gate"]),
        ({"keep_last": 5, "skip": ("layers.10",)}, NAMES[1:]),
    ],
)
def test_layers_are_left_alone_by(arguments: dict[str, Any], left: list[str] | None) -> None:
    model = Decoder()
    if left is None:
        with pytest.raises(ValueError, match=r"skip: got pattern 'layers.\[!1\]\*'; it matches no"):
            mixprec.convert(model, "fp8_tensorwise", **arguments)
        return
    report = mixprec.convert(model, "fp8_tensorwise", **arguments)
    assert [row.name for row in report.left] == left
    assert [row.name for row in report.converted] == [name for name in NAMES if name not in left]
    types = {name: type(module) for name, module in model.named_modules()}
    assert all(types[name] is (nn.Linear if name in left else QuantizedLinear) for name in NAMES)


@pytest.mark.parametrize("argument", ["skip", "include"])
def test_one_string_is_not_taken_for_several_patterns(argument: str) -> None:
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("a", "b", "ab")})
    with pytest.raises((TypeError, ValueError), match=rf"{argument}: got 'ab'"):
        mixprec.convert(model, "fp8_rowwise", **{argument: "ab"})


@pytest.mark.parametrize("count", [6, 100])
def test_keeping_every_layer_warns(count: int) -> None:
    with pytest.warns(UserWarning, match="nothing was converted"):
        report = mixprec.convert(Decoder(), "fp8_tensorwise", keep_last=count)
    assert {row.reason for row in report.left} == {"among the last layers (keep_last)"}


def test_reasons_name_the_argument_and_the_value() -> None:
    report = mixprec.convert(
        Decoder(),
        {"layers.1.*": "fp8_delayed", "gate": "fp8_rowwise", "*.w1": "fp32"},
        skip=("layers.1.gate*",),
        multiple_of=16,
    )
    assert outcome(report) == {
        "layers.1.w1": "fp8_delayed",
        "layers.1.gate_proj": "skip='layers.1.gate*'",
        "layers.10.w1": "recipe fp32 quantises nothing",
        "layers.10.gate_proj": "no pattern of the recipe mapping matches",
        "gate": "sizes 16 and 20 are not multiples of 16",
        "head": "no pattern of the recipe mapping matches",
    }


def test_first_pattern_of_a_mapping_wins() -> None:
    recipes = {"head": "fp32", "layers.1": "rowwise", "*.w1": mixprec.RECIPES["fp8_delayed"]}
    assert outcome(mixprec.convert(Decoder(), {**recipes, "*": "tensorwise"})) == {
        "layers.1.w1": "fp8_rowwise",
        "layers.1.gate_proj": "fp8_rowwise",
        "layers.10.w1": "fp8_delayed",
        "layers.10.gate_proj": "fp8_tensorwise",
        "gate": "fp8_tensorwise",
        "head": "recipe fp32 quantises nothing",
    }


def test_filter_function_is_asked_once_a_layer_with_its_name() -> None:
    model, asked = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Sequential(nn.Linear(4, 4))), []
    mixprec.convert(
        model, "fp8_rowwise", module_filter_fn=lambda m, name: asked.append((m, name)) or True
    )
    assert asked == [(model[0], "0"), (model[2][0], "2.0")]


@pytest.mark.parametrize(
    "arguments",
    [
        {"skip": ("second",)},
        {"module_filter_fn": lambda module, name: name != "second"},
    ],
    ids=["skip", "filter"],
)
def test_a_shared_module_is_left_alone_by_any_of_its_names(arguments: dict[str, Any]) -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"first": shared, "second": shared, "other": nn.Linear(16, 16)})
    report = mixprec.convert(model, "fp8_tensorwise", **arguments)
    assert [row.name for row in report.converted] == ["other"]


def test_a_mapping_reaches_a_shared_module_by_its_second_name() -> None:
    shared = nn.Linear(16, 16)
    model = nn.ModuleDict({"first": shared, "second": shared, "other": nn.Linear(16, 16)})
    report = mixprec.convert(model, {"second": "fp8_rowwise", "other": "fp8_tensorwise"})
    assert outcome(report)["second"] == "fp8_rowwise"


@pytest.mark.parametrize("kind", [Doubled, Renamed, Bypassing], ids=lambda kind: kind.__name__)
def test_subclass_is_left_alone_with_the_way_to_include_it(kind: type[nn.Linear]) -> None:
    model, x = nn.Sequential(kind(16, 16), nn.Linear(16, 16)), torch.randn(4, 16)
    before = model[0](x)
    row = mixprec.convert(model, "fp8_tensorwise").rows[0]
    assert (row.type, row.status) == (kind.__name__, "left")
    assert f"include=('{kind.__name__}',)" in row.reason
    assert type(model[0]) is kind
    assert torch.equal(model[0](x), before)


@pytest.mark.parametrize("by", [lambda kind: kind, lambda kind: kind.__name__])
@pytest.mark.parametrize(("kind", "factor"), [(Doubled, 2), (Renamed, 1)])
def test_included_subclass_keeps_its_forward_around_the_recipe(
    by: Callable[[type], Any], kind: type[nn.Linear], factor: int
) -> None:
    layer, x = kind(16, 16), torch.randn(4, 16)
    row = only(layer, include=(by(kind),))
    assert (row.type, row.status) == (kind.__name__, "converted")
    assert isinstance(layer, kind)
    assert isinstance(layer, QuantizedLinear)
    product = mixprec.linear(x, layer.weight, layer.bias, recipe="fp8_rowwise")
    assert torch.equal(layer(x), factor * product)
    mixprec.revert(layer)
    assert type(layer) is kind


@pytest.mark.filterwarnings("ignore:convert. nothing was converted")
def test_subclass_with_attributes_of_our_names_is_left_alone() -> None:
    layer = Tagged(16, 16)
    row = only(layer, include=(Tagged,))
    assert (row.status, "of its own named impl, recipe" in row.reason) == ("left", True)
    assert (layer.recipe, layer.impl) == ("soup", "spoon")


@pytest.mark.parametrize(
    "kind",
    [
        Bypassing,
        OverBypassing,
    ],
    ids=lambda kind: kind.__name__,
)
@pytest.mark.filterwarnings("ignore:convert. nothing was converted")
def test_included_subclass_that_no_recipe_reaches_is_left_alone(kind: type[nn.Linear]) -> None:
    layer = kind(16, 16)
    row = only(layer, include=(kind,))
    assert row.status == "left"
    assert "a recipe would not reach it" in row.reason
    assert type(layer) is kind


@pytest.mark.filterwarnings("ignore:convert. nothing was converted")
def test_layer_whose_forward_was_replaced_is_not_called_converted() -> None:
    layer = nn.Linear(16, 16)
    inner = layer.forward
    layer.forward = lambda x: inner(x)
    assert only(layer).status == "left"


def calls_of_products(model: nn.Module, run: Callable[[], object]) -> set[str]:
    """Names of the converted layers whose forward ran."""
    reached: set[str] = set()
    handles = [
        module.register_forward_hook(lambda *_, name=name: reached.add(name))
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLayer)
    ]
    run()
    for handle in handles:
        handle.remove()
    return reached


ENCODER = {"d_model": 32, "nhead": 4, "dim_feedforward": 48, "dropout": 0.0, "batch_first": True}


@pytest.mark.parametrize("training", [True, False])
def test_attention_and_encoder_layers_left_alone_compute_what_they_did(training: bool) -> None:
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(32, 4, batch_first=True),
            "encoder": nn.TransformerEncoderLayer(**ENCODER),
            "head": nn.Linear(32, 32),
        }
    ).train(training)
    reference, x = copy.deepcopy(model), torch.randn(2, 5, 32)
    skip = ("attention", "encoder")
    reasons = outcome(mixprec.convert(model, "fp8_tensorwise", skip=skip))
    assert reasons["head"] == "fp8_tensorwise"
    assert "multiplies by its weight without calling it" in reasons["attention.out_proj"]
    with torch.set_grad_enabled(training):
        assert torch.equal(model["encoder"](x), reference["encoder"](x))
        found, expected = (m["attention"](x, x, x)[0] for m in (model, reference))
        assert torch.equal(found, expected)
        assert not torch.equal(model["head"](x), reference["head"](x))


@pytest.mark.parametrize("training", [True, False])
def test_every_layer_called_converted_in_a_transformer_decoder_runs(training: bool) -> None:
    model, x = nn.TransformerDecoderLayer(**ENCODER).train(training), torch.randn(2, 5, 32)
    report = mixprec.convert(model, "fp8_tensorwise")
    layers = {"self_attn", "self_attn.out_proj", "multihead_attn", "multihead_attn.out_proj"}
    layers |= {"linear1", "linear2"}
    assert {row.name for row in report.converted} == layers
    assert calls_of_products(model, lambda: model(x, x)) == layers


@pytest.mark.parametrize("module", [nn.LayerNorm(16), nn.PReLU(), nn.Embedding(4, 16)], ids=str)
def test_other_layers_with_parameters_are_listed_as_not_covered(module: nn.Module) -> None:
    model = nn.Sequential(copy.deepcopy(module), nn.Linear(16, 16))
    row = mixprec.convert(model, "fp8_tensorwise").rows[0]
    name = type(module).__name__
    assert (row.type, row.status, row.reason) == (name, "left", f"{name} is not covered")


def parametrised() -> nn.Linear:
    return parametrizations.weight_norm(nn.Linear(16, 16))


def pruned() -> nn.Linear:
    return prune.l1_unstructured(nn.Linear(16, 16), "weight", 0.5)


@pytest.mark.parametrize("make", [parametrised, pruned])
def test_layer_whose_weight_is_computed_is_converted_and_trains(
    make: Callable[[], nn.Linear],
) -> None:
    layer, x = make(), torch.randn(4, 16)
    assert only(layer).status == "converted"
    expected = mixprec.linear(x, layer.weight, layer.bias, recipe="fp8_rowwise")
    assert torch.equal(layer(x), expected)
    layer(x).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_revert_refuses_a_layer_that_was_parametrised_after_conversion() -> None:
    layer, x = nn.Linear(16, 16), torch.randn(4, 16)
    mixprec.convert(layer, "fp8_rowwise")
    parametrizations.weight_norm(layer)
    with pytest.raises(ValueError, match=r"class ParametrizedQuantizedLinear; .* undo that first"):
        mixprec.revert(layer)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    mixprec.revert(layer)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.filterwarnings("ignore:convert. nothing was converted")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_layer_is_refused_or_stays_converted() -> None:
    layer = nn.LazyLinear(16)
    status = only(layer, include=("LazyLinear",)).status
    layer(torch.randn(4, 16))
    assert isinstance(layer, QuantizedLinear) == (status == "converted")
