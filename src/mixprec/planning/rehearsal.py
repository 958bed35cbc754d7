"""A training step on shapes alone: what it keeps and how much is alive, without memory.

The step is the trainer's own: the converted model, the optimizer and its wrapper, the region of the
base. Every operation runs on tensors that stand for the target's, and the bytes that it would take
are counted as ``mixprec.memory`` counts those that exist.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from mixprec import nn as layers
from mixprec.amp.inputs import cast_inputs
from mixprec.amp.setup import region, with_update
from mixprec.measure import saved_bytes
from mixprec.memory import live_bytes, storage_bytes, tensors_in
from mixprec.planning.batches import META, Row, batch_of
from mixprec.recipes import Recipe
from mixprec.train import optimizers
from mixprec.train.config_fields import OptimizerConfig
from mixprec.train.models import Loss

UPDATE = "update"
BACKWARD = "backward"
_KEPT = "mixed_precision"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What is rehearsed.

    Attributes:
        model: Converted, on the step's device, its parameters in their type.
        loss: (output, targets) -> the mean loss.
        recipe: Of everything around the products.
        optimizer: Which, and its options.
        row: What a row of a batch is.
        accumulates: Whether gradients of several batches are summed, so that some exist in forward.
        device: Where the tensors say they are that stand for the target's: meta for a GPU's.
    """

    model: nn.Module
    loss: Loss
    recipe: Recipe
    optimizer: OptimizerConfig
    row: Row
    accumulates: bool = False
    device: torch.device = META


@dataclass(slots=True, kw_only=True)
class Rehearsal:
    """What one step took, in bytes.

    Attributes:
        gradients, masters, state: Of the parameters at the end of the step; masters are whatever
            the wrapper keeps of 16-bit parameters.
        saved: Kept for backward by a batch, parameters apart.
        peaks: The most alive at once in each stretch of the step, state and parameters among it.
        present: Gradients that were there when a stretch began.
    """

    gradients: int = 0
    masters: int = 0
    state: int = 0
    saved: int = 0
    peaks: dict[str, int] = field(default_factory=dict)
    present: dict[str, int] = field(default_factory=dict)

    def numbers(self) -> dict[tuple[str, str], int]:
        """All figures under one kind of key, for arithmetic."""
        own = {("", name): getattr(self, name) for name in ("gradients", "masters", "state")}
        own["", "saved"] = self.saved
        for kind, values in (("peak", self.peaks), ("present", self.present)):
            own |= {(kind, stretch): value for stretch, value in values.items()}
        return own


def rehearse(step: Step, rows: int, runs: Sequence[Sequence[nn.Module]] = ()) -> Rehearsal:
    """One optimizer step with a batch of so many rows; the model is as before, without gradients.

    The stretches are the update, and forward and backward cut where each of the repeated blocks
    starts that ``runs`` lists.
    """
    found = Rehearsal()
    model = step.model
    optimizer = _optimizer(step)
    existing = [*model.parameters(), *model.buffers(), *tensors_in(optimizer.state_dict())]
    live = live_bytes(existing, meta=True)
    stretches = _Stretches(model, live, found)
    handles = stretches.watch(runs)
    try:
        with live, _without_collector(), warnings.catch_warnings():
            # of values, which are none
            warnings.simplefilter("ignore")
            optimizer.zero_grad()
            for _ in range(1 + step.accumulates):
                _forward_backward(step, rows, stretches, found)
                gc.collect(0)
            stretches.begin(UPDATE)
            found.gradients = found.present[UPDATE]
            optimizer.step()
            stretches.end()
    finally:
        for handle in handles:
            handle.remove()
    kept = optimizer.state_dict()
    found.masters = storage_bytes(tensors_in(kept.pop(_KEPT, {})), meta=True)
    found.state = storage_bytes(tensors_in(kept), meta=True)
    for stretch in found.peaks.keys() - {UPDATE}:
        # made in the first update, there in every later step
        found.peaks[stretch] += found.state
    for parameter in model.parameters():
        parameter.grad = None
    return found


@contextmanager
def _without_collector() -> Iterator[None]:
    """A stretch in which garbage is collected on request alone: figures are the same always.

    torch's own functions on meta leave cycles with tensors in them, which count as alive till then.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


def _optimizer(step: Step) -> Optimizer:
    config, options = step.optimizer, step.optimizer.options
    if step.device == META and not options.keys() & {"foreach", "fused"}:
        # torch's choice there, whose temporaries are as large as all parameters
        config = replace(config, options={"foreach": True, **options})
    made = optimizers.make(config, step.model.named_parameters())
    optimizer = with_update(made, step.recipe)
    layers.attach(step.model, optimizer)
    return optimizer


def _forward_backward(step: Step, rows: int, stretches: _Stretches, found: Rehearsal) -> None:
    inputs, targets = batch_of(step.row, rows, step.device)
    stretches.begin("forward")
    attention = FusedAttention()
    with saved_bytes(step.model.parameters()) as saved, attention, region(step.recipe):
        output = step.model(cast_inputs(inputs, step.recipe.parameters))
        loss = step.loss(output, targets)
    found.saved = saved.activation_bytes
    stretches.begin(BACKWARD)
    del output
    loss.backward()


class _Stretches:
    """Cuts a step at marks; each stretch has the peak of what was alive in it."""

    def __init__(self, model: nn.Module, live: live_bytes, found: Rehearsal) -> None:
        self._model, self._live, self._found = model, live, found
        self._name = ""

    def begin(self, name: str) -> None:
        self.end()
        self._name = name
        grads = (p.grad for p in self._model.parameters() if p.grad is not None)
        self._found.present.setdefault(name, storage_bytes(grads, meta=True))

    def end(self) -> None:
        if self._name:
            peaks = self._found.peaks
            peaks[self._name] = max(peaks.get(self._name, 0), self._live.peak)
        self._live.peak = self._live.now

    def watch(self, runs: Sequence[Sequence[nn.Module]]) -> list[Any]:
        """Marks where blocks start, forward and backward; the first, the last, those between."""
        handles = []
        for number, blocks in enumerate(runs):
            for place, block in zip(_places(len(blocks)), blocks, strict=True):
                name = f"{place} of run {number}"
                handles.append(block.register_forward_pre_hook(self._forward_mark(name)))
                handles.append(block.register_forward_hook(self._backward_mark(name)))
        return handles

    def _forward_mark(self, name: str) -> Callable[..., None]:
        return lambda *_: self.begin(f"forward, {name}")

    def _backward_mark(self, name: str) -> Callable[..., None]:
        def mark(module: nn.Module, args: Any, output: Any) -> None:
            first = next((t for t in tensors_in(output) if t.requires_grad), None)
            if first is not None:
                first.register_hook(lambda _: self.begin(f"{BACKWARD}, {name}"))

        return mark


def _places(count: int) -> list[str]:
    return ["first", *["middle"] * (count - 2), "last"]


class FusedAttention(TorchFunctionMode):
    """Attention as GPUs run it, in one kernel that keeps no scores; meta would spell it out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            result = self._attention(*args, **(kwargs or {}))
            if result is not None:
                return result
        return func(*args, **(kwargs or {}))

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        """The kernel's result, or None for what the fused ones leave to plain products."""
        if not query.is_meta or enable_gqa or attn_mask is not None:
            return None
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, scale=scale
        )[0]
