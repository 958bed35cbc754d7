"""What a context of emulation did: how often each operation was emulated, and why not the rest."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mixprec.fp64.plan import NATIVE
from mixprec.fp64.report import MatmulReport


@dataclass(slots=True, kw_only=True)
class OperationTally:
    """One operation of torch.

    Attributes:
        emulated: Calls done by emulated products.
        products: Exact integer products that those took.
        native_rows: Rows and columns of those that were native: they needed more bits than the
            limit.
        reasons: Why a call was native -> how many were.
    """

    emulated: int = 0
    products: int = 0
    native_rows: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def native(self) -> int:
        """Calls that torch did."""
        return sum(self.reasons.values())


class Tally:
    """What ``emulate`` yields: printed, a table; it grows while its context is open.

    Attributes:
        note: What there is to say of the context as a whole; empty when it emulates.
        strategy, bits: As asked for.
        operations: By torch's name, those that were called.
    """

    def __init__(self, *, strategy: str, bits: int | str, note: str = "") -> None:
        self.strategy, self.bits, self.note = strategy, bits, note
        self.operations: dict[str, OperationTally] = {}
        # backward on GPUs runs in threads of its own
        self._lock = threading.Lock()

    @property
    def emulated(self) -> int:
        """Calls of all operations that were emulated."""
        return sum(tally.emulated for tally in self.operations.values())

    @property
    def native(self) -> int:
        """Calls of all operations that were not."""
        return sum(tally.native for tally in self.operations.values())

    def add_emulated(self, operation: str, reports: Iterable[MatmulReport]) -> None:
        """Count a call that was emulated, by the reports of its products."""
        with self._lock:
            tally = self.operations.setdefault(operation, OperationTally())
            tally.emulated += 1
            for report in reports:
                tally.products += report.products
                tally.native_rows += report.native_rows + report.native_columns

    def add_native(self, operation: str, reason: str) -> None:
        """Count a call that torch does."""
        with self._lock:
            reasons = self.operations.setdefault(operation, OperationTally()).reasons
            reasons[reason] = reasons.get(reason, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "note": self.note,
            "strategy": self.strategy,
            "bits": self.bits,
            "emulated": self.emulated,
            NATIVE: self.native,
            "operations": {
                name: {
                    "emulated": tally.emulated,
                    NATIVE: tally.native,
                    "products": tally.products,
                    "native_rows": tally.native_rows,
                    "reasons": dict(tally.reasons),
                }
                for name, tally in self.operations.items()
            },
        }

    def __str__(self) -> str:
        if self.note:
            return self.note
        if not self.operations:
            return "no product of matrices was called"
        head = ("operation", "emulated", NATIVE, "why native")
        rows = [head, *(_row(name, tally) for name, tally in self.operations.items())]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        return "\n".join(
            f"{name:<{widths[0]}}  {emulated:>{widths[1]}}  {native:>{widths[2]}}  {why}".rstrip()
            for name, emulated, native, why in rows
        )

    __repr__ = __str__


def _row(name: str, tally: OperationTally) -> tuple[str, str, str, str]:
    whys = _counted(tally.reasons)
    if tally.native_rows:
        whys.append(f"{tally.native_rows} rows or columns of the emulated need more bits")
    return name, str(tally.emulated), str(tally.native), "; ".join(whys)


def _counted(reasons: Mapping[str, int]) -> list[str]:
    if len(reasons) == 1:
        return list(reasons)
    return [f"{reason} ({count})" for reason, count in reasons.items()]
