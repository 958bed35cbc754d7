"""Which layers a conversion takes, and the reason that each of the others gets."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import is_lazy

from mixprec.nn.linear import NUMERICS_ATTRIBUTES, QuantizedLinear, plain_class
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
    read_by_weight: Mapping[int, str]

    def decide(self, module: nn.Module, names: Sequence[str]) -> Recipe | str:
        """The recipe for a module known by these names, or the reason to leave it alone."""
        if not isinstance(module, nn.Linear):
            return _why_no_linear(module)
        if id(module) in self.read_by_weight:
            return self.read_by_weight[id(module)]
        reason = _why_no_swap(module, self.include)
        if reason is not None:
            return reason
        for pattern in self.skip:
            if any(_matches(pattern, name) for name in names):
                return f"skip={pattern!r}"
        if self.module_filter_fn is not None:
            if not all(self.module_filter_fn(module, name) for name in names):
                return "module_filter_fn said no"
        sizes = (module.in_features, module.out_features)
        if self.multiple_of and any(size % self.multiple_of for size in sizes):
            return f"sizes {sizes[0]} and {sizes[1]} are not multiples of {self.multiple_of}"
        if id(module) in self.kept:
            return "among the last layers (keep_last)"
        for pattern, recipe in self.recipes:
            if any(_matches(pattern, name) for name in names):
                return f"recipe {recipe} quantises nothing" if recipe.is_high_precision else recipe
        return "no pattern of the recipe mapping matches"


def _why_no_linear(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "its input projections are bare parameters, not covered"
    if any(True for _ in module.parameters(recurse=False)):
        return f"{type(module).__name__} is not covered"
    return NO_PARAMETERS


def _why_no_swap(module: nn.Linear, include: tuple[str, ...]) -> str | None:
    """Why a linear layer cannot take another class, or None."""
    if "forward" in vars(module):
        return "its forward was replaced on the object, so a recipe would not reach it"
    kind = plain_class(module)
    if kind is nn.Linear:
        return None
    if kind.__name__ not in include:
        return f"a subclass of Linear; pass include=('{kind.__name__}',) to convert it"
    if is_lazy(module.weight):
        return "its sizes are not known before its first forward; convert it after that"
    taken = sorted(
        name for name in NUMERICS_ATTRIBUTES if name in dir(kind) or name in vars(module)
    )
    if taken and not isinstance(module, QuantizedLinear):
        return f"it has attributes of its own named {', '.join(taken)}"
    if not _reaches_linear(kind):
        return "its forward does not call nn.Linear's, so a recipe would not reach it"
    return None


def _reaches_linear(kind: type[nn.Linear]) -> bool:
    """Whether every forward between a subclass and nn.Linear calls the next one."""
    for ancestor in kind.__mro__[: kind.__mro__.index(nn.Linear)]:
        forward = vars(ancestor).get("forward")
        if forward is not None:
            code = getattr(forward, "__code__", None)
            if code is None or not {"super", "forward"} <= set(code.co_names):
                return False
    return True


def read_by_weight_of(model: nn.Module) -> dict[int, str]:
    """Layers whose forward is bypassed: others take their weight and multiply themselves."""
    found = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            found[id(module.out_proj)] = (
                "nn.MultiheadAttention multiplies by its weight without calling it"
            )
        elif isinstance(module, nn.TransformerEncoderLayer):
            for layer in (module.linear1, module.linear2):
                found[id(layer)] = (
                    "the eval fast path of nn.TransformerEncoderLayer bypasses its forward"
                )
    return found


def last_linears(model: nn.Module, count: int) -> frozenset[int]:
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return frozenset(id(module) for module in (linears[-count:] if count else []))


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
    kinds = sorted(
        {
            plain_class(module).__name__
            for module in model.modules()
            if isinstance(module, nn.Linear)
        }
    )
    for name in include:
        if name not in kinds:
            raise ValueError(
                f"include: got {name!r}; the model has no such Linear; it has {', '.join(kinds)}"
            )
