"""`mixprec.plan`: layers on targets, rooflines, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mixprec
from mixprec.hardware import ACCELERATORS
from mixprec.planning.batches import ROWS, row_of
from mixprec.planning.records import Plan, RecipePlan
from mixprec.planning.targets import TARGETS, size_of
from mixprec.train import models
from mixprec.train.config import Config, from_dict
from mixprec.train.data import DATASETS
from mixprec.train.feed import _collated, dataset_of
from mixprec.train.models import ModelEntry
from mixprec.train.splits import Items

WIDTH, HIDDEN, CLASSES, BATCH = 784, 200, 10, 24


class Two(nn.Module):
    """Two linear layers; the input has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.fc2 = nn.Linear(HIDDEN, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x.flatten(1)))


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ModelEntry(build=Two, loss=F.cross_entropy)
    monkeypatch.setattr(models, "MODELS", {"mnist_cnn": entry})


def config(recipe: str, **rest: Any) -> Config:
    return from_dict({"recipe": recipe, "data": {"batch_size": BATCH}} | rest)


def only(made: Plan) -> RecipePlan:
    (entry,) = made.recipes
    return entry


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("recipe", "target", "reason"),
    [
        ("fp8_tensorwise", "h100", ""),
        ("fp8_rowwise", "l4", ""),
        ("mxfp8", "b200", ""),
        ("nvfp4", "gb200", ""),
        ("bf16", "mi300x", "bf16: CDNA 3 (9.4) has units, but torch no float32 sums of them there"),
        ("fp8_tensorwise", "a100", "e4m3: no units in Ampere (8.0)"),
        ("mxfp8", "h200", "capability 9.0 (Hopper) has no blocks of 32; 10.0 has"),
        ("fp8_blockwise", "b200", "has no blocks of 128; 9.0 alone has"),
        (
            "fp8_tensorwise",
            "mi300x",
            "e4m3: no units in CDNA 3 (9.4), which multiplies e4m3fnuz in its place; Ada (8.9) has",
        ),
        ("fp8_tensorwise", "cpu", "e4m3: no units in this CPU"),
        ("mxfp6_e3m2", "b200", "torch has no type"),
    ],
)
def test_layers_on_a_target(recipe: str, target: str, reason: str) -> None:
    made = only(mixprec.plan(config(recipe), target))
    linears = [layer for layer in made.layers if layer.type == "Linear"]
    assert [layer.name for layer in linears] == ["fc1", "fc2"]
    assert {layer.status for layer in linears} == {"emulated" if reason else "native"}
    assert all(reason in layer.reason for layer in linears)


@pytest.mark.usefixtures("two")
def test_reasons_name_the_torch_release_the_configuration_and_the_asked_impl() -> None:
    old = only(mixprec.plan(config("fp8_rowwise"), "h100", torch_version="2.0.1"))
    assert old.layers[-1].reason == "e4m3: needs torch 2.1, this is 2.0"
    convert = {"skip": ["fc1"], "impl": "emulated"}
    skipped = only(mixprec.plan(config("fp8_rowwise", convert=convert), "h100"))
    assert {(x.name, x.status, x.reason) for x in skipped.layers if x.name} == {
        ("fc1", "left", "skip='fc1'"),
        ("fc2", "emulated", "convert.impl = 'emulated' asks for it"),
    }


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("recipe", "target", "rows", "multiple"),
    [("fp8_rowwise", "h100", 1, 16), ("nvfp4", "b200", 16, 32)],
)
def test_sizes_of_products_and_what_is_filled_up(
    recipe: str, target: str, rows: int, multiple: int
) -> None:
    layers = {layer.name: layer for layer in only(mixprec.plan(config(recipe), target)).layers}
    sizes = {name: {p.product: p.sizes for p in layers[name].products} for name in ("fc1", "fc2")}
    assert sizes == {
        # nobody asks for the gradient of the images
        "fc1": {"output": (BATCH, HIDDEN, WIDTH), "grad_weight": (HIDDEN, WIDTH, BATCH)},
        "fc2": {
            "output": (BATCH, CLASSES, HIDDEN),
            "grad_input": (BATCH, HIDDEN, CLASSES),
            "grad_weight": (CLASSES, HIDDEN, BATCH),
        },
    }
    for layer in ("fc1", "fc2"):
        for product in layers[layer].products:
            m, n, k = product.sizes
            expected = [
                -(-size // unit) * unit for size, unit in ((m, rows), (n, 16), (k, multiple))
            ]
            assert list(product.filled) == expected


@pytest.mark.usefixtures("two")
def test_roofline_of_products_is_the_ratio_of_rates() -> None:
    batch = 64 * 16
    made = mixprec.plan(
        config("fp8_tensorwise", base="bf16"),
        "h100",
        recipes=["fp32", "bf16", "fp8_tensorwise"],
        batch=batch,
    )
    plain, half, fp8 = (entry.roofline for entry in made.recipes)
    assert plain is not None
    assert half is not None
    assert fp8 is not None
    rates = ACCELERATORS["H100"].rates
    sizes = [(batch, HIDDEN, WIDTH)] * 2 + [(batch, CLASSES, HIDDEN)] * 3
    operations = sum(2 * m * n * k for m, n, k in sizes)
    # N and K are filled up to multiples of 16: 200 to 208, 10 to 16
    filled = 2 * batch * (208 * 784 + 200 * 784 + 16 * 208 + 208 * 16 + 10 * 208)
    assert (plain.share, plain.product_speedup, plain.speedup) == (0, 1, 1)
    assert half.product_speedup == pytest.approx(rates["bf16"] / rates["fp32"])
    expected = operations / rates["bf16"] / (filled / rates["fp8"])
    assert fp8.product_speedup == pytest.approx(expected)
    for line in (half, fp8):
        assert line.operations_share == pytest.approx(1)
        rest = (1 - line.share) * line.baseline_seconds
        assert line.share * line.baseline_seconds == pytest.approx(
            operations / rates[line.baseline] / 1e12
        )
        assert rest > 0
    assert (half.baseline, fp8.baseline) == ("fp32", "bf16")
    assert 1 < fp8.speedup < fp8.product_speedup


@pytest.mark.usefixtures("two")
def test_what_is_emulated_is_no_faster_than_the_base_and_a_cpu_has_no_roofline() -> None:
    line = only(mixprec.plan(config("mxfp8", base="bf16"), "a100")).roofline
    assert line is not None
    assert (line.product_speedup, line.speedup) == (pytest.approx(1), pytest.approx(1))
    assert only(mixprec.plan(config("mxfp8"), "cpu")).roofline is None


class Attending(nn.Module):
    """Attention over the rows of an image, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(28))
        self.fc = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shift
        return self.fc(F.scaled_dot_product_attention(x, x, x).flatten(1))


@pytest.mark.parametrize("attention", [False, True])
def test_attention_by_the_recipe_counts_among_its_products(
    monkeypatch: pytest.MonkeyPatch, attention: bool
) -> None:
    entry = ModelEntry(build=Attending, loss=F.cross_entropy)
    monkeypatch.setattr(models, "MODELS", {"mnist_cnn": entry})
    table = {"variant_of": "fp8_tensorwise", "attention": attention, "base": "bf16"}
    line = only(
        mixprec.plan(from_dict({"recipe": table, "data": {"batch_size": 8}}), "h100")
    ).roofline
    assert line is not None
    # three products of the linear layer; two of attention, and five in the kernel's backward
    linear, attended = 3 * 8 * WIDTH * CLASSES, 7 * 8 * 28 * 28 * 28
    expected = 1 if attention else linear / (linear + attended)
    assert line.operations_share == pytest.approx(expected)


def test_rows_are_those_of_the_data_sets() -> None:
    assert set(ROWS) == set(DATASETS)
    for table in (
        {"model": "vit", "model_options": {"preset": "tiny"}},
        {"model": "gpt", "data": {"name": "text", "options": {"context": 32}}},
    ):
        made = from_dict(table)
        rows = dataset_of(made).train
        inputs, targets = _collated(rows, [0]) if isinstance(rows, Items) else rows.batch(slice(1))
        row = row_of(made)
        assert (row.inputs, row.dtype) == (tuple(inputs.shape[1:]), inputs.dtype)
        assert row.targets == tuple(targets.shape[1:])


def test_a_plan_is_plain_data_for_every_target() -> None:
    assert set(TARGETS) == {*map(str.lower, ACCELERATORS), "cpu"}
    made = mixprec.plan(config("bf16"), "L4", memory=10**9, gpus=2)
    assert (made.target, made.memory_bytes, made.gpus, made.batch) == ("l4", 10**9, 2, BATCH)
    assert json.loads(json.dumps(dataclasses.asdict(made)))["model"] == "mnist_cnn"
    assert any(note.startswith("sharded: ") for note in made.notes)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("80GB", 80 * 10**9),
        ("75.5 GiB", int(75.5 * 2**30)),
        ("1000", 1000),
        (7, 7),
        ("2tb", 2 * 10**12),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert size_of(text) == count


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "h99"}, r"target: got 'h99'; unknown"),
        ({"memory": "80 giga"}, r"memory: got '80 giga'; must be a number of bytes"),
        ({"memory": "0GB"}, r"memory: got '0GB'; must be"),
        ({"gpus": 0}, r"gpus: got 0; must be a whole number of at least 1; use 1"),
        ({"batch": 0}, r"data.batch_size: got 0"),
        ({"recipes": []}, r"recipes: got none"),
        ({"torch_version": "new"}, r"torch_version: got 'new'"),
    ],
)
def test_refusals(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixprec.plan(config("fp32"), **arguments)


class Reads(nn.Module):
    """A model that looks at its own numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.size = float(self.fc.weight.sum())


def test_a_model_that_meta_cannot_make_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ModelEntry(build=Reads, loss=F.cross_entropy)
    monkeypatch.setattr(models, "MODELS", {"mnist_cnn": entry})
    with pytest.raises(ValueError, match=r"model: got mnist_cnn, which cannot be made on .*meta"):
        mixprec.plan(config("fp32"))
