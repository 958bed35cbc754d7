"""What a plan is for: a row of the hardware table or this CPU, and its memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mixprec.bench.plan import available_memory
from mixprec.formats import lookup
from mixprec.hardware import ACCELERATORS, GB, Accelerator
from mixprec.memory import GIB
from mixprec.survey import machine

CPU = "cpu"
TARGETS = (*(name.lower() for name in ACCELERATORS), CPU)
"""Names that a plan can be for."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": GB,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": GIB,
    "tib": 2**40,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a run is planned.

    Attributes:
        name: One of ``TARGETS``.
        accelerator: Its row of the hardware table; None for a CPU, whose rates no table has.
        memory: Bytes that one of them has for the run.
        features: Of a CPU.
    """

    name: str
    accelerator: Accelerator | None
    memory: int
    features: Mapping[str, bool]

    @property
    def capability(self) -> tuple[int, int] | None:
        """Compute capability; None for a CPU."""
        return None if self.accelerator is None else self.accelerator.capability

    @property
    def vendor(self) -> str:
        """Of the GPU; of no matter for a CPU."""
        return "nvidia" if self.accelerator is None else self.accelerator.vendor


def target_of(name: str, memory: str | int | None) -> Target:
    """The target of a name.

    Args:
        name: One of ``TARGETS``.
        memory: Bytes, or text such as "80GB" or "75.5 GiB"; None is the accelerator's own, for the
            CPU 0.8 of what this machine has free.

    Raises: ValueError: An unknown name, or no size.
    """
    rows = {**{row.name.lower(): row for row in ACCELERATORS.values()}, CPU: None}
    row = lookup("target", name, rows, {})
    if memory is not None:
        size = size_of(memory)
    else:
        size = available_memory() if row is None else row.memory_bytes
    features = machine().cpu_features if row is None else ()
    return Target(
        name=name.lower(), accelerator=row, memory=size, features=dict.fromkeys(features, True)
    )


def size_of(text: str | int) -> int:
    """Bytes of a size such as "80GB" (10^9 each) or "80GiB" (2^30 each); a number is bytes.

    Raises: ValueError: Another text, or less than one byte.
    """
    found = _SIZE.fullmatch(str(text).strip())
    size = int(float(found[1]) * _UNITS[(found[2] or "B").lower()]) if found else 0
    if size < 1:
        raise ValueError(
            f"memory: got {text!r}; must be a number of bytes above 0, or one with a unit; write "
            "80GB or 75.5GiB"
        )
    return size
