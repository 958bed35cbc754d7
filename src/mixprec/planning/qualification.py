"""Which layers run natively on a target, why others do not, and what is filled up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mixprec.amp.inputs import cast_inputs
from mixprec.amp.setup import region
from mixprec.gemm.api import EMULATED
from mixprec.gemm.impl import scaled_mm
from mixprec.nn.layer import QuantizedLayer
from mixprec.nn.report import Report
from mixprec.planning.batches import batch_of
from mixprec.planning.rehearsal import FusedAttention, Step
from mixprec.planning.targets import Target
from mixprec.recipes import PRODUCTS, Recipe
from mixprec.support import why_not_native

Sizes = tuple[int, int, int]
ProductSizes = dict[int, list[tuple[str, str, Sizes]]]
NATIVE, LEFT = "native", "left"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductPlan:
    """One product of a layer in a step.

    Attributes:
        product: ``output``, ``grad_input`` or ``grad_weight``.
        name: Which of the layer's, where it has several.
        sizes: M, N and K of a[M, K] times b[N, K], of one batch.
        filled: The same as the units multiply them; equal where nothing is filled up.
        native: Whether the target's units multiply it.
        reason: Why not; empty where they do.
    """

    product: str
    name: str
    sizes: Sizes
    filled: Sizes
    native: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One module.

    Attributes:
        name, type: As in the model.
        status: ``native``, all of its products; ``emulated``, some are not; ``left`` in the base.
        recipe: What it multiplies by; empty where it is left.
        reason: Why it is emulated or left.
        products: Its products in a step, with their sizes; none for attention, and for layers that
            are left.
    """

    name: str
    type: str
    status: str
    recipe: str = ""
    reason: str = ""
    products: tuple[ProductPlan, ...] = ()


def layer_plans(
    report: Report,
    names: Mapping[str, nn.Module],
    sizes: ProductSizes,
    target: Target,
    *,
    torch_version: str,
    impl: str,
) -> tuple[LayerPlan, ...]:
    """What becomes of each module of the conversion's report.

    Args:
        report: Of the conversion.
        names: The modules by their names in it.
        sizes: As ``product_sizes`` gives them.
        target: Where it would run.
        torch_version: The release that would run it.
        impl: What the configuration asks for.
    """
    answers: dict[Recipe, dict[str, str | None]] = {}
    found = []
    for row in report.rows:
        module = names[row.name]
        if not isinstance(module, QuantizedLayer):
            found.append(LayerPlan(name=row.name, type=row.type, status=LEFT, reason=row.reason))
            continue
        recipe = module.recipe
        if recipe not in answers:
            answers[recipe] = why_not_native(
                recipe,
                target.capability,
                torch_version,
                vendor=target.vendor,
                features=target.features,
            )
            if impl == EMULATED:
                answers[recipe] = dict.fromkeys(PRODUCTS, "convert.impl = 'emulated' asks for it")
        why_not = answers[recipe]
        reasons = dict.fromkeys(why for why in why_not.values() if why)
        products = [
            _product(recipe, product, name, size, why_not[product])
            for product, name, size in sizes.get(id(module), [])
        ]
        found.append(
            LayerPlan(
                name=row.name,
                type=row.type,
                status=EMULATED if reasons else NATIVE,
                recipe=row.recipe,
                reason="; ".join(reasons),
                products=tuple(products),
            )
        )
    return tuple(found)


def _product(
    recipe: Recipe, product: str, name: str, sizes: Sizes, why_not: str | None
) -> ProductPlan:
    gemm = getattr(recipe, product)
    is_filled = why_not is None and gemm.is_narrow
    return ProductPlan(
        product=product,
        name=name,
        sizes=sizes,
        filled=scaled_mm.filled(gemm.a, gemm.b, sizes) if is_filled else sizes,
        native=why_not is None,
        reason=why_not or "",
    )


def product_sizes(step: Step, rows: int) -> ProductSizes:
    """The products of each converted layer in a step, by the layer's id: which, its name, sizes."""
    found: ProductSizes = {}
    inputs, targets = batch_of(step.row, rows, step.device)
    with _recording(step.model, found), FusedAttention(), region(step.recipe):
        step.loss(step.model(cast_inputs(inputs, step.recipe.parameters)), targets)
    return found


@contextmanager
def _recording(model: nn.Module, found: ProductSizes) -> Iterator[None]:
    """A stretch in which converted layers note the sizes of what they multiply."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]

    def noting(layer: QuantizedLayer) -> Any:
        def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
            out = QuantizedLayer.multiply(layer, x, weight, bias, **options)
            n, k = weight.shape
            products = _products(out.numel() // n if n else 0, n, k, x, weight)
            name = options.get("name", "")
            found.setdefault(id(layer), []).extend((p, name, size) for p, size in products)
            return out

        return multiply

    for layer in layers:
        vars(layer)["multiply"] = noting(layer)
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("multiply", None)


def _products(m: int, n: int, k: int, x: Tensor, weight: Tensor) -> Sequence[tuple[str, Sizes]]:
    """output, and the gradients that somebody asks for."""
    output, grad_input, grad_weight = PRODUCTS
    made = [(output, (m, n, k))]
    if x.requires_grad:
        made.append((grad_input, (m, k, n)))
    if weight.requires_grad:
        made.append((grad_weight, (n, k, m)))
    return made
