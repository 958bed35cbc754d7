"""Training in 16 bits: resuming exactly, learning under every recipe, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mixprec.measure import saved_bytes
from mixprec.optim import MixedPrecision
from mixprec.recipes import NARROW, OPT_LEVELS, RECIPES
from mixprec.train import checkpoint
from mixprec.train.config import Config
from mixprec.train.trainer import Trainer
from train.small_models import SLOPE, SMALL_NET, slope_data, use

Small = Callable[..., Config]
OVERFLOWS = ["scaler.init_scale=1e6", "scaler.growth_interval=2"]
COMPENSATED = 'recipe={variant_of = "bf16_pure", update = "compensated"}'
RESUMED = {
    "fp16": ["recipe=fp16", *OVERFLOWS],
    "fp16_pure": ["recipe=fp16_pure", *OVERFLOWS],
    "O2": ["opt_level=O2", *OVERFLOWS],
    "bf16_pure": ["recipe=bf16_pure"],
    "compensated": [COMPENSATED],
    "fp64_emulated": ["recipe=fp64_emulated"],
    "fp8_delayed on bf16": ["recipe=fp8_delayed", "base=bf16"],
    "fp8_delayed on fp16": ["recipe=fp8_delayed", "base=fp16", *OVERFLOWS],
}
STEPS = 12


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a tree with its path; a tensor by its type and bits."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from leaves(entry, f"{path}/{key}")
    elif isinstance(value, list | tuple):
        for place, entry in enumerate(value):
            yield from leaves(entry, f"{path}/{place}")
    elif isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1)
        yield path, (value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes())
    else:
        yield path, value


@pytest.fixture(params=RESUMED)
def settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    use(monkeypatch, SMALL_NET)
    shared = ["train.clip_norm=5.0", "optimizer.lr=0.01"]
    return [*shared, "optimizer.name=adamw", *RESUMED[request.param]]


def test_a_run_resumed_after_any_step_equals_the_uninterrupted_one(
    small: Small, tmp_path: Path, settings: list[str]
) -> None:
    config = small(*settings)
    straight = Trainer(config)
    records, paths = [], []
    for step in range(STEPS):
        paths.append(checkpoint.save(tmp_path, step, straight.state(), keep=STEPS))
        records.append(straight.step())
    expected, score = dict(leaves(straight.state())), straight.evaluate()
    if straight.scaler.is_enabled():
        scales = [record.loss_scale for record in records]
        assert 0 < records[-1].skipped < STEPS - 5
        assert any(a < b for a, b in pairwise(scales))
    for done, path in enumerate(paths):
        torch.manual_seed(99)
        resumed = Trainer(config)
        resumed.load_state(checkpoint.load(path))
        # as text, since the norm of gradients that overflowed is no number and equals nothing
        assert repr([resumed.step() for _ in range(done, STEPS)]) == repr(records[done:])
        found = dict(leaves(resumed.state()))
        assert found.keys() == expected.keys()
        assert [key for key in found if found[key] != expected[key]] == []
        assert resumed.evaluate() == score


def test_a_checkpoint_holds_what_the_recipe_keeps_beside_the_parameters(
    small: Small, settings: list[str]
) -> None:
    trainer = Trainer(small(*settings))
    for _ in range(12):
        trainer.step()
    state, recipe = trainer.state(), trainer.recipe
    own = state["optimizer"].get("mixed_precision")
    assert (own is not None) == (recipe.parameters in NARROW)
    if own is not None:
        kept = {"masters": torch.float32, "compensated": torch.bfloat16, "stochastic": None}
        types = {None if each is None else each.dtype for each in own["kept"].values()}
        assert types == {kept[recipe.update]}
        assert own["steps"] == trainer.done - trainer.skipped
        assert trainer.model.fc1.weight.dtype == getattr(torch, kept_in(recipe.parameters))
    if trainer.scaler.is_enabled():
        keys = {"scale", "_growth_tracker", "_hysteresis_tracker", "skipped"}
        assert keys <= state["scaler"].keys()
        assert state["scaler"]["skipped"] == trainer.skipped > 0
    else:
        assert state["scaler"] == {}


def kept_in(parameters: str) -> str:
    return {"bf16": "bfloat16", "fp16": "float16"}[parameters]


def test_batch_norms_stay_in_single_precision_where_the_level_says_so(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, SMALL_NET)
    types = {}
    for level in OPT_LEVELS:
        model = Trainer(small(f"opt_level={level}")).model
        types[level] = (model.conv.weight.dtype, model.norm.weight.dtype)
    half, single = torch.float16, torch.float32
    assert types == {
        "O0": (single, single),
        "O1": (single, single),
        "O2": (half, single),
        "O3": (half, half),
    }


LEARNING = {
    **{name: [f"recipe={name}"] for name in RECIPES},
    **{f"level {name}": [f"opt_level={name}"] for name in OPT_LEVELS},
    "fp8_rowwise on bf16": ["recipe=fp8_rowwise", "base=bf16"],
    "fp8_rowwise on fp16": ["recipe=fp8_rowwise", "base=fp16"],
    "compensated": [COMPENSATED],
    "16-true": ["recipe=16-true"],
    "bf16-true": ["recipe=bf16-true"],
}


@pytest.mark.parametrize("settings", LEARNING.values(), ids=LEARNING)
def test_twenty_steps_lower_the_loss(
    small: Small, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    use(monkeypatch, SMALL_NET)
    trainer = Trainer(small(*settings, "optimizer.lr=0.5", "optimizer.gamma=1.0"))
    losses = [trainer.step().loss for _ in range(20)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert trainer.evaluate().accuracy > 0.8
    assert trainer.skipped == 0


@pytest.mark.parametrize("settings", LEARNING.values(), ids=LEARNING)
def test_micro_batches_add_up_to_one_batch_in_32_bits(
    small: Small, monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    use(monkeypatch, SLOPE)
    sgd = ["optimizer.name=sgd", "optimizer.lr=1.0", "scaler.init_scale=1024"]
    parts = ["data.batch_size=2", "train.accumulate=4"]
    trainer = Trainer(small(*settings, *sgd, *parts), slope_data())
    with torch.no_grad():
        trainer.model.fc.weight.zero_()
    assert trainer.step().skipped == 0
    weight = trainer.model.fc.weight
    assert weight.grad.element_size() >= 4
    expected = torch.full((1, 16), 0.5)
    torch.testing.assert_close(weight.grad.float(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(-weight.float(), expected, rtol=1e-5, atol=0)


def kept_for_backward(trainer: Trainer) -> int:
    with saved_bytes(trainer.model.parameters()) as saved:
        trainer.loss_of(*trainer.batches(0)[0])
    return saved.activation_bytes


@pytest.mark.parametrize("recipe", ["bf16", "fp16"])
def test_activations_take_half_the_memory(small: Small, recipe: str) -> None:
    single, narrow = (
        kept_for_backward(Trainer(small("data.batch_size=56", f"recipe={name}")))
        for name in ("fp32", recipe)
    )
    # where the pool found its maxima, and the labels, are whole numbers of 64 bits in either
    indices = 8 * 56 * (64 * 12 * 12 + 1)
    assert 0.49 < (narrow - indices) / (single - indices) < 0.52


@pytest.mark.parametrize(
    ("recipe", "each"),
    [("bf16", 4), ("bf16_pure", 2), ("fp16_pure", 2), ("fp64", 8), ("fp64_emulated", 8)],
)
def test_parameters_are_held_in_the_recipe_s_type(small: Small, recipe: str, each: int) -> None:
    model = Trainer(small(f"recipe={recipe}")).model
    assert {parameter.element_size() for parameter in model.parameters()} == {each}


def test_exact_sums_train_as_native_double_precision_does(small: Small) -> None:
    skip = 'convert.skip=["conv*"]'
    native, exact = (Trainer(small(f"recipe={name}", skip)) for name in ("fp64", "fp64_emulated"))
    losses = [(native.step().loss, exact.step().loss) for _ in range(5)]
    assert all(abs(x - y) <= 1e-13 * x for x, y in losses)
    assert (native.impl, exact.impl) == ("native", "exact")
    assert {row.bits for row in exact.report.converted} == {"64"}
    assert native.evaluate().accuracy == exact.evaluate().accuracy


def test_masters_are_the_values_before_they_were_narrowed(small: Small) -> None:
    exact, narrow = Trainer(small()), Trainer(small("opt_level=O2"))
    assert isinstance(narrow.optimizer, MixedPrecision)
    originals = list(exact.model.parameters())
    masters = narrow.optimizer.masters()
    for master, original, held in zip(masters, originals, narrow.model.parameters(), strict=True):
        assert torch.equal(master, original)
        assert torch.equal(held, original.half())
    assert any(
        not torch.equal(held.float(), original)
        for held, original in zip(narrow.model.parameters(), originals, strict=True)
    )


def test_a_converted_layer_of_a_base_equals_it_on_16_bit_tensors_alone(small: Small) -> None:
    trainer = Trainer(small("recipe=fp8_rowwise", "base=bf16"))
    layer, seen = trainer.model.fc2, []
    handle = layer.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    trainer.loss_of(*trainer.batches(0)[0])
    handle.remove()
    ((x, output),) = seen
    assert x.dtype == output.dtype == torch.bfloat16
    assert torch.equal(layer(x.detach()), output)
