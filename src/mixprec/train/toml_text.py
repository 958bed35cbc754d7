"""Nested tables written as TOML, which the standard library only reads."""

import json
import re
from collections.abc import Mapping
from typing import Any


def document(table: Mapping[str, Any]) -> str:
    """A TOML document whose values that are tables become sections."""
    sections = {key: value for key, value in table.items() if isinstance(value, dict)}
    lines = [f"{_key(key)} = {_value(table[key])}" for key in table if key not in sections]
    for name, section in sections.items():
        lines += ["", f"[{name}]", *(f"{_key(key)} = {_value(section[key])}" for key in section)]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{_key(key)} = {_value(entry)}" for key, entry in value.items()) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    # TOML has JSON's true, false and escapes; its inf and nan are Python's.
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
