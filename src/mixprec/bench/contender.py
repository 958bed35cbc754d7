"""One contender: a model under a recipe or another library, its steps, their times and memory."""

import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mixprec import nn as layers
from mixprec.amp.autocast import DTYPES
from mixprec.amp.setup import cast_parameters, region, scaler_for, with_update
from mixprec.bench.peers import PEERS, joined
from mixprec.bench.presets import COMPILED, Workload
from mixprec.measure import saved_bytes
from mixprec.memory import live_bytes, peak_bytes, state_bytes, tensors_in
from mixprec.recipes import NARROW, Recipe
from mixprec.train import optimizers
from mixprec.train.config_fields import OptimizerConfig

_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is run: a recipe, or a peer's recipe, in a mode at a batch.

    recipe: Of the products, and for a peer of everything around them; label: for tables.
    """

    label: str
    recipe: Recipe
    mode: str
    batch: int
    peer: str | None = None
    peer_recipe: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What all the cases of a run have alike."""

    device: torch.device
    optimizer: OptimizerConfig
    impl: str = "auto"
    seed: int = 0
    limit: int | None = None


class Contender:
    """A model in training; a step is zero_grad(set_to_none=True), forward, backward, update.

    Args:
        workload: The model and its batches; weights and batches follow from the seed alone.
        case: What is run.
        settings: Where and how.

    Attributes:
        impl: What multiplies.
        losses: Of every step so far, on the device.
        step_ms: Of the timed steps.

    Raises: Whatever conversion or the library raises.
    """

    def __init__(self, workload: Workload, case: Case, settings: Settings) -> None:
        self.case, self.settings = case, settings
        self._loss, device = workload.loss, settings.device
        torch.manual_seed(settings.seed)
        self.model = workload.build().to(device)
        self._region, self.impl = self._prepare(case)
        optimizer = optimizers.make(settings.optimizer, self.model.named_parameters())
        self.optimizer = with_update(optimizer, case.recipe, settings.seed)
        if case.peer is None:
            cast_parameters(self.model, case.recipe)
        self.scaler = scaler_for(case.recipe)
        layers.attach(self.model, self.optimizer)
        self._forward: Any = self.model
        if case.mode == COMPILED:
            self._forward = torch.compile(self.model, fullgraph=True, dynamic=False)
        generator = torch.Generator().manual_seed(settings.seed)
        batches = [workload.batch(case.batch, generator) for _ in range(_BATCHES)]
        self._batches = [self._pinned(*batch) for batch in batches]
        self.losses: list[Tensor] = []
        self.step_ms: list[float] = []

    def _prepare(self, case: Case) -> tuple[Any, str]:
        """Convert the model; the region of its forward pass, and what multiplies."""
        if case.peer is not None:
            peer = PEERS[case.peer]
            inner, impl = peer.prepare(peer.load(), self.model, case.peer_recipe)
            dtype = DTYPES[case.recipe.base] if case.recipe.base in NARROW else None
            return partial(joined, self.settings.device, dtype, inner), impl
        report = layers.convert(
            self.model, case.recipe, impl=self.settings.impl, seed=self.settings.seed
        )
        impl = ", ".join(sorted({row.impl for row in report.converted})) or "native"
        return partial(region, case.recipe), impl

    def _pinned(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        if inputs.is_floating_point():
            inputs = inputs.to(DTYPES[self.case.recipe.parameters])
        if self.settings.device.type != "cuda":
            return inputs.to(self.settings.device), targets.to(self.settings.device)
        return inputs.pin_memory(), targets.pin_memory()

    def forward(self) -> Tensor:
        """The loss of the next batch."""
        inputs, targets = (
            tensor.to(self.settings.device, non_blocking=True)
            for tensor in self._batches[len(self.losses) % _BATCHES]
        )
        scope: AbstractContextManager[Any] = self._region()
        with scope:
            loss = self._loss(self._forward(inputs), targets)
        self.losses.append(loss.detach())
        return loss

    def update(self, loss: Tensor) -> None:
        """Backward and the optimizer's step."""
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def step(self) -> None:
        """One step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.update(self.forward())

    def timed_step(self) -> None:
        """One step, its time kept: to the end of the device's work."""
        synchronise(self.settings.device)
        started = time.perf_counter()
        self.step()
        synchronise(self.settings.device)
        self.step_ms.append(1e3 * (time.perf_counter() - started))

    @property
    def is_counted(self) -> bool:
        """Whether its live tensors can be counted: a compiled CPU model's cannot."""
        return self.settings.device.type != "cpu" or self.case.mode != COMPILED

    def first_step(self) -> None:
        """The step that compiles and makes the optimizer's state, under the memory limit."""
        if self.settings.device.type == "cpu" and self.is_counted:
            with live_bytes(self._existing(), limit=self.settings.limit):
                self.step()
        else:
            self.step()

    def memory(self) -> dict[str, int | None]:
        """Bytes by kind, from one more step with the optimizer's state there."""
        saved = 0

        def step() -> None:
            nonlocal saved
            self.optimizer.zero_grad(set_to_none=True)
            with saved_bytes(self.model.parameters()) as kept:
                loss = self.forward()
            saved = kept.activation_bytes
            self.update(loss)

        peak = None
        if self.is_counted and self.settings.device.type in ("cpu", "cuda"):
            peak = peak_bytes(
                step, self.settings.device, tensors=self._existing(), limit=self.settings.limit
            )
        else:
            step()
        held = state_bytes(self.model, self.optimizer)
        return {**held, "saved_bytes": saved, "peak_bytes": peak}

    def _existing(self) -> list[Tensor]:
        model: nn.Module = self.model
        state = tensors_in(self.optimizer.state_dict())
        return [*model.parameters(), *model.buffers(), *state]


def synchronise(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
