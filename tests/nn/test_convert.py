"""Conversion changes what a model computes and nothing else; revert and re-conversion."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quant_oracles import with_distinct_products
from torch import Tensor, nn

import mixprec
from mixprec.nn import QuantizedLinear
from mixprec.recipes import RECIPES

QUANTISING = [
    name for name, each in with_distinct_products(RECIPES).items() if not each.is_high_precision
]
STOCHASTIC = mixprec.Recipe.from_dict(
    {"variant_of": "fp8_delayed", "grad_input": {"a": {"rounding": "stochastic"}}}
)


class Net(nn.Module):
    """A tied head, a layer under two names, one without bias, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.inner = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.narrow = nn.Sequential(nn.Linear(32, 16, bias=False), nn.ReLU(), nn.Linear(16, 32))
        self.again = self.inner
        self.head = nn.Linear(32, 40)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.inner(self.embed(tokens)))
        return self.head(self.again(self.narrow(hidden)))


def tokens() -> Tensor:
    return torch.arange(24) % 40


def plain(attribute: Any) -> Any:
    """What an attribute is, in values that can be compared: objects by identity."""
    if isinstance(attribute, dict):
        return {key: plain(value) for key, value in attribute.items()}
    if isinstance(attribute, set | bool | int | str | type(None)):
        return copy.copy(attribute)
    return id(attribute)


def everything(model: nn.Module) -> dict[str, Any]:
    """Each module's class and its whole ``__dict__``."""
    named = model.named_modules(remove_duplicate=False)
    return {name: (id(m), type(m), plain(vars(m))) for name, m in named}


def identity(model: nn.Module) -> dict[str, Any]:
    """What a conversion must not touch."""
    named = list(model.named_modules(remove_duplicate=False))
    return {
        "modules": [(name, id(module)) for name, module in named],
        "training": [module.training for _, module in named],
        "hooks": [
            {key: plain(value) for key, value in vars(module).items() if "hooks" in key}
            for _, module in named
        ],
        "parameters": [
            (name, id(p), p.data_ptr(), p.dtype, p.requires_grad, p.grad is None)
            for name, p in model.named_parameters(remove_duplicate=False)
        ],
        "state": [(key, value.data_ptr()) for key, value in model.state_dict().items()],
        "public": [{key for key in vars(m) if not key.startswith("_")} for _, m in named],
    }


def prepared() -> Net:
    """A net with flags and hooks of every kind set."""
    net = Net()
    net.narrow[0].weight.requires_grad_(False)
    net.narrow.eval()
    net.inner.register_forward_pre_hook(lambda module, args: None)
    net.inner.register_forward_hook(lambda module, args, out: None)
    net.inner.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    net.inner.register_full_backward_pre_hook(lambda module, grad_out: None)
    net.inner.register_state_dict_post_hook(lambda *args: None)
    net.inner.register_buffer("calls", torch.zeros(()), persistent=False)
    return net


@pytest.mark.parametrize("recipe", [*QUANTISING, STOCHASTIC], ids=str)
def test_identity_is_kept_and_revert_restores_everything(recipe: str | mixprec.Recipe) -> None:
    net = prepared()
    before, all_before = identity(net), everything(net)
    report = mixprec.convert(net, recipe)
    assert {row.name for row in report.converted} == {
        *("inner", "again", "narrow.0", "narrow.2", "head")
    }
    after = identity(net)
    added = {"recipe", "impl", "noise_seed", "noise_stream", "cache_weights"}
    after["public"] = [names - added for names in after["public"]]
    assert after == before
    assert all(type(layer) is QuantizedLinear for layer in (net.inner, net.head, net.narrow[0]))
    mixprec.revert(net)
    assert everything(net) == all_before


def test_revert_after_training_restores_classes_buffers_and_attributes() -> None:
    net = prepared()
    names, classes = list(dict(net.named_buffers())), [type(m) for m in net.modules()]
    attributes = [set(vars(m)) for m in net.modules()]
    mixprec.convert(net, STOCHASTIC)
    net(tokens()).sum().backward()
    mixprec.sync_scales(net)
    mixprec.revert(net)
    assert list(dict(net.named_buffers())) == names
    assert [type(m) for m in net.modules()] == classes
    assert [set(vars(m)) for m in net.modules()] == attributes
    assert all("mixprec" not in str(m._non_persistent_buffers_set) for m in net.modules())


def test_revert_leaves_an_unconverted_model_as_it_is() -> None:
    net = prepared()
    before = everything(net)
    mixprec.revert(net)
    assert everything(net) == before


def test_reverted_model_computes_what_it_did_before() -> None:
    net = Net().eval()
    before = net(tokens())
    mixprec.convert(net, "fp8_tensorwise")
    assert not torch.equal(net(tokens()), before)
    mixprec.revert(net)
    assert torch.equal(net(tokens()), before)


def test_hooks_of_every_kind_still_fire_once() -> None:
    net, fired = Net(), []
    layer = net.narrow[2]
    layer.register_forward_pre_hook(lambda *_: fired.append("forward_pre"))
    layer.register_forward_hook(lambda *_: fired.append("forward"))
    layer.register_full_backward_pre_hook(lambda *_: fired.append("backward_pre"))
    layer.register_full_backward_hook(lambda *_: fired.append("backward"))
    layer.weight.register_hook(lambda grad: fired.append("weight"))
    layer.weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    mixprec.convert(net, "fp8_tensorwise")
    net(tokens()).sum().backward()
    assert fired[:3] == ["forward_pre", "forward", "backward_pre"]
    assert sorted(fired[3:]) == ["accumulated", "backward", "weight"]


def test_tie_survives_and_its_gradient_is_the_sum_of_both_uses() -> None:
    tied, untied = Net(), Net()
    untied.load_state_dict(tied.state_dict())
    untied.head.weight = nn.Parameter(tied.embed.weight.detach().clone())
    for net in (tied, untied):
        mixprec.convert(net, "fp8_tensorwise")
        net(tokens()).square().mean().backward()
    assert tied.head.weight is tied.embed.weight
    assert len(list(tied.parameters())) == len(list(untied.parameters())) - 1
    expected = untied.embed.weight.grad + untied.head.weight.grad
    assert torch.equal(tied.head.weight.grad, expected)


def test_report_names_what_a_tied_weight_is_shared_with() -> None:
    (row,) = (row for row in mixprec.convert(Net(), "fp8_rowwise").rows if row.name == "head")
    assert (row.status, row.reason) == ("converted", "weight shared with embed")


def test_module_under_two_names_is_converted_once_and_reported_twice() -> None:
    net = Net()
    report = mixprec.convert(net, "fp8_delayed")
    notes = {row.name: row.reason for row in report.converted}
    assert net.again is net.inner
    assert (notes["inner"], notes["again"]) == ("", "the same module as inner")


@pytest.mark.parametrize("recipe", QUANTISING)
def test_the_model_itself_may_be_a_linear(recipe: str) -> None:
    layer, x = nn.Linear(32, 32), torch.randn(4, 32)
    report = mixprec.convert(layer, recipe)
    assert [(row.name, row.type, row.status) for row in report.rows] == [
        ("", "Linear", "converted")
    ]
    assert type(layer) is QuantizedLinear
    assert not torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    mixprec.revert(layer)
    assert type(layer) is nn.Linear


def test_converting_twice_by_the_same_recipe_changes_nothing_and_keeps_state() -> None:
    net = Net()
    first = mixprec.convert(net, "fp8_delayed")
    net(tokens()).sum().backward()
    mixprec.sync_scales(net)
    before = everything(net)
    state = {key: value.clone() for key, value in mixprec.state_dict(net).items()}
    assert mixprec.convert(net, "fp8_delayed") == first
    assert everything(net) == before
    assert all(torch.equal(value, state[key]) for key, value in mixprec.state_dict(net).items())


@pytest.mark.parametrize("first", QUANTISING)
@pytest.mark.parametrize("second", ["fp8_delayed", "fp8_rowwise"])
def test_another_recipe_replaces_the_first(first: str, second: str) -> None:
    once, twice = Net(), Net()
    twice.load_state_dict(once.state_dict())
    mixprec.convert(once, second)
    mixprec.convert(twice, first)
    report = mixprec.convert(twice, second)
    assert {row.recipe for row in report.converted} == {second}
    assert type(twice.inner) is QuantizedLinear
    assert list(mixprec.state_dict(twice)) == list(mixprec.state_dict(once))
    assert torch.equal(twice(tokens()), once(tokens()))


def test_another_selection_replaces_the_first() -> None:
    net = Net()
    mixprec.convert(net, "fp8_delayed")
    report = mixprec.convert(net, "fp8_delayed", skip=("narrow",), keep_last=1)
    assert [row.name for row in report.converted] == ["inner", "again"]
    assert [type(m) for m in (net.inner, net.narrow[0], net.narrow[2], net.head)] == [
        QuantizedLinear,
        *[nn.Linear] * 3,
    ]
    assert all(key.startswith("inner.") for key in mixprec.state_dict(net))


def test_a_high_precision_recipe_restores_the_layers_without_a_warning() -> None:
    net = prepared()
    before = everything(net)
    mixprec.convert(net, "fp8_delayed")
    report = mixprec.convert(net, "fp32")
    assert everything(net) == before
    assert not report.converted
    assert {row.reason for row in report.left if row.type == "Linear"} == {
        "recipe fp32 quantises nothing"
    }


def explode(module: nn.Module, name: str) -> bool:
    raise RuntimeError(f"asked about {name}")


@pytest.mark.parametrize("already", [None, "fp8_delayed"])
@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        ("tf32", {"impl": "scaled_mm"}, "impl: got 'scaled_mm'; .*tf32"),
        ("fp8_tensorwise", {"impl": "cutlass"}, "impl: got 'cutlass'; must be one of auto"),
        ({"inner": "fp8_tensorwise", "head": "tf32"}, {"impl": "scaled_mm"}, "tf32"),
        ("fp8_tensorwide", {}, "fp8_tensorwise"),
        ("fp8_rowwise", {"skip": ("narow",)}, "skip: got pattern 'narow'.*near names: narrow"),
        ({"hed": "fp8_rowwise"}, {}, "recipe: got pattern 'hed'.*near names: head"),
        ("fp8_rowwise", {"include": ("Lin",)}, "include: got 'Lin'; .*it has .*Linear"),
        ("fp8_rowwise", {"keep_last": -1}, "keep_last: got -1; must be at least 0; use 0"),
        ("fp8_rowwise", {"multiple_of": 0}, "multiple_of: got 0; must be at least 1; use 16"),
        ("fp8_rowwise", {"module_filter_fn": explode}, "asked about inner"),
    ],
)
def test_an_error_changes_nothing(
    recipe: Any, arguments: dict[str, Any], message: str, already: str | None
) -> None:
    net = prepared()
    if already:
        mixprec.convert(net, already)
    before = everything(net)
    with pytest.raises((ValueError, RuntimeError), match=message):
        mixprec.convert(net, recipe, **arguments)
    assert everything(net) == before


@pytest.mark.parametrize("model", [3, nn.Linear])
def test_what_is_no_module_is_refused(model: Any) -> None:
    with pytest.raises(TypeError, match=r"model: got .*; must be"):
        mixprec.convert(model, "fp8_rowwise")


def test_nothing_converted_is_loud() -> None:
    with pytest.warns(UserWarning, match="nothing was converted; print the report for why"):
        report = mixprec.convert(nn.Sequential(nn.LayerNorm(4)), "fp8_tensorwise")
    assert "NOTHING WAS CONVERTED" in str(report)


def test_flushed_subnormals_are_warned_about() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        with pytest.warns(UserWarning, match=r"torch.set_flush_denormal\(False\)"):
            mixprec.convert(nn.Linear(4, 4), "fp8_rowwise")
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(
    "default",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
    ],
    ids=str,
)
def test_default_dtype_makes_no_false_warning(default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    try:
        assert mixprec.convert(nn.Linear(4, 4), "fp8_rowwise").converted
    finally:
        torch.set_default_dtype(torch.float32)


def test_conversion_keeps_storage_and_type_of_a_bfloat16_model() -> None:
    net = nn.Sequential(*(nn.Linear(64, 64, bias=i % 2 == 0) for i in range(8))).bfloat16()
    before = [(p.dtype, p.data_ptr()) for p in net.parameters()]
    mixprec.convert(net, "fp8_delayed")
    net(torch.randn(2, 64, dtype=torch.bfloat16)).sum().backward()
    assert [(p.dtype, p.data_ptr()) for p in net.parameters()] == before
    assert [layer.bias is None for layer in net] == [i % 2 == 1 for i in range(8)]
