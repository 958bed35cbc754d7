"""What a training step of a small vision transformer costs in 16 bits, beside FP32 and torch's own.

    python benchmarks/vit_step.py            a table
    python benchmarks/vit_step.py --json     one JSON document

A step is forward and loss in the region, backward outside it, and AdamW; 32 images of 32x32 pixels,
patches of 4x4, 4 blocks of width 192 with 3 heads. All contenders run in one process, in turns; a
figure is the median over the rounds of the ratio to FP32 within a round. Errors are signal to
noise ratios of the logits and of the gradient of the first convolution, against float64. The peer
is torch.autocast(bfloat16) on the CPU, timed in three rounds only, for it is slow without units of
16 bits.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from mixprec import amp
from mixprec.measure import interleaved, sqnr_db

ROUNDS, SLOW_ROUNDS = 15, 3
BATCH, SIZE, PATCH, WIDTH, HEADS, BLOCKS, CLASSES = 32, 32, 4, 192, 3, 4, 10
Region = Callable[[], AbstractContextManager[object]]


class VisionTransformer(nn.Module):
    """Patches by a convolution, encoder blocks with the normalisation first, the mean, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.places = nn.Parameter(torch.randn((SIZE // PATCH) ** 2, WIDTH) * 0.02)
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


class Contender:
    """A model and its optimizer, both in FP32, and the region of its forward pass."""

    def __init__(self, region: Region, scaler: amp.GradScaler, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = VisionTransformer().to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.region, self.scaler = region, scaler
        self.images = torch.randn(BATCH, 3, SIZE, SIZE).to(dtype)
        self.targets = torch.randint(0, CLASSES, (BATCH,))

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Logits, and the gradient of the first convolution, unscaled."""
        self.optimizer.zero_grad()
        with self.region():
            logits = self.model(self.images)
            loss = nn.functional.cross_entropy(logits, self.targets)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        assert self.model.patches.weight.grad is not None
        return logits.detach(), self.model.patches.weight.grad

    def step(self) -> None:
        """One training step."""
        self.gradients()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def contenders() -> dict[str, Contender]:
    """FP32 first, then mixprec's regions, then torch's."""
    off = amp.GradScaler(enabled=False)
    return {
        "fp32": Contender(nullcontext, off, torch.float32),
        "mixprec bf16": Contender(lambda: amp.autocast("bf16"), off, torch.float32),
        "mixprec fp16": Contender(lambda: amp.autocast("fp16"), amp.GradScaler(), torch.float32),
        "torch.autocast bf16": Contender(
            lambda: torch.autocast("cpu", torch.bfloat16), off, torch.float32
        ),
    }


def measure(rounds: int) -> dict[str, Any]:
    """Ratio to FP32, milliseconds, and errors of every contender."""
    # one freed block of this size lifts glibc's thresholds: later blocks stay mapped, for everyone
    torch.empty(31 * 2**18).sum()
    exact = Contender(nullcontext, amp.GradScaler(enabled=False), torch.float64).gradients()
    found = contenders()
    errors = {
        name: [sqnr_db(a, b) for a, b in zip(exact, each.gradients(), strict=True)]
        for name, each in found.items()
    }
    for each in found.values():
        each.scaler.skip(each.optimizer)
    steps = {name: each.step for name, each in found.items()}
    slow = {name: steps[name] for name in ("fp32", "torch.autocast bf16")}
    slow_timing = interleaved(slow, SLOW_ROUNDS)
    del steps["torch.autocast bf16"]
    timing = interleaved(steps, rounds)
    ratios = {**slow_timing.ratios, **timing.ratios}
    seconds = {**slow_timing.seconds, **timing.seconds}
    return {
        name: {
            "ratio": ratios[name],
            "milliseconds": 1e3 * seconds[name],
            "sqnr_db": errors[name],
        }
        for name in found
    }


def show(result: Mapping[str, Any]) -> None:
    """The table."""
    table = Table(title=f"vision transformer step, {torch.get_num_threads()} threads")
    table.add_column("contender")
    for column in ("ratio", "ms", "SQNR dB logits / gradient"):
        table.add_column(column, justify="right")
    for name, entry in result.items():
        errors = " / ".join(f"{value:.1f}" for value in entry["sqnr_db"])
        table.add_row(name, f"{entry['ratio']:.2f}", f"{entry['milliseconds']:.1f}", errors)
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.rounds)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


if __name__ == "__main__":
    main()
