"""What a conversion did: one row a module, printed as a table."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

Status = Literal["converted", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRow:
    """One module: its name, its type, what became of it and why.

    Of a linear layer also what it multiplies: ``formats`` of output, grad_input and grad_weight
    ("e5m2 x e4m3" where the operands differ), and ``multiplications`` a token in each of them.
    ``bits`` are the widths of its operands.
    """

    name: str
    type: str
    status: Status
    recipe: str = ""
    impl: str = ""
    reason: str = ""
    formats: tuple[str, ...] = ()
    multiplications: int = 0
    bits: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Every module that holds parameters or has no children, in the model's order.

    Args:
        rows: The modules.
        asked: Whether some recipe quantises, so that converting nothing is worth a loud word.
    """

    rows: tuple[ReportRow, ...]
    asked: bool = True

    @property
    def converted(self) -> tuple[ReportRow, ...]:
        """The rows of modules that multiply by a recipe now."""
        return tuple(row for row in self.rows if row.status == "converted")

    @property
    def left(self) -> tuple[ReportRow, ...]:
        """The rows of modules that are as they were."""
        return tuple(row for row in self.rows if row.status == "left")

    @property
    def shares(self) -> dict[str, float]:
        """Share of the multiplications of linear layers, in training, by the operands' formats.

        Each of a layer's three products has as many. A layer that is there under several names
        counts once; convolutions and products without parameters do not.
        """
        counts: dict[str, int] = {}
        for row in self.rows:
            for name in row.formats:
                counts[name] = counts.get(name, 0) + row.multiplications
        whole = sum(counts.values())
        return {name: count / whole for name, count in counts.items() if whole}

    def table(self) -> Table:
        """The report as a rich table."""
        title = f"{len(self.converted)} converted, {len(self.left)} left alone"
        is_loud = self.asked and not self.converted
        shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in self.shares.items())
        table = Table(
            title="NOTHING WAS CONVERTED" if is_loud else title,
            caption=f"multiplications of linear layers: {shares}" if shares else None,
        )
        for column in ("module", "type", "status", "recipe", "bits", "impl", "why"):
            table.add_column(column, overflow="fold")
        for row in self.rows:
            name = row.name or "(model)"
            table.add_row(name, row.type, row.status, row.recipe, row.bits, row.impl, row.reason)
        return table

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=120).print(self.table())
        return text.getvalue()
