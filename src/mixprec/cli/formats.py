"""`mixprec formats`: the table of number formats, and what rounding does to given numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from mixprec.cli.options import Json
from mixprec.cli.output import console, print_json, print_table
from mixprec.formats import FORMAT_ALIASES, FORMATS, FloatFormat, finfo

LIMITS = ("max", "min", "smallest_normal", "eps")


def formats(
    cast: Annotated[
        str | None,
        typer.Option(
            help="Numbers separated by commas, rounded to every format: --cast=0.1,-2.5",
            metavar="VALUES",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Number formats and their limits, or rounding.

    Prints bits, max, min, smallest normal and eps of every format; with --cast, what numbers become
    in it (to nearest, ties to even; finite numbers beyond the range become the largest).
    """
    if cast is None:
        _show_limits(as_json)
    else:
        _show_cast(parse_values(cast), as_json)


def parse_values(text: str) -> tuple[float, ...]:
    """Numbers separated by commas.

    Raises:
        ValueError: No number, or something that is none.
    """
    values = []
    for word in text.split(","):
        try:
            values.append(float(word))
        except ValueError:
            raise ValueError(
                f"cast: got {word.strip()!r}; must be numbers separated by commas; "
                "write for example --cast=0.1,-2.5"
            ) from None
    return tuple(values)


def cast_values(values: Sequence[float]) -> Mapping[str, list[float]]:
    """The numbers rounded to every format, ties to even, saturating; each rounded once."""
    import torch

    from mixprec.rounding import round_to_format

    source = torch.tensor(values, dtype=torch.float64)
    return {name: round_to_format(source, fmt).tolist() for name, fmt in FORMATS.items()}


def _show_limits(as_json: bool) -> None:
    """The table of limits, and the other names."""
    aliases = {
        name: [alias for alias, target in FORMAT_ALIASES.items() if target == name]
        for name in FORMATS
    }
    if as_json:
        rows = [dataclasses.asdict(finfo(name)) | {"aliases": aliases[name]} for name in FORMATS]
        print_json({"formats": rows})
        return
    headings = ("bits", *(limit.replace("_", " ") for limit in LIMITS))
    print_table(
        ("format", *headings),
        [
            (name, str(fmt.bits), *(f"{getattr(fmt, limit):g}" for limit in LIMITS))
            for name, fmt in FORMATS.items()
        ],
        numeric=headings,
    )
    named = "; ".join(f"{name}: {', '.join(also)}" for name, also in aliases.items() if also)
    console().print(f"Other names. {named}.")


def _show_cast(values: Sequence[float], as_json: bool) -> None:
    """One row a format, one column a number."""
    rounded = cast_values(values)
    if as_json:
        named = {name: [_json_number(value) for value in row] for name, row in rounded.items()}
        print_json({"values": [_json_number(value) for value in values], "formats": named})
        return
    headings = [repr(value) for value in values]
    print_table(
        ("format", *headings),
        [(name, *(_text(v, fmt) for v in rounded[name])) for name, fmt in FORMATS.items()],
        numeric=headings,
    )


def _json_number(value: float) -> float | str:
    """The number, or its name where JSON has no number for it."""
    return value if math.isfinite(value) else str(value)


def _text(value: float, fmt: FloatFormat) -> str:
    """All digits of a value; of a 24-bit significand those that tell it from its neighbours."""
    return repr(float(f"{value:.9g}") if 10 < fmt.mantissa <= 23 else value)
