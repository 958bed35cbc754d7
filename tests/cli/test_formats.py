"""`mixprec formats`: limits and rounding, as people and programs read them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import ml_dtypes
import numpy
import pytest

from mixprec.cli.formats import parse_values
from mixprec.formats import FORMAT_ALIASES, FORMATS

LIMITS = {
    "fp32": ("32", "3.40282e+38", "1.17549e-38", "1.19209e-07"),
    "bf16": ("16", "3.38953e+38", "1.17549e-38", "0.0078125"),
    "e4m3": ("8", "448", "0.015625", "0.125"),
    "e5m2": ("8", "57344", "6.10352e-05", "0.25"),
}
VALUES = "2.073093891143,-0.78251332044,-0.4708491862,-1.3255727911"
ROUNDED = {
    "bf16": ["2.078125", "-0.78125", "-0.470703125", "-1.328125"],
    "e4m3": ["2.0", "-0.8125", "-0.46875", "-1.375"],
    "e5m2": ["2.0", "-0.75", "-0.5", "-1.25"],
}


def rows(text: str) -> dict[str, list[str]]:
    """The rows of a printed table by their first cell."""
    cells = [line.split() for line in text.splitlines()]
    return {row[0]: row[1:] for row in cells if row and row[0] in FORMATS}


def test_table_of_limits(cli: Callable) -> None:
    table = rows(cli("formats").out)
    assert set(table) == set(FORMATS)
    for name, (bits, largest, smallest_normal, eps) in LIMITS.items():
        assert table[name] == [bits, largest, f"-{largest}", smallest_normal, eps]


def test_table_agrees_with_numpy_and_ml_dtypes(cli: Callable) -> None:
    table = rows(cli("formats").out)
    types = {
        "fp64": numpy.float64,
        "fp16": numpy.float16,
        "e3m2": ml_dtypes.float6_e3m2fn,
        "e2m3": ml_dtypes.float6_e2m3fn,
        "e2m1": ml_dtypes.float4_e2m1fn,
        "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
        "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    }
    for name, dtype in types.items():
        info = ml_dtypes.finfo(dtype)
        limits = (info.max, info.min, info.smallest_normal, info.eps)
        assert table[name][1:] == [f"{float(limit):g}" for limit in limits]


def test_aliases_are_named(cli: Callable) -> None:
    out = " ".join(cli("formats").out.split())
    assert all(alias in out for alias in FORMAT_ALIASES)
    assert "bf16: bfloat16;" in out


def test_json_of_limits_is_exact(cli: Callable) -> None:
    data = {row["name"]: row for row in json.loads(cli("formats", "--json").out)["formats"]}
    assert list(data) == list(FORMATS)
    for name, fmt in FORMATS.items():
        assert data[name]["bits"] == fmt.bits
        assert data[name]["max"] == fmt.max
        assert data[name]["eps"] == fmt.eps
    assert data["e4m3"]["aliases"] == ["e4m3fn", "float8_e4m3fn"]


def test_cast_shows_exact_values(cli: Callable) -> None:
    table = rows(cli("formats", f"--cast={VALUES}").out)
    assert set(table) == set(FORMATS)
    for name, expected in ROUNDED.items():
        assert table[name] == expected
    assert table["fp64"] == VALUES.split(",")
    assert table["e8m0"] == ["2.0", "nan", "nan", "nan"]


def test_cast_json(cli: Callable) -> None:
    data = json.loads(cli("formats", f"--cast={VALUES}", "--json").out)
    assert data["values"] == [float(value) for value in VALUES.split(",")]
    for name, expected in ROUNDED.items():
        assert data["formats"][name] == [float(value) for value in expected]


def test_cast_json_of_special_values_is_valid_json(cli: Callable) -> None:
    out = cli("formats", "--cast=nan,-inf,1e300,-0.0", "--json").out
    data = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert data["formats"]["e5m2"][:3] == ["nan", "-inf", 57344.0]
    assert math.copysign(1, data["formats"]["e4m3"][3]) == -1


@pytest.mark.parametrize(
    "values", [VALUES, "1e300,3.3e38,-1e-300,5e-324,nan,inf", "0.1," * 30 + "1"]
)
def test_cast_fits_80_columns_and_cuts_nothing(cli: Callable, values: str) -> None:
    out = cli("formats", f"--cast={values}").out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    numbers = [word for row in out.splitlines() for word in row.split()[1:] if row.strip()]
    assert len(numbers) == (len(values.split(",")) * (len(FORMATS) + 1)), "a cell wrapped"


def test_limits_fit_80_columns_and_cut_nothing(cli: Callable) -> None:
    out = cli("formats").out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out


@pytest.mark.parametrize("text", ["1,x", "", "1,,2", "0x10", "1;2"])
def test_bad_values_are_one_line(cli: Callable, text: str) -> None:
    code, out, err = cli("formats", f"--cast={text}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cast: got " in err
    assert "must be numbers separated by commas" in err


def test_parse_values_takes_spaces_and_specials() -> None:
    assert parse_values(" 1, -2.5e3 ,inf") == (1.0, -2500.0, math.inf)
    with pytest.raises(ValueError, match="cast: got 'two'; must be numbers"):
        parse_values("1,two")
