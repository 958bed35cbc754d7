"""`explain`: one forward and backward pass of a model or of a run, operation by operation."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from mixprec.amp.inputs import cast_inputs
from mixprec.amp.setup import cast_parameters
from mixprec.explanation.operations import OperationRow
from mixprec.explanation.recording import Recording
from mixprec.nn import QuantizedLayer, convert
from mixprec.policy import POLICIES
from mixprec.recipes import PRODUCTS, RECIPES, Recipe, get_recipe
from mixprec.train import checkpoint
from mixprec.train.config import Config
from mixprec.train.distributed import pick_device
from mixprec.train.trainer import Trainer


def explain(
    model: nn.Module,
    inputs: Any,
    recipe: str | Recipe = "bf16",
    policy: str = "cuda",
    *,
    loss: Callable[[Any], Any] | None = None,
    backward: bool = True,
) -> list[OperationRow]:
    """Every operation of a forward and a backward pass under a recipe: its types, and why.

    Args:
        model: Stays as it is: a deep copy runs, in the model's mode (train or eval).
        inputs: A tensor, a list or tuple of positional arguments, or a dictionary of named ones.
        recipe: Its base decides outside converted layers. A model that is converted keeps its own
            layers' recipes; another is converted to this one, unless the base alone says it all, as
            that of bf16 and fp16 does. Where the recipe holds parameters in another type than fp32,
            parameters and inputs get it; else they keep theirs.
        policy: A name in ``POLICIES``; no matter for a base of 32 or 64 bits.
        loss: Called with the model's output in the same region, for its operations too; where
            backward starts. Without it backward starts from every output, with gradients of ones.
        backward: Whether to run the backward pass too, for what has gradients.

    Returns:
        A row an operation, in the order of execution, views among them. Operations without
        floating-point inputs or results are left out; what a function written in Python calls has
        rows of its own. Products by a recipe are rows with their operands, ``grad_input``,
        ``grad_weight`` and ``grad_bias`` in backward; those of a batch's entries, or of groups,
        that follow each other and are alike are one row. Casts and views inside a converted layer
        have none.

        In backward a row is what one operation of forward made: its gradient, with the casts
        around it. Sums of gradients that meet, and into parameters, are none of them.

    Raises:
        ValueError: An unknown recipe or policy.
        TypeError: The recipe is neither a name nor a ``Recipe``.

    Edge cases: a loop in the model gives rows for each turn. Dropout draws from generators that are
    put back. Compiled modules run as they are written. A function of one's own
    (``autograd.Function``) and a reentrant checkpoint are one row in backward, with their node's
    name.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy: got {policy!r}; must be one of {', '.join(POLICIES)}")
    recipe = get_recipe(recipe)
    model = copy.deepcopy(model)
    if not _says_it_all(recipe) and not any(
        isinstance(module, QuantizedLayer) for module in model.modules()
    ):
        convert(model, recipe)
    if recipe.parameters != Recipe().parameters:
        cast_parameters(model, recipe)
        inputs = cast_inputs(inputs, recipe.parameters)
    recording = Recording(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with checkpoint.isolated_generators(device), eagerly():
        with recording.region(recipe, policy):
            output = call(model, inputs)
            recording.enter_loss()
            result = output if loss is None else loss(output)
        if backward:
            recording.backward(result)
    return recording.rows


def explain_run(config: Config) -> list[OperationRow]:
    """Every operation of the first batch's forward pass, loss and backward pass in a run.

    Gradients are not scaled, whatever the loss scale, which has no part in their types.

    Raises: ConfigError, ValueError: As ``mixprec.train.run``.
    """
    with checkpoint.isolated_generators(pick_device(config.train.device)):
        trainer = Trainer(config)
        inputs, targets = trainer.batches(0)[0]
        inputs = cast_inputs(inputs, trainer.recipe.parameters)
        recording = Recording(trainer.model)
        with recording.region(trainer.recipe, "cuda"):
            output = trainer.model(inputs)
            recording.enter_loss()
            loss = trainer.criterion(output, targets)
        recording.backward(loss)
    return recording.rows


def eagerly() -> AbstractContextManager[None]:
    """A stretch in which compiled modules run as they are written, operation by operation."""
    # who has compiled a module has loaded this, which takes seconds
    is_loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_loaded else nullcontext()


def _says_it_all(recipe: Recipe) -> bool:
    """Whether the base's policy has the recipe's products, so that no layer needs converting."""
    own = RECIPES[recipe.base]
    return all(getattr(recipe, product) == getattr(own, product) for product in PRODUCTS)


def call(model: nn.Module, inputs: Any) -> Any:
    """The model's output, of a dictionary by name, of a list or tuple by place."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)
