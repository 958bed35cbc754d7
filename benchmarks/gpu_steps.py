"""Training steps of vision transformers on one device: time, memory, and what a recipe gains.

A step is zero_grad(set_to_none=True), forward and cross-entropy in a region of bf16, backward and
Adam, on one batch of random images that stays on the device. Compiled is each block of the model by
torch.compile, one graph: all blocks share it, so that it is compiled once. On a CPU the base is
fp32, where products of 16 bits are emulated out of the graph.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from gpu_report import BASELINE, EAGER
from torch import Tensor

import mixprec
from mixprec.amp.setup import region
from mixprec.memory import peak_bytes, tensors_in
from mixprec.recipes import Base, get_recipe, with_base
from mixprec.train.models import VIT_PRESETS, VisionTransformer

RECIPES = ("fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "bf16")
LABELS = (BASELINE, *RECIPES)
COMPILED = "compiled blocks"
BASES: dict[str, Base] = {"cuda": "bf16", "cpu": "fp32"}
TINY = {"size": 16, "patch": 8, "width": 32, "depth": 2, "heads": 2, "classes": 16}
OUT_OF_MEMORY = "out of memory"


class Steps:
    """A model in training under one recipe, or torch's autocast.

    Args:
        label: A recipe's name, or ``BASELINE``.
        arguments: Of ``VisionTransformer``.
        batch: Images a step.
        device: Where.
        backend: Of torch.compile; None for eager.
    """

    def __init__(
        self,
        label: str,
        arguments: dict[str, Any],
        batch: int,
        device: torch.device,
        backend: str | None,
    ) -> None:
        torch.manual_seed(0)
        with torch.device(device):
            self.model = VisionTransformer(**arguments)
            self.images = torch.randn(batch, *self.model.shape)
            self.targets = torch.arange(batch) % arguments["classes"]
        self.impl = "torch"
        self.region: Callable[[], AbstractContextManager[Any]] = lambda: torch.autocast(
            device.type, torch.bfloat16
        )
        if label != BASELINE:
            recipe = with_base(get_recipe(label), BASES[device.type])
            report = mixprec.convert(self.model, recipe)
            self.impl = ", ".join(sorted({row.impl for row in report.converted}))
            self.region = lambda: region(recipe)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        mixprec.attach(self.model, self.optimizer)
        self.is_compiled = backend is not None
        if backend is not None:
            for block in self.model.blocks:
                block.compile(fullgraph=True, dynamic=False, backend=backend)

    def step(self) -> Tensor:
        """One step; its loss, on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        with self.region():
            loss = F.cross_entropy(self.model(self.images), self.targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def existing(self) -> list[Tensor]:
        """Parameters, buffers, the optimizer's state and the batch."""
        state = tensors_in(self.optimizer.state_dict())
        return [*self.model.parameters(), *self.model.buffers(), *state, self.images]


def step_times(step: Callable[[], object], steps: int, device: torch.device) -> list[float]:
    """Milliseconds of each step; on a GPU between events, so that the CPU may run ahead."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (after - before) for before, after in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize(device)
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize(device)
    return [before.elapsed_time(after) for before, after in pairwise(events)]


def _measure(run: Steps, warmup: int, steps: int, device: torch.device) -> dict[str, Any]:
    started = time.perf_counter()
    losses = [run.step() for _ in range(warmup)]
    warm = time.perf_counter() - started
    if device.type == "cuda":
        # synchronised by the reading of the loss
        first = float(losses[0])
        torch.cuda.reset_peak_memory_stats(device)
        times = step_times(run.step, steps, device)
        peak: int | None = torch.cuda.max_memory_allocated(device)
    else:
        first = float(losses[0])
        times = step_times(run.step, steps, device)
        # a compiled graph allocates out of the counter's sight
        peak = None if run.is_compiled else peak_bytes(run.step, device, tensors=run.existing())
    median = statistics.median(times)
    return {
        "median_ms": median,
        "mean_ms": statistics.fmean(times),
        "images_per_second": 1e3 * len(run.images) / median,
        "peak_bytes": peak,
        "warmup_seconds": warm,
        "first_loss": first,
        "last_loss": float(run.step()),
    }


def measure(
    label: str,
    preset: str,
    batch: int,
    device: torch.device,
    *,
    backend: str | None,
    warmup: int,
    steps: int,
) -> dict[str, Any]:
    """One row; running out of memory is one, too. Other errors are raised."""
    arguments = dict(VIT_PRESETS.get(preset, TINY))
    row = {
        "model": f"vit-{preset}",
        "mode": EAGER if backend is None else COMPILED,
        "batch": batch,
        "recipe": label,
    }
    # the frames of a failed run hold its tensors: freed once the error is forgotten
    _free(device)
    try:
        run = Steps(label, arguments, batch, device, backend)
        return row | {"impl": run.impl} | _measure(run, warmup, steps, device)
    except torch.OutOfMemoryError:
        return row | {"why": OUT_OF_MEMORY}
    finally:
        if backend is not None:
            torch.compiler.reset()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
