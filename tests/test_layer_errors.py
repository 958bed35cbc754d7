"""Errors of every recipe in every layer: figures of tensors that plain hooks saw, exactly."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional
from train.conftest import write_idx_folder

import mixprec
from mixprec import layer_errors
from mixprec.layer_errors import RecipeError, recipe_errors, recipe_errors_of_run
from mixprec.noise import Noise
from mixprec.quantization_error import quantize_error
from mixprec.recipes import OPERANDS, RECIPES
from mixprec.train import checkpoint
from mixprec.train.config import Config, from_dict, load, to_dict
from mixprec.train.trainer import Trainer

CHOSEN = ("fp8_tensorwise", "mxfp8", "nvfp4", "fp8_rowwise_hp_grad_weight", "fp8_delayed")
XS = torch.linspace(-2, 3, 6 * 24).reshape(2, 3, 24).sin()


def square(output: Tensor) -> Tensor:
    return output.square().mean()


class Mlp(nn.Module):
    """Two layers; the second one's input has many zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40), nn.Linear(40, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.relu(self.up(x)))


def digits_mlp() -> nn.Module:
    """A small model for runs on digits."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))


def seen(model: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """x, weight and gradient of each linear layer, by hooks on the model itself."""
    found: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):

            def note(m: nn.Module, args: tuple[Tensor], out: Tensor, name: str = name) -> None:
                found[name] = [args[0].detach(), m.weight.detach()]
                out.register_hook(found[name].append)

            module.register_forward_hook(note)
    square(model(x)).backward()
    return {name: tuple(t.reshape(-1, t.shape[-1]) for t in ts) for name, ts in found.items()}


def by_place(rows: list[RecipeError]) -> dict[tuple[str, str, str], RecipeError]:
    return {(row.layer, row.recipe, f"{row.product}.{row.operand}"): row for row in rows}


def test_figures_are_those_of_the_tensors_that_hooks_saw() -> None:
    model = Mlp()
    rows = by_place(recipe_errors(model, XS, loss=square, recipes=CHOSEN, seed=3))
    tensors = seen(copy.deepcopy(model), XS)
    assert {layer for layer, *_ in rows} == {"up", "down"}
    checked = 0
    for layer, (x, w, g) in tensors.items():
        as_operand = dict(zip(OPERANDS, (x, w, g, w.t(), g.t(), x.t()), strict=True))
        for recipe in CHOSEN:
            for path, spec in zip(OPERANDS, RECIPES[recipe].specs, strict=True):
                row = rows.get((layer, recipe, path))
                # nobody asks for the gradient of the model's input
                if spec is None or (layer == "up" and path.startswith("grad_input")):
                    assert row is None
                    continue
                noise = Noise(seed=3) if spec.is_stochastic else None
                assert row.figures == quantize_error(as_operand[path], spec, noise=noise)
                assert (row.spec, row.sqnr_db) == (spec, row.figures.sqnr_db)
                checked += 1
    assert checked == 2 * (6 * len(CHOSEN) - 2) - 2 * len(CHOSEN)


def test_error_of_a_product_is_that_of_its_quantised_operands() -> None:
    model = Mlp()
    rows = by_place(recipe_errors(model, XS, loss=square, recipes=["mxfp8", "bf16"]))
    x, w, g = seen(copy.deepcopy(model), XS)["down"]
    for product, a, b in (
        ("output", x, w),
        ("grad_input", g, w.t()),
        ("grad_weight", g.t(), x.t()),
    ):
        spec = RECIPES["mxfp8"].output.a
        used = mixprec.quantize(a, spec).dequantize(), mixprec.quantize(b, spec).dequantize()
        exact = a.double() @ b.double().t()
        noise = (used[0] @ used[1].t()).double() - exact
        expected = 10 * math.log10(exact.square().sum() / noise.square().sum())
        assert rows["down", "mxfp8", f"{product}."].sqnr_db == pytest.approx(expected, abs=1e-3)
        rounded = (a.bfloat16().double() @ b.bfloat16().double().t()).bfloat16()
        noise = rounded.double() - exact
        expected = 10 * math.log10(exact.square().sum() / noise.square().sum())
        # a sum in FP32 may fall on the other side of a tie
        assert rows["down", "bf16", f"{product}."].sqnr_db == pytest.approx(expected, abs=0.1)


def test_order_of_rows() -> None:
    rows = recipe_errors(Mlp(), XS, loss=square, recipes=["mxfp8", "fp16"])
    found = [(row.layer, row.product, row.recipe, row.operand) for row in rows]
    products = {"up": ("output", "grad_weight"), "down": ("output", "grad_input", "grad_weight")}
    assert found == [
        (layer, product, recipe, operand)
        for layer, its in products.items()
        for product in its
        for recipe in ("mxfp8", "fp16")
        for operand in ("a", "b", "")
    ]
    assert all((row.figures is None) == (row.operand == "") for row in rows)


def test_a_convolutions_operands_are_its_windows() -> None:
    conv = nn.Conv2d(3, 4, (2, 3), stride=(1, 2), padding=1)
    x = torch.randn(2, 3, 5, 6)
    rows = by_place(recipe_errors(conv, x, loss=square, recipes=["mxfp8"]))
    # torch has the channels outside, ours are side by side in an offset
    windows = functional.unfold(x, (2, 3), padding=1, stride=(1, 2))
    matrix = windows.unflatten(1, (3, 6)).permute(0, 3, 2, 1).flatten(2).flatten(0, 1)
    spec = RECIPES["mxfp8"].output.a
    assert rows["", "mxfp8", "output.a"].figures == quantize_error(matrix, spec)
    assert rows["", "mxfp8", "grad_weight.b"].figures == quantize_error(matrix.t(), spec)
    weight = conv.weight.detach().movedim(1, -1).flatten(1)
    assert rows["", "mxfp8", "output.b"].figures == quantize_error(weight, spec)


def test_of_groups_the_worst_one_counts() -> None:
    conv = nn.Conv1d(8, 8, 1, groups=2, bias=False)
    x = torch.cat([torch.ones(1, 4, 16), torch.randn(1, 4, 16)], dim=1)
    rows = by_place(recipe_errors(conv, x, recipes=["fp8_tensorwise"]))
    spec = RECIPES["fp8_tensorwise"].output.a
    errors = [quantize_error(part[0].t(), spec) for part in x.chunk(2, 1)]
    assert errors[0].sqnr_db == math.inf
    assert rows["", "fp8_tensorwise", "output.a"].figures == errors[1]
    # without a loss there are no gradients
    assert {path.partition(".")[0] for _, _, path in rows} == {"output"}


@pytest.mark.parametrize("training", [True, False])
def test_layers_with_several_products_name_them(training: bool) -> None:
    model = nn.LSTM(8, 4, dropout=0.0).train(training)
    rows = recipe_errors(
        model, XS[..., :8], loss=lambda out: square(out[0]), recipes=["fp8_rowwise"]
    )
    assert {row.name for row in rows} == {"weight_ih_l0", "weight_hh_l0"}
    steps = {(row.name, row.product) for row in rows}
    assert ("weight_hh_l0", "grad_input") in steps
    assert model.training is training


def test_gradients_of_fp16_are_those_of_the_scaled_loss() -> None:
    model = Mlp()
    _, _, g = seen(copy.deepcopy(model), XS)["down"]
    recipes = ["fp16", replace(RECIPES["fp16"], loss_scale=None, name="", description="")]
    rows = by_place(
        recipe_errors(
            model, XS, loss=lambda out: square(out) * 2.0**-20, recipes=recipes, loss_scale=2.0**12
        )
    )
    spec, small = RECIPES["fp16"].grad_input.a, g * 2.0**-20
    scaled = rows["down", "fp16", "grad_input.a"].figures
    assert scaled == quantize_error(small * 2.0**12, spec)
    plain = rows["down", "custom on fp16", "grad_input.a"].figures
    assert plain == quantize_error(small, spec)
    assert plain.sqnr_db < scaled.sqnr_db


def test_model_of_16_bits_runs_in_float32_and_stays_what_it_was() -> None:
    model = Mlp().bfloat16()
    mixprec.convert(model, "fp8_rowwise")
    before = copy.deepcopy(model.state_dict())
    rows = recipe_errors(model, XS.bfloat16(), loss=square, recipes=["mxfp8"])
    assert by_place(rows) == by_place(
        recipe_errors(copy.deepcopy(model).float(), XS.bfloat16(), loss=square, recipes=["mxfp8"])
    )
    assert model.up.weight.dtype == torch.bfloat16
    assert str(model.up.recipe) == "fp8_rowwise"
    assert all(before[name].equal(value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_all_recipes_that_quantise_by_default_each_once() -> None:
    rows = recipe_errors(nn.Linear(4, 4), torch.ones(1, 4), loss=square)
    twice = {"bf16_pure", "fp16_pure"}
    expected = [name for name, recipe in RECIPES.items() if any(recipe.specs)]
    found = dict.fromkeys(row.recipe for row in rows if row.product == "output")
    assert list(found) == [name for name in expected if name not in twice]


def test_a_terminal_shows_how_far_it_is() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    recipe_errors(Mlp(), XS, loss=square, recipes=["mxfp8"], console=console)
    # two layers, forward and backward; the last one is the first layer's backward
    assert "4/4" in screen.getvalue()
    assert "up" in screen.getvalue()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="recipes: got fp32; nothing is quantised"):
        recipe_errors(Mlp(), XS, recipes=["fp32"])
    with pytest.raises(ValueError, match="recipes: got several that print as 'mxfp8'"):
        recipe_errors(Mlp(), XS, recipes=["mxfp8", "mxfp8"])
    with pytest.raises(ValueError, match="model: got one without a layer"):
        recipe_errors(nn.ReLU(), XS)
    with pytest.raises(ValueError, match="recipe: got 'fp9'"):
        recipe_errors(Mlp(), XS, recipes=["fp9"])


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run in FP8, whose errors are asked for."""
    folder = write_idx_folder(tmp_path_factory.mktemp("digits"))
    own = ["model=test_layer_errors:digits_mlp", "data.batch_size=4", "recipe=fp8_tensorwise"]
    return load(None, [*own, f"data.path={folder}"])


def test_a_run_and_its_checkpoint(config: Config, tmp_path: Path) -> None:
    trainer = Trainer(config)
    trainer.step()
    path = checkpoint.save(tmp_path, trainer.done, trainer.state(), keep=1)
    recipes = ["mxfp8"]
    fresh = recipe_errors_of_run(config, recipes=recipes)
    later = by_place(recipe_errors_of_run(config, checkpoint_path=path, recipes=recipes))
    assert list(dict.fromkeys(row.layer for row in fresh)) == ["1", "3"]
    weight = trainer.model[3].weight.detach()
    expected = quantize_error(weight, RECIPES["mxfp8"].output.b)
    assert later["3", "mxfp8", "output.b"].figures == expected
    assert by_place(fresh)["3", "mxfp8", "output.b"].figures != expected
    # the batch of the next step
    assert later["1", "mxfp8", "output.a"] != by_place(fresh)["1", "mxfp8", "output.a"]


def test_a_configurations_own_recipe_is_among_them(config: Config) -> None:
    own = {"variant_of": "mxfp8", "name": "mine", "output": {"a": {"block": [1, 16]}}}
    config = from_dict({**to_dict(config), "recipe": {"3": own, "*": "nvfp4"}})
    rows = recipe_errors_of_run(config)
    names = list(dict.fromkeys(row.recipe for row in rows))
    assert (names[-1], names.count("nvfp4"), "tf32" in names) == ("mine", 1, True)
    named = by_place(recipe_errors_of_run(config, recipes=["mine"]))
    assert named["1", "mine", "output.a"].spec.block == (1, 16)


def test_checkpoint_of_another_model_is_refused(config: Config, tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(1)}, "position": {"step": 1}}
    path = checkpoint.save(tmp_path, 1, state, keep=1)
    with pytest.raises(ValueError, match=r"checkpoint: got .*step_00000001; it is of another"):
        recipe_errors_of_run(config, checkpoint_path=path)
    with pytest.raises(ValueError, match=r"checkpoint: got .*nowhere"):
        recipe_errors_of_run(config, checkpoint_path=tmp_path / "nowhere")


class Experts(nn.Module):
    """Attention and experts, by functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.scaled_dot_product_attention(x, x, 2 * x)
        ends = torch.tensor([2, 6], dtype=torch.int32)
        return functional.grouped_mm(y.flatten(0, 1), self.w, offs=ends)


@pytest.mark.parametrize("training", [True, False])
def test_attention_and_experts_are_seen_too(training: bool) -> None:
    model, x = Experts().train(training), XS[..., :8].clone().requires_grad_()
    rows = recipe_errors(model, x, loss=square, recipes=["mxfp8"])
    found = {(row.name, row.product): row for row in rows if row.operand == "b"}
    assert {name for name, _ in found} == {"scores", "values", "grouped_mm"}
    assert len(found) == 9
    spec = RECIPES["mxfp8"].output.b
    worst = min((quantize_error(w.mT, spec) for w in model.w), key=lambda f: f.sqnr_db)
    assert found["grouped_mm", "output"].figures == worst
    worst = min((quantize_error(k, spec) for k in x), key=lambda f: f.sqnr_db)
    assert found["scores", "output"].figures == worst
    worst = min((quantize_error(2 * v.mT, spec) for v in x), key=lambda f: f.sqnr_db)
    assert found["values", "output"].figures == worst


def test_of_many_products_a_few_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = torch.randn(70, 1, 8)
    seen, own = [], layer_errors._rows

    def spy(product: str, operands: tuple[Tensor, Tensor], *rest: Any) -> Any:
        seen.append(len(operands[0]))
        return own(product, operands, *rest)

    monkeypatch.setattr(layer_errors, "_rows", spy)
    recipe_errors(nn.LSTM(8, 4), steps, recipes=["mxfp8"])
    # all steps of the input at once; of the state step 0, 1, 2, 4 to 64
    assert sorted(seen) == [1] * 8 + [70]
