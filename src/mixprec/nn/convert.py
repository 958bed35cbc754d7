"""Conversion of a model to a recipe, in place, and back: which layers, and why not the rest."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mixprec.gemm.api import check_impl, resolve_spec
from mixprec.nn.linear import (
    NUMERICS_ATTRIBUTES,
    QuantizedLinear,
    is_converted_class,
    plain_class,
    quantized_class,
)
from mixprec.nn.report import Report, ReportRow, Status
from mixprec.recipes import Recipe, get_recipe

_NO_PARAMETERS = "no parameters"

Recipes = str | Recipe | Mapping[str, str | Recipe]


def _matches(pattern: str, name: str) -> bool:
    """Whether a glob pattern matches a module's name or that of a module it lies in."""
    parts = name.split(".")
    return any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Selection:
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
    return _NO_PARAMETERS


def _why_no_swap(module: nn.Linear, include: tuple[str, ...]) -> str | None:
    """Why a linear layer cannot take another class, or None."""
    if isinstance(module, QuantizedLinear) and not is_converted_class(type(module)):
        return "its class was changed after conversion; undo that first"
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


def _read_by_weight(model: nn.Module) -> dict[int, str]:
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


def _last_linears(model: nn.Module, count: int) -> frozenset[int]:
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return frozenset(id(module) for module in (linears[-count:] if count else []))


def _recipes(recipe: Recipes) -> tuple[tuple[str, Recipe], ...]:
    if isinstance(recipe, Mapping):
        late = list(recipe)[list(recipe).index("*") + 1 :] if "*" in recipe else []
        if late:
            raise ValueError(
                f"recipe: got patterns {', '.join(late)} after '*'; the first match wins, so they "
                "never do; put '*' last"
            )
        return tuple((pattern, get_recipe(entry)) for pattern, entry in recipe.items())
    return (("*", get_recipe(recipe)),)


def _check_patterns(argument: str, patterns: Iterable[str], names: list[str]) -> None:
    for pattern in patterns:
        if pattern != "*" and not any(_matches(pattern, name) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
            hint = f"near names: {', '.join(near)}" if near else f"names: {', '.join(names[:8])}"
            raise ValueError(f"{argument}: got pattern {pattern!r}; it matches no module; {hint}")


def _check_include(include: tuple[str, ...], model: nn.Module) -> None:
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


def _check_arguments(
    model: object,
    skip: object,
    include: object,
    multiple_of: object,
    keep_last: object,
    seed: object,
) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; must be an nn.Module; pass the model")
    for name, patterns in (("skip", skip), ("include", include)):
        if isinstance(patterns, str):
            raise TypeError(
                f"{name}: got {patterns!r}; must be several names; pass ({patterns!r},)"
            )
    for name, value, least, usual in (
        ("multiple_of", 16 if multiple_of is None else multiple_of, 1, 16),
        ("keep_last", keep_last, 0, 0),
        ("seed", seed, 0, 0),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name}: got {value!r}; must be at least {least}; use {usual}")


def convert(
    model: nn.Module,
    recipe: Recipes,
    *,
    skip: Iterable[str] = (),
    include: Iterable[str | type[nn.Linear]] = (),
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    multiple_of: int | None = None,
    keep_last: int = 0,
    impl: str = "auto",
    seed: int = 0,
) -> Report:
    """Let the linear layers of a model multiply by a recipe, in place.

    Changes behaviour, not identity: the same module objects, parameters, hooks, buffers, names,
    ties, flags and ``state_dict`` keys. ``revert`` undoes it. Converting a converted model replaces
    its recipe and its selection; a layer that keeps its recipe keeps its state.

    Args:
        model: Any module; it may itself be an ``nn.Linear``, on any device (meta too).
        recipe: Name or value, or a mapping from name patterns to them: the first that matches wins,
            and layers that none matches are left alone.
        skip: Name patterns of layers to leave alone. A pattern is a glob over a module's full name
            (``*`` also spans dots); it also takes what lies inside the modules it matches.
        include: Subclasses of ``nn.Linear``, by name or class, to convert too.
        module_filter_fn: (module, name) -> whether to convert; asked for linear layers only.
        multiple_of: Leave layers alone whose sizes are not multiples of it.
        keep_last: Keep the last so many linear layers in high precision: late layers are the
            sensitive ones.
        impl: ``auto`` or an implementation that every converted product must be able to use.
        seed: Of the noise of stochastic rounding.

    Returns:
        A report: every module, what became of it, and why.

    Raises:
        ValueError: An unknown recipe, a pattern or class that matches nothing, an impl that cannot
            run here. Nothing is converted then.

    Warns:
        UserWarning: Nothing was converted although a recipe quantises; or the CPU flushes FP32
            subnormals to zero, which small scales need.
    """
    _check_arguments(model, skip, include, multiple_of, keep_last, seed)
    recipes, skip = _recipes(recipe), tuple(skip)
    classes = tuple(entry if isinstance(entry, str) else entry.__name__ for entry in include)
    named = list(model.named_modules(remove_duplicate=False))
    names = [name for name, _ in named if name]
    _check_patterns("skip", skip, names)
    _check_patterns("recipe", (pattern for pattern, _ in recipes), names)
    _check_include(classes, model)
    selection = _Selection(
        recipes=recipes,
        skip=skip,
        include=classes,
        module_filter_fn=module_filter_fn,
        multiple_of=multiple_of,
        kept=_last_linears(model, keep_last),
        read_by_weight=_read_by_weight(model),
    )
    aliases: dict[int, list[str]] = {}
    for name, module in named:
        aliases.setdefault(id(module), []).append(name)
    decisions = {name: selection.decide(module, aliases[id(module)]) for name, module in named}
    chosen = {entry for entry in decisions.values() if isinstance(entry, Recipe)}
    impls = {entry: _resolved(entry, model, check_impl(impl)) for entry in chosen}
    rows = _convert(named, decisions, impls, (impl, seed))
    asked = any(not entry.is_high_precision for _, entry in recipes)
    report = Report(rows=rows, asked=asked)
    if asked and not report.converted:
        warnings.warn("convert: nothing was converted; print the report for why", stacklevel=2)
    subnormal = torch.full((), 2.0**-127, dtype=torch.float32, device="cpu")
    if report.converted and float(subnormal * 1.0) == 0.0:
        warnings.warn(
            "convert: FP32 subnormals are flushed to zero; small scales need them; call "
            "torch.set_flush_denormal(False)",
            stacklevel=2,
        )
    return report


def _convert(
    named: list[tuple[str, nn.Module]],
    decisions: Mapping[str, Recipe | str],
    impls: Mapping[Recipe, str],
    settings: tuple[str, int],
) -> tuple[ReportRow, ...]:
    rows = []
    first_names: dict[int, str] = {}
    owners = _parameter_owners(named)
    for name, module in named:
        decision = decisions[name]
        first = first_names.setdefault(id(module), name)
        if isinstance(decision, Recipe):
            assert isinstance(module, nn.Linear)
            if first == name:
                _swap(module, decision, *settings, index=len(first_names) - 1)
                note = _tie_note(module, owners)
            else:
                note = f"the same module as {first}"
            rows.append(_row(name, module, "converted", decision, impls[decision], note))
            continue
        if isinstance(module, QuantizedLinear):
            _restore(module)
        if decision != _NO_PARAMETERS or not any(True for _ in module.children()):
            rows.append(_row(name, module, "left", None, "", decision))
    return tuple(rows)


def _row(
    name: str, module: nn.Module, status: Status, recipe: Recipe | None, impl: str, reason: str
) -> ReportRow:
    return ReportRow(
        name=name,
        type=plain_class(module).__name__,
        status=status,
        recipe="" if recipe is None else str(recipe),
        impl=impl,
        reason=reason,
    )


def _resolved(recipe: Recipe, model: nn.Module, impl: str) -> str:
    """The implementations of the three products, in one word where they agree."""
    parameter = next(iter(model.parameters()), torch.empty(0))
    names = [
        resolve_spec(gemm, parameter.device, parameter.dtype, impl)[0]
        for gemm in (recipe.output, recipe.grad_input, recipe.grad_weight)
        if gemm.a is not None or gemm.b is not None
    ]
    return "/".join(dict.fromkeys(names))


def _parameter_owners(named: list[tuple[str, nn.Module]]) -> dict[int, dict[int, str]]:
    """For each parameter, the modules that hold it."""
    owners: dict[int, dict[int, str]] = {}
    for name, module in named:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), {}).setdefault(id(module), name)
    return owners


def _tie_note(module: nn.Linear, owners: Mapping[int, Mapping[int, str]]) -> str:
    holders = owners.get(id(module.weight), {})
    others = [name for key, name in holders.items() if key != id(module)]
    return f"weight shared with {', '.join(others)}" if others else ""


def _swap(module: nn.Linear, recipe: Recipe, impl: str, seed: int, index: int) -> None:
    if isinstance(module, QuantizedLinear) and module.recipe == recipe:
        module.impl, module.noise_seed = impl, seed
        return
    if not isinstance(module, QuantizedLinear):
        module.__class__ = quantized_class(type(module))
    assert isinstance(module, QuantizedLinear)
    module.start_numerics(recipe, impl, seed, index)


def _restore(module: QuantizedLinear) -> None:
    if not is_converted_class(type(module)):
        raise ValueError(
            f"model: got a layer of class {type(module).__name__}; its class was changed after "
            "conversion, for instance by a parametrisation; undo that first"
        )
    module.stop_numerics()
    module.__class__ = plain_class(module)


def revert(model: nn.Module) -> None:
    """Turn every converted layer of a model back into what it was; numerics state is dropped.

    Args:
        model: Any module; one without converted layers is left as it is.
    """
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            _restore(module)
