"""What runs in which type: every operation of one forward pass, and the rule that decided."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mixprec.amp.autocast import region_dtype
from mixprec.amp.inputs import cast_inputs
from mixprec.amp.setup import cast_parameters
from mixprec.gemm.api import resolve_spec
from mixprec.nn import QuantizedLayer, convert
from mixprec.nn.kinds import kind_of, plain_class
from mixprec.policy import POLICIES, Operation, Region
from mixprec.recipes import PRODUCTS, RECIPES, Recipe, get_recipe
from mixprec.rounding import SOURCE_FORMATS
from mixprec.train import checkpoint
from mixprec.train.config import Config
from mixprec.train.trainer import Trainer, pick_device

LOSS = "(loss)"
_AUTO = "auto"
# torch's names of operations that give another view of a tensor, or the tensor itself
_VIEWS = frozenset(
    """__get__ __getitem__ alias as_strided atleast_1d atleast_2d atleast_3d broadcast_tensors
    broadcast_to chunk contiguous detach diagonal dsplit expand expand_as flatten hsplit movedim
    moveaxis narrow permute ravel requires_grad_ reshape reshape_as select split
    split_with_sizes squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold
    unsqueeze unsafe_chunk unsafe_split view view_as vsplit""".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """One operation of a forward pass.

    Attributes:
        module: Path of the module that ran it; "" is the model, ``(loss)`` the loss.
        operation: Torch's name; of a converted layer ``linear``.
        inputs: Types of its floating-point inputs, in their order, as ``fp32`` or ``bf16``.
        compute: The types that they are cast to before, or their own; of a converted layer the
            formats of the output's two operands.
        outputs: Types of its results.
        rule: What decided: a rule of the policy, or a converted layer's recipe.
        impl: The implementation of a converted layer; else "".
        is_view: Whether nothing is computed (``view``, ``transpose``, ``reshape``).
    """

    module: str
    operation: str
    inputs: tuple[str, ...]
    compute: tuple[str, ...]
    outputs: tuple[str, ...]
    rule: str
    impl: str = ""
    is_view: bool = False


def explain(
    model: nn.Module,
    inputs: Any,
    recipe: str | Recipe = "bf16",
    policy: str = "cuda",
    *,
    loss: Callable[[Any], Any] | None = None,
) -> list[OperationRow]:
    """Every operation of one forward pass of a model under a recipe: its types, and why.

    Args:
        model: Stays as it is: a deep copy runs, in the model's mode (train or eval).
        inputs: A tensor, a list or tuple of positional arguments, or a dictionary of named ones.
        recipe: Its base decides outside converted layers. A model that is converted keeps its own
            layers' recipes; another is converted to this one, unless the base alone says it all, as
            that of bf16 and fp16 does. Where the recipe holds parameters in another type than fp32,
            parameters and inputs get it; else they keep theirs.
        policy: A name in ``POLICIES``; no matter for a base of 32 or 64 bits.
        loss: Called with the model's output in the same region, for its operations too.

    Returns:
        A row an operation, in the order of execution, views among them. Operations without
        floating-point inputs or results are left out; what a function written in Python calls has
        rows of its own; what runs inside a converted layer has none.

    Raises:
        ValueError: An unknown recipe or policy.
        TypeError: The recipe is neither a name nor a ``Recipe``.

    Edge cases: a loop in the model gives rows for each turn. Dropout draws from generators that are
    put back. Compiled modules are taken as they are, and what they compile has no rows.
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
    recording = _Recording(model)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with checkpoint.isolated_generators(device), recording.region(recipe, policy):
        output = _call(model, inputs)
        recording.path = LOSS
        if loss is not None:
            loss(output)
    return recording.rows


def explain_run(config: Config) -> list[OperationRow]:
    """Every operation of the first batch's forward pass and loss in a run of this configuration.

    Raises: ConfigError, ValueError: As ``mixprec.train.run``.
    """
    with checkpoint.isolated_generators(pick_device(config.train.device)):
        trainer = Trainer(config)
        inputs, targets = trainer.batches(0)[0]
        inputs = cast_inputs(inputs, trainer.recipe.parameters)
        recording = _Recording(trainer.model)
        with recording.region(trainer.recipe, "cuda"):
            output = trainer.model(inputs)
            recording.path = LOSS
            trainer.criterion(output, targets)
    return recording.rows


class _Recording:
    """The rows of a model whose modules say when they run."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: list[OperationRow] = []
        self.path = ""
        self._outer: list[str] = []
        self._converted = 0
        for path, module in model.named_modules():
            self._watch(path, module)

    def region(self, recipe: Recipe, policy: str) -> AbstractContextManager[Any]:
        """The region of a recipe's base, each of whose operations becomes a row."""
        return Region(region_dtype(recipe), policy, record=self._record)

    def _watch(self, path: str, module: nn.Module) -> None:
        is_converted = isinstance(module, QuantizedLayer)

        def enter(*_: Any) -> None:
            self._outer.append(self.path)
            self.path = path
            self._converted += is_converted

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if isinstance(module, QuantizedLayer):
                self.rows.append(_layer_row(path, module, (args, kwargs), output))
            # not before the row, for which an implementation may be tried
            self._converted -= is_converted
            self.path = self._outer.pop()

        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, with_kwargs=True)

    def _record(self, operation: Operation) -> None:
        if self._converted:
            return
        self.rows.append(
            OperationRow(
                module=self.path,
                operation=_plain(operation.name),
                inputs=_names(operation.inputs),
                compute=_names(operation.compute),
                outputs=_names(operation.outputs),
                rule=operation.rule,
                is_view=operation.name in _VIEWS,
            )
        )


def _layer_row(path: str, layer: QuantizedLayer, given: Any, output: Any) -> OperationRow:
    """A converted layer as one operation."""
    gemm, x = layer.recipe.output, _flat(output)[0].detach()
    impl = layer.impl
    if impl == _AUTO:
        impl, _ = resolve_spec(gemm, x.device, x.dtype)
    dtypes = [value.dtype for value in _flat(given) if value.is_floating_point()]
    weights = dict.fromkeys(p.dtype for p in layer.parameters(recurse=False) if p.dim() > 1)
    high = SOURCE_FORMATS[x.dtype]
    return OperationRow(
        module=path,
        operation=(kind_of(layer) or plain_class(layer)).__name__.lower(),
        inputs=_names([*dtypes, *weights]),
        compute=tuple(str(spec.format if spec else high) for spec in (gemm.a, gemm.b)),
        outputs=_names([x.dtype]),
        rule=f"recipe {layer.recipe}",
        impl=impl,
    )


def _says_it_all(recipe: Recipe) -> bool:
    """Whether the base's policy has the recipe's products, so that no layer needs converting."""
    own = RECIPES[recipe.base]
    return all(getattr(recipe, product) == getattr(own, product) for product in PRODUCTS)


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)


def _flat(value: Any) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(value)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _plain(name: str) -> str:
    """``add`` for ``__add__``."""
    is_special = name.startswith("__") and name.endswith("__") and name not in _VIEWS
    return name.strip("_") if is_special else name


def _names(dtypes: Iterable[torch.dtype]) -> tuple[str, ...]:
    return tuple(
        str(SOURCE_FORMATS.get(dtype, str(dtype).removeprefix("torch."))) for dtype in dtypes
    )
