"""Other libraries' FP8 training, as rows beside ours: the same model, batches and optimizer."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

Region = Callable[[], AbstractContextManager[Any]]
_MULTIPLE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """How a library converts a model, and the region of its forward pass.

    Attributes:
        module: What is imported.
        recipes: The names of its recipes that become rows.
        prepare: (imported module, model on its device, recipe) -> the region, and in a word what
            multiplies; the model is changed in place.
    """

    module: str
    recipes: tuple[str, ...]
    prepare: Callable[[Any, nn.Module, str], tuple[Region, str]]

    def load(self) -> Any:
        """The library.

        Raises: ImportError: In a line: what is missing, and what to do.
        """
        try:
            return importlib.import_module(self.module)
        except Exception as error:  # a library built for another torch fails in its own ways
            line = (str(error).splitlines() or [type(error).__name__])[0]
            raise ImportError(f"{self.module} cannot be imported: {line}") from error


def _torchao(library: Any, model: nn.Module, recipe: str) -> tuple[Region, str]:
    on_cuda = next(model.parameters()).is_cuda
    config = library.Float8LinearConfig.from_recipe_name(recipe)
    if not on_cuda:
        config = dataclasses.replace(config, emulate=True)
    # its products take no other sizes
    library.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, _: _fits(module)
    )
    return nullcontext, "torchao" if on_cuda else "torchao emulated"


def _transformer_engine(library: Any, model: nn.Module, recipe: str) -> tuple[Region, str]:
    recipes = importlib.import_module("transformer_engine.common.recipe")
    made = getattr(recipes, recipe)()
    for module in list(model.modules()):
        for child, layer in list(module.named_children()):
            if type(layer) is nn.Linear and _fits(layer):
                setattr(module, child, _te_linear(library, layer))
    return lambda: library.fp8_autocast(enabled=True, fp8_recipe=made), "transformer_engine"


def _te_linear(library: Any, layer: nn.Linear) -> nn.Module:
    """Its linear layer with the same parameters' values."""
    made: nn.Module = library.Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        params_dtype=layer.weight.dtype,
        device=str(layer.weight.device),
    )
    made.load_state_dict(layer.state_dict(), strict=False)
    return made


def _fits(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not (
        module.in_features % _MULTIPLE or module.out_features % _MULTIPLE
    )


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "torchao": Peer(
            module="torchao.float8", recipes=("tensorwise", "rowwise"), prepare=_torchao
        ),
        "transformer_engine": Peer(
            module="transformer_engine.pytorch",
            recipes=("DelayedScaling", "Float8CurrentScaling"),
            prepare=_transformer_engine,
        ),
    }
)


def check_peers(names: tuple[str, ...]) -> tuple[str, ...]:
    """The names, if each is in `PEERS`.

    Raises: ValueError: One is not.
    """
    for name in names:
        if name not in PEERS:
            raise ValueError(f"peers: got {name!r}; must be one of {', '.join(PEERS)}")
    return names


@contextmanager
def joined(device: torch.device, dtype: torch.dtype | None, region: Region) -> Any:
    """A library's region inside torch's autocast to a base of 16 bits, if there is one."""
    with ExitStack() as stack:
        if dtype is not None:
            stack.enter_context(torch.autocast(device.type, dtype))
        stack.enter_context(region())
        yield
