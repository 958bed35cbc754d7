"""watch.py: training is the same to the bit, and what is counted is what was quantised."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from live_tensors import live_tensors, new_tensors
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.hadamard import hadamard
from mixprec.inspection.statistics import ProductStatistics, StepStatistics
from mixprec.linear_products import state_position
from mixprec.nn import QuantizedLayer, QuantizedLinear
from mixprec.noise import Noise
from mixprec.recipes import OPERANDS, PRODUCTS, RECIPES

from .watched import QUANTISING, Run, images, operands, run_of, small_model, small_run


@pytest.mark.parametrize("recipe", [*QUANTISING, "fp64_emulated"])
def test_watching_changes_no_bit_of_a_training(recipe: str) -> None:
    plain, watched = [], []
    for every, states in ((None, plain), (2, watched)):
        run = small_run(recipe)
        watcher = None if every is None else run.watch(every)
        for step in range(4):
            states.append([run.step(images(step), images(step + 9)), *run.state()])
    assert watcher is not None
    assert [record.step for record in watcher.records] == [2, 4]
    for before, after in zip(plain, watched, strict=True):
        assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True] * len(
            before
        )


def saved_by(layer: nn.Module) -> list[Tensor]:
    """x and then the output's gradient, of the layer's next step."""
    saved: list[Tensor] = []

    def save(_: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        saved.append(args[0].detach())
        out.register_hook(saved.append)

    layer.register_forward_hook(save)
    return saved


def quantised_by(layer: QuantizedLinear, tensors: list[Tensor]) -> list[Tensor]:
    """The six operands as the layer's state of now makes them, in float64."""
    delayed, noise = layer.delayed_states(), layer.noise()
    decoded = []
    for position, (x, spec) in enumerate(zip(tensors, layer.recipe.specs, strict=True)):
        if spec is not None:
            state = delayed[state_position(layer.recipe, position)] if spec.is_delayed else None
            own = noise and Noise(seed=noise.seed, step=noise.step, stream=noise.stream + position)
            x = mixprec.quantize(x, spec, noise=own, state=state).dequantize()
        decoded.append(x.double())
    return decoded


@pytest.mark.parametrize("recipe", QUANTISING)
def test_a_trained_step_is_that_of_an_independent_computation(recipe: str) -> None:
    run = run_of(nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 24)), recipe)
    run.step(torch.randn(30, 12))
    layer = run.model[2]
    before, saved = copy.deepcopy(layer), saved_by(layer)
    with run.watch() as watcher:
        run.step(torch.randn(30, 12) * 3)
    (x, g), w = saved, before.weight.detach()
    tensors = [x, w, g, w.t(), g.t(), x.t()]
    decoded, rows = quantised_by(before, tensors), watcher.records[0].rows
    for path, spec, exact, used in zip(OPERANDS, layer.recipe.specs, tensors, decoded, strict=True):
        row = operands(watcher.records[0]).get(("2", "", path))
        if row is None or spec is None:
            assert row is spec is None
            continue
        exact = hadamard(exact) if spec.hadamard else exact
        pairs = zip(exact.flatten().tolist(), used.flatten().tolist(), strict=True)
        gone = sum(before != 0 and after == 0 for before, after in pairs)
        assert (row.elements, row.underflow) == (exact.numel(), gone / exact.numel())
        assert row.amax == float(exact.abs().max())
    sqnr = {row.product: row.sqnr_db for row in rows if row.layer == "2" and not row.operand}
    for index, product in enumerate(PRODUCTS):
        pair = slice(2 * index, 2 * index + 2)
        (a, b), (a_used, b_used) = tensors[pair], decoded[pair]
        exact = a.double() @ b.double().t()
        error = a_used @ b_used.t() - exact
        expected = 10 * math.log10(float(exact.square().sum() / error.square().sum()))
        gemm = getattr(layer.recipe, product)
        if gemm.out is None and gemm.a is not None:
            # the sample is whole here
            assert sqnr[product] == pytest.approx(expected, abs=1e-3)


def test_every_product_that_ran_has_its_rows() -> None:
    run = small_run("fp8_tensorwise")
    with run.watch() as watcher:
        run.step(images())
    rows = [(row.layer, row.product, row.operand) for row in watcher.records[0].rows]
    sides = ("a", "b", "")
    # nobody asks for the gradient of the images
    first = [("0", product, side) for product in ("output", "grad_weight") for side in sides]
    rest = [
        (layer, product, side)
        for layer in ("3", "6")
        for product in ("output", "grad_input", "grad_weight")
        for side in sides
    ]
    assert rows == [*first, *rest]


def test_a_frozen_weight_has_no_product_of_its_gradient() -> None:
    run = small_run("fp8_rowwise")
    run.model[6].weight.requires_grad_(False)
    with run.watch() as watcher:
        run.step(images())
    rows = {row.product for row in watcher.records[0].rows if row.layer == "6"}
    assert rows == {"output", "grad_input"}


def test_micro_batches_and_groups_of_a_step_are_counted_together() -> None:
    run = small_run("fp8_rowwise")
    with run.watch() as watcher:
        run.step(images(rows=6))
        run.step(images(1, rows=4), images(2, rows=3))
    one, two = (operands(record) for record in watcher.records)
    for path in ("output.a", "grad_weight.a"):
        assert one["6", "", path].elements * 7 == two["6", "", path].elements * 6
    # two groups of windows, each of 9 taps of 2 channels at 16 places
    assert one["0", "", "output.a"].elements == 2 * 6 * 16 * 18
    assert one["0", "", "output.b"].elements * 2 == two["0", "", "output.b"].elements


def test_the_sampled_figures_are_those_of_both_micro_batches() -> None:
    def record(*inputs: Tensor) -> StepStatistics:
        run = run_of(nn.Sequential(nn.Linear(16, 8)), "mxfp4")
        torch.nn.init.constant_(run.model[0].weight, 0.1)
        with run.watch() as watcher:
            run.step(*inputs)
        return watcher.records[0]

    parts = [torch.randn(5, 16), 100 * torch.randn(3, 16)]
    both = operands(record(*parts))["0", "", "output.a"]
    single = [operands(record(part))["0", "", "output.a"] for part in parts]
    assert both.amax == max(row.amax for row in single)
    assert both.underflow * both.elements == pytest.approx(
        sum(row.underflow * row.elements for row in single)
    )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_delayed", "mxfp4"])
def test_what_a_checkpoint_runs_again_counts_once(recipe: str, reentrant: bool) -> None:
    def record(wraps: bool) -> StepStatistics:
        run = small_run(recipe)
        run.model[4].p = 0.0

        def forward(x: Tensor) -> Tensor:
            return checkpoint(run.model, x, use_reentrant=reentrant) if wraps else run.model(x)

        with run.watch() as watcher:
            run.step(images().requires_grad_(), forward=forward)
        return watcher.records[0]

    assert record(True) == record(False)


def test_evaluation_and_transforms_of_functions_are_not_seen() -> None:
    run = small_run("fp8_tensorwise")
    parameters = dict(run.model.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(run.model, parameters, (images(),)).square().mean()

    with run.watch() as watcher:
        run.model.eval()
        run.model(images())
        run.model.train()
        torch.func.grad(loss)({name: value.detach() for name, value in parameters.items()})
        run.step(images())
    with run.watch() as other:
        run.step(images())
    found, expected = operands(watcher.records[0]), operands(other.records[0])
    assert {key: row.elements for key, row in found.items()} == {
        key: row.elements for key, row in expected.items()
    }


@pytest.mark.parametrize(
    ("layer", "call", "names"),
    [
        (nn.GRU(8, 8), lambda layer, x: layer(x)[0], ("weight_ih_l0", "weight_hh_l0")),
        (
            nn.MultiheadAttention(8, 2),
            lambda layer, x: layer(x, x, x)[0],
            ("query", "key", "value"),
        ),
        (
            nn.MultiheadAttention(8, 2),
            lambda layer, x: layer(x, x, x, need_weights=False)[0],
            ("query", "key", "value", "scores", "values"),
        ),
    ],
    ids=["GRU", "MultiheadAttention", "attention"],
)
def test_products_of_a_layer_with_several_have_their_names(
    layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor], names: tuple[str, ...]
) -> None:
    recipe = replace(RECIPES["fp8_rowwise"], attention="scores" in names)
    run = run_of(nn.Sequential(copy.deepcopy(layer)), recipe)
    with run.watch() as watcher:
        run.step(torch.randn(5, 3, 8), forward=lambda x: call(run.model[0], x))
    found = [row.name for row in watcher.records[0].rows if row.layer == "0"]
    assert tuple(dict.fromkeys(found)) == names


def test_heads_of_attention_are_counted_together() -> None:
    recipe = replace(RECIPES["fp8_rowwise"], attention=True)
    run = run_of(nn.Sequential(nn.MultiheadAttention(8, 2)), recipe)
    with run.watch() as watcher:
        run.step(
            torch.randn(5, 3, 8), forward=lambda x: run.model[0](x, x, x, need_weights=False)[0]
        )
    found = operands(watcher.records[0])
    # 3 sequences of 5 tokens, 2 heads of 4 features
    assert found["0", "scores", "output.a"].elements == 3 * 2 * 5 * 4
    assert found["0", "values", "grad_input.a"].elements == 3 * 2 * 5 * 4
    assert found["0", "values", "output.a"].elements == 3 * 2 * 5 * 5


def test_steps_of_a_recurrent_layer_are_counted_together() -> None:
    run = run_of(nn.Sequential(nn.RNN(4, 6)), "fp8_rowwise")
    with run.watch() as watcher:
        run.step(torch.randn(5, 3, 4), forward=lambda x: run.model[0](x)[0])
    found = operands(watcher.records[0])
    assert found["0", "weight_hh_l0", "output.a"].elements == 5 * 3 * 6
    # nobody asks for the gradient of the first state
    assert found["0", "weight_hh_l0", "grad_input.a"].elements == 4 * 3 * 6


def test_the_given_function_takes_the_records() -> None:
    run, taken = small_run("mxfp8"), []
    watcher = mixprec.watch(run.model, 2, on_record=taken.append, done=3)
    run.step(images())
    assert watcher.step() is taken[0]
    assert watcher.step() is None
    assert (taken[0].step, watcher.done, watcher.records) == (4, 5, [])
    watcher.restart(7)
    run.step(images())
    watcher.step()
    assert [record.step for record in taken] == [4, 8]


def test_after_closing_nothing_is_observed() -> None:
    run = small_run("mxfp8")
    watcher = run.watch()
    run.step(images())
    watcher.close()
    run.step(images())
    watcher.step()
    assert [record.step for record in watcher.records] == [1]
    assert not any(layer.observers for layer in layers(run.model))


def layers(model: nn.Module) -> list[QuantizedLayer]:
    return [module for module in model.modules() if isinstance(module, QuantizedLayer)]


def test_two_watchers_see_the_same() -> None:
    run = small_run("fp8_blockwise")
    with run.watch(1) as one, run.watch(2) as two:
        run.step(images())
        run.step(images())
    assert one.records[1] == two.records[0]
    assert len(one.records) == 2


def test_a_copy_is_nobodys_to_watch_and_revert_takes_observers_along() -> None:
    run = small_run("fp8_tensorwise")
    watcher = run.watch()
    assert all(layer.observers for layer in layers(run.model))
    for other in (copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))):
        assert not any(layer.observers for layer in layers(other))
    mixprec.revert(run.model)
    assert not any("observers" in vars(module) for module in run.model.modules())
    watcher.close()


def test_a_step_in_which_nothing_could_be_seen_warns() -> None:
    run = small_run("fp8_tensorwise")
    run.model.eval()
    watcher = mixprec.watch(run.model, 1)
    run.model(images())
    with pytest.warns(UserWarning, match=r"no product of a converted layer ran in step 1"):
        watcher.step()
    assert watcher.records == [StepStatistics(step=1, rows=())]


def test_a_gradient_that_is_not_finite_is_seen_and_training_goes_on() -> None:
    run = small_run("fp8_tensorwise")
    with run.watch() as watcher:
        run.optimizer.zero_grad()
        (run.model(images()) * math.inf).sum().backward()
        run.optimizer.step()
    rows = [row for row in watcher.records[0].rows if row.product == "grad_weight"]
    assert all(math.isnan(row.sqnr_db) for row in rows if isinstance(row, ProductStatistics))


def test_nothing_of_a_step_is_held_after_it() -> None:
    run = small_run("fp8_tensorwise")
    held, before = [], live_tensors()
    with run.watch():
        for _ in range(2):
            run.step(images())
            held.append(new_tensors(before))
    assert held[0] == held[1]


def test_arguments_that_are_refused() -> None:
    converted = small_run("fp8_tensorwise").model
    with pytest.raises(TypeError, match=r"model: got str; must be an nn\.Module"):
        mixprec.watch("model")  # type: ignore[arg-type]
    for every in (0, True, 1.5):
        with pytest.raises(ValueError, match=rf"every: got {every}; must be a whole number"):
            mixprec.watch(converted, every)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"model: got Sequential without converted layers"):
        mixprec.watch(small_model())


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_refused(in_place: bool) -> None:
    model = small_run("fp8_tensorwise").model
    if in_place:
        model.compile(backend="eager")
    compiled = model if in_place else torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match=r"model: got \w+, compiled; a compiled graph is not"):
        mixprec.watch(compiled)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_compiled_layer_inside_the_model_has_no_rows() -> None:
    run: Run = small_run("fp8_tensorwise")
    run.model[6].compile(backend="eager")
    with run.watch() as watcher:
        run.step(images())
    assert {row.layer for row in watcher.records[0].rows} == {"0", "3"}


def test_recipes_are_all_tried() -> None:
    assert len(QUANTISING) >= 15
    assert set(QUANTISING) <= set(RECIPES)
