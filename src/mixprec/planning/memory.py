"""The memory of a step at any batch on any number of GPUs, from a few rehearsals.

Figures are linear in the number of repeated blocks, and at each instant of a step in the batch (but
where a CPU takes other passes over larger tensors):

    bytes(counts) = bytes(two of each) + sum over runs of (count - 2) * (bytes(three) - bytes(two))

On N GPUs sharding is full (ZeRO-3, FSDP2): parameters, masters, optimizer state and gradients are
divided by N, activations are not, each GPU having the whole batch. While a block runs, its
parameters are gathered, those of the next as well, and its gradient is whole until it is scattered;
what lies in no repeated block is one more unit that stays gathered through forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from mixprec.bench.batches import MOST
from mixprec.memory import storage_bytes
from mixprec.planning.rehearsal import BACKWARD, UPDATE, Step, rehearse
from mixprec.planning.repeats import FEWEST, Repeat, shortened

Figures = dict[tuple[str, str], float]
# batches so much larger than the configuration's has its peak where still larger ones have it
_FAR = 4
_GATHERED = 2


class Memory:
    """What a step takes, by batch; each batch is rehearsed once."""

    def __init__(self, step: Step, repeats: Sequence[Repeat], gpus: int) -> None:
        self._step, self._repeats, self._gpus = step, repeats, gpus
        self._found: dict[int, Figures] = {}
        model = step.model
        self.parameters = storage_bytes(model.parameters(), meta=True)
        self.buffers = storage_bytes(model.buffers(), meta=True)
        blocks = [
            storage_bytes(block.parameters(), meta=True)
            for repeat in repeats
            for block in repeat.blocks
        ]
        self._rest = self.parameters - sum(blocks)
        self._gathered = min(self.parameters, self._rest + _GATHERED * max(blocks, default=0))

    def figures(self, rows: int) -> Figures:
        """Of the whole model on one GPU, by kind and name as ``Rehearsal.numbers``."""
        if rows not in self._found:
            few = [FEWEST] * len(self._repeats)
            base = self._rehearsed(rows, few)
            whole: Figures = dict(base)
            for run, repeat in enumerate(self._repeats):
                more = self._rehearsed(rows, [n + (run == i) for i, n in enumerate(few)])
                for key, value in base.items():
                    whole[key] += (len(repeat.blocks) - FEWEST) * (more[key] - value)
            self._found[rows] = whole
        return self._found[rows]

    def _rehearsed(self, rows: int, counts: Sequence[int]) -> Figures:
        runs = [repeat.blocks[:count] for repeat, count in zip(self._repeats, counts, strict=True)]
        with shortened(self._repeats, counts):
            return {**rehearse(self._step, rows, runs).numbers()}

    def share(self, size: float) -> int:
        """One GPU's share of something that is divided."""
        return math.ceil(size / self._gpus)

    def peaks(self, rows: int) -> dict[str, float]:
        """The most bytes alive on a GPU in each stretch of a step."""
        figures = self.figures(rows)
        peaks = {name: value for (kind, name), value in figures.items() if kind == "peak"}
        if self._gpus == 1:
            return peaks
        held = self.parameters + figures["", "masters"] + figures["", "state"]
        return {
            name: self._sharded(name, peak, held, figures["present", name])
            for name, peak in peaks.items()
        }

    def _sharded(self, stretch: str, peak: float, held: float, gradients: float) -> float:
        if stretch == UPDATE:
            return self.buffers + self.share(peak - self.buffers)
        whole = peak - held - gradients + self.share(held + gradients) + self._gathered
        if stretch.startswith(BACKWARD):
            whole += min(gradients, self._rest)
        return whole

    def peak(self, rows: int) -> float:
        """The most bytes alive on a GPU at any time of a step."""
        return max(self.peaks(rows).values())

    def largest_batch(self, memory: int, rows: int) -> int:
        """The largest batch of one GPU whose peak is within the memory; at most 2^20, 0 for none.

        Past 8 times ``rows`` it follows from the slopes between 8 and 16 times; below, from batches
        rehearsed on both sides.
        """
        near, far = _FAR // 2 * rows, _FAR * rows
        if self.peak(near) <= memory:
            lines = _crossing(self.peaks(near), self.peaks(far), (near, far), memory)
            return min(MOST, max(near, lines))
        if self.peak(1) > memory:
            return 0
        return _between(1, near, memory, self.peaks)


def _crossing(
    first: dict[str, float], second: dict[str, float], rows: tuple[int, int], memory: float
) -> int:
    """The batch at which the first of some straight lines reaches the memory, rounded down."""
    found = float(MOST)
    for stretch, start in first.items():
        slope = (second[stretch] - start) / (rows[1] - rows[0])
        if slope > 0:
            found = min(found, rows[0] + (memory - start) / slope)
    return math.floor(found)


def _between(fits: int, exceeds: int, memory: int, peaks: Callable[[int], dict[str, float]]) -> int:
    """The last batch that fits, between one that does and one that does not.

    Peaks are convex in the batch, so that the straight line between two batches is never too low;
    but for a CPU's, which takes other passes over larger tensors.
    """
    while exceeds - fits > 1:
        guess = _crossing(peaks(fits), peaks(exceeds), (fits, exceeds), memory)
        guess = min(max(guess, fits), exceeds - 2)
        if max(peaks(guess + 1).values()) <= memory:
            fits = guess + 1
        elif max(peaks(guess).values()) <= memory:
            return guess
        else:
            exceeds = guess
    return fits
