"""Recipes as data: how each operand of the three products of a linear layer is quantised.

    output      = gemm(x[M, K],   w[N, K])     contraction K
    grad_input  = gemm(g[M, N],   w.T[K, N])   contraction N
    grad_weight = gemm(g.T[N, M], x.T[K, M])   contraction M

and what the rest of a training step does: the type of all other operations, of the parameters and
of the losses' scale.

Sources: OCP OFP8 v1.0 (which format serves which tensor); torchao (tensorwise, rowwise,
rowwise_with_gw_hp); Transformer Engine (delayed scaling); torch.amp and NVIDIA apex (16 bits).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

from mixprec.formats import FORMATS, lookup
from mixprec.gemm.accumulation import EXACT, FP32, MODELS, check_accumulate
from mixprec.gemm.api import GemmSpec
from mixprec.quant_spec import UNSCALED, QuantSpec
from mixprec.recipe_fields import DYNAMIC, PRODUCTS, Base, Update, check_recipe
from mixprec.recipe_fields import NARROW as NARROW
from mixprec.serialization import check_keys, gemm_from, to_plain

OPERANDS = tuple(f"{product}.{side}" for product in PRODUCTS for side in ("a", "b"))
"""Paths of the six operands in a recipe; an operand's place here is its position."""
_HIGH_PRECISION = GemmSpec()
_EXACT = GemmSpec(accumulate=EXACT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the products of a layer do, and what a training step does around them.

    Args:
        output: x and w, for y = x w^T; None for an operand is high precision.
        grad_input: g and w, for the gradient of x.
        grad_weight: g and x, for the gradient of w.
        attention: Scaled dot-product attention in converted modules makes its products by it too.
        base: Type in which everything outside converted layers runs: of bf16 and fp16 the policy
            of operations decides (numerics.md, section 6).
        parameters: Type in which the parameters are held.
        keep_batchnorm_fp32: Batch normalisations keep float32 parameters.
        update: Of parameters of 16 bits: from float32 ``masters``, rounded ``stochastic``ally,
            ``compensated`` (what rounding drops is kept), or ``plain``.
        loss_scale: ``dynamic``, a constant, or None for none.
        name: The name in ``RECIPES``; empty for a custom recipe.
        description: One line for tables.
    """

    output: GemmSpec = _HIGH_PRECISION
    grad_input: GemmSpec = _HIGH_PRECISION
    grad_weight: GemmSpec = _HIGH_PRECISION
    attention: bool = False
    base: Base = "fp32"
    parameters: Base = "fp32"
    keep_batchnorm_fp32: bool = False
    update: Update = "plain"
    loss_scale: Literal["dynamic"] | float | None = None
    name: str = ""
    description: str = ""

    def __post_init__(self) -> None:
        check_recipe(self)

    def __str__(self) -> str:
        name = self.name or "custom"
        default = _NAMED[name].base if name in _NAMED else "fp32"
        on = "" if self.base == default else f" on {self.base}"
        return f"{name}{on}{' with attention' if self.attention else ''}"

    @property
    def specs(self) -> tuple[QuantSpec | None, ...]:
        """The six operands: output a, b, grad_input a, b, grad_weight a, b."""
        gemms = (self.output, self.grad_input, self.grad_weight)
        return tuple(spec for gemm in gemms for spec in (gemm.a, gemm.b))

    @property
    def is_high_precision(self) -> bool:
        """Whether every product is torch's own, so that a layer is best left as it is."""
        return all(getattr(self, product).is_plain for product in PRODUCTS)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain values, for TOML and JSON; formats of the table by name."""
        return to_plain(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Recipe:
        """A recipe from plain values; ``variant_of`` names the recipe that they change.

        Args:
            data: ``to_dict``'s form, or part of it: {"variant_of": "fp8_tensorwise", "output":
                {"a": {"format": {"exponent": 4, "mantissa": 2}}}}. An operand "none" is high
                precision. A variant in base and loss scale alone keeps the name.

        Raises:
            ValueError: An unknown key (the nearest is named) or a value that a field refuses.
        """
        if not isinstance(data, Mapping):
            raise TypeError(
                f"recipe: got {type(data).__name__}; must be a table; pass a dict, or a name to "
                "get_recipe"
            )
        values = dict(data)
        start = get_recipe(values.pop("variant_of")) if "variant_of" in values else Recipe()
        if not values:
            return start
        known = [field.name for field in dataclasses.fields(Recipe)]
        check_keys("recipe", values, ["variant_of", *known])
        changes: dict[str, Any] = {}
        if not values.keys() <= _AROUND:
            changes = {"name": "", "description": ""}
        if values.get("base") in get_args(Base):
            start = with_base(start, values["base"])
        for key, value in values.items():
            given = None if value == "none" else value
            changes[key] = gemm_from(key, value, getattr(start, key)) if key in PRODUCTS else given
        recipe = replace(start, **changes)
        own = _NAMED.get(recipe.name, recipe)
        if replace(own, **{key: getattr(recipe, key) for key in _AROUND}) != recipe:
            raise ValueError(
                f"name: got {recipe.name!r}; that name has another definition; choose another"
            )
        return recipe


_AROUND = {"attention", "base", "loss_scale", "description"}
"""Fields that a recipe may change and keep its name."""


def operands(recipe: Recipe) -> dict[str, QuantSpec | None]:
    """The six operands by their path, ``output.a`` to ``grad_weight.b``."""
    return dict(zip(OPERANDS, recipe.specs, strict=True))


def _products(
    name: str,
    description: str,
    spec: QuantSpec,
    *,
    weight: QuantSpec | None = None,
    gradient: QuantSpec | None = None,
    out: QuantSpec | None = None,
    hadamard: bool = False,
) -> Recipe:
    """x by one spec in all products; w and g by the same, unless they have their own."""
    weight, gradient = weight or spec, gradient or spec
    return Recipe(
        name=name,
        description=description,
        output=GemmSpec(a=spec, b=weight, out=out),
        grad_input=GemmSpec(a=gradient, b=weight, out=out),
        grad_weight=GemmSpec(
            a=replace(gradient, hadamard=hadamard), b=replace(spec, hadamard=hadamard), out=out
        ),
    )


def _mixed(base: Literal["bf16", "fp16"], loss_scale: Literal["dynamic"] | None) -> Recipe:
    """Products of 16 bits in a base of the same type, parameters in FP32."""
    # overflow has to reach infinity, where a loss scaler sees it
    spec = QuantSpec(format=FORMATS[base], scale_rule=UNSCALED, saturate=False)
    scaled = ", dynamic loss scale" if loss_scale else ""
    return replace(
        _products(base, f"16-bit products, FP32 masters{scaled}", spec, out=spec),
        base=base,
        loss_scale=loss_scale,
    )


def _pure(mixed: Recipe) -> Recipe:
    """Parameters of 16 bits too."""
    scaled = ", dynamic loss scale" if mixed.loss_scale else ""
    return replace(
        mixed,
        name=f"{mixed.name}_pure",
        description=f"16-bit parameters, stochastically rounded updates{scaled}",
        parameters=mixed.base,
        update="stochastic",
    )


_FP64 = Recipe(
    name="fp64",
    description="native double precision, nothing quantised",
    base="fp64",
    parameters="fp64",
)
_E4M3, _E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]
_HISTORY = 16
_ROW = QuantSpec(format=_E4M3, block=(1, -1), scale_rule="pow2")
_ROWWISE = _products("fp8_rowwise", "e4m3 everywhere, power-of-two scale a row", _ROW)
_BF16, _FP16 = _mixed("bf16", None), _mixed("fp16", DYNAMIC)


def _mx(name: str) -> QuantSpec:
    return QuantSpec(format=FORMATS[name], block=(1, 32), scale_rule="e8m0_rceil")


_SLAB = QuantSpec(format=_E4M3, block=(1, 128), scale_rule="pow2")
_NVFP4 = QuantSpec(format=FORMATS["e2m1"], block=(1, 16), scale_rule="nvfp4")

RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        recipe.name: recipe
        for recipe in (
            _FP64,
            replace(
                replace(_FP64, output=_EXACT, grad_input=_EXACT, grad_weight=_EXACT),
                name="fp64_emulated",
                description="double precision from exact products of small integers",
            ),
            Recipe(name="fp32", description="native single precision, nothing quantised"),
            _products(
                "tf32",
                "operands rounded to a 10-bit mantissa, FP32 accumulation",
                QuantSpec(format=FORMATS["tf32"], scale_rule=UNSCALED),
            ),
            _BF16,
            _FP16,
            _pure(_BF16),
            _pure(_FP16),
            _products(
                "fp8_tensorwise",
                "e4m3 forward, e5m2 gradients, one dynamic scale a tensor",
                QuantSpec(format=_E4M3),
                gradient=QuantSpec(format=_E5M2),
            ),
            _products(
                "fp8_delayed",
                "as tensorwise, scale from a history of maxima",
                QuantSpec(format=_E4M3, amax_history_len=_HISTORY),
                gradient=QuantSpec(format=_E5M2, amax_history_len=_HISTORY),
            ),
            _ROWWISE,
            replace(
                _ROWWISE,
                name="fp8_rowwise_hp_grad_weight",
                description="as rowwise, weight gradient in high precision",
                grad_input=GemmSpec(a=_ROW, b=replace(_ROW, block=(-1, -1))),
                grad_weight=_HIGH_PRECISION,
            ),
            _products(
                "fp8_blockwise",
                "e4m3, 1x128 activations and gradients, 128x128 weights, power-of-two scales",
                _SLAB,
                weight=replace(_SLAB, block=(128, 128)),
            ),
            _products("mxfp8", "OCP MX: e4m3 in blocks of 32", _mx("e4m3")),
            _products("mxfp6_e3m2", "OCP MX: e3m2 in blocks of 32", _mx("e3m2")),
            _products("mxfp6_e2m3", "OCP MX: e2m3 in blocks of 32", _mx("e2m3")),
            _products(
                "mxfp4",
                "OCP MX: e2m1 in blocks of 32, transformed, gradients stochastic",
                _mx("e2m1"),
                gradient=replace(_mx("e2m1"), rounding="stochastic"),
                hadamard=True,
            ),
            _products(
                "nvfp4",
                "e2m1 in blocks of 16, 2-D weights, transformed, gradients stochastic",
                _NVFP4,
                weight=replace(_NVFP4, block=(16, 16)),
                gradient=replace(_NVFP4, rounding="stochastic"),
                hadamard=True,
            ),
        )
    }
)

RECIPE_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "float64": "fp64",
        "64-true": "fp64",
        "float32": "fp32",
        "32-true": "fp32",
        "no": "fp32",
        "tfloat32": "tf32",
        "bfloat16": "bf16",
        "bf16-mixed": "bf16",
        "float16": "fp16",
        "16-mixed": "fp16",
        "tensorwise": "fp8_tensorwise",
        "delayed": "fp8_delayed",
        "rowwise": "fp8_rowwise",
        "rowwise_with_gw_hp": "fp8_rowwise_hp_grad_weight",
        "rowwise_hp_grad_weight": "fp8_rowwise_hp_grad_weight",
    }
)


def with_base(recipe: Recipe, base: Base) -> Recipe:
    """The recipe on another base, with the loss scale that it needs; ValueError for no base."""
    scale = RECIPES[base].loss_scale if base in get_args(Base) else None
    return replace(recipe, base=base, loss_scale=scale)


def with_accumulate(recipe: Recipe, accumulate: str) -> Recipe:
    """The recipe with the products of operands of 8 bits or less added up in another way.

    Args:
        recipe: Any recipe; its wider products stay as they are.
        accumulate: ``fp32``, ``hopper`` or ``hopper_promoted``.

    Returns:
        The recipe itself where nothing changes; else a variant named ``NAME_hopper`` and alike.

    Raises:
        ValueError: Another way.
    """
    how = check_accumulate(accumulate)
    gemms = {product: getattr(recipe, product) for product in PRODUCTS}
    changed = {
        product: replace(gemm, accumulate=how) for product, gemm in gemms.items() if gemm.is_narrow
    }
    if all(gemms[product] == gemm for product, gemm in changed.items()):
        return recipe
    name = recipe.name
    for model in MODELS:
        name = name.removesuffix(f"_{model}")
    plain = replace(recipe, **changed, name=name)
    return plain if how == FP32 else replace(plain, name=f"{name}_{how}")


OPT_LEVELS: Mapping[str, Recipe] = MappingProxyType(
    {
        "O0": RECIPES["fp32"],
        "O1": _FP16,
        "O2": replace(
            _FP16,
            name="O2",
            description="fp16 parameters but batch norms, FP32 masters, dynamic loss scale",
            parameters="fp16",
            keep_batchnorm_fp32=True,
            update="masters",
        ),
        "O3": replace(
            _FP16,
            name="O3",
            description="fp16 parameters, plain updates",
            parameters="fp16",
            loss_scale=1.0,
        ),
    }
)
"""The optimisation levels that apex defined, as recipes."""
_VARIANTS: Mapping[str, Recipe] = MappingProxyType(
    {
        "fp8": replace(RECIPES["fp8_tensorwise"], base="bf16"),
        "bf16-true": replace(
            RECIPES["bf16_pure"],
            name="bf16-true",
            description="16-bit parameters, updates rounded to nearest",
            update="plain",
        ),
        "16-true": replace(
            RECIPES["fp16_pure"],
            name="16-true",
            description="16-bit parameters, updates rounded to nearest, no loss scale",
            update="plain",
            loss_scale=None,
        ),
        **{name.lower(): recipe for name, recipe in OPT_LEVELS.items()},
    }
)
"""Names of other tools that no entry of ``RECIPES`` is the same as."""

_NAMED = {recipe.name: recipe for recipe in (*_VARIANTS.values(), *RECIPES.values())}


def get_recipe(recipe: str | Recipe) -> Recipe:
    """A recipe by name, alias or value; also public as ``mixprec.resolve``.

    Args:
        recipe: A name in ``RECIPES``, one that another tool gives the same (Lightning's
            ``bf16-mixed``, Accelerate's ``fp8``: fp8_tensorwise on bf16, apex's ``O1``), or a
            Recipe, which is returned as it is.

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
    if recipe.lower() in _VARIANTS:
        return _VARIANTS[recipe.lower()]
    return lookup("recipe", recipe, RECIPES, RECIPE_ALIASES)
