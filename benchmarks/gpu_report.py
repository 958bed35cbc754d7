"""What ``gpu.py`` found, as Markdown: a table a section, failures and omissions below it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
GIB = 2**30
BASELINE = "torch.autocast bf16"
EAGER = "eager"


def number(value: Any, form: str = ".2f", unit: float = 1.0) -> str:
    """A figure, or nothing where there is none."""
    return "" if value is None else format(value / unit, form)


def _correct(row: Row) -> Sequence[str]:
    worst = row.get("worst", {})
    return (
        row["recipe"],
        row["product"],
        row["impl"],
        row["status"],
        number(worst.get("float32"), ".3f"),
        number(worst.get("bfloat16"), ".3f"),
        number(row.get("worst_without_cut"), ".3f"),
        {True: "equal", False: "DIFFERENT", None: ""}[row.get("operands_equal")],
        row.get("why", ""),
    )


def _product(row: Row) -> Sequence[str]:
    return (
        str(row["n"]),
        row["recipe"],
        row["impl"],
        number(row["product_ms"], ".3f"),
        number(row["tflops"], ".1f"),
        number(row["product_speedup"]),
        number(row["whole_ms"], ".3f"),
        number(row["whole_speedup"]),
    )


def _step(row: Row) -> Sequence[str]:
    return (
        row["model"],
        row["mode"],
        str(row["batch"]),
        row["recipe"],
        row.get("impl", ""),
        number(row.get("median_ms"), ".1f"),
        number(row.get("mean_ms"), ".1f"),
        number(row.get("images_per_second"), ".1f"),
        number(row.get("peak_bytes"), ".2f", GIB),
        number(row.get("speedup")),
        number(row.get("overall")),
        row.get("why", ""),
    )


def _double(row: Row) -> Sequence[str]:
    return (
        str(row["n"]),
        row["way"],
        row.get("scheme", ""),
        row.get("engine", ""),
        str(row.get("products", "")),
        number(row["ms"]),
        number(row["tflops"], ".1f"),
        number(row["speedup"]),
        number(row["grade"], ".2g"),
    )


_STEP_COLUMNS = (
    "model|mode|batch|recipe|impl|median ms|mean ms|images/s|peak GiB|speed-up|over eager|why"
)
TABLES: Mapping[str, tuple[str, str, Callable[[Row], Sequence[str]]]] = {
    "correctness": (
        "recipe|product|impl|status|float32|bfloat16|FP32 sums|operands|why not",
        "Largest error by the bound of docs/numerics.md, section 4, for results in float32 and in "
        "bfloat16 (pass: at most 1, units that add in fewer bits have their part in it); the same "
        "without that part; operands: bits equal to the CPU's.",
        _correct,
    ),
    "products": (
        "n|recipe|impl|product ms|TFLOP/s|speed-up|with quantising ms|speed-up",
        "[n, n] x [n, n] to bfloat16, speed-ups over torch's bf16 product: of operands quantised "
        "before, and with the quantisation of both each time.",
        _product,
    ),
    "steps": (
        _STEP_COLUMNS,
        f"Adam, cross-entropy, base bf16. Speed-up: throughput over {BASELINE} in the same mode at "
        "the same batch; over eager: over it in eager mode at the smallest batch.",
        _step,
    ),
    "fp64": (
        "n|way|scheme|engine|products|ms|TFLOP/s|speed-up|grade",
        "Grade: the largest error of sampled elements by 2^-53 |A||B|; below 1 is better than one "
        "rounding.",
        _double,
    ),
    "compiled steps": (_STEP_COLUMNS, "As above; each block is one compiled graph.", _step),
}


def markdown(result: Mapping[str, Any]) -> str:
    """The whole page."""
    lines = ["# One GPU", ""]
    lines += [f"- {name}: {value}" for name, value in result["environment"].items()]
    for section, found in result["sections"].items():
        columns, note, cells = TABLES[section]
        heads = columns.split("|")
        lines += ["", f"## {section} ({found['seconds']:.0f} s)", "", note, ""]
        lines += [_line(heads), _line(["---"] * len(heads))]
        lines += [_line(cells(row)) for row in found["rows"]]
        for title, key, text in (("Failed", "errors", "error"), ("Dropped", "dropped", "why")):
            if found[key]:
                lines += ["", f"{title}:", ""]
                lines += [f"- {entry['case']}: {_short(entry[text])}" for entry in found[key]]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _short(text: str) -> str:
    return " ".join(text.split())[:300]


def with_speedups(rows: Sequence[Row], known: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of steps with two ratios of throughput, None where there is nothing to compare with.

    Args:
        rows: To be completed.
        known: Rows of sections before; the baseline of eager mode may be among these.
    """
    keys = ("model", "mode", "batch")
    base = {
        tuple(row[key] for key in keys): row["images_per_second"]
        for row in [*known, *rows]
        if row.get("recipe") == BASELINE and "images_per_second" in row
    }
    found = []
    for row in rows:
        eager = [key for key in base if key[:2] == (row["model"], EAGER)]
        first = min(eager, key=lambda key: key[2], default=None)
        speed, own = row.get("images_per_second"), tuple(row[key] for key in keys)
        ratios = {
            name: speed / base[key] if speed is not None and key in base else None
            for name, key in (("speedup", own), ("overall", first))
        }
        found.append({**row, **ratios})
    return found
