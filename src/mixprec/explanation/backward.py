"""What a backward pass does, operation by operation: its nodes, gathered by what made them.

Forward numbers the nodes of the graph in their order. The nodes that one operation made, its casts
among them, are one row: the gradients that come from outside go in, those that go outside come out.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from mixprec.explanation.operations import OperationRow, type_names
from mixprec.explanation.products import Products
from mixprec.linear_products import GRAD_INPUT, GRAD_WEIGHT, Plan, sum_dtype
from mixprec.operation import Product
from mixprec.policy import FOLLOWS
from mixprec.recipes import PRODUCTS

_GRAD_BIAS = "grad_bias"
_LEAF = "torch::autograd::AccumulateGrad"
Types = Sequence[torch.dtype | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """What the nodes up to a number, from the mark before on, belong to; no row is no operation."""

    end: int
    path: str
    row: OperationRow | None = None
    product: Product | None = None
    is_hidden: bool = False


@dataclass(slots=True, kw_only=True)
class _Group:
    """What one operation's nodes did: the types that came in from outside, and that went out."""

    mark: _Mark
    node: Node
    inputs: list[torch.dtype | None] = field(default_factory=list)
    outputs: list[torch.dtype | None] = field(default_factory=list)


class Backward:
    """The rows of a backward pass, whose operations are marked while forward runs."""

    def __init__(self, products: Products) -> None:
        self._products = products
        self._marks: list[_Mark] = []

    def mark(
        self,
        path: str,
        row: OperationRow | None = None,
        product: Product | None = None,
        *,
        is_hidden: bool = False,
    ) -> None:
        """The nodes that were made since the last mark belong to this operation, or to none."""
        end: int = torch.autograd._get_sequence_nr()
        self._marks.append(_Mark(end=end, path=path, row=row, product=product, is_hidden=is_hidden))

    def run(self, results: Any, path: str) -> list[OperationRow]:
        """The rows of a pass from every tensor among the results that has a gradient.

        Each starts from ones. Parameters' gradients are added to; nothing else is changed.

        Args:
            results: Nested outputs of the forward pass.
            path: Of what ran last.
        """
        self.mark(path)
        leaves, _ = torch.utils._pytree.tree_flatten(results)
        roots = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
        edges = [get_gradient_edge(x) for x in roots]
        nodes = _reachable(edges)
        ran: dict[int, tuple[Types, Types]] = {}
        for index, node in enumerate(nodes):
            node.register_hook(_noting(ran, index))
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
        return self._rows(self._groups(nodes, edges, ran))

    def _groups(
        self, nodes: Sequence[Node], roots: Iterable[GradientEdge], ran: dict[int, Any]
    ) -> list[_Group]:
        """The groups of nodes in the order in which the first of each ran."""
        keys: dict[Node | None, Any] = {node: self._key(node) for node in nodes}
        entries: set[tuple[Node | None, int]] = {(edge.node, edge.output_nr) for edge in roots}
        for node in nodes:
            entries |= {edge for edge in node.next_functions if keys.get(edge[0]) != keys[node]}
        groups: dict[Any, _Group] = {}
        for index, (given, taken) in ran.items():
            node = nodes[index]
            key = keys[node]
            group = groups.setdefault(key, _Group(mark=self._mark_of(node), node=node))
            group.inputs += [t for i, t in enumerate(taken) if (node, i) in entries]
            group.outputs += [
                t
                for t, (after, _) in zip(given, node.next_functions, strict=True)
                if keys.get(after) != key
            ]
        return list(groups.values())

    def _mark_of(self, node: Node) -> _Mark:
        place = bisect.bisect_right(self._marks, node._sequence_nr(), key=lambda mark: mark.end)
        return self._marks[place]

    def _key(self, node: Node) -> Any:
        """What the nodes of one operation have alike: its mark, or the node itself."""
        if isinstance(node, BackwardCFunction):
            return node
        mark = self._mark_of(node)
        return node if mark.row is None else mark.end

    def _rows(self, groups: Iterable[_Group]) -> list[OperationRow]:
        rows: list[OperationRow] = []
        before: list[OperationRow] = []
        for group in groups:
            plan, mark = getattr(group.node, "plan", None), group.mark
            if isinstance(plan, Plan) and mark.row is not None and mark.product is not None:
                own = list(self._products_of(group, plan, mark.row, mark.product))
                if own == before:
                    # of another entry of a batch, or another group
                    continue
            elif mark.is_hidden or mark.product is not None:
                # the shape of a product's result is part of it
                continue
            else:
                own = [_row(group)]
            rows += own
            before = before if own and own[0].is_view else own
        return rows

    def _products_of(
        self, group: _Group, plan: Plan, forward: OperationRow, product: Product
    ) -> Iterator[OperationRow]:
        """The gradients that a product by a recipe was asked for."""
        (g,) = group.inputs
        assert g is not None
        x, weight, *bias = group.outputs
        asked = ((GRAD_INPUT, x, plan.weight_dtype), (GRAD_WEIGHT, weight, plan.dtype))
        for index, out, other in asked:
            if out is not None:
                row = _changed(forward, PRODUCTS[index], [g, other], [out])
                yield self._products.completed(row, product, plan.gemms[index], plan.dtype, out)
        for out in filter(None, bias):
            row = _changed(forward, _GRAD_BIAS, [g], [out])
            yield replace(row, compute=type_names([sum_dtype(g)]), operands=(), impl="")


def _changed(forward: OperationRow, operation: str, inputs: Types, outputs: Types) -> OperationRow:
    """A row of forward in backward; gradients that nobody asked for are left out."""
    return replace(
        forward,
        operation=operation,
        inputs=type_names(filter(None, inputs)),
        outputs=type_names(filter(None, outputs)),
        phase="backward",
    )


def _row(group: _Group) -> OperationRow:
    row = group.mark.row
    if row is not None and not isinstance(group.node, BackwardCFunction):
        return _changed(row, row.operation, group.inputs, group.outputs)
    types = type_names(filter(None, group.inputs))
    bare = OperationRow(
        module=group.mark.path, operation="", inputs=(), compute=types, outputs=(), rule=FOLLOWS
    )
    return _changed(bare, group.node.name(), group.inputs, group.outputs)


def _noting(ran: dict[int, tuple[Types, Types]], index: int) -> Callable[..., None]:
    # it must not hold the node, which holds it
    def note(given: tuple[Tensor | None, ...], taken: tuple[Tensor | None, ...]) -> None:
        ran[index] = _types(given), _types(taken)

    return note


def _types(gradients: Iterable[Tensor | None]) -> Types:
    return tuple(None if g is None else g.dtype for g in gradients)


def _reachable(roots: Iterable[GradientEdge]) -> list[Node]:
    """The nodes of a graph, but for those that add to a leaf's gradient."""
    found: dict[Node, None] = {}
    waiting = [edge.node for edge in roots]
    while waiting:
        node = waiting.pop()
        if node.name() != _LEAF and node not in found:
            found[node] = None
            waiting += [after for after, _ in node.next_functions if after is not None]
    return list(found)
