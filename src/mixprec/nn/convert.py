"""Conversion of a model to a recipe, in place, and back: which layers, and why not the rest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from mixprec.formats import FloatFormat
from mixprec.gemm.api import EMULATED, check_impl, resolve_spec
from mixprec.nn.kinds import calling_of, converted_class, is_converted_class, plain_class
from mixprec.nn.layer import QuantizedLayer, device_of
from mixprec.nn.report import Report, ReportRow, Status
from mixprec.nn.selection import (
    NO_PARAMETERS,
    Recipes,
    Selection,
    bypassed_layers,
    check_include,
    check_patterns,
    last_layers,
    recipe_patterns,
)
from mixprec.nn.wrapping import is_wrapper, leave_out_of_broadcasts
from mixprec.recipes import OPERANDS, PRODUCTS, Recipe
from mixprec.rounding import SOURCE_FORMATS


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
    include: Iterable[str | type[nn.Module]] = (),
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    multiple_of: int | None = None,
    keep_last: int = 0,
    impl: str = "auto",
    seed: int = 0,
    cache_weights: bool = False,
) -> Report:
    """Let the layers of a model that multiply do so by a recipe, in place.

    Changes behaviour, not identity: the same module objects, parameters, hooks, buffers, names,
    ties, flags and ``state_dict`` keys. ``revert`` undoes it. Converting a converted model replaces
    its recipe and its selection; a layer that keeps its recipe keeps its state.

    The layers are linear and bilinear ones, convolutions, recurrent layers and cells and
    ``nn.MultiheadAttention`` (see ``nn.KINDS``), and modules whose own forward calls
    ``torch.nn.functional.grouped_mm`` or, with ``recipe.attention``,
    ``scaled_dot_product_attention``.

    Args:
        model: Any module; it may itself be such a layer, on any device (meta too).
        recipe: Name or value, or a mapping from name patterns to them: the first that matches wins,
            and layers that none matches are left alone.
        skip: Name patterns of layers to leave alone. A pattern is a glob over a module's full name
            (``*`` also spans dots); it also takes what lies inside the modules it matches.
        include: Subclasses of torch's layers, and modules whose attention or grouped products are
            called by functions of theirs, by name or class, to convert too.
        module_filter_fn: (module, name) -> whether to convert; asked for such layers only.
        multiple_of: Leave layers alone whose sizes are not multiples of it.
        keep_last: Keep the last so many layers in high precision: late layers are the sensitive
            ones.
        impl: ``auto`` or an implementation that every converted product with a quantised operand
            must be able to use.
        seed: Of the noise of stochastic rounding.
        cache_weights: Keep each quantised weight until the parameter's version changes, so that
            micro-batches of one optimizer step quantise it once; costs its codes' memory. Changes
            through ``.data`` and by fused optimizers raise no version: ``sync_scales`` after the
            step, which ``mixprec.attach`` calls, tells of them. Compiled code does without.

    Returns:
        A report: every module, what became of it, and why.

    Raises:
        ValueError: An unknown recipe, a pattern or class that matches nothing, an impl that cannot
            run here, a layer whose class was changed after conversion. Nothing is converted then.

    Warns:
        UserWarning: Nothing was converted although a recipe quantises; or the CPU flushes FP32
            subnormals to zero, which small scales need.
    """
    _check_arguments(model, skip, include, multiple_of, keep_last, seed)
    _check_classes(model)
    recipes, skip = recipe_patterns(recipe), tuple(skip)
    classes = tuple(entry if isinstance(entry, str) else entry.__name__ for entry in include)
    named = list(model.named_modules(remove_duplicate=False))
    names = [name for name, _ in named if name]
    check_patterns("skip", skip, names)
    check_patterns("recipe", (pattern for pattern, _ in recipes), names)
    check_include(classes, model)
    selection = Selection(
        recipes=recipes,
        skip=skip,
        include=classes,
        module_filter_fn=module_filter_fn,
        multiple_of=multiple_of,
        kept=last_layers(model, keep_last),
    )
    aliases: dict[int, list[str]] = {}
    for name, module in named:
        aliases.setdefault(id(module), []).append(name)
    decided = {id(module): selection.decide(module, aliases[id(module)]) for _, module in named}
    decided |= bypassed_layers(model, decided)
    decisions = {name: decided[id(module)] for name, module in named}
    impls = _resolved(named, decisions, check_impl(impl))
    rows = _convert(named, decisions, impls, (impl, seed, cache_weights))
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
    impls: Mapping[str, tuple[str, str]],
    settings: tuple[str, int, bool],
) -> tuple[ReportRow, ...]:
    rows = []
    first_names: dict[int, str] = {}
    index = -1
    owners = _parameter_owners(named)
    for name, module in named:
        decision = decisions[name]
        first = first_names.setdefault(id(module), name)
        if first == name:
            index += not is_wrapper(module)
        if isinstance(decision, Recipe):
            if first == name:
                _swap(module, decision, *settings, index=index)
                note = _tie_note(module, owners)
            else:
                note = f"the same module as {first}"
            impl, why = impls[name]
            reason = "; ".join(filter(None, (note, why)))
            rows.append(
                _row(name, module, "converted", decision, impl, reason, is_counted=first == name)
            )
            continue
        if isinstance(module, QuantizedLayer):
            _restore(module)
        if decision != NO_PARAMETERS or not any(True for _ in module.children()):
            rows.append(_row(name, module, "left", None, "", decision, is_counted=first == name))
    _call_layers(named, any(isinstance(decision, Recipe) for decision in decisions.values()))
    leave_out_of_broadcasts(named[0][1])
    return tuple(rows)


def _call_layers(named: list[tuple[str, nn.Module]], is_converted: bool) -> None:
    """Let modules that would pass converted layers by call them, or be what they were."""
    for _, module in named:
        if calling_of(module) is not None:
            module.__class__ = converted_class(module) if is_converted else plain_class(module)


def _row(
    name: str,
    module: nn.Module,
    status: Status,
    recipe: Recipe | None,
    impl: str,
    reason: str,
    is_counted: bool = True,
) -> ReportRow:
    row = ReportRow(
        name=name,
        type=plain_class(module).__name__,
        status=status,
        recipe="" if recipe is None else str(recipe),
        impl=impl,
        reason=reason,
    )
    dtype = _weight_dtype(module)
    if recipe is None and not isinstance(module, nn.Linear):
        return row
    formats = _formats(dtype, recipe)
    words = [str(fmt or dtype) for fmt in formats]
    pairs = zip(words[::2], words[1::2], strict=True)
    count = module.in_features * module.out_features if _has_sizes(module) else 0
    return replace(
        row,
        formats=tuple(a if a == b else f"{a} x {b}" for a, b in pairs) if is_counted else (),
        multiplications=count,
        bits=", ".join(str(width) for width in sorted({fmt.bits for fmt in formats if fmt})),
    )


def _has_sizes(module: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear) and not is_lazy(module.weight)


def _weight_dtype(module: nn.Module) -> torch.dtype:
    """The type of a layer's weights, without computing one that is parametrised."""
    return next((p.dtype for p in module.parameters()), torch.get_default_dtype())


def _formats(dtype: torch.dtype, recipe: Recipe | None) -> list[FloatFormat | None]:
    """Of the six operands; None where the weight has a type that is no format."""
    own = SOURCE_FORMATS.get(dtype)
    if recipe is None:
        return [own] * len(OPERANDS)
    exact = SOURCE_FORMATS[torch.float64]
    gemms = (getattr(recipe, product) for product in PRODUCTS)
    high = [exact if gemm.is_exact else own for gemm in gemms for _ in "ab"]
    return [spec.format if spec else other for spec, other in zip(recipe.specs, high, strict=True)]


def _resolved(
    named: list[tuple[str, nn.Module]], decisions: Mapping[str, Recipe | str], impl: str
) -> dict[str, tuple[str, str]]:
    """For each layer to convert, what runs its products, and what a native path has to say."""
    found: dict[tuple[Recipe, torch.device, torch.dtype], tuple[str, str]] = {}
    impls = {}
    for name, module in named:
        recipe = decisions[name]
        if isinstance(recipe, Recipe):
            device = device_of(module) or torch.device("cpu")
            key = (recipe, device, _weight_dtype(module))
            if key not in found:
                found[key] = _resolve_recipe(*key, impl)
            impls[name] = found[key]
    return impls


def _resolve_recipe(
    recipe: Recipe, device: torch.device, dtype: torch.dtype, impl: str
) -> tuple[str, str]:
    """Names and reasons, each once; the reason of what is emulated everywhere else is no news."""
    choices = [
        resolve_spec(gemm, device, dtype, impl)
        for gemm in (recipe.output, recipe.grad_input, recipe.grad_weight)
        if not gemm.is_plain
    ]
    names = dict.fromkeys(name for name, _ in choices)
    reasons = dict.fromkeys(reason for name, reason in choices if name != EMULATED)
    return "/".join(names), "; ".join(reasons)


def _parameter_owners(named: list[tuple[str, nn.Module]]) -> dict[int, dict[int, str]]:
    """For each parameter, the modules that hold it."""
    owners: dict[int, dict[int, str]] = {}
    for name, module in named:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), {}).setdefault(id(module), name)
    return owners


def _tie_note(module: nn.Module, owners: Mapping[int, Mapping[int, str]]) -> str:
    own = list(module.parameters(recurse=False))
    others = dict.fromkeys(
        name
        for parameter in own
        for key, name in owners.get(id(parameter), {}).items()
        if key != id(module)
    )
    return f"weight shared with {', '.join(others)}" if others else ""


def _swap(
    module: nn.Module, recipe: Recipe, impl: str, seed: int, cache_weights: bool, index: int
) -> None:
    if isinstance(module, QuantizedLayer) and module.recipe == recipe:
        module.impl, module.noise_seed, module.cache_weights = impl, seed, cache_weights
        vars(module).pop("sharding", None)
        module.forget_weight()
        return
    if not isinstance(module, QuantizedLayer):
        module.__class__ = converted_class(module)
    assert isinstance(module, QuantizedLayer)
    module.start_numerics(recipe, impl, seed, cache_weights, index)


def _restore(module: nn.Module) -> None:
    original = plain_class(module)
    if isinstance(module, QuantizedLayer):
        module.stop_numerics()
    module.__class__ = original


def _check_classes(model: nn.Module) -> None:
    """Refuse before anything is changed what cannot be changed back."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer) and not is_converted_class(type(module)):
            raise ValueError(
                f"model: got layer {name or '(model)'} of class {type(module).__name__}; its class "
                "was changed after conversion; convert and revert before fully_shard is called for "
                "the layer itself; if it was parametrised, undo that first"
            )


def revert(model: nn.Module) -> None:
    """Turn every converted layer of a model back into what it was; numerics state is dropped.

    Args:
        model: Any module; one without converted layers is left as it is.

    Raises:
        ValueError: A layer's class was changed after conversion; nothing is reverted then.
    """
    _check_classes(model)
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            _restore(module)
    _call_layers(list(model.named_modules()), is_converted=False)
    leave_out_of_broadcasts(model)
