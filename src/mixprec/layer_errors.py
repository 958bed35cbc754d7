"""What every recipe would do to each layer's operands and products, from one high-precision run.

    x, w, g of a layer  ──>  each recipe's operands: their error  ──>  their product: its error

Forward and backward run once, in float32 or wider. A layer's tensors are quantised as each recipe
would while they are there, so that none of them is kept.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from mixprec.amp.inputs import cast_inputs
from mixprec.explanation.passes import call, eagerly
from mixprec.gemm.api import EMULATED, GemmSpec
from mixprec.inspection.statistics import evenly_apart, tally_gemm
from mixprec.linear_products import GRAD_INPUT, GRAD_WEIGHT, OUTPUT, Plan
from mixprec.modes import plain_arithmetic
from mixprec.nn import QuantizedLayer, convert
from mixprec.nn.state import converted_layers
from mixprec.quant_spec import UNSCALED, QuantSpec
from mixprec.quantization_error import ErrorFigures
from mixprec.recipes import DYNAMIC, PRODUCTS, RECIPES, Recipe, get_recipe
from mixprec.rounding import SOURCE_FORMATS
from mixprec.train import checkpoint, sharded_checkpoint
from mixprec.train.config import Config
from mixprec.train.distributed import pick_device
from mixprec.train.log import ProgressLines
from mixprec.train.recipe_choice import resolve_recipe
from mixprec.train.splits import stream_seed
from mixprec.train.trainer import Trainer
from mixprec.what_if import first_use, what_if

LOSS_SCALE = 2.0**16
_SAMPLED = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeError:
    """The error of one operand of one product of a layer under a recipe, or of the product.

    Where a layer has several products of a name in a pass (heads, groups, time steps, several
    calls), the worst of them: that of the lowest SQNR, among the products number 0, 1, 2, 4, 8 and
    so on.

    Attributes:
        layer: The layer's path in the model.
        name: Of the layer's products, in a layer with several ("query", "weight_hh_l0"; "scores"
            and "values" of attention); else "".
        recipe: As it prints.
        product: ``output``, ``grad_input`` or ``grad_weight``.
        operand: ``a`` or ``b``; "" for the product itself.
        sqnr_db: Signal to quantisation noise, decibels: of an operand that of its figures, of a
            product against that of the operands as they were. inf where nothing changed, NaN where
            an element is not finite.
        spec: How the operand is quantised; None for a product.
        figures: All figures of the operand; None for a product.
    """

    layer: str
    name: str
    recipe: str
    product: str
    operand: str
    sqnr_db: float
    spec: QuantSpec | None = None
    figures: ErrorFigures | None = None


def recipe_errors(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    recipes: Iterable[str | Recipe] | None = None,
    skip: Iterable[str] = (),
    include: Iterable[str | type[nn.Module]] = (),
    loss_scale: float = LOSS_SCALE,
    seed: int = 0,
    console: Console | None = None,
) -> list[RecipeError]:
    """What every recipe would do to each layer, from one forward and backward pass.

    Args:
        model: Stays as it is: a deep copy runs, parameters of 16 bits widened to float32.
        inputs: A tensor, a list or tuple of positional arguments, or a dictionary of named ones.
        loss: Of the model's output, where backward starts; without it only ``output`` has rows.
        recipes: Names or values; all of ``RECIPES`` that quantise, but for those whose products
            are an earlier one's.
        skip, include: As in ``convert``, which chooses the layers; all that it can convert.
        loss_scale: What gradients are multiplied by under recipes with a dynamic loss scale.
        seed: Of the noise of stochastic rounding.
        console: Where a progress bar is drawn if it is a terminal; standard error by default.

    Returns:
        Rows by layer in the order of execution, then product, recipe and operand. Operands in high
        precision have none, nor have products of two such.

    Raises:
        ValueError: No layer qualifies; no recipe quantises anything; two recipes print alike.

    Edge cases: a delayed scale is made of the tensor itself, as in its first use. Compiled modules
    run as they are written.

    Exactness: operands' figures are ``quantize_error``'s of the whole tensors. A product's error is
    that of up to 512 rows of each operand, evenly apart, against their float64 product.
    """
    chosen = _chosen(recipes)
    model = copy.deepcopy(model)
    dtype = _widened(model)
    layers = _observable(model, dtype, skip, include)
    inputs = cast_inputs(inputs, dtype)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with ProgressLines(2 * len(layers), console) as progress:
        tables = _Tables(chosen, loss_scale, seed, progress)
        for path, layer in layers.items():
            layer.observers = (functools.partial(tables.observe, path),)
        with checkpoint.isolated_generators(device), eagerly():
            output = call(model, inputs)
            if loss is not None:
                loss(output).backward()
    return tables.rows()


def recipe_errors_of_run(
    config: Config,
    *,
    checkpoint_path: str | Path | None = None,
    recipes: Iterable[str | Recipe] | None = None,
    console: Console | None = None,
) -> list[RecipeError]:
    """``recipe_errors`` of a configuration's model on its next batch.

    Args:
        config: The run.
        checkpoint_path: The folder of a checkpoint of such a model; without it the model is as a
            run starts with it.
        recipes: As in ``recipe_errors``, the configuration's own among them: by default too, or by
            its name.
        console: As in ``recipe_errors``.

    Raises:
        ValueError: As ``recipe_errors``; a checkpoint that is damaged, absent, or of another model.
    """
    with checkpoint.isolated_generators(pick_device(config.train.device)):
        trainer = Trainer(config)
        step = 0
        if checkpoint_path is not None:
            state = checkpoint.load(Path(checkpoint_path))
            whole = sharded_checkpoint.assembled({"model": state["model"]}, None)
            _load_model(trainer.model, whole["model"], checkpoint_path)
            step = min(state["position"]["step"], trainer.total - 1)
        inputs, targets = trainer.batches(step)[0]
        checkpoint.seed_step(stream_seed("step", config.train.seed, step), trainer.device)
        return recipe_errors(
            trainer.model,
            inputs,
            loss=lambda output: trainer.criterion(output, targets),
            recipes=_with_own(config, recipes),
            include=config.convert.include,
            loss_scale=config.scaler.init_scale,
            seed=config.train.seed,
            console=console,
        )


def _load_model(model: nn.Module, state: Mapping[str, Tensor], path: str | Path) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(
            f"checkpoint: got {path}; it is of another model "
            f"({str(error).splitlines()[-1].strip()}); give the configuration that it was made with"
        ) from error


def _chosen(recipes: Iterable[str | Recipe] | None) -> tuple[Recipe, ...]:
    """The recipes that quantise an operand, each with a text of its own."""
    found = [get_recipe(recipe) for recipe in recipes] if recipes is not None else _all_recipes()
    names = [str(recipe) for recipe in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"recipes: got several that print as {twice!r}; rows could not be told apart; give "
            "each a name of its own"
        )
    chosen = tuple(recipe for recipe in found if any(recipe.specs))
    if not chosen:
        raise ValueError(
            f"recipes: got {', '.join(names) or 'none'}; nothing is quantised; name others"
        )
    return chosen


def _all_recipes() -> list[Recipe]:
    """Those of the table, but for those whose products are an earlier one's."""
    first = {(r.specs, r.loss_scale): r for r in reversed(list(RECIPES.values()))}
    return [r for r in RECIPES.values() if first[r.specs, r.loss_scale] is r]


def _with_own(config: Config, recipes: Iterable[str | Recipe] | None) -> list[str | Recipe]:
    """The recipes asked for, a configuration's own among them by name or by default."""
    choice = resolve_recipe(config.recipe)
    own = {str(r): r for r in (choice.values() if isinstance(choice, dict) else [choice])}
    if recipes is not None:
        return [own.get(r, r) if isinstance(r, str) else r for r in recipes]
    known = _all_recipes()
    return [*known, *(r for r in own.values() if all(r.specs != other.specs for other in known))]


def _widened(model: nn.Module) -> torch.dtype:
    """The type of the model's parameters, after those of 16 bits were widened to float32."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if any(dtype.itemsize < torch.float32.itemsize for dtype in dtypes):
        model.float()
    return torch.float64 if dtypes == {torch.float64} else torch.float32


def _observable(
    model: nn.Module, dtype: torch.dtype, skip: Iterable[str], include: Iterable[Any]
) -> dict[str, QuantizedLayer]:
    """The layers that multiply, converted to a recipe that changes nothing: observers are told."""
    result = QuantSpec(format=SOURCE_FORMATS[dtype], scale_rule=UNSCALED, saturate=False)
    gemm = GemmSpec(out=result)
    with warnings.catch_warnings():
        # an error here, said below
        warnings.filterwarnings("ignore", "convert: nothing was converted")
        convert(
            model,
            Recipe(output=gemm, grad_input=gemm, grad_weight=gemm, attention=True),
            skip=skip,
            include=include,
        )
    layers = dict(converted_layers(model))
    if not layers:
        raise ValueError(
            "model: got one without a layer that a recipe could convert; the report of "
            "mixprec.convert says why; pass include= for subclasses of torch's layers"
        )
    return layers


class _Tables:
    """The rows so far, by place; told of each product of a pass by its layer."""

    def __init__(
        self, recipes: Sequence[Recipe], loss_scale: float, seed: int, progress: ProgressLines
    ) -> None:
        self._recipes = {str(recipe): recipe for recipe in recipes}
        self._loss_scale, self._seed, self._progress = loss_scale, seed, progress
        self._rows: dict[tuple[str, str, int, str, str], RecipeError] = {}
        self._seen: set[tuple[str, bool]] = set()
        self._counts: Counter[tuple[str, str]] = Counter()

    def rows(self) -> list[RecipeError]:
        """By layer in the order of execution, then product, recipe and operand, itself last."""
        places = list(dict.fromkeys((layer, name) for layer, name, *_ in self._rows))
        recipes = list(self._recipes)

        def order(key: tuple[str, str, int, str, str]) -> tuple[Any, ...]:
            layer, name, product, recipe, operand = key
            return places.index((layer, name)), product, recipes.index(recipe), not operand, operand

        return [self._rows[key] for key in sorted(self._rows, key=order)]

    def observe(self, layer: str, name: str, plan: Plan, x: Tensor, w: Tensor, out: Tensor) -> None:
        """Take the operands of output now, and those of the others once there is a gradient."""
        place, x, w = (layer, name), x.detach(), w.detach()
        index = self._counts[place]
        self._counts[place] += 1
        # of the many entries of a batch a few, further and further apart
        if index & (index - 1):
            return
        self._add(place, OUTPUT, plan.matrix(x), w)
        if out.requires_grad:
            out.register_hook(functools.partial(self._backward, place, plan, x, w))

    def _backward(
        self, place: tuple[str, str], plan: Plan, x: Tensor, w: Tensor, g: Tensor
    ) -> None:
        g = g.detach()
        if plan.needs[0]:
            self._add(place, GRAD_INPUT, g, w.t())
        if plan.needs[1]:
            self._add(place, GRAD_WEIGHT, g.t(), plan.matrix(x).t())

    def _add(self, place: tuple[str, str], product: int, a: Tensor, b: Tensor) -> None:
        self._seen.add((place[0], product > OUTPUT))
        self._progress.advance(len(self._seen), place[0])
        by_scale: dict[float, list[Recipe]] = {}
        for recipe in self._recipes.values():
            scale = self._loss_scale if recipe.loss_scale == DYNAMIC else recipe.loss_scale or 1.0
            by_scale.setdefault(1.0 if product == OUTPUT else scale, []).append(recipe)
        with torch.no_grad(), plain_arithmetic(a):
            for scale, recipes in by_scale.items():
                operands = (a if scale == 1 else a * scale, b)
                for row in _rows(PRODUCTS[product], operands, recipes, self._seed):
                    key = (*place, product, row.recipe, row.operand)
                    row = replace(row, layer=place[0], name=place[1])
                    self._rows[key] = min(self._rows.get(key, row), row, key=_badness)


def _badness(row: RecipeError) -> float:
    return -math.inf if math.isnan(row.sqnr_db) else row.sqnr_db


def _rows(
    product: str, operands: tuple[Tensor, Tensor], recipes: Sequence[Recipe], seed: int
) -> Iterator[RecipeError]:
    """The rows of one product of operands a [M, K] and b [N, K], in no place yet."""
    for side, x in zip("ab", operands, strict=True):
        for found in what_if(x, recipes, paths=(f"{product}.{side}",), seed=seed):
            for name in found.uses:
                yield RecipeError(
                    layer="",
                    name="",
                    recipe=name,
                    product=product,
                    operand=side,
                    sqnr_db=found.figures.sqnr_db,
                    spec=found.spec,
                    figures=found.figures,
                )
    errors: dict[GemmSpec, float] = {}
    for recipe in recipes:
        gemm: GemmSpec = getattr(recipe, product)
        if gemm.a is None and gemm.b is None:
            continue
        if gemm not in errors:
            errors[gemm] = _product_sqnr(gemm, operands, seed)
        yield RecipeError(
            layer="",
            name="",
            recipe=str(recipe),
            product=product,
            operand="",
            sqnr_db=errors[gemm],
        )


def _product_sqnr(gemm: GemmSpec, operands: tuple[Tensor, Tensor], seed: int) -> float:
    exact, decoded = [], []
    for x, spec in zip(operands, (gemm.a, gemm.b), strict=True):
        rows = evenly_apart(x, _SAMPLED)
        used = x if spec is None else first_use(x, spec, seed=seed).dequantize()
        exact.append(x[rows])
        decoded.append(used[rows])
    tally = tally_gemm(gemm, (exact[0], exact[1]), (decoded[0], decoded[1]), EMULATED)
    return tally.sqnr_db
