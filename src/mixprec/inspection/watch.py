"""`watch`: statistics of a model's converted layers every N steps, beside an untouched training.

A sampled step is told of each product by its layer. The operands are quantised once more, with the
scales and the noise that the product had, and counted there and then: nothing of a layer is held
but a few rows of its operands, and of backward's operands only until their gradient is there. No
random number is drawn and no state is written, so that training goes on as if unwatched, to the
bit.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

import torch
from torch import Tensor, nn

from mixprec.gemm.api import GemmSpec
from mixprec.inspection.statistics import (
    OperandTally,
    ProductStatistics,
    ProductTally,
    Statistics,
    StepStatistics,
    evenly_apart,
    tally_gemm,
    tally_operand,
)
from mixprec.linear_products import (
    G_GRAD_INPUT,
    G_GRAD_WEIGHT,
    GRAD_INPUT,
    GRAD_WEIGHT,
    OUTPUT,
    W_GRAD_INPUT,
    W_OUTPUT,
    X_GRAD_WEIGHT,
    X_OUTPUT,
    Plan,
)
from mixprec.modes import plain_arithmetic
from mixprec.nn import QuantizedLayer
from mixprec.nn.state import converted_layers
from mixprec.quant_spec import QuantSpec
from mixprec.quantized_tensor import QuantizedTensor
from mixprec.recipes import OPERANDS, PRODUCTS

_SAMPLED_ROWS = 64
_Tally = TypeVar("_Tally", OperandTally, ProductTally)


@dataclass(frozen=True, slots=True)
class _Operand:
    """An operand [free, contraction] before and after it was quantised, and what is counted of it.

    No tally: it is in high precision.
    """

    exact: Tensor
    decoded: Tensor
    tally: OperandTally | None

    def t(self) -> _Operand:
        return _Operand(self.exact.t(), self.decoded.t(), self.tally)

    def sampled(self) -> _Operand:
        """Rows evenly apart, in memory of their own, with what is counted of all."""
        index = evenly_apart(self.exact, _SAMPLED_ROWS)
        exact, decoded = (x.index_select(0, index) for x in (self.exact, self.decoded))
        return _Operand(exact, decoded, self.tally)


def _operand(plan: Plan, x: Tensor, position: int, first: _Operand | None = None) -> _Operand:
    """What a plan makes of an operand: of shared values the first one's, else quantised anew."""
    if first is not None and position in plan.shared:
        return first.t()
    q = plan.quantize(x, position, records=False)
    if not isinstance(q, QuantizedTensor):
        return _Operand(x, q, None)
    decoded = q.dequantize()
    return _Operand(x, decoded, tally_operand(x, q, decoded))


@dataclass(slots=True, eq=False)
class _LayerTallies:
    """What the products of one layer come to in a step, over all of its calls; their observer."""

    operands: dict[tuple[str, int], OperandTally] = field(default_factory=dict)
    products: dict[tuple[str, int], ProductTally] = field(default_factory=dict)
    specs: tuple[QuantSpec | None, ...] = ()
    # names whose forward pass had no graph, which a reentrant checkpoint makes in backward
    graphless: set[str] = field(default_factory=set)

    def observe(self, name: str, plan: Plan, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """Count forward's operands now, and backward's as soon as the gradient is there."""
        is_again = not plan.state.records_forward
        if is_again and name not in self.graphless:
            return
        if not out.requires_grad:
            self.graphless.add(name)
        self.specs = plan.specs
        x, weight = plan.matrix(x.detach()), weight.detach()
        kept_x = kept_w = None
        with torch.no_grad(), plain_arithmetic(x):
            a, b = _operand(plan, x, X_OUTPUT), _operand(plan, weight, W_OUTPUT)
            if not is_again:
                self._count(name, plan, OUTPUT, a.sampled(), b.sampled())
            if out.requires_grad and plan.needs[0] and _quantises(plan.gemms[GRAD_INPUT]):
                kept_w = _operand(plan, weight.t(), W_GRAD_INPUT, b).sampled()
            if out.requires_grad and plan.needs[1] and _quantises(plan.gemms[GRAD_WEIGHT]):
                kept_x = _operand(plan, x.t(), X_GRAD_WEIGHT, a).sampled()
        if kept_x is not None or kept_w is not None:
            out.register_hook(functools.partial(self._backward, name, plan, kept_w, kept_x))

    def _backward(
        self, name: str, plan: Plan, w: _Operand | None, x: _Operand | None, grad: Tensor
    ) -> None:
        g, first = grad.detach(), None
        with torch.no_grad(), plain_arithmetic(g):
            if w is not None or G_GRAD_WEIGHT in plan.shared:
                first = _operand(plan, g, G_GRAD_INPUT)
            if w is not None:
                assert first is not None
                self._count(name, plan, GRAD_INPUT, first.sampled(), w)
            if x is not None:
                g_T = _operand(plan, g.t(), G_GRAD_WEIGHT, first)
                self._count(name, plan, GRAD_WEIGHT, g_T.sampled(), x)

    def _count(self, name: str, plan: Plan, product: int, a: _Operand, b: _Operand) -> None:
        for position, operand in enumerate((a, b), start=2 * product):
            if operand.tally is not None:
                _add(self.operands, (name, position), operand.tally)
        gemm = plan.gemms[product]
        if _quantises(gemm):
            exact, decoded = (a.exact, b.exact), (a.decoded, b.decoded)
            _add(self.products, (name, product), tally_gemm(gemm, exact, decoded, "auto"))

    def rows(self, layer: str) -> Iterator[Statistics]:
        """Of each product its operands, then itself."""
        for name in dict.fromkeys(name for name, _ in self.products):
            for index, product in enumerate(PRODUCTS):
                if (name, index) not in self.products:
                    continue
                for position in (2 * index, 2 * index + 1):
                    spec, tally = self.specs[position], self.operands.get((name, position))
                    if spec is not None and tally is not None:
                        yield tally.statistics(
                            layer=layer,
                            product=product,
                            operand=OPERANDS[position].rpartition(".")[2],
                            name=name,
                            format=str(spec.format),
                        )
                sqnr = self.products[name, index].sqnr_db
                yield ProductStatistics(layer=layer, product=product, name=name, sqnr_db=sqnr)


def _add(tallies: dict[tuple[str, int], _Tally], key: tuple[str, int], tally: _Tally) -> None:
    tallies[key] = tallies[key] + tally if key in tallies else tally


def _quantises(gemm: GemmSpec) -> bool:
    return gemm.a is not None or gemm.b is not None


class Watcher:
    """Samples steps of a training; made by ``watch``.

    Attributes:
        every: Steps from one sampled step to the next.
        done: Steps so far.
        records: The sampled steps, but for those that ``on_record`` has taken.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        optimizer: torch.optim.Optimizer | None = None,
        on_record: Callable[[StepStatistics], object] | None = None,
        done: int = 0,
    ) -> None:
        self.every, self.done = every, done
        self.records: list[StepStatistics] = []
        self._model, self._on_record = model, on_record or self.records.append
        self._observed: dict[str, tuple[nn.Module, _LayerTallies]] = {}
        self._handle = optimizer and optimizer.register_step_post_hook(self._stepped)
        self._observe_if_due()

    def step(self) -> StepStatistics | None:
        """Say that an optimizer step is over; its statistics, if it was one of those sampled.

        Called by the optimizer's own hook, where ``watch`` was given one.
        """
        self.done += 1
        record = self._record() if self._observed else None
        self._release()
        self._observe_if_due()
        return record

    def _stepped(self, *_: object) -> None:
        self.step()

    def restart(self, done: int) -> None:
        """Go on counting from so many steps, as after a checkpoint was loaded."""
        self._release()
        self.done = done
        self._observe_if_due()

    def close(self) -> None:
        """Stop; what a step was sampled of so far is dropped."""
        self._release()
        # never due again, should something still count steps
        self._model = nn.Identity()
        if self._handle:
            self._handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _record(self) -> StepStatistics:
        rows = tuple(
            row for name, (_, tallies) in self._observed.items() for row in tallies.rows(name)
        )
        if not any(tallies.specs for _, tallies in self._observed.values()):
            warnings.warn(
                f"watch: no product of a converted layer ran in step {self.done} in training mode "
                "and eager; compiled code and evaluation are not watched; call model.train()",
                stacklevel=3,
            )
        record = StepStatistics(step=self.done, rows=rows)
        self._on_record(record)
        return record

    def _observe_if_due(self) -> None:
        if (self.done + 1) % self.every:
            return
        for name, layer in converted_layers(self._model):
            tallies = _LayerTallies()
            layer.observers = (*layer.observers, tallies.observe)
            self._observed[name] = layer, tallies

    def _release(self) -> None:
        for layer, tallies in self._observed.values():
            if not isinstance(layer, QuantizedLayer):
                # reverted meanwhile
                continue
            # by equality: every look at a method makes another object
            layer.observers = tuple(each for each in layer.observers if each != tallies.observe)
        self._observed = {}


def watch(
    model: nn.Module,
    every: int = 100,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    on_record: Callable[[StepStatistics], object] | None = None,
    done: int = 0,
) -> Watcher:
    """Statistics of every quantised operand and product of a model, each ``every`` steps.

        with mixprec.watch(model, every=100, optimizer=optimizer) as watcher:
            train()
        watcher.records[-1].worst

    Steps ``every``, 2 ``every`` and so on are sampled, over all of their forward passes in training
    mode and their backward passes: counts are of all elements that were quantised, the error of a
    product is that of 64 of its rows by 64 of its columns. Training is the same to the bit.

    Args:
        model: A converted model, eager.
        every: Steps from one sampled step to the next.
        optimizer: Counts the steps that it takes; without it call ``step()`` of the result after
            each one. Steps that a loss scaler skips are none, and add to the next one's figures.
        on_record: Takes each sampled step, in place of ``records``.
        done: Steps before the first one, in a run that goes on.

    Returns:
        A context manager with ``step``, ``close`` and ``records``.

    Raises:
        TypeError: model is no module.
        ValueError: every below 1; a model that is compiled or has no converted layer.

    Warns:
        UserWarning: A sampled step had no product to look at.

    Edge cases: gradients are seen as they are quantised, with the loss scale; what activation
    checkpointing runs again counts once; evaluation, compiled submodules and what runs inside
    ``torch.func`` transforms is not seen. Each rank sees its own part.

    Memory: of each call 64 rows of the operands that its backward multiplies.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; must be an nn.Module; pass the model")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every: got {every!r}; must be a whole number of steps from 1; use 100")
    if hasattr(model, "_orig_mod") or model._compiled_call_impl is not None:
        raise ValueError(
            f"model: got {type(model).__name__}, compiled; a compiled graph is not watched; pass "
            "the model and train it uncompiled"
        )
    if next(converted_layers(model), None) is None:
        raise ValueError(
            f"model: got {type(model).__name__} without converted layers; only these have "
            "statistics; call mixprec.convert first"
        )
    return Watcher(model, every, optimizer, on_record, done)
