"""The roofline of a step: products at their peak rate, all else at the memory's peak bandwidth.

    seconds = sum over products of 2 M N K / rate + bytes of everything else / bandwidth

Bytes are what eager operations read and write, each tensor once an operation, and what the update
reads and writes of parameters, gradients and state. Quantising, emulating, launching and
communicating cost nothing here: no step is faster, real ones are slower. Attention is its products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mixprec.amp.inputs import cast_inputs
from mixprec.bench.flops import peak_rate, product_rate
from mixprec.formats import FORMATS
from mixprec.hardware import Accelerator
from mixprec.modes import EagerMode
from mixprec.planning.batches import batch_of
from mixprec.planning.qualification import NATIVE, LayerPlan
from mixprec.planning.rehearsal import FusedAttention, Step
from mixprec.recipes import PRODUCTS, RECIPES, Base, Recipe

Cost = dict[str, int]
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_backward,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The least time of a step that peak rates allow, on one GPU; not a forecast.

    Attributes:
        baseline: The recipe that it is compared with: that of the base, or fp32 for that one.
        share: Of the baseline's time, in the products that the recipe quantises; 0 to 1.
        operations_share: Of the baseline's multiplications, in these products; 0 to 1.
        baseline_seconds, seconds: Of a step at the configuration's batch.
        speedup: baseline_seconds / seconds: the most that the peak rates allow.
        product_speedup: The same of the quantised products alone; 1 where there are none.
    """

    baseline: str
    share: float
    operations_share: float
    baseline_seconds: float
    seconds: float
    speedup: float
    product_speedup: float


def cost(step: Step, rows: int) -> Cost:
    """Operations of products, those of attention among them, and bytes of all else, by kind.

    The step's model is a plain one, on meta, in the type that it is to be counted in.
    """
    inputs, targets = batch_of(step.row, rows, step.device)
    with _Counting() as counting, FusedAttention():
        output = step.model(cast_inputs(inputs, step.recipe.parameters))
        step.loss(output, targets).backward()
    for parameter in step.model.parameters():
        parameter.grad = None
    return counting.cost


class _Counting(EagerMode):
    """Adds up what every operation costs."""

    def __init__(self) -> None:
        # it imports triton, which may be broken
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        self._operations = flop_registry
        self.cost: Cost = {"operations": 0, "attention": 0, "bytes": 0}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in self._operations:
            operations = self._operations[packet](*args, **kwargs, out_val=result)
            self.cost["operations"] += operations
            self.cost["attention"] += operations if packet in _ATTENTION else 0
        elif not func.is_view:
            tensors = {id(t): t for t in tree_leaves((args, kwargs, result)) if _is_tensor(t)}
            self.cost["bytes"] += sum(t.numel() * t.element_size() for t in tensors.values())
        return result


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def roofline(
    recipe: Recipe,
    layers: Sequence[LayerPlan],
    own: Mapping[str, Recipe],
    row: Accelerator,
    costs: Mapping[str, Cost],
    update_bytes: float,
) -> Roofline | None:
    """The roofline of a recipe on a GPU.

    Args:
        recipe: Of everything around the products.
        layers: Of the plan.
        own: The recipe of each converted layer, by its name.
        row: The GPU.
        costs: Of the plain model, by the base that it runs in: the recipe's, and the baseline's.
        update_bytes: What the optimizer reads and writes.

    Returns: None where the table has no rate for a base.
    """
    base = recipe.base
    baseline = baseline_of(recipe)
    rate, slow_rate = (row.rate(FORMATS[name]) for name in (base, baseline))
    if rate is None or slow_rate is None:
        return None
    operations, quantised = 0, 0.0
    taken = [layer for layer in layers if layer.name in own]
    # each has its share of it
    attention = costs[base]["attention"] // max(1, sum(not layer.products for layer in taken))
    for layer in taken:
        for count, filled, fast in _parts(layer, own[layer.name], row, attention):
            operations += count
            quantised += filled / (fast or rate)
    traffic = {name: (costs[name]["bytes"] + update_bytes) / row.bandwidth for name in costs}
    before = costs[baseline]["operations"] / slow_rate + traffic[baseline]
    after = quantised + (costs[base]["operations"] - operations) / rate + traffic[base]
    return Roofline(
        baseline=baseline,
        share=operations / slow_rate / before,
        operations_share=operations / max(1, costs[baseline]["operations"]),
        baseline_seconds=before,
        seconds=after,
        speedup=before / after,
        product_speedup=operations / slow_rate / quantised if quantised else 1.0,
    )


def baseline_of(recipe: Recipe) -> Base:
    """What a recipe is compared with: its base's own recipe, or fp32 where that is the recipe."""
    own = RECIPES[recipe.base]
    is_own = all(getattr(recipe, product) == getattr(own, product) for product in PRODUCTS)
    return "fp32" if is_own else recipe.base


def _parts(
    layer: LayerPlan, recipe: Recipe, row: Accelerator, attention: int
) -> Iterator[tuple[int, int, float | None]]:
    """Of each product its operations, those with what is filled up, and its rate if native."""
    for product in layer.products:
        fast = product_rate(getattr(recipe, product.product), recipe, row)
        operations, filled = (2 * math.prod(sizes) for sizes in (product.sizes, product.filled))
        yield operations, filled, fast if product.native else None
    if not layer.products and recipe.attention:
        yield attention, attention, peak_rate(recipe, row) if layer.status == NATIVE else None
