"""TOML to nested tables and back, and settings that change one value of them."""

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_DEEPEST = 32


class ConfigError(ValueError):
    """A configuration that cannot be used; the text has one line for each mistake."""


def read_document(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises: ConfigError: It cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = f"cannot be read ({error.strerror}); give the path of a TOML file"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = f"is not TOML: {error}; correct it"
    except RecursionError:
        reason = f"is deeper than {_DEEPEST} levels; no setting is; correct it"
    raise ConfigError(f"config: got {path}; {reason}")


def require_shallow(table: Mapping[str, Any]) -> None:
    """Refuse what is nested deeper than anything that a configuration holds.

    Raises: ConfigError: It names the outermost key.
    """
    rest = [(key, value, 1) for key, value in table.items()]
    while rest:
        key, value, depth = rest.pop()
        if depth > _DEEPEST:
            raise ConfigError(
                f"{key}: got a value deeper than {_DEEPEST} levels; no setting is; correct it"
            )
        inner = value.values() if isinstance(value, Mapping) else value
        if isinstance(value, Mapping | list | tuple):
            rest += [(key, entry, depth + 1) for entry in inner]


def apply_setting(table: dict[str, Any], setting: str) -> str:
    """Put a setting `section.key=value` into the table; the outermost key that it changes.

    Raises: ConfigError: It does not read so, or a section in it is a value.
    """
    path, equals, text = setting.partition("=")
    *sections, key = (part.strip() for part in path.split("."))
    if not equals or not key:
        raise ConfigError(f"set: got {setting!r}; a setting reads section.key=value; write it so")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        value = text.strip()
    for place, section in enumerate(sections, start=1):
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(
                f"{'.'.join(sections[:place])}: got {table!r}, of which {path} cannot be set; "
                f"{section} is a value, not a table; correct either"
            )
    table[key] = value
    return [*sections, key][0]


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
