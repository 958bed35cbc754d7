"""Comparisons across bases: labels, what is kept between steps, scales and skipped steps."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from mixprec.measure import saved_bytes
from mixprec.train import compare
from mixprec.train.config import Config
from mixprec.train.trainer import Trainer
from train.small_models import SMALL_NET, SmallNet, use

Small = Callable[..., Config]
COMPENSATED = {"variant_of": "bf16_pure", "name": "kahan", "update": "compensated"}
PICKED: list[Any] = [
    "fp32",
    "bf16",
    {"variant_of": "fp8_rowwise", "base": "bf16"},
    {"variant_of": "fp8_delayed", "base": "fp16"},
    "fp8",
    "bf16_pure",
    COMPENSATED,
    "bf16-true",
    "O2",
    "fp64",
]
LABELS = [
    "fp32",
    "bf16",
    "fp8_rowwise on bf16",
    "fp8_delayed on fp16",
    "fp8_tensorwise on bf16",
    "bf16_pure",
    "kahan on bf16",
    "bf16-true",
    "O2",
    "fp64",
]
PARAMETERS = sum(parameter.numel() for parameter in SmallNet().parameters())
TENSORS, NORM = 8, 8


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def runs(small: Small) -> dict[str, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(monkeypatch, SMALL_NET)
        config = small("scaler.init_scale=1e6", "optimizer.name=adamw", "optimizer.lr=0.01")
        result = compare.run(config, recipes=PICKED, steps=10, console=quiet())
    assert [run["recipe"] for run in result["runs"]] == LABELS
    return {run["recipe"]: run for run in result["runs"]}


@pytest.mark.parametrize("label", LABELS)
def test_every_base_trains_from_the_same_weights_and_rows(
    runs: dict[str, dict[str, Any]], label: str
) -> None:
    run, first = runs[label], runs["fp32"]
    assert run["failure"] is None
    assert run["curve"]["loss"][0] == pytest.approx(first["curve"]["loss"][0], rel=0.02)
    assert 0 <= run["accuracy"] <= 1


@pytest.mark.parametrize(
    ("label", "parameters", "beside"),
    [
        ("fp32", 4 * PARAMETERS, 0),
        ("fp8_rowwise on bf16", 4 * PARAMETERS, 0),
        ("bf16_pure", 2 * PARAMETERS, 0),
        ("bf16-true", 2 * PARAMETERS, 0),
        ("kahan on bf16", 2 * PARAMETERS, 2 * PARAMETERS),
        # batch normalisation keeps single precision, and has no masters
        ("O2", 2 * PARAMETERS + 2 * NORM, 4 * (PARAMETERS - NORM)),
    ],
)
def test_masters_and_compensations_count_with_the_optimizer(
    runs: dict[str, dict[str, Any]], label: str, parameters: int, beside: int
) -> None:
    # two moments a parameter and a count a tensor, in float32 whatever the parameters' type
    state = 2 * 4 * PARAMETERS + 4 * TENSORS
    assert runs[label]["param_bytes"] == parameters
    assert runs[label]["optimizer_bytes"] == state + beside


@pytest.mark.parametrize("label", LABELS)
def test_scale_and_skipped_steps_are_those_of_the_run_alone(
    small: Small, runs: dict[str, dict[str, Any]], label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs[label]
    if label not in ("fp8_delayed on fp16", "O2"):
        assert (run["loss_scale"], run["skipped"]) == (None, 0)
        return
    use(monkeypatch, SMALL_NET)
    recipe = ["opt_level=O2"] if label == "O2" else ["recipe=fp8_delayed", "base=fp16"]
    settings = [*recipe, "scaler.init_scale=1e6", "optimizer.name=adamw", "optimizer.lr=0.01"]
    alone = Trainer(small(*settings))
    curve = [alone.step().loss for _ in range(10)]
    assert run["curve"]["loss"] == curve
    assert (run["loss_scale"], run["skipped"]) == (alone.scaler.get_scale(), alone.skipped)
    assert run["skipped"] > 0
    assert run["loss_scale"] == 1e6 / 2 ** run["skipped"]


def test_kept_activations_are_half_in_16_bits(small: Small) -> None:
    runs = compare.run(
        small("data.batch_size=56"), recipes=["fp32", "bf16"], steps=1, console=quiet()
    )["runs"]
    trainer = Trainer(small("data.batch_size=56", "recipe=bf16"))
    with saved_bytes(trainer.model.parameters()) as saved:
        trainer.loss_of(*trainer.batches(0)[0])
    assert runs[1]["saved_bytes"] == saved.activation_bytes
    # where the pool found its maxima, and the labels, are whole numbers of 64 bits in either
    indices = 8 * 56 * (64 * 12 * 12 + 1)
    single, narrow = (run["saved_bytes"] - indices for run in runs)
    assert 0.49 < narrow / single < 0.52


def test_one_recipe_on_two_bases_is_two_runs(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, SMALL_NET)
    on = {"variant_of": "fp8_rowwise", "base": "bf16"}
    result = compare.run(small(), recipes=["fp8_rowwise", on], steps=2, console=quiet())
    assert [run["recipe"] for run in result["runs"]] == ["fp8_rowwise", "fp8_rowwise on bf16"]
    first, second = (run["curve"]["loss"] for run in result["runs"])
    assert first != second
    with pytest.raises(ValueError, match="recipes: got fp8_rowwise on bf16 twice"):
        compare.run(small(), recipes=[on, dict(on)], steps=1, console=quiet())
