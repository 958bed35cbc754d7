"""What a recipe asks of a training step: its region, parameters, updates and loss scale."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mixprec.amp.setup import cast_parameters, region, scaler_for, with_update
from mixprec.optim import MixedPrecision
from mixprec.policy import innermost_region
from mixprec.recipes import OPT_LEVELS, RECIPES, get_recipe, with_base

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("fp32", "fp32"),
        ("tf32", "fp32"),
        ("fp8_rowwise", "fp32"),
        ("bf16", "bf16"),
        ("fp16_pure", "fp16"),
        ("fp8", "bf16"),
    ],
)
def test_region_is_that_of_the_base(name: str, result: str) -> None:
    x = torch.ones(2, 2)
    with region(get_recipe(name)):
        assert (x @ x).dtype == DTYPES[result]
        assert x.exp().dtype == torch.float32
    assert innermost_region() is None


def test_region_of_a_wide_base_leaves_the_one_around_it() -> None:
    x = torch.ones(2, 2)
    with region(RECIPES["bf16"]), region(RECIPES["fp32"]):
        assert (x @ x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", RECIPES)
def test_parameters_are_held_in_the_recipe_s_type_and_stay_the_same_objects(name: str) -> None:
    net, recipe = model(), RECIPES[name]
    before = list(net.parameters())
    values = copy.deepcopy(before)
    cast_parameters(net, recipe)
    for new, old, value in zip(net.parameters(), before, values, strict=True):
        assert new is old
        assert torch.equal(new, value.to(DTYPES[recipe.parameters]))


def test_buffers_are_widened_and_never_narrowed() -> None:
    for name, want in (("fp64", torch.float64), ("bf16_pure", torch.float32)):
        net = model()
        net[1].running_mean.fill_(1 / 3)
        cast_parameters(net, RECIPES[name])
        assert net[1].running_mean.dtype == want
        assert net[1].running_mean[0].item() == torch.tensor(1 / 3).item()
        assert net[1].num_batches_tracked.dtype == torch.int64


def test_batch_norms_are_kept_by_the_recipe_that_says_so() -> None:
    for keep in (True, False):
        net = model()
        cast_parameters(net, replace(OPT_LEVELS["O2"], keep_batchnorm_fp32=keep))
        assert net[0].weight.dtype == torch.float16
        assert net[1].weight.dtype == (torch.float32 if keep else torch.float16)


def test_parameters_of_integers_and_shared_ones() -> None:
    net = nn.ParameterDict({"count": nn.Parameter(torch.tensor([3]), requires_grad=False)})
    net["first"] = net["second"] = nn.Parameter(torch.ones(2))
    cast_parameters(net, RECIPES["bf16_pure"])
    assert net["count"].dtype == torch.int64
    assert net["first"] is net["second"]
    assert net["first"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "update"),
    [
        ("fp32", None),
        ("fp64", None),
        ("bf16", None),
        ("fp16", None),
        ("bf16_pure", "stochastic"),
        ("fp16_pure", "stochastic"),
        ("bf16-true", "plain"),
        ("16-true", "plain"),
        ("O2", "masters"),
        ("O3", "plain"),
    ],
)
def test_optimizer_is_wrapped_where_parameters_are_narrow(name: str, update: str | None) -> None:
    own = SGD(model().parameters(), lr=1.0)
    wrapped = with_update(own, get_recipe(name), seed=7)
    if update is None:
        assert wrapped is own
    else:
        assert isinstance(wrapped, MixedPrecision)
        assert (wrapped.inner, wrapped.update, wrapped.seed) == (own, update, 7)


def test_masters_are_the_values_from_before_the_cast() -> None:
    net = model()
    before = copy.deepcopy(list(net.parameters()))
    optimizer = with_update(SGD(net.parameters(), lr=1.0), OPT_LEVELS["O2"])
    cast_parameters(net, OPT_LEVELS["O2"])
    assert isinstance(optimizer, MixedPrecision)
    assert all(map(torch.equal, optimizer.masters(), before))


@pytest.mark.parametrize(
    ("name", "is_enabled", "scale"),
    [
        ("fp32", False, 1.0),
        ("bf16", False, 1.0),
        ("bf16_pure", False, 1.0),
        ("fp8", False, 1.0),
        ("16-true", False, 1.0),
        ("fp16", True, 65536.0),
        ("fp16_pure", True, 65536.0),
        ("O3", True, 1.0),
    ],
)
def test_scaler_is_the_one_that_the_recipe_asks_for(
    name: str, is_enabled: bool, scale: float
) -> None:
    scaler = scaler_for(get_recipe(name))
    assert (scaler.is_enabled(), scaler.get_scale()) == (is_enabled, scale)
    assert scaler.scale(torch.ones(())).item() == scale


def test_scale_of_a_base_comes_with_it() -> None:
    assert scaler_for(with_base(RECIPES["fp8_rowwise"], "fp16")).get_scale() == 65536
    assert not scaler_for(with_base(RECIPES["fp16"], "bf16")).is_enabled()


@pytest.mark.parametrize("constant", [128, 0.25, 2.0**30])
def test_constant_scale_never_moves(constant: float) -> None:
    scaler = scaler_for(replace(RECIPES["fp16"], loss_scale=constant), growth_interval=1)
    weight = torch.ones(1, requires_grad=True)
    optimizer = SGD([weight], lr=0.5)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(weight.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == constant
    assert weight.item() == 0
    assert scaler.skipped_steps == 1


def test_options_of_a_dynamic_scale() -> None:
    scaler = scaler_for(RECIPES["fp16"], init_scale=8.0, max_scale=16.0, growth_interval=5)
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (8.0, 5)
    assert scaler.state_dict()["max_scale"] == 16.0
