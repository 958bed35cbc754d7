"""What a model does while it runs, operation by operation: the rows of its forward pass."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from torch import nn

from mixprec.amp.autocast import region_dtype
from mixprec.explanation.backward import Backward
from mixprec.explanation.operations import LOSS, VIEWS, OperationRow, plain, type_names
from mixprec.explanation.products import Products
from mixprec.nn import QuantizedLayer
from mixprec.nn.kinds import kind_of, plain_class
from mixprec.operation import Operation
from mixprec.policy import Region
from mixprec.recipes import Recipe

# what a converted layer does to its operands before it multiplies, beside views
_CASTS = frozenset({"to"})


class Recording:
    """The rows of a model whose modules say when they run."""

    def __init__(self, model: nn.Module) -> None:
        self.rows: list[OperationRow] = []
        self._path, self._layer = "", ""
        self._outer: list[tuple[str, str]] = []
        self._products = Products()
        self._backward = Backward(self._products)
        for path, module in model.named_modules():
            self._watch(path, module)

    def region(self, recipe: Recipe, policy: str) -> AbstractContextManager[Any]:
        """The region of a recipe's base, each of whose operations becomes a row."""
        return Region(region_dtype(recipe), policy, record=self._record)

    def enter_loss(self) -> None:
        """What runs from here on is the loss."""
        self._backward.mark(self._path)
        self._path, self._layer = LOSS, ""

    def backward(self, results: Any) -> None:
        """Run the backward pass from results of the forward pass; its rows follow the others."""
        self.rows += self._backward.run(results, self._path)

    def _watch(self, path: str, module: nn.Module) -> None:
        is_converted = isinstance(module, QuantizedLayer)
        kind = (kind_of(module) or plain_class(module)).__name__.lower() if is_converted else ""

        def enter(*_: Any) -> None:
            self._backward.mark(self._path)
            self._outer.append((self._path, self._layer))
            self._path, self._layer = path, kind

        def leave(*_: Any) -> None:
            self._backward.mark(self._path)
            self._path, self._layer = self._outer.pop()

        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave)

    def _record(self, operation: Operation) -> None:
        row = OperationRow(
            module=self._path,
            operation=plain(operation.name),
            inputs=type_names(operation.inputs),
            compute=type_names(operation.compute),
            outputs=type_names(operation.outputs),
            rule=operation.rule,
            is_view=operation.name in VIEWS,
        )
        if operation.product is not None:
            product = operation.product
            dtype = operation.compute[0]
            row = self._products.completed(row, product, product.gemm, dtype, dtype)
            row = replace(row, operation=self._layer or row.operation)
        is_hidden = self._layer and (row.is_view or operation.name in _CASTS)
        self._backward.mark(self._path, row, operation.product, is_hidden=bool(is_hidden))
        before = next((each for each in reversed(self.rows) if not each.is_view), None)
        # alike and one after the other are the entries of a batch, and groups
        if not is_hidden and not (row.operands and row == before):
            self.rows.append(row)
