"""Comparisons: every run is the run it would be alone, and the table says what happened."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from mixprec.measure import saved_bytes, sqnr_db
from mixprec.nn import QuantizedLinear
from mixprec.quantization import quantize
from mixprec.recipes import RECIPES, Recipe
from mixprec.train import compare
from mixprec.train.compared import DEFAULT_RECIPES, chosen_recipes, configuration
from mixprec.train.config import Config
from mixprec.train.faults import NonFiniteError
from mixprec.train.trainer import Trainer

Small = Callable[..., Config]
E4M2 = {"format": {"exponent": 4, "mantissa": 2}}
# How many points of accuracy a recipe may differ from fp32 in the demo.
POINTS = {
    **dict.fromkeys(("bf16", "fp16"), 0.5),
    **dict.fromkeys(("bf16_pure", *DEFAULT_RECIPES[3:]), 1.0),
    **dict.fromkeys(("fp8_blockwise", "mxfp8", "mxfp6_e3m2", "mxfp6_e2m3"), 1.0),
    **dict.fromkeys(("mxfp4", "nvfp4"), 2.0),
}
FURTHER = [recipe for recipe in POINTS if recipe not in DEFAULT_RECIPES]
PICKED = ("fp32", "fp8_delayed", "fp8_rowwise_hp_grad_weight")


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def result(small: Small, out: Path) -> dict[str, Any]:
    return compare.run(small(), recipes=PICKED, steps=12, seeds=2, out=out, console=quiet())


def test_a_run_is_the_one_that_the_recipe_has_alone(small: Small, result: dict[str, Any]) -> None:
    for place, recipe in enumerate(PICKED):
        alone = Trainer(small(f"recipe={recipe}", "train.steps=12"))
        curve = [alone.step().loss for _ in range(12)]
        record = result["by_seed"][0][place]
        assert record["curve"] == curve
        assert record["accuracy"] == alone.evaluate().accuracy
        assert record["loss"] == alone.evaluate().loss


def test_all_runs_start_from_the_same_weights_rows_and_masks(result: dict[str, Any]) -> None:
    for records in result["by_seed"]:
        first = [record["curve"][0] for record in records]
        assert max(first) - min(first) < 0.05
        assert len({tuple(record["curve"]) for record in records}) == len(PICKED)


def test_order_of_the_recipes_changes_no_number(small: Small) -> None:
    there, back = (
        compare.run(small(), recipes=order, steps=4, console=quiet())["runs"]
        for order in (PICKED, PICKED[::-1])
    )
    for a, b in zip(there, back[::-1], strict=True):
        assert (a["recipe"], a["curve"], a["loss"]) == (b["recipe"], b["curve"], b["loss"])


def test_entries(result: dict[str, Any]) -> None:
    assert [run["recipe"] for run in result["runs"]] == list(PICKED)
    assert result["seeds"] == [1, 2]
    for run in result["runs"]:
        assert 0 <= run["accuracy"] <= 1
        assert run["step_ms"] > 0
        assert run["failure"] is None
        assert run["param_bytes"] == 4 * 1_199_882
        # Adadelta keeps two moments a parameter and one step count a tensor.
        assert run["optimizer_bytes"] == 2 * 4 * 1_199_882 + 8 * 4
        assert run["grad_bytes"] == run["param_bytes"]
        # at the end of backward weights, state and gradients are alive, not the 56 rows of data
        assert run["peak_bytes"] > run["optimizer_bytes"] + 2 * run["param_bytes"]
        assert run["curve"]["step"] == list(range(1, 13))
    assert result["runs"][0]["impl"] == "native"
    assert result["runs"][0]["step_ratio"] == 1.0
    assert result["runs"][0]["accuracy_difference"] == 0.0


@pytest.mark.parametrize("key", ["train_loss", "loss", "accuracy", "accuracy_difference"])
def test_numbers_over_seeds(result: dict[str, Any], key: str) -> None:
    for place, run in enumerate(result["runs"]):
        values = [records[place][key] for records in result["by_seed"]]
        assert run[key] == pytest.approx(statistics.fmean(values))
        assert run["spread"][key] == pytest.approx(statistics.stdev(values))


def test_training_loss_is_the_mean_of_the_last_tenth(small: Small) -> None:
    config = small("train.epochs=3")
    (run,) = compare.run(config, recipes=["fp32"], console=quiet())["runs"]
    assert len(run["curve"]["loss"]) == 21
    assert run["train_loss"] == pytest.approx(sum(run["curve"]["loss"][-2:]) / 2)
    assert run["spread"] == dict.fromkeys(run["spread"])


def test_step_times_are_medians_within_a_step(result: dict[str, Any]) -> None:
    for place, run in enumerate(result["runs"]):
        mine, first = (
            [ms for records in result["by_seed"] for ms in records[which]["step_ms"]]
            for which in (place, 0)
        )
        assert len(mine) == 2 * 11
        assert run["step_ms"] == statistics.median(mine)
        assert run["step_ratio"] == statistics.median(
            a / b for a, b in zip(mine, first, strict=True)
        )


def test_sqnr_is_that_of_the_operands_in_the_layers(small: Small) -> None:
    config = small("train.steps=3")
    (run,) = compare.run(config, recipes=["fp8_rowwise_hp_grad_weight"], console=quiet())["runs"]
    trainer = Trainer(small("recipe=fp8_rowwise_hp_grad_weight", "train.steps=3"))
    for _ in range(3):
        trainer.step()
    layers = [m for m in trainer.model.modules() if isinstance(m, QuantizedLinear)]
    assert len(layers) == 2
    recipe = RECIPES["fp8_rowwise_hp_grad_weight"]
    expected = []
    for weight in (layer.weight.detach() for layer in layers):
        for spec, w in ((recipe.output.b, weight), (recipe.grad_input.b, weight.t())):
            assert spec is not None
            expected.append(sqnr_db(w, quantize(w.contiguous(), spec).dequantize()))
    assert run["sqnr"]["w"] == pytest.approx(statistics.fmean(expected))


def test_sqnr_follows_the_mantissa(small: Small) -> None:
    changed = {
        "variant_of": "fp8_rowwise",
        "name": "e4m2",
        "output": {"a": E4M2, "b": E4M2},
        "grad_input": {"a": E4M2, "b": E4M2},
        "grad_weight": {"a": E4M2, "b": E4M2},
    }
    recipes = ["fp32", "fp8_rowwise", changed]
    runs = compare.run(small(), recipes=recipes, steps=2, console=quiet())["runs"]
    assert [run["recipe"] for run in runs] == ["fp32", "fp8_rowwise", "e4m2"]
    assert runs[0]["sqnr"] == {"x": None, "w": None, "g": None}
    for kind in "xwg":
        # One bit of mantissa is a factor 2 in error, 6.02 dB.
        assert runs[1]["sqnr"][kind] - runs[2]["sqnr"][kind] == pytest.approx(6.02, abs=1.5)


def test_saved_bytes_are_those_of_a_training_batch(small: Small) -> None:
    recipes = ("fp32", "fp8_tensorwise")
    config = small("data.batch_size=56")
    runs = compare.run(config, recipes=recipes, steps=1, console=quiet())["runs"]
    for recipe, run in zip(recipes, runs, strict=True):
        trainer = Trainer(small("data.batch_size=56", f"recipe={recipe}"))
        with saved_bytes(trainer.model.parameters()) as saved:
            trainer.loss_of(*trainer.batches(0)[0])
        assert run["saved_bytes"] == saved.activation_bytes
        assert run["peak_bytes"] > run["param_bytes"] + run["optimizer_bytes"] + run["saved_bytes"]
    assert runs[1]["saved_bytes"] < runs[0]["saved_bytes"]


def test_files(result: dict[str, Any], out: Path) -> None:
    assert json.loads((out / "result.json").read_text()) == result
    with (out / "losses.csv").open() as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["seed", "step", *PICKED]
    assert [row[:2] for row in rows[1:]] == [[s, str(i)] for s in "12" for i in range(1, 13)]
    assert [float(row[2]) for row in rows[1:13]] == result["by_seed"][0][0]["curve"]
    assert [float(row[4]) for row in rows[13:]] == result["by_seed"][1][2]["curve"]


def test_a_run_that_fails_says_so_and_the_others_go_on(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Trainer.step

    def poisoned(trainer: Trainer) -> Any:
        if trainer.config.recipe == "fp8_rowwise" and trainer.done == 2:
            with torch.no_grad():
                trainer.model.fc1.bias.fill_(math.inf)
        return step(trainer)

    monkeypatch.setattr(Trainer, "step", poisoned)
    recipes = ["fp32", "fp8_rowwise"]
    result = compare.run(small(), recipes=recipes, steps=4, out=tmp_path, console=quiet())
    good, bad = result["runs"]
    assert "step 3: the loss is not finite" in bad["failure"]
    assert "fc1.bias" in bad["failure"]
    for key in ("loss", "accuracy", "train_loss", "step_ms", "step_ratio", "saved_bytes"):
        assert bad[key] is None
    assert len(bad["curve"]["loss"]) == 2
    assert good["failure"] is None
    assert len(good["curve"]["loss"]) == 4
    assert (tmp_path / "losses.csv").read_text().splitlines()[-1].endswith(",")


def test_emulation_is_told_apart_from_hardware_speed(small: Small) -> None:
    config = small("convert.impl=emulated")
    emulated = compare.run(config, recipes=["fp32", "fp8_rowwise"], steps=2, console=quiet())
    assert emulated["notes"] == ["emulated: timing is not hardware speed"]
    assert emulated["runs"][1]["impl"] == "emulated"
    native = compare.run(config, recipes=["fp32"], steps=1, console=quiet())
    assert native["notes"] == []


@pytest.mark.parametrize(
    ("impls", "device", "capability", "expected"),
    [
        ("native scaled_mm", "cuda", (9, 0), ["FP8 sums in about 13 fraction bits, collected in"]),
        ("native scaled_mm", "cuda", (10, 0), []),
        ("scaled_mm/emulated", "cuda", (9, 0), [compare.EMULATED_NOTE, "FP8 sums in about 13"]),
        ("emulated", "cuda", (9, 0), [compare.EMULATED_NOTE]),
        ("scaled_mm", "cpu", (9, 0), []),
    ],
)
def test_notes_say_where_sums_take_fewer_bits(
    impls: str,
    device: str,
    capability: tuple[int, int],
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    notes = compare._notes(impls, torch.device(device))
    assert len(notes) == len(expected)
    assert all(map(str.startswith, notes, expected))


def test_default_recipes_and_that_of_the_configuration(small: Small) -> None:
    result = compare.run(small("recipe=tf32"), steps=1, console=quiet())
    assert [run["recipe"] for run in result["runs"]] == [*DEFAULT_RECIPES, "tf32"]


def test_without_a_configuration_it_is_three_epochs_of_mnist() -> None:
    config = configuration(None, None, None, None)
    assert (config.model, config.data.name, config.data.path) == ("mnist_cnn", "mnist", None)
    assert (config.train.epochs, config.train.seed, config.data.batch_size) == (3, 1, 64)


def test_recipes_are_accepted_by_value_and_alias(small: Small) -> None:
    mine = Recipe(name="mine", output=RECIPES["fp8_rowwise"].output)
    runs = compare.run(small(), recipes=["float32", mine], steps=1, console=quiet())["runs"]
    assert [run["recipe"] for run in runs] == ["fp32", "mine"]
    assert runs[1]["sqnr"]["g"] is None
    assert runs[1]["sqnr"]["x"] > 20


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"recipes": []}, "recipes: got none"),
        ({"recipes": ["fp32", "float32"]}, "recipes: got fp32 twice"),
        ({"recipes": ["fp9"]}, "recipe: got 'fp9'; unknown"),
        ({"seeds": 0}, "seeds: got 0"),
        ({"steps": 0}, r"train\.steps: got 0"),
        ({"device": "tpu"}, r"train\.device: got 'tpu'"),
    ],
)
def test_wrong_arguments(small: Small, arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        compare.run(small(), console=quiet(), **arguments)


def test_generators_of_the_caller_are_left_alone(small: Small) -> None:
    before = torch.get_rng_state()
    compare.run(small(), recipes=["fp32"], steps=1, console=quiet())
    assert torch.equal(before, torch.get_rng_state())


def test_a_run_without_quantised_layers_has_no_sqnr(small: Small) -> None:
    config = small('convert.skip=["conv*", "fc*"]')
    with pytest.warns(UserWarning, match="nothing was converted"):
        (run,) = compare.run(config, recipes=["fp8_rowwise"], steps=1, console=quiet())["runs"]
    assert run["impl"] == "native"
    assert run["sqnr"] == {"x": None, "w": None, "g": None}
    assert issubclass(QuantizedLinear, nn.Linear)


@pytest.fixture(scope="module")
def demo() -> list[dict[str, Any]]:
    """What `mixprec compare` shows without a configuration, and a recipe that must fail."""
    torch.set_num_threads(1)
    two_bits = {side: {"format": {"exponent": 1, "mantissa": 0}} for side in "ab"}
    products = dict.fromkeys(("output", "grad_input", "grad_weight"), two_bits)
    failing = {"variant_of": "fp8_tensorwise", "name": "two_bits", **products}
    recipes = [*DEFAULT_RECIPES, *FURTHER, failing]
    result = compare.run(recipes=recipes, console=quiet())
    return list(result["runs"])


@pytest.mark.slow
@pytest.mark.long
def test_the_demo_trains_under_every_recipe(demo: list[dict[str, Any]]) -> None:
    assert demo[0]["accuracy"] > 0.94
    assert {run["recipe"]: run["failure"] for run in demo[:-1] if run["failure"]} == {}
    assert max(run["train_loss"] for run in demo[:-1]) < 0.3


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("recipe", "points"), POINTS.items())
def test_the_demo_keeps_each_recipe_close_to_fp32(
    demo: list[dict[str, Any]], recipe: str, points: float
) -> None:
    (run,) = (run for run in demo if run["recipe"] == recipe)
    assert abs(100 * run["accuracy_difference"]) <= points
    assert run["skipped"] <= 2


@pytest.mark.slow
@pytest.mark.long
def test_a_recipe_of_two_bits_misses_that_bar(demo: list[dict[str, Any]]) -> None:
    assert demo[-1]["recipe"] == "two_bits"
    assert demo[-1]["failure"] is not None or demo[-1]["accuracy_difference"] < -0.01


def refuse_to_train(trainer: Trainer) -> Any:
    raise AssertionError("a step was taken")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("", "out: got ''; a folder has a name"),
        ("file", "out: got '.*file'; it is a file; name a folder"),
        ("file/below", "out: got '.*below'; it cannot be written .*; name a folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_training(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, match: str
) -> None:
    (tmp_path / "file").write_text("kept")
    monkeypatch.setattr(Trainer, "step", refuse_to_train)
    out = str(tmp_path / name) if name else ""
    with pytest.raises(ValueError, match=match):
        compare.run(small(), recipes=["fp32"], steps=1, out=out, console=quiet())
    assert (tmp_path / "file").read_text() == "kept"


OWN = 'recipe={name = "mine", variant_of = "fp8_rowwise", output.a.format = "e5m2"}'


def test_the_configuration_s_own_recipe_is_named_by_its_label(small: Small) -> None:
    config = small(OWN)
    result = compare.run(config, recipes=["fp32", "mine"], steps=1, console=quiet())
    assert [run["recipe"] for run in result["runs"]] == ["fp32", "mine"]
    (alone,) = compare.run(config, recipes="mine", steps=1, console=quiet())["runs"]
    assert alone["curve"] == result["runs"][1]["curve"]
    assert chosen_recipes(config, None)["mine"] == config.recipe


def test_one_recipe_needs_no_list(small: Small) -> None:
    for one in ("fp32", RECIPES["fp32"], {"variant_of": "fp32"}):
        (run,) = compare.run(small(), recipes=one, steps=1, console=quiet())["runs"]
        assert run["recipe"] == "fp32"


def test_what_is_neither_a_configuration_nor_recipes_is_a_type_error(small: Small) -> None:
    with pytest.raises(TypeError, match="config: got 3; it is a Config or the path"):
        compare.run(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="recipes: got 3; a recipe is a name"):
        compare.run(small(), recipes=3)  # type: ignore[arg-type]


def test_steps_are_those_asked_for_where_every_run_fails(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(trainer: Trainer) -> Any:
        raise NonFiniteError(1, "the loss", "the loss itself")

    monkeypatch.setattr(Trainer, "step", failing)
    result = compare.run(small(), recipes=["fp32", "tf32"], steps=5, console=quiet())
    assert result["steps"] == 5
    assert all(run["failure"] for run in result["runs"])
