"""The trainer: the network, steps that depend on nothing hidden, and states that resume exactly."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixprec.train import checkpoint
from mixprec.train.checkpoint import isolated_generators
from mixprec.train.config import Config, ConfigError
from mixprec.train.distributed import pick_device
from mixprec.train.faults import NonFiniteError, first_fault
from mixprec.train.feed import dataset_of
from mixprec.train.models import MnistCNN
from mixprec.train.trainer import Trainer

RECIPES = {
    name: [f"recipe={name}"]
    for name in (
        "fp32",
        "tf32",
        "fp8_tensorwise",
        "fp8_delayed",
        "fp8_rowwise",
        "fp8_rowwise_hp_grad_weight",
    )
}
CUSTOM = ["recipe.variant_of=fp8_rowwise", "recipe.output.a.format={exponent = 4, mantissa = 2}"]
STOCHASTIC = ["recipe.variant_of=fp8_delayed", "recipe.grad_input.a.rounding=stochastic"]
Small = Callable[..., Config]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert list(a) == list(b)
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def test_the_network_is_that_of_the_mnist_example() -> None:
    model = MnistCNN()
    shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
    assert shapes == {
        "conv1.weight": (32, 1, 3, 3),
        "conv1.bias": (32,),
        "conv2.weight": (64, 32, 3, 3),
        "conv2.bias": (64,),
        "fc1.weight": (128, 9216),
        "fc1.bias": (128,),
        "fc2.weight": (10, 128),
        "fc2.bias": (10,),
    }
    assert (model.dropout1.p, model.dropout2.p) == (0.25, 0.5)


def test_the_network_computes_what_the_example_writes_out() -> None:
    model, x = MnistCNN().eval(), torch.randn(3, 1, 28, 28)
    h = F.max_pool2d(F.relu(model.conv2(F.relu(model.conv1(x)))), 2)
    logits = model.fc2(F.relu(model.fc1(torch.flatten(h, 1))))
    assert torch.equal(model(x), F.log_softmax(logits, dim=1))
    torch.testing.assert_close(model(x).exp().sum(1), torch.ones(3))


@pytest.mark.parametrize("recipe", [*RECIPES.values(), CUSTOM, STOCHASTIC], ids=str)
def test_loss_goes_down(small: Small, recipe: list[str]) -> None:
    trainer = Trainer(small(*recipe, "optimizer.lr=0.3", "optimizer.gamma=1.0"))
    losses = [trainer.step().loss for _ in range(20)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert trainer.evaluate().accuracy > 0.8


@pytest.mark.parametrize("recipe", [["recipe=fp32"], ["recipe=fp8_rowwise"], STOCHASTIC], ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stop", [1, 3, 7, 8])
def test_resumed_run_equals_the_uninterrupted_one(
    small: Small, tmp_path: Path, recipe: list[str], accumulate: int, stop: int
) -> None:
    config = small(*recipe, f"train.accumulate={accumulate}", "train.epochs=4")
    straight = Trainer(config)
    for _ in range(stop):
        straight.step()
    path = checkpoint.save(tmp_path, stop, straight.state(), keep=1)
    expected = [straight.step() for _ in range(4)]

    torch.manual_seed(99)
    resumed = Trainer(config)
    resumed.load_state(checkpoint.load(path))
    assert [resumed.step() for _ in range(4)] == expected
    assert_same(weights(resumed), weights(straight))
    assert resumed.evaluate() == straight.evaluate()


def test_a_step_does_not_depend_on_what_else_draws_random_numbers(small: Small) -> None:
    config = small()
    quiet, noisy = Trainer(config), Trainer(config)
    for _ in range(3):
        torch.rand(17)
        noisy.evaluate()
        assert quiet.step() == noisy.step()
    assert_same(weights(quiet), weights(noisy))


def test_seeds_differ_in_weights_and_order(small: Small) -> None:
    first, second = (Trainer(small(f"train.seed={seed}")) for seed in (1, 2))
    assert not torch.equal(first.model.fc1.weight, second.model.fc1.weight)
    assert not torch.equal(first.batches(0)[0][1], second.batches(0)[0][1])


def test_an_epoch_has_every_row_once_and_a_last_smaller_batch(small: Small) -> None:
    trainer = Trainer(small("data.batch_size=10", "train.accumulate=2"))
    assert trainer.steps_per_epoch == 3
    sizes = [[len(targets) for _, targets in trainer.batches(step)] for step in range(3)]
    assert sizes == [[10, 10], [10, 10], [10, 6]]
    for epoch in (0, 1):
        batches = [b for step in range(3) for b in trainer.batches(3 * epoch + step)]
        images = torch.cat([inputs for inputs, _ in batches])
        rows = dataset_of(trainer.config).train
        order = torch.cdist(images.flatten(1), rows.inputs.flatten(1)).argmin(1)
        assert sorted(order.tolist()) == list(range(56))


@pytest.mark.parametrize("sizes", [(4, 14), (8, 7)])
def test_accumulated_gradients_are_those_of_one_batch(small: Small, sizes: tuple[int, int]) -> None:
    whole = Trainer(small("data.batch_size=56"))
    parts = Trainer(small(f"data.batch_size={sizes[0]}", f"train.accumulate={sizes[1]}"))
    for trainer in (whole, parts):
        # Masks differ between one batch and several, so the sum is compared without dropout.
        trainer.model.eval()
        trainer.step()
    for name, parameter in whole.model.named_parameters():
        other = parts.model.get_parameter(name).grad
        torch.testing.assert_close(other, parameter.grad, rtol=1e-4, atol=1e-6)


def test_uneven_batches_count_by_their_rows(small: Small) -> None:
    trainer = Trainer(small("data.batch_size=40", "train.accumulate=2"))
    trainer.model.eval()
    rows = dataset_of(trainer.config).train
    expected = F.nll_loss(trainer.model(rows.inputs), rows.targets)
    assert trainer.step().loss == pytest.approx(expected.item(), rel=1e-5)


def test_learning_rate_falls_by_gamma_after_each_epoch(small: Small) -> None:
    trainer = Trainer(small("optimizer.lr=1.0", "optimizer.gamma=0.5", "data.batch_size=28"))
    records = [trainer.step() for _ in range(4)]
    assert [record.lr for record in records] == [1.0, 1.0, 0.5, 0.5]
    assert [record.epoch for record in records] == [0, 0, 1, 1]


def test_optimizer_options_reach_the_optimizer(small: Small) -> None:
    trainer = Trainer(small("optimizer.name=adamw", "optimizer.options.betas=[0.8, 0.9]"))
    assert isinstance(trainer.optimizer, torch.optim.AdamW)
    assert tuple(trainer.optimizer.param_groups[0]["betas"]) == (0.8, 0.9)


def test_clipping_scales_to_the_largest_norm_and_reports_the_one_before(small: Small) -> None:
    free, clipped = Trainer(small()), Trainer(small("train.clip_norm=0.05"))
    record = (free.step(), clipped.step())[1]
    grads = {n: p.grad for n, p in free.model.named_parameters()}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    assert norm > 0.05
    assert record.grad_norm == pytest.approx(norm, rel=1e-3)
    for name, parameter in clipped.model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name] * (0.05 / norm), rtol=1e-3, atol=0)


def test_gradients_within_the_norm_are_left_as_they_are(small: Small) -> None:
    free, clipped = Trainer(small()), Trainer(small("train.clip_norm=1e6"))
    free.step(), clipped.step()
    assert_same(weights(free), weights(clipped))


def test_clipping_takes_the_norm_of_16_bit_gradients_in_32(small: Small) -> None:
    trainer = Trainer(small())
    trainer.model.half()
    for parameter in trainer.model.parameters():
        parameter.grad = torch.full_like(parameter, 1000.0)
    assert trainer._clip(1e9) == pytest.approx(1000 * math.sqrt(1_199_882), rel=1e-3)


def test_a_non_finite_parameter_is_named_and_nothing_is_updated(small: Small) -> None:
    trainer = Trainer(small())
    trainer.step()
    with torch.no_grad():
        trainer.model.conv2.bias[3] = math.inf
    before = weights(trainer)
    with pytest.raises(NonFiniteError, match=r"step 2: the loss is not finite; .*conv2\.bias") as e:
        trainer.step()
    assert (e.value.step, e.value.tensor) == (2, "parameter conv2.bias")
    assert_same(before, weights(trainer))
    assert trainer.done == 1


def test_a_state_with_a_non_finite_parameter_is_not_saved(small: Small) -> None:
    trainer = Trainer(small())
    with torch.no_grad():
        trainer.model.fc1.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError, match=r"parameter fc1\.weight"):
        trainer.state()


def test_a_non_finite_gradient_is_named_where_it_is_clipped(small: Small) -> None:
    trainer = Trainer(small("train.clip_norm=1.0"))
    trainer.model.fc1.weight.register_hook(lambda grad: grad * math.inf)
    with pytest.raises(NonFiniteError, match=r"gradient fc1\.weight"):
        trainer.step()
    assert trainer.done == 0


def test_a_non_finite_evaluation_is_named(small: Small) -> None:
    trainer = Trainer(small())
    with torch.no_grad():
        trainer.model.fc2.bias[0] = math.nan
    with pytest.raises(NonFiniteError, match=r"evaluation loss .*fc2\.bias"):
        trainer.evaluate()
    assert trainer.model.training


class Overflow(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e30) * 1e30


@pytest.mark.parametrize(
    ("place", "value", "expected"),
    [
        (None, 1.0, None),
        ("input", math.nan, "the input batch"),
        ("0.weight", math.inf, "parameter 0.weight"),
        ("1", 1.0, "output of 1"),
    ],
)
def test_first_fault(place: str | None, value: float, expected: str | None) -> None:
    middle = Overflow() if place == "1" else nn.Identity()
    model, x = nn.Sequential(nn.Linear(2, 2), middle, nn.Linear(2, 2)), torch.ones(3, 2)
    with torch.no_grad():
        if place == "input":
            x[1, 0] = value
        elif place == "0.weight":
            model[0].weight[0, 0] = value
    assert first_fault(model, x, model) == expected
    assert not any(module._forward_hooks for module in model.modules())


def test_a_state_of_another_run_is_refused_with_every_difference(small: Small) -> None:
    state = Trainer(small("recipe=fp32")).state()
    other = Trainer(small("recipe=tf32", "data.batch_size=4", "train.epochs=9"))
    with pytest.raises(ValueError, match="checkpoint was made with") as caught:
        other.load_state(state)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "data.batch_size",
        "recipe",
    ]


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert pick_device("auto") == pick_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match=r"train\.device: got 'cuda'; .* 0 cuda devices; use"):
        pick_device("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == torch.device("cuda")
    assert pick_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"got 'cuda:2'"):
        pick_device("cuda:2")


def test_generators_are_given_back(small: Small) -> None:
    before = torch.get_rng_state()
    with isolated_generators(torch.device("cpu")):
        Trainer(small()).step()
        assert not torch.equal(before, torch.get_rng_state())
    assert torch.equal(before, torch.get_rng_state())


def test_conversion_settings_reach_the_model(small: Small) -> None:
    config = small("recipe=fp8_rowwise", 'convert.skip=["fc1"]', "convert.impl=emulated")
    report = Trainer(config).report
    assert [row.name for row in report.converted] == ["conv1", "conv2", "fc2"]
    kept = replace(config, convert=replace(config.convert, skip=(), keep_last=1))
    assert [row.name for row in Trainer(kept).report.converted] == ["conv1", "conv2", "fc1"]


def test_sensitive_layers_of_a_configuration_multiply_in_bf16(small: Small) -> None:
    report = Trainer(small("recipe=nvfp4", "convert.keep_first=1")).report
    assert [row.recipe for row in report.converted] == ["bf16 on fp32", *["nvfp4"] * 3]
    report = Trainer(small("recipe=nvfp4", "convert.keep_last_share=0.15")).report
    assert [row.recipe for row in report.converted] == [*["nvfp4"] * 3, "bf16 on fp32"]
    with pytest.raises(ValueError, match="of 4 layers none is left for the recipe"):
        Trainer(small("recipe=nvfp4", "convert.keep_first=3", "convert.keep_last_share=0.15"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_model_evaluates_like_an_eager_one_and_trains(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Inductor takes minutes for this model; tests/test_compile_models.py is about its numbers
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    settings = ["recipe=fp8_rowwise", "optimizer.lr=0.3", "optimizer.gamma=1.0"]
    eager, compiled = Trainer(small(*settings)), Trainer(small(*settings, "train.compile=true"))
    assert compiled.evaluate().loss == pytest.approx(eager.evaluate().loss, rel=1e-4)
    losses = [compiled.step().loss for _ in range(20)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("adam", "betas=[0.9]", r"^optimizer\.options\.betas: got \[0\.9\]; adam: "),
        ("adam", "betas=0.9", r"^optimizer\.options\.betas: got 0\.9; adam: "),
        ("adam", 'eps="x", amsgrad=true', r"^optimizer\.options\.eps: got 'x'; adam: "),
        ("adamw", "fused=true, foreach=true", r"^optimizer\.options: got \{'fused': True, 'fore"),
        ("adam", "capturable=true", r"^optimizer\.options\.capturable: got True; adam: "),
        ("adam", "differentiable=true", r"^optimizer\.options\.differentiable: got True; adam: "),
        (
            "sgd",
            'momentum=0.9, dampening="x"',
            r"^optimizer\.options: got \{'momentum': 0.9, 'damp",
        ),
    ],
)
def test_options_that_do_not_work_are_named_in_one_line(
    small: Small, name: str, options: str, match: str
) -> None:
    with pytest.raises(ConfigError, match=match) as refused:
        Trainer(small(f"optimizer.name={name}", f"optimizer.options={{{options}}}"))
    assert len(str(refused.value).splitlines()) == 1
