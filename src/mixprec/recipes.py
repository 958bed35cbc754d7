"""Recipes as data: how each operand of the three products of a linear layer is quantised.

    output      = gemm(x[M, K],   w[N, K])     contraction K
    grad_input  = gemm(g[M, N],   w.T[K, N])   contraction N
    grad_weight = gemm(g.T[N, M], x.T[K, M])   contraction M

Sources: OCP OFP8 v1.0 (which format serves which tensor); torchao (tensorwise, rowwise and
rowwise_with_gw_hp by their rules); NVIDIA Transformer Engine (delayed scaling).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from mixprec.formats import FORMATS, FloatFormat, get_format, lookup
from mixprec.gemm.api import GemmSpec
from mixprec.quant_spec import UNSCALED, QuantSpec, as_spec

PRODUCTS = ("output", "grad_input", "grad_weight")
OPERANDS = tuple(f"{product}.{side}" for product in PRODUCTS for side in ("a", "b"))
"""Paths of the six operands in a recipe; an operand's place here is its position."""
_HIGH_PRECISION = GemmSpec()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the products of a layer do; six operands, None being high precision.

    Args:
        output: x and w, for y = x w^T.
        grad_input: g and w, for the gradient of x.
        grad_weight: g and x, for the gradient of w.
        name: The name in ``RECIPES``; empty for a custom recipe.
        description: One line for tables.
    """

    output: GemmSpec = _HIGH_PRECISION
    grad_input: GemmSpec = _HIGH_PRECISION
    grad_weight: GemmSpec = _HIGH_PRECISION
    name: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        for product in PRODUCTS:
            gemm = getattr(self, product)
            if not isinstance(gemm, GemmSpec):
                raise TypeError(
                    f"{product}: got {type(gemm).__name__}; must be a GemmSpec; pass "
                    "GemmSpec(a=..., b=...)"
                )

    def __str__(self) -> str:
        return self.name or "custom"

    @property
    def specs(self) -> tuple[QuantSpec | None, ...]:
        """The six operands: output a, b, grad_input a, b, grad_weight a, b."""
        gemms = (self.output, self.grad_input, self.grad_weight)
        return tuple(spec for gemm in gemms for spec in (gemm.a, gemm.b))

    @property
    def is_high_precision(self) -> bool:
        """Whether no operand is quantised, so that a layer is best left as it is."""
        return all(spec is None for spec in self.specs)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain values, for TOML and JSON; formats of the table by name."""
        return _plain(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Recipe:
        """A recipe from plain values; ``base`` names the recipe that they change.

        Args:
            data: ``to_dict``'s form, or part of it: {"base": "fp8_tensorwise", "output": {"a":
                {"format": {"exponent": 4, "mantissa": 2}}}}. An operand "none" is high precision.

        Raises:
            ValueError: An unknown key (the nearest is named) or a value that a field refuses.
        """
        if not isinstance(data, Mapping):
            raise TypeError(
                f"recipe: got {type(data).__name__}; must be a table; pass a dict, or a name to "
                "get_recipe"
            )
        values = dict(data)
        base = get_recipe(values.pop("base")) if "base" in values else Recipe()
        if not values:
            return base
        _check_keys("recipe", values, [field.name for field in dataclasses.fields(Recipe)])
        changes: dict[str, Any] = {"name": "", "description": ""}
        for key, value in values.items():
            changes[key] = (
                _gemm_from(key, value, getattr(base, key)) if key in PRODUCTS else str(value)
            )
        recipe = replace(base, **changes)
        if RECIPES.get(recipe.name, recipe).specs != recipe.specs:
            raise ValueError(
                f"name: got {recipe.name!r}; that name has another definition; choose another"
            )
        return recipe


def operands(recipe: Recipe) -> dict[str, QuantSpec | None]:
    """The six operands by their path, ``output.a`` to ``grad_weight.b``."""
    return dict(zip(OPERANDS, recipe.specs, strict=True))


def _plain(value: Any) -> Any:
    if isinstance(value, FloatFormat) and FORMATS.get(value.name) == value:
        return value.name
    if dataclasses.is_dataclass(value):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {name: "none" if entry is None else entry for name, entry in fields.items()}
    return list(value) if isinstance(value, tuple) else value


def _check_keys(where: str, values: Mapping[str, Any], known: list[str]) -> None:
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            raise ValueError(f"{where}: got unknown key {key!r}; {hint}")


def _gemm_from(where: str, value: Any, base: GemmSpec) -> GemmSpec:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: got {value!r}; must be a table with a and b; write {where}.a")
    _check_keys(where, value, ["a", "b"])
    changes = {
        side: _spec_from(f"{where}.{side}", entry, getattr(base, side))
        for side, entry in value.items()
    }
    return replace(base, **changes)


def _spec_from(where: str, value: Any, base: QuantSpec | None) -> QuantSpec | None:
    if value is None or value == "none":
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: got {value!r}; must be a table or 'none'; write {where}.format")
    _check_keys(where, value, [field.name for field in dataclasses.fields(QuantSpec)])
    changes = dict(value)
    if "format" in changes:
        changes["format"] = _format_from(f"{where}.format", changes["format"])
    elif base is None:
        raise ValueError(f"{where}: got no format; an operand that is quantised needs one; add it")
    if base is None:
        changes.setdefault("scale_rule", as_spec(changes["format"]).scale_rule)
    try:
        if isinstance(changes.get("block"), list):
            changes["block"] = tuple(changes["block"])
        return replace(base, **changes) if base is not None else QuantSpec(**changes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}.{error}") from error


def _format_from(where: str, value: Any) -> FloatFormat:
    if not isinstance(value, Mapping):
        try:
            return get_format(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
    _check_keys(where, value, [field.name for field in dataclasses.fields(FloatFormat)])
    for width in ("exponent", "mantissa"):
        if width not in value:
            raise ValueError(
                f"{where}: got no {width}; a format has both widths; add {width} = ..."
            )
    try:
        fmt = FloatFormat(**value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}.{error}") from error
    if FORMATS.get(fmt.name, fmt) != fmt:
        raise ValueError(
            f"{where}.name: got {fmt.name!r}; that name has another definition; choose another"
        )
    return fmt


def _products(
    name: str, description: str, forward: QuantSpec, gradient: QuantSpec | None = None
) -> Recipe:
    """x and w quantised by one spec, g by the other, in all three products."""
    gradient = gradient or forward
    return Recipe(
        name=name,
        description=description,
        output=GemmSpec(a=forward, b=forward),
        grad_input=GemmSpec(a=gradient, b=forward),
        grad_weight=GemmSpec(a=gradient, b=forward),
    )


_E4M3, _E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]
_HISTORY = 16
_ROW = QuantSpec(format=_E4M3, block=(1, -1), scale_rule="pow2")
_ROWWISE = _products("fp8_rowwise", "e4m3 everywhere, power-of-two scale a row", _ROW)

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            Recipe(name="fp32", description="native single precision, nothing quantised"),
            _products(
                "tf32",
                "operands rounded to a 10-bit mantissa, FP32 accumulation",
                QuantSpec(format=FORMATS["tf32"], scale_rule=UNSCALED),
            ),
            _products(
                "fp8_tensorwise",
                "e4m3 forward, e5m2 gradients, one dynamic scale a tensor",
                QuantSpec(format=_E4M3),
                QuantSpec(format=_E5M2),
            ),
            _products(
                "fp8_delayed",
                "as tensorwise, scale from a history of maxima",
                QuantSpec(format=_E4M3, amax_history_len=_HISTORY),
                QuantSpec(format=_E5M2, amax_history_len=_HISTORY),
            ),
            _ROWWISE,
            replace(
                _ROWWISE,
                name="fp8_rowwise_hp_grad_weight",
                description="as rowwise, weight gradient in high precision",
                grad_input=GemmSpec(a=_ROW, b=replace(_ROW, block=(-1, -1))),
                grad_weight=_HIGH_PRECISION,
            ),
        )
    }
)

RECIPE_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "float32": "fp32",
        "tfloat32": "tf32",
        "tensorwise": "fp8_tensorwise",
        "delayed": "fp8_delayed",
        "rowwise": "fp8_rowwise",
        "rowwise_with_gw_hp": "fp8_rowwise_hp_grad_weight",
        "rowwise_hp_grad_weight": "fp8_rowwise_hp_grad_weight",
    }
)


def get_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe by name, alias or value.

    Raises:
        ValueError: An unknown name; the message lists near ones.
        TypeError: Neither a name nor a ``Recipe``.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(
            f"recipe: got {type(recipe).__name__}; must be a name or a Recipe; pass for example "
            "'fp8_tensorwise'"
        )
    return lookup("recipe", recipe, RECIPES, RECIPE_ALIASES)
