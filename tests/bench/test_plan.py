"""What a run consists of, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.tiny import PARAMETERS, TINY
from mixprec.bench import plan as planning
from mixprec.bench.plan import Plan, all_cases, device_of, fits_in_turns, plan_of, too_large
from mixprec.bench.presets import PRESETS, workload_of
from mixprec.recipes import RECIPES

CPU = torch.device("cpu")


def plan(preset: str = "vit-tiny", **arguments: Any) -> Plan:
    usual: dict[str, Any] = dict.fromkeys(
        ("workload", "recipes", "base", "modes", "batches", "steps", "warmup", "memory_limit")
    )
    return plan_of(preset, **(usual | {"peers": (), "device": CPU, "impl": "auto", "seed": 0}
                              | arguments))  # fmt: skip


def test_the_published_experiment() -> None:
    found = plan("vit-huge", device=torch.device("cuda"))
    preset = found.preset
    assert (preset.steps, preset.warmup, preset.batches) == (50, 11, (16, 32))
    assert (preset.optimizer.name, preset.modes) == ("adam", ("eager", "compiled"))
    assert found.parameters == 632_304_384
    assert list(found.recipes) == ["bf16", "fp8_delayed", "fp8_tensorwise"]
    assert {recipe.base for recipe in found.recipes.values()} == {"bf16"}
    assert {recipe.parameters for recipe in found.recipes.values()} == {"fp32"}
    assert found.settings.limit is None
    assert len(list(all_cases(found))) == 3 * 2 * 2


@pytest.mark.parametrize("name", PRESETS)
def test_batches_of_every_preset_have_the_shape_the_model_takes(name: str) -> None:
    preset = PRESETS[name]
    workload = workload_of(preset.model, preset.options)
    inputs, targets = workload.batch(3, torch.Generator().manual_seed(1))
    with torch.device("meta"):
        model = workload.build()
    loss = workload.loss(model(inputs.to("meta")), targets.to("meta"))
    assert loss.shape == ()
    assert len(inputs) == len(targets) == 3
    assert targets.numel() == 3 * workload.units_per_row


def test_text_targets_are_the_next_bytes() -> None:
    workload = workload_of("gpt", {"preset": "tiny"})
    inputs, targets = workload.batch(2, torch.Generator().manual_seed(1))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(inputs[0].tolist()).isascii()


def test_peers_are_rows_of_every_mode_and_batch() -> None:
    found = plan(recipes=["bf16"], peers=("torchao",), batches=[2, 4])
    labels = ["bf16", "torchao tensorwise", "torchao rowwise"]
    assert [(case.label, case.batch) for case in all_cases(found)] == [
        (label, batch) for batch in (2, 4) for label in labels
    ]
    around = [case.recipe for case in all_cases(found)][1]
    assert (around.base, around.parameters, around.is_high_precision) == ("bf16", "fp32", True)


def test_weights_that_cannot_fit_are_known_before_the_model_is_made() -> None:
    least = 8 * PARAMETERS
    assert too_large(plan(workload=TINY, memory_limit=least)) is None
    reason = too_large(plan(workload=TINY, memory_limit=least - 1))
    assert reason is not None
    assert reason.startswith(f"out of memory: {PARAMETERS:,} weights and their gradients are")


def test_turns_are_taken_where_all_fit_into_half_of_the_memory() -> None:
    all_of_them = 2 * 3 * 16 * PARAMETERS
    for limit, expected in ((all_of_them, True), (all_of_them - 2, False)):
        found = plan(workload=TINY, recipes=["fp32", "bf16", "mxfp8"], memory_limit=limit)
        assert fits_in_turns(found, list(all_cases(found))) is expected


def test_labels_name_the_base_only_where_it_is_not_that_of_all() -> None:
    custom = RECIPES["mxfp8"].from_dict({"variant_of": "mxfp8", "base": "bf16"})
    assert list(plan(recipes=["fp32", custom]).recipes) == ["fp32", "mxfp8 on bf16"]
    assert list(plan(recipes=["fp32", custom], base="bf16").recipes) == ["fp32", "mxfp8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": "largest"}, "batches: got 'largest'; must be whole numbers, or auto"),
        ({"batches": [0]}, "batches: got 0; a batch has at least one row"),
        ({"batches": []}, r"batches: got \[\]; must be one or more"),
        ({"batches": [2, 2]}, r"batches: got \[2, 2\]; must be one or more, each once"),
        ({"modes": ["jit"]}, "modes: got 'jit'; must be one of eager, compiled"),
        ({"warmup": 1}, "warmup: got 1; the first step compiles"),
        ({"steps": 2}, "steps: got 2, of which 2 are the warm-up"),
        ({"recipes": []}, "recipes: got none"),
        ({"recipes": ["fp32", "float32"]}, "recipes: got fp32 twice"),
        ({"recipes": ["fp9"]}, "recipe: got 'fp9'; unknown"),
        ({"peers": ("apex",)}, "peers: got 'apex'; must be one of torchao"),
        ({"impl": "fast"}, "impl: got 'fast'; must be one of auto"),
        ({"memory_limit": 0}, "memory_limit: got 0"),
        ({"preset": "vit-giant"}, "preset: got 'vit-giant'; unknown"),
    ],
)
def test_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(**arguments)


def test_devices() -> None:
    assert device_of("cpu") == (CPU, None)
    with pytest.raises(ValueError, match="device: got 'tpu'; must be one of auto, cpu"):
        device_of("tpu")
    device, reason = device_of("cuda:99")
    assert device == CPU
    assert reason is not None
    assert reason.startswith("no device: train.device: got 'cuda:99'; this machine")
    with pytest.raises(ValueError, match="no device"):
        planning.required_device("cuda:99")


def test_memory_is_a_share_of_what_is_there() -> None:
    assert 2**20 < planning.available_memory() < 2**50
    assert plan(memory_limit=12345).settings.limit == 12345
