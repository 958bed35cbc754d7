"""`mixprec recipes --measure`: one tensor under every operand of recipes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mixprec.cli.output import console, print_json, print_table

if TYPE_CHECKING:
    from mixprec.quantization import QuantSpec
    from mixprec.recipes import Recipe
    from mixprec.what_if import WhatIf

DEFAULT_DATA = "normal"
BLOCKS = {(-1, -1): "tensor", (1, -1): "row", (-1, 1): "column"}
_COLUMNS = ("quantised as", "bits", "SQNR dB", "saturated %", "underflow %")


def show_measured(recipes: Iterable[Recipe], data: str, as_json: bool) -> None:
    """The table, or one JSON document.

    Raises:
        ValueError: No such data, or recipes that quantise nothing.
    """
    from mixprec.what_if import load_data, what_if

    x = load_data(data)
    rows = what_if(x, recipes)
    if not rows:
        names = ", ".join(map(str, recipes))
        raise ValueError(f"name: got {names} with --measure; it quantises nothing; name another")
    shape, dtype = list(x.shape), str(x.dtype).removeprefix("torch.")
    if as_json:
        document = {"data": data, "shape": shape, "dtype": dtype}
        print_json({**document, "operands": [_data(row) for row in rows]})
        return
    print_table(
        _COLUMNS,
        [_cells(row) for row in rows],
        title=f"{data}, {dtype} {'x'.join(map(str, shape))}, as each operand",
        numeric=_COLUMNS[1:],
    )
    console().print("Where a tensor is transformed, its error is that of the transformed one.")
    print_table(("quantised as", "operands"), [(described(row.spec), _uses(row)) for row in rows])


def described(spec: QuantSpec) -> str:
    """A specification in a few words."""
    free, contraction = spec.block
    block = BLOCKS.get(spec.block, f"{free}x{contraction}")
    words = [str(spec.format)]
    if spec.scale_rule != "none":
        words += [block, spec.scale_rule]
    words += ["delayed"] * spec.is_delayed + ["transformed"] * spec.hadamard
    return " ".join(words + [spec.rounding] * spec.is_stochastic)


def _uses(row: WhatIf) -> str:
    return "; ".join(f"{name} {', '.join(paths)}" for name, paths in row.uses.items())


def _cells(row: WhatIf) -> tuple[str, ...]:
    figures = row.figures
    sqnr = "exact" if figures.sqnr_db == math.inf else f"{figures.sqnr_db:.1f}"
    shares = (f"{100 * share:.3g}" for share in (figures.saturation, figures.underflow))
    return (described(row.spec), f"{figures.bits_per_element:.2f}", sqnr, *shares)


def _data(row: WhatIf) -> dict[str, Any]:
    from mixprec.serialization import to_plain

    return {
        "spec": to_plain(row.spec),
        "uses": dict(row.uses),
        **finite_or_text(to_plain(row.figures)),
    }


def finite_or_text(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures with those that JSON has no number for as text, ``inf`` and ``nan``."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }
