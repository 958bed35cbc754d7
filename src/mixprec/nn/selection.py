"""Which layers a conversion takes, and the reason that each of the others gets."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from mixprec.nn.kinds import is_kind_itself, kind_of, layer_class, plain_class
from mixprec.nn.layer import NUMERICS_ATTRIBUTES, QuantizedLayer
from mixprec.recipes import Recipe, get_recipe

NO_PARAMETERS = "no parameters"

Recipes = str | Recipe | Mapping[str, str | Recipe]


def _matches(pattern: str, name: str) -> bool:
    """Whether a glob pattern matches a module's name or that of a module it lies in."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The arguments of ``convert`` that decide which layers it takes."""

    recipes: tuple[tuple[str, Recipe], ...]
    skip: tuple[str, ...]
    include: tuple[str, ...]
    module_filter_fn: Callable[[nn.Module, str], bool] | None
    multiple_of: int | None
    kept: frozenset[int]

    def decide(self, module: nn.Module, names: Sequence[str]) -> Recipe | str:
        """The recipe for a module known by these names, or the reason to leave it alone."""
        kind = layer_class(module, self.include)
        if kind is None:
            return _why_no_layer(module)
        reason = _why_no_swap(module, kind, self.include)
        if reason is not None:
            return reason
        for pattern in self.skip:
            if any(_matches(pattern, name) for name in names):
                return f"skip={pattern!r}"
        if self.module_filter_fn is not None:
            if not all(self.module_filter_fn(module, name) for name in names):
                return "module_filter_fn said no"
        sizes = kind.sizes(module)
        if self.multiple_of and any(size % self.multiple_of for size in sizes):
            words = " and ".join(map(str, sizes))
            return f"sizes {words} are not multiples of {self.multiple_of}"
        if id(module) in self.kept:
            return "among the last layers (keep_last)"
        for pattern, recipe in self.recipes:
            if any(_matches(pattern, name) for name in names):
                if recipe.is_high_precision:
                    return f"recipe {recipe} quantises nothing"
                return kind.why_not(module, recipe) or recipe
        return "no pattern of the recipe mapping matches"


def _why_no_layer(module: nn.Module) -> str:
    if any(True for _ in module.parameters(recurse=False)):
        return f"{plain_class(module).__name__} is not covered"
    return NO_PARAMETERS


def _why_no_swap(
    module: nn.Module, converted: type[QuantizedLayer], include: tuple[str, ...]
) -> str | None:
    """Why a layer cannot take another class, or None."""
    if "forward" in vars(module):
        return "its forward was replaced on the object, so a recipe would not reach it"
    kind, own = kind_of(module), plain_class(module)
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        return "its sizes are not known before its first forward; convert it after that"
    taken = _taken_names(module, converted)
    if taken:
        return f"it has attributes of its own named {', '.join(sorted(taken))}"
    if kind is None or is_kind_itself(module):
        return None
    if own.__name__ not in include:
        return f"a subclass of {kind.__name__}; pass include=('{own.__name__}',) to convert it"
    if not _reaches(own, kind):
        return f"its forward does not call nn.{kind.__name__}'s, so a recipe would not reach it"
    return None


def _taken_names(module: nn.Module, converted: type[nn.Module]) -> set[str]:
    """Names that conversion adds and that a user's class or object has already."""
    # mypy takes a class for its instances, whose hash is another
    kinds: list[Any] = [converted, kind_of(module) or nn.Module, plain_class(module)]
    added = _added_names(*kinds[:2])
    taken = added & _class_names(kinds[2])
    if isinstance(module, QuantizedLayer):
        return set(taken)
    held = (vars(module), module._parameters, module._buffers, module._modules)
    return {*taken, *(name for names in held for name in names if name in added)}


# a model has thousands of layers and few classes, and ``dir`` takes a tenth of a millisecond
@cache
def _added_names(converted: type[nn.Module], kind: type[nn.Module]) -> frozenset[str]:
    return frozenset({*dir(converted), *NUMERICS_ATTRIBUTES} - set(dir(kind)))


@cache
def _class_names(own: type[nn.Module]) -> frozenset[str]:
    return frozenset(dir(own))


def _reaches(own: type[nn.Module], kind: type[nn.Module]) -> bool:
    """Whether every forward between a subclass and torch's own layer calls the next one."""
    for ancestor in own.__mro__[: own.__mro__.index(kind)]:
        forward = vars(ancestor).get("forward")
        if forward is not None:
            code = getattr(forward, "__code__", None)
            if code is None or not {"super", "forward"} <= set(code.co_names):
                return False
    return True


def bypassed_layers(model: nn.Module, decisions: Mapping[int, Recipe | str]) -> dict[int, str]:
    """Layers that no recipe can reach: the module around them multiplies by their weight."""
    found = {}
    for module in model.modules():
        is_left = not isinstance(decisions[id(module)], Recipe)
        if isinstance(module, nn.MultiheadAttention) and is_left:
            found[id(module.out_proj)] = (
                "nn.MultiheadAttention, which is left, multiplies by its weight without calling it"
            )
    return found


def last_layers(model: nn.Module, count: int) -> frozenset[int]:
    """The last so many layers that multiply."""
    layers = [module for module in model.modules() if kind_of(module) is not None]
    return frozenset(id(module) for module in (layers[-count:] if count else []))


def recipe_patterns(recipe: Recipes) -> tuple[tuple[str, Recipe], ...]:
    if isinstance(recipe, Mapping):
        if not recipe:
            raise ValueError(
                "recipe: got {}; it must name a recipe; pass for example {'*': 'fp32'}"
            )
        late = list(recipe)[list(recipe).index("*") + 1 :] if "*" in recipe else []
        if late:
            raise ValueError(
                f"recipe: got patterns {', '.join(late)} after '*'; the first match wins, so they "
                "never do; put '*' last"
            )
        return tuple((pattern, get_recipe(entry)) for pattern, entry in recipe.items())
    return (("*", get_recipe(recipe)),)


def check_patterns(argument: str, patterns: Iterable[str], names: list[str]) -> None:
    for pattern in patterns:
        if pattern != "*" and not any(_matches(pattern, name) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
            hint = f"near names: {', '.join(near)}" if near else f"names: {', '.join(names[:8])}"
            raise ValueError(f"{argument}: got pattern {pattern!r}; it matches no module; {hint}")


def check_include(include: tuple[str, ...], model: nn.Module) -> None:
    kinds = sorted({plain_class(module).__name__ for module in model.modules()})
    for name in include:
        if name not in kinds:
            raise ValueError(
                f"include: got {name!r}; the model has no such module; it has {', '.join(kinds)}"
            )
