"""Planned bytes against those of real training steps, and against sums worked out by hand."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch

from mixprec import codes
from mixprec.bench.contender import Case, Contender, Settings
from mixprec.bench.presets import EAGER, workload_of
from mixprec.formats import get_format
from mixprec.planning import plan
from mixprec.planning.batches import META, row_of
from mixprec.planning.memory import Memory, _between
from mixprec.planning.records import MemoryPlan
from mixprec.planning.rehearsal import Step
from mixprec.planning.repeats import find_repeats
from mixprec.planning.stand_ins import stand_ins
from mixprec.recipes import get_recipe, with_base
from mixprec.train.config import Config, from_dict
from mixprec.train.config_fields import OptimizerConfig
from mixprec.train.models import build_model

# the presets' layers on fewer tokens: weights are quantised as ever, activations in less time
MODELS: dict[str, dict[str, Any]] = {
    "mnist_cnn": {},
    "vit": {"preset": "tiny", "size": 64},
    "gpt": {"preset": "tiny", "context": 64},
}


def config(model: str, recipe: str, batch: int, **rest: Any) -> Config:
    table = {"model": model, "recipe": recipe, "model_options": MODELS.get(model, {})}
    return from_dict(
        table | {"data": {"batch_size": batch}, "optimizer": {"name": "adam", "lr": 1e-3}} | rest
    )


def measured(
    model: str, recipe: str, base: str | None, batch: int, **options: Any
) -> dict[str, int | None]:
    """What the counters see of the second step of a real run."""
    resolved = get_recipe(recipe)
    resolved = resolved if base is None else with_base(resolved, base)
    contender = Contender(
        workload_of(model, MODELS[model] | options),
        Case(label=recipe, recipe=resolved, mode=EAGER, batch=batch),
        Settings(device=torch.device("cpu"), optimizer=OptimizerConfig(name="adam", lr=1e-3)),
    )
    contender.first_step()
    return contender.memory()


CASES = [
    ("mnist_cnn", "fp32", None, 16),
    ("mnist_cnn", "fp8_rowwise", "bf16", 16),
    ("mnist_cnn", "O2", None, 16),
    ("gpt", "fp8_tensorwise", None, 1),
    ("vit", "bf16", None, 1),
]
MORE = [
    (model, recipe, base, 2)
    for model in MODELS
    for recipe, base in (
        ("fp64", None),
        ("bf16_pure", None),
        ("fp8_tensorwise", "bf16"),
        ("fp8_delayed", None),
        ("fp8_blockwise", "bf16"),
        ("mxfp8", None),
        ("nvfp4", "bf16"),
    )
] + [
    ("mnist_cnn", recipe, base, 16)
    for recipe, base in (
        ("fp8_delayed", None),
        ("fp8_rowwise_hp_grad_weight", None),
        ("mxfp6_e3m2", "bf16"),
        ("mxfp4", "bf16"),
    )
]


@pytest.mark.parametrize(
    ("model", "recipe", "base", "batch"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_bytes_are_those_of_a_real_step(
    model: str, recipe: str, base: str | None, batch: int
) -> None:
    real = measured(model, recipe, base, batch)
    made = plan(config(model, recipe, batch, **({"base": base} if base else {})), "cpu")
    memory = made.recipes[0].memory
    assert memory.parameters == real["param_bytes"]
    assert memory.gradients == real["grad_bytes"]
    assert memory.optimizer + memory.masters == real["optimizer_bytes"]
    assert memory.activations == pytest.approx(real["saved_bytes"], rel=0.001)
    assert memory.peak == pytest.approx(real["peak_bytes"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp32"])
def test_large_activations_are_those_of_a_real_step(recipe: str) -> None:
    batch, options = 16, {"context": 256}
    real = measured("gpt", recipe, None, batch, **options)
    made = config("gpt", recipe, batch, model_options=MODELS["gpt"] | options)
    memory = memory_of(made, "cpu")
    assert real["peak_bytes"] is not None
    assert real["peak_bytes"] > 2**28
    assert memory.activations == pytest.approx(real["saved_bytes"], rel=0.001)
    assert memory.peak == pytest.approx(real["peak_bytes"], rel=0.01)


def test_a_plan_for_a_cpu_leaves_nothing_behind() -> None:
    """Neither of the generators, nor of tables that are kept: numbers decode as before."""
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(small_gpt("fp8_delayed", depth=1), "cpu")
    assert torch.equal(before, torch.get_rng_state())
    codes._pair_table.cache_clear()
    packed, fmt = torch.tensor([[0x21]], dtype=torch.uint8), get_format("e2m1")
    with stand_ins(torch.nn.Identity(), packed.device):
        codes.decode_pairs(torch.zeros_like(packed), fmt)
    assert codes.decode_pairs(packed, fmt).tolist() == [[0.5, 1.0]]


GPT = {"context": 16, "width": 32, "depth": 6, "heads": 4, "vocabulary": 256}
PLAIN = {"name": "sgd", "lr": 0.1}


def small_gpt(recipe: str = "fp32", batch: int = 2, **options: int) -> Config:
    chosen = {"model_options": GPT | options, "optimizer": PLAIN}
    return config("gpt", recipe, batch, **chosen)


def memory_of(made: Config, target: str = "h100", **rest: Any) -> MemoryPlan:
    return plan(made, target, **rest).recipes[0].memory


def memory(made: Config) -> Memory:
    """That of a high-precision configuration's step on one GPU."""
    with META:
        model, loss = build_model(made.model, made.model_options)
    recipe = get_recipe(str(made.recipe))
    step = Step(model=model, loss=loss, recipe=recipe, optimizer=made.optimizer, row=row_of(made))
    return Memory(step, find_repeats(model), 1)


def gpt_parameters(context: int, width: int, depth: int, heads: int, vocabulary: int) -> int:
    """Two norms, qkv, proj, fc1 and fc2 a block; embedding, positions, a norm and the head."""
    block = 4 * width + 12 * width**2 + 9 * width
    return depth * block + (2 * vocabulary + context + 2) * width + vocabulary


def test_bytes_of_parameters_follow_from_shapes() -> None:
    made = plan(small_gpt(), "h100")
    count = gpt_parameters(**GPT)
    memory = made.recipes[0].memory
    assert made.parameters == count
    assert (memory.parameters, memory.gradients) == (4 * count, 4 * count)
    assert (memory.masters, memory.optimizer) == (0, 0)


@pytest.mark.parametrize(
    ("recipe", "parameters", "gradients", "masters"),
    [
        ("fp64", 8, 8, 0),
        ("bf16", 4, 4, 0),
        ("bf16-true", 2, 4, 0),
        ("O2", 2, 4, 4),
        ("O3", 2, 4, 0),
    ],
)
def test_bytes_a_parameter_by_recipe(
    recipe: str, parameters: int, gradients: int, masters: int
) -> None:
    adam = {"name": "adam", "lr": 0.1}
    memory = memory_of(config("gpt", recipe, 2, model_options=GPT, optimizer=adam))
    count = gpt_parameters(**GPT)
    assert memory.parameters == parameters * count
    assert memory.gradients == gradients * count
    assert memory.masters == masters * count
    # two averages in the update's type, and a count of steps for each tensor
    assert 0 < memory.optimizer - 2 * (8 if recipe == "fp64" else 4) * count < 1000


@pytest.mark.parametrize("batch", [1, 3])
def test_activations_follow_from_shapes(batch: int) -> None:
    tokens, width, heads = batch * GPT["context"], GPT["width"], GPT["heads"]
    unit, statistics = 4 * tokens * width, 2 * 4 * tokens
    # norm1 and its output, q, k, v, attention and its sums, norm2 and its output, gelu, fc2
    block = (1 + 1 + 3 + 1 + 1 + 1 + 4 + 4) * unit + 2 * statistics + 4 * tokens * heads
    head = 2 * unit + statistics + 4 * tokens * GPT["vocabulary"]
    indices = 2 * 8 * tokens
    expected = GPT["depth"] * block + head + indices
    # a kernel's random state, and sums of a few numbers
    assert 0 <= memory_of(small_gpt(batch=batch)).activations - expected < 40 * GPT["depth"]


def test_codes_of_8_bits_take_a_quarter_of_what_products_keep() -> None:
    unit = 4 * 2 * GPT["context"] * GPT["width"]
    kept = memory_of(small_gpt("fp8_tensorwise")).activations
    saved = memory_of(small_gpt()).activations - kept
    # inputs of qkv, fc1 (1 unit each) and fc2 (4) and of the head shrink; proj keeps its codes
    # beside what attention keeps
    expected = GPT["depth"] * (0.75 * (1 + 1 + 4) - 0.25) * unit + 0.75 * unit
    layers = 4 * GPT["depth"] + 1
    assert 0 <= expected - saved < 64 * layers


@pytest.mark.slow
def test_repeated_blocks_that_are_left_out_change_no_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = small_gpt("fp8_rowwise", depth=4)
    short = plan(made, "h100")
    assert short.recipes[0].largest_batch > 0
    monkeypatch.setattr("mixprec.planning.planner.find_repeats", lambda model: [])
    assert plan(made, "h100") == short


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    made = memory(small_gpt())
    for limit in (3_000_000, 12_000_000):
        largest = made.largest_batch(limit, rows=2)
        assert largest > 2
        assert made.peak(largest) <= limit < made.peak(largest + 1)


@pytest.mark.parametrize("limit", [150, 420, 555, 1099])
def test_the_largest_batch_is_found_where_peaks_flatten(limit: int) -> None:
    def peaks(batch: int) -> dict[str, float]:
        return {"forward": 100.0 * batch if batch < 5 else 500.0 + batch - 5}

    largest = _between(1, 700, limit, peaks)
    assert peaks(largest)["forward"] <= limit < peaks(largest + 1)["forward"]


def test_where_no_row_fits_the_largest_batch_is_none() -> None:
    made = plan(small_gpt(), "a100", "500kB").recipes[0]
    assert (made.fits, made.largest_batch) == (False, 0)


def test_sharding_divides_all_but_activations() -> None:
    adam = {"optimizer": {"name": "adam", "lr": 0.1}}
    made = config("gpt", "O2", 2, model_options=GPT, **adam)
    one, eight = memory_of(made), memory_of(made, gpus=8)
    for name in ("parameters", "gradients", "masters", "optimizer"):
        assert getattr(eight, name) == -(-getattr(one, name) // 8)
    assert eight.activations == one.activations
    shares = eight.parameters + eight.masters + eight.optimizer
    block = 2 * (12 * GPT["width"] ** 2 + 13 * GPT["width"])
    gathered = one.parameters - (GPT["depth"] - 2) * block
    assert shares + gathered + eight.activations <= eight.peak < one.peak


def test_the_update_on_a_gpu_has_temporaries_for_all_parameters_at_once() -> None:
    adam = {"optimizer": {"name": "adam", "lr": 0.1}}
    made = config("gpt", "fp32", 1, model_options=GPT | {"width": 256, "context": 4}, **adam)
    each, together = memory_of(made, "cpu"), memory_of(made)
    # parameters, gradients, two averages; with so few tokens the update needs the most
    state = each.parameters + each.gradients + each.optimizer
    assert each.peak < state + each.parameters / 2
    assert state + each.parameters <= together.peak < state + 2.1 * each.parameters
    one_by_one = config(
        "gpt",
        "fp32",
        1,
        model_options=GPT | {"width": 256, "context": 4},
        optimizer={"name": "adam", "lr": 0.1, "options": {"foreach": False}},
    )
    assert memory_of(one_by_one).peak == each.peak


def test_accumulation_has_gradients_throughout_forward() -> None:
    once, twice = (
        memory_of(config("gpt", "fp32", 64, model_options=GPT, optimizer=PLAIN, train=train))
        for train in ({"accumulate": 1}, {"accumulate": 4})
    )
    # activations of so many rows outweigh all else, so that the peak is where backward starts
    assert twice.peak - once.peak == once.gradients


@pytest.mark.slow
def test_the_garbage_collector_changes_no_figure() -> None:
    made, before = [], gc.get_threshold()
    for threshold in (1_000_000, 50):
        gc.collect()
        gc.set_threshold(threshold)
        try:
            train = {"accumulate": 2}
            made.append(memory_of(config("gpt", "mxfp8", 64, model_options=GPT, train=train)))
        finally:
            gc.set_threshold(*before)
    assert made[0] == made[1]


@pytest.mark.slow
def test_a_transformer_of_405_billion_parameters() -> None:
    sizes = {"context": 8192, "width": 16384, "depth": 126, "heads": 128, "vocabulary": 256}
    made = plan(
        config("gpt", "fp8_tensorwise", 1, model_options=sizes, base="bf16"), "h100", gpus=2048
    )
    assert made.parameters == gpt_parameters(**sizes) == 406_043_885_824
    (entry,) = made.recipes
    assert entry.memory.parameters == -(-4 * made.parameters // 2048)
    assert sum(layer.status == "native" for layer in entry.layers) == 4 * 126 + 1
