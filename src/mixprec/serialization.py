"""Specifications as plain values, for TOML and JSON, and back, with errors that name the place."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from mixprec.formats import FORMATS, FloatFormat, get_format
from mixprec.quant_spec import QuantSpec, as_spec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Gemm = TypeVar("Gemm", bound=DataclassInstance)

_SPECS = ("a", "b", "out")


def to_plain(value: Any) -> Any:
    """A dataclass as nested tables; formats of the table by name, None as "none"."""
    if isinstance(value, FloatFormat) and FORMATS.get(value.name) == value:
        return value.name
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {name: "none" if entry is None else entry for name, entry in fields.items()}
    return list(value) if isinstance(value, tuple) else value


def check_keys(where: str, values: Mapping[str, Any], known: list[str]) -> None:
    """Raise ValueError for the first key that is not known, with the nearest that is."""
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(known)}"
            raise ValueError(f"{where}: got unknown key {key!r}; {hint}")


def gemm_from(where: str, value: Any, base: Gemm) -> Gemm:
    """A product from a table of its fields, as far as it differs from another product."""
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{where}: got {value!r}; must be a table with a, b and out; write {where}.a"
        )
    check_keys(where, value, ["a", "b", "out", "accumulate"])
    changes = {
        key: spec_from(f"{where}.{key}", entry, getattr(base, key)) if key in _SPECS else entry
        for key, entry in value.items()
    }
    try:
        return replace(base, **changes)
    except ValueError as error:
        raise ValueError(f"{where}.{error}") from error


def spec_from(where: str, value: Any, base: QuantSpec | None) -> QuantSpec | None:
    """An operand from a table of its fields, as far as it differs from another; None for none."""
    if value is None or value == "none":
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: got {value!r}; must be a table or 'none'; write {where}.format")
    check_keys(where, value, [field.name for field in dataclasses.fields(QuantSpec)])
    changes = dict(value)
    if "format" in changes:
        changes["format"] = _format_from(f"{where}.format", changes["format"])
    elif base is None:
        raise ValueError(f"{where}: got no format; an operand that is quantised needs one; add it")
    if base is None:
        changes.setdefault("scale_rule", as_spec(changes["format"]).scale_rule)
    try:
        if isinstance(changes.get("block"), list):
            changes["block"] = tuple(changes["block"])
        return replace(base, **changes) if base is not None else QuantSpec(**changes)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}.{error}") from error


def _format_from(where: str, value: Any) -> FloatFormat:
    if not isinstance(value, Mapping):
        try:
            return get_format(value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
    check_keys(where, value, [field.name for field in dataclasses.fields(FloatFormat)])
    for width in ("exponent", "mantissa"):
        if width not in value:
            raise ValueError(
                f"{where}: got no {width}; a format has both widths; add {width} = ..."
            )
    try:
        fmt = FloatFormat(**value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}.{error}") from error
    if FORMATS.get(fmt.name, fmt) != fmt:
        raise ValueError(
            f"{where}.name: got {fmt.name!r}; that name has another definition; choose another"
        )
    return fmt
