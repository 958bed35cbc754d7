"""formats.py: derived properties against other derivations, the table and other libraries."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from oracles import (
    assert_same,
    code_bits,
    code_value,
    decode_array,
    exponent_bias,
    magnitude,
    top_code,
    unit,
)

from mixprec.formats import FORMATS, FloatFormat, code_values, finfo, get_format, lookup

IEEE_NANS = {code for code in range(256) if code & 0x7F > 0x7C}
# name: bits, exponent, mantissa, max, smallest normal, smallest subnormal, inf, NaN codes
TABLE = {
    "fp64": (64, 11, 52, float(np.finfo(np.float64).max), 2.0**-1022, 2.0**-1074, True, None),
    "fp32": (32, 8, 23, float(np.finfo(np.float32).max), 2.0**-126, 2.0**-149, True, None),
    "tf32": (19, 8, 10, (2 - 2**-10) * 2.0**127, 2.0**-126, 2.0**-136, True, None),
    "bf16": (16, 8, 7, (2 - 2**-7) * 2.0**127, 2.0**-126, 2.0**-133, True, None),
    "fp16": (16, 5, 10, 65504.0, 2.0**-14, 2.0**-24, True, None),
    "e5m2": (8, 5, 2, 57344.0, 2.0**-14, 2.0**-16, True, IEEE_NANS),
    "e4m3": (8, 4, 3, 448.0, 2.0**-6, 2.0**-9, False, {0x7F, 0xFF}),
    "e5m2fnuz": (8, 5, 2, 57344.0, 2.0**-15, 2.0**-17, False, {0x80}),
    "e4m3fnuz": (8, 4, 3, 240.0, 2.0**-7, 2.0**-10, False, {0x80}),
    "e3m2": (6, 3, 2, 28.0, 2.0**-2, 2.0**-4, False, set()),
    "e2m3": (6, 2, 3, 7.5, 1.0, 2.0**-3, False, set()),
    "e2m1": (4, 2, 1, 6.0, 1.0, 0.5, False, set()),
    "e8m0": (8, 8, 0, 2.0**127, 2.0**-127, 2.0**-127, False, {0xFF}),
}
FORMAT_VALUES = list(FORMATS.values())


def custom(exponent: int, mantissa: int, specials: str = "none") -> FloatFormat:
    return FloatFormat(exponent=exponent, mantissa=mantissa, specials=specials)


def constructible() -> list[FloatFormat]:
    """Custom formats of many widths and all kinds of specials that ``FloatFormat`` accepts."""
    found = []
    for exponent in (1, 2, 3, 4, 5, 8, 11):
        for mantissa in (0, 1, 2, 3, 7):
            for specials in ("ieee", "nan", "fnuz", "none"):
                try:
                    found.append(custom(exponent, mantissa, specials))
                except ValueError:
                    continue
    return found


EVERY = [*FORMAT_VALUES, *constructible()]


def test_formats_are_those_of_the_table() -> None:
    assert list(FORMATS) == list(TABLE)
    assert all(fmt.name == str(fmt) == name for name, fmt in FORMATS.items())


@pytest.mark.parametrize("name", TABLE)
def test_format_has_the_properties_of_the_table(name: str) -> None:
    fmt = FORMATS[name]
    bits, exponent, mantissa, largest, normal, subnormal, has_inf, nans = TABLE[name]
    assert (fmt.bits, fmt.exponent, fmt.mantissa) == (bits, exponent, mantissa)
    assert (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal) == (largest, normal, subnormal)
    assert fmt.min == (2.0**-127 if name == "e8m0" else -largest)
    assert fmt.eps == 2.0**-mantissa
    assert (fmt.has_inf, fmt.has_nan) == (has_inf, nans != set())
    if nans is not None:
        assert {code for code in range(2**bits) if math.isnan(fmt.value(code))} == nans


@pytest.mark.parametrize("fmt", EVERY, ids=str)
def test_derived_properties_equal_their_derivation(fmt: FloatFormat) -> None:
    top, smallest = top_code(fmt), 1 if fmt.signed else 0
    largest = code_value(fmt, top)
    assert (fmt.bits, fmt.bias) == (code_bits(fmt), exponent_bias(fmt))
    assert fmt.max == largest
    assert fmt.min == (-largest if fmt.signed else code_value(fmt, 0))
    assert fmt.smallest_normal == float(magnitude(fmt, smallest << fmt.mantissa) * unit(fmt))
    assert fmt.smallest_subnormal == float(unit(fmt))
    assert fmt.min_exponent == math.frexp(fmt.smallest_normal)[1] - 1
    assert fmt.max_exponent == math.frexp(largest)[1] - 1
    assert fmt.sign_mask == (2 ** (fmt.bits - 1) if fmt.signed else 0)


def one_is_normal(fmt: FloatFormat) -> bool:
    """Whether 1 is a normal number of the format, and not its largest."""
    first = 1 if fmt.signed else 0
    return first <= exponent_bias(fmt) and exponent_bias(fmt) << fmt.mantissa < top_code(fmt)


@pytest.mark.parametrize("fmt", [fmt for fmt in EVERY if one_is_normal(fmt)], ids=str)
def test_eps_is_the_gap_above_one(fmt: FloatFormat) -> None:
    one = exponent_bias(fmt) << fmt.mantissa
    assert magnitude(fmt, one) * unit(fmt) == 1
    assert Fraction(fmt.eps) == (magnitude(fmt, one + 1) - magnitude(fmt, one)) * unit(fmt)


@pytest.mark.parametrize("fmt", [fmt for fmt in EVERY if code_bits(fmt) <= 12], ids=str)
def test_value_of_every_code(fmt: FloatFormat) -> None:
    want = [code_value(fmt, code) for code in range(2 ** code_bits(fmt))]
    got = [fmt.value(code) for code in range(2 ** code_bits(fmt))]
    assert_same(got, want)
    assert_same(code_values(fmt), want)
    assert fmt.has_inf == bool(np.isinf(want).any())
    assert fmt.has_nan == bool(np.isnan(want).any())


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_value_of_every_16_bit_code(name: str) -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    numpy_type = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[name]
    assert_same(code_values(FORMATS[name]), patterns.view(numpy_type))
    assert_same(decode_array(patterns, FORMATS[name]), patterns.view(numpy_type))


@pytest.mark.parametrize(("name", "unsigned"), [("fp32", np.uint32), ("fp64", np.uint64)])
def test_value_of_wide_codes(name: str, unsigned: type) -> None:
    fmt = FORMATS[name]
    random = np.random.default_rng(0).integers(0, 2**fmt.bits, 2000, unsigned, endpoint=False)
    codes = np.concatenate([random, np.arange(16, dtype=unsigned), ~np.arange(16, dtype=unsigned)])
    here = codes.view(f"f{codes.itemsize}")
    assert_same([fmt.value(int(code)) for code in codes], here)
    assert_same([code_value(fmt, int(code)) for code in codes], here)
    assert_same(decode_array(codes, fmt), here)


@pytest.mark.parametrize("fmt", [fmt for fmt in EVERY if code_bits(fmt) <= 32], ids=str)
def test_nan_code_is_nan(fmt: FloatFormat) -> None:
    if fmt.specials == "none":
        with pytest.raises(ValueError, match=rf"^format: got {fmt}; it has no NaN code; use"):
            _ = fmt.nan_code
    else:
        assert math.isnan(code_value(fmt, fmt.nan_code))


@pytest.mark.parametrize("code", [-1, 256])
def test_value_refuses_codes_out_of_range(code: int) -> None:
    with pytest.raises(ValueError, match=rf"^code: got {code}; e4m3 has codes 0 to 255$"):
        FORMATS["e4m3"].value(code)


def test_code_values_stop_at_16_bits() -> None:
    with pytest.raises(ValueError, match=r"^format: got tf32 of 19 bits; tables stop at 16"):
        code_values(FORMATS["tf32"])


@pytest.mark.parametrize("name", TABLE)
def test_finfo_equals_the_table(name: str) -> None:
    bits, _, mantissa, largest, normal, subnormal, _, _ = TABLE[name]
    lowest = normal if name == "e8m0" else -largest
    got = dataclasses.astuple(finfo(name))
    assert got == (name, bits, largest, lowest, normal, subnormal, 2.0**-mantissa)


TORCH_TYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e5m2": torch.float8_e5m2,
    "e4m3": torch.float8_e4m3fn,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e8m0": torch.float8_e8m0fnu,
}


@pytest.mark.parametrize("name", TORCH_TYPES)
def test_finfo_equals_torch(name: str) -> None:
    ours, torchs = finfo(name), torch.finfo(TORCH_TYPES[name])
    assert (ours.bits, ours.max, ours.min) == (torchs.bits, torchs.max, torchs.min)
    assert ours.smallest_normal == torchs.smallest_normal
    if name != "e5m2fnuz":  # torch gives 0.125 there; the number after 1 is 1.25
        assert ours.eps == torchs.eps


ML_TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp32": np.float32,
    "fp64": np.float64,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}


@pytest.mark.parametrize("name", ML_TYPES)
def test_finfo_equals_ml_dtypes(name: str) -> None:
    ours, theirs = finfo(name), ml_dtypes.finfo(ML_TYPES[name])
    assert (ours.max, ours.min) == (float(theirs.max), float(theirs.min))
    assert ours.smallest_normal == float(theirs.smallest_normal)
    assert ours.smallest_subnormal == float(theirs.smallest_subnormal)
    assert ours.eps == float(theirs.eps)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("float32", "fp32"),
        ("torch.float32", "fp32"),
        ("Double", "fp64"),
        ("tfloat32", "tf32"),
        ("bfloat16", "bf16"),
        ("half", "fp16"),
        ("e4m3fn", "e4m3"),
        ("float8_e4m3fn", "e4m3"),
        ("torch.float8_e4m3fnuz", "e4m3fnuz"),
        ("float8_e5m2", "e5m2"),
        ("float4_e2m1fn", "e2m1"),
        ("E8M0FNU", "e8m0"),
    ],
)
def test_get_format_resolves_aliases(alias: str, name: str) -> None:
    assert get_format(alias) is FORMATS[name]


def test_get_format_passes_values_through() -> None:
    fmt = custom(4, 2)
    assert get_format(fmt) is fmt
    assert finfo(fmt).name == "e4m2"


@pytest.mark.parametrize(("near", "meant"), [("e4m4", "e4m3"), ("bflot16", "bfloat16")])
def test_get_format_names_the_nearest(near: str, meant: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^format: got '{near}'; unknown, did you mean .*{meant}"
    ):
        get_format(near)


def test_get_format_lists_all_when_none_is_near() -> None:
    with pytest.raises(
        ValueError, match=r"^format: got 'zzzz'; unknown, .*choose from fp64, .*e8m0"
    ):
        get_format("zzzz")


@pytest.mark.parametrize("wrong", [None, 8, torch.float32])
def test_get_format_refuses_other_types(wrong: object) -> None:
    with pytest.raises(TypeError, match=rf"^format: got {type(wrong).__name__}; must be a name"):
        get_format(wrong)


def test_lookup_names_the_argument() -> None:
    with pytest.raises(ValueError, match=r"^recipe: got 'onee'; unknown, did you mean one\?"):
        lookup("recipe", "onee", {"one": 1}, {})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exponent": 0, "mantissa": 3}, "exponent: got 0; must lie in 1..11"),
        ({"exponent": 12, "mantissa": 3}, "exponent: got 12; must lie in 1..11"),
        ({"exponent": 4, "mantissa": -1}, "mantissa: got -1; must lie in 0..52"),
        ({"exponent": 4, "mantissa": 53}, "mantissa: got 53; must lie in 0..52"),
        (
            {"exponent": 4, "mantissa": 3, "specials": "fn"},
            "specials: got 'fn'; must be one of ieee",
        ),
        (
            {"exponent": 4, "mantissa": 0, "specials": "ieee"},
            "specials: got 'ieee' with exponent=4",
        ),
        (
            {"exponent": 1, "mantissa": 3, "specials": "ieee"},
            "specials: got 'ieee' with exponent=1",
        ),
        ({"exponent": 11, "mantissa": 3}, "specials: got 'none' with exponent=11"),
        ({"exponent": 8, "mantissa": 0, "signed": False}, "signed: got False; only power-of-two"),
    ],
)
def test_float_format_refuses(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        FloatFormat(**fields)


@pytest.mark.parametrize(
    ("fmt", "text"),
    [
        (custom(4, 2), "e4m2"),
        (custom(3, 4, "ieee"), "e3m4_ieee"),
        (custom(5, 4, "nan"), "e5m4_nan"),
    ],
)
def test_custom_formats_are_named_by_their_fields(fmt: FloatFormat, text: str) -> None:
    assert str(fmt) == text


def test_formats_are_frozen_values() -> None:
    fmt = FORMATS["e4m3"]
    with pytest.raises(dataclasses.FrozenInstanceError, match="mantissa"):
        fmt.mantissa = 2
    assert custom(4, 2) == custom(4, 2)
    assert len({custom(4, 2), custom(4, 2), custom(4, 2, "nan")}) == 2
