"""Sensitive layers in higher precision: which are kept, and what the report says of products."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mixprec
from mixprec.nn import keep_sensitive
from mixprec.recipes import RECIPES, with_base

BF16 = with_base(RECIPES["bf16"], "fp32")


def model(count: int, size: int = 16) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(size, size), nn.ReLU()) for _ in range(count - 1)]
    return nn.ModuleDict({"layers": nn.ModuleList(layers), "head": nn.Linear(size, size)})


@pytest.mark.parametrize(
    ("count", "share", "last"), [(20, 0.15, 3), (21, 0.15, 4), (4, 0.15, 1), (10, 0.0, 0)]
)
def test_first_layer_and_the_last_share_are_kept(count: int, share: float, last: int) -> None:
    net = model(count)
    names = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    report = mixprec.convert(net, keep_sensitive(net, "nvfp4", keep_last_share=share))
    kept = [row.name for row in report.converted if row.recipe == "bf16 on fp32"]
    assert kept == [names[0], *(names[-last:] if last else [])]
    assert [row.name for row in report.converted] == names
    assert {row.recipe for row in report.converted} == {"nvfp4", "bf16 on fp32"}


def test_a_mapping_keeps_its_patterns_behind_the_kept_layers() -> None:
    net = model(10)
    mapping = keep_sensitive(net, {"layers.1": "mxfp8", "*": "nvfp4"}, kept="fp8_rowwise")
    assert list(mapping) == ["layers.0.0", "layers.8.0", "head", "layers.1", "*"]
    recipes = {row.name: row.recipe for row in mixprec.convert(net, mapping).converted}
    assert recipes["layers.1.0"] == "mxfp8"
    assert recipes["layers.2.0"] == "nvfp4"
    assert recipes["head"] == "fp8_rowwise"


def test_kept_layers_stand_on_the_base_of_the_recipe() -> None:
    net = model(10)
    mapping = keep_sensitive(net, with_base(RECIPES["nvfp4"], "bf16"))
    assert {recipe.base for recipe in mapping.values()} == {"bf16"}
    assert keep_sensitive(net, "nvfp4")["head"] == BF16


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"keep_first": -1}, "keep_first: got -1; must be at least 0"),
        ({"keep_first": True}, "keep_first: got True"),
        ({"keep_last_share": 1.0}, r"keep_last_share: got 1\.0; must be a share below 1"),
        ({"keep_first": 3}, "of 4 layers none is left for the recipe"),
    ],
)
def test_what_keeps_everything_or_is_no_share_is_refused(
    arguments: dict[str, object], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        keep_sensitive(model(4), "nvfp4", **arguments)
    with pytest.raises(ValueError, match="of 0 layers none is left"):
        keep_sensitive(nn.ReLU(), "nvfp4")


def test_report_has_the_share_of_the_multiplications_in_each_format() -> None:
    net = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    report = mixprec.convert(net, {"0": "bf16", "1": "fp8_tensorwise", "2": "nvfp4"})
    first, second, third, head = 16 * 32, 32 * 64, 64 * 64, 64 * 8
    whole = 3 * (first + second + third + head)
    assert report.shares == {
        "bf16": 3 * first / whole,
        "e4m3": second / whole,
        "e5m2 x e4m3": 2 * second / whole,
        "e2m1": 3 * third / whole,
        "fp32": 3 * head / whole,
    }
    assert [row.bits for row in report.rows] == ["16", "8", "4", "32"]
    assert "e2m1 57.1 %" in " ".join(str(report).split())


def test_products_in_high_precision_have_the_parameters_type() -> None:
    report = mixprec.convert(
        nn.Sequential(nn.Linear(16, 16, dtype=torch.bfloat16)), "fp8_rowwise_hp_grad_weight"
    )
    (row,) = report.rows
    assert row.formats == ("e4m3", "e4m3", "bf16")
    assert row.bits == "8, 16"
    assert row.multiplications == 256


def test_a_layer_under_two_names_counts_once() -> None:
    layer = nn.Linear(16, 16)
    net = nn.ModuleDict({"a": layer, "b": layer, "c": nn.Linear(16, 16)})
    report = mixprec.convert(net, {"a": "nvfp4", "*": "mxfp8"})
    assert report.shares == {"e2m1": 0.5, "e4m3": 0.5}


def test_a_model_without_linear_layers_has_no_shares() -> None:
    with pytest.warns(UserWarning, match="nothing was converted"):
        report = mixprec.convert(nn.Sequential(nn.LayerNorm(3), nn.ReLU()), "nvfp4")
    assert report.shares == {}
    assert "multiplications" not in str(report)
