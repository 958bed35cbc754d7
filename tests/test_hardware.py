"""The hardware table: its figures against facts derived elsewhere."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest

from mixprec.formats import FORMATS, FloatFormat, code_values
from mixprec.hardware import (
    ACCELERATORS,
    GENERATIONS,
    RATE_TYPES,
    Accelerator,
    find_accelerator,
    generation,
)

EVERY = pytest.mark.parametrize("row", ACCELERATORS.values(), ids=lambda row: row.name)


def test_table_has_the_named_rows() -> None:
    assert set(ACCELERATORS) == {"L4", "A100", "H100", "H200", "B200", "GB200", "MI300X"}


@pytest.mark.parametrize(("name", "ratio"), [("H100", 7.4), ("H200", 7.4), ("B200", 27.5)])
def test_tf32_to_fp64_tensor_ratio(name: str, ratio: float) -> None:
    rates = ACCELERATORS[name].rates
    assert round(rates["tf32"] / rates["fp64_tensor"], 1) == ratio


@EVERY
def test_rates_double_as_the_width_halves(row: Accelerator) -> None:
    rates = row.rates
    assert rates["bf16"] == rates["fp16"]
    assert rates["bf16"] / rates["tf32"] == pytest.approx(2, rel=0.03)
    if "fp8" in rates:
        assert rates["fp8"] / rates["bf16"] == pytest.approx(2, rel=0.005)
    if "fp4" in rates:
        assert rates["fp4"] == 2 * rates["fp8"] == 2 * rates["fp6"]


@EVERY
def test_rates_and_native_formats_agree(row: Accelerator) -> None:
    assert set(row.rates) <= set(RATE_TYPES)
    assert row.formats <= set(FORMATS)
    for rate, formats in {
        "tf32": {"tf32"},
        "bf16": {"bf16"},
        "fp16": {"fp16"},
        "fp8": {"e4m3", "e4m3fnuz"},
        "fp6": {"e3m2"},
        "fp4": {"e2m1"},
    }.items():
        assert (rate in row.rates) == bool(formats & row.formats), rate


@EVERY
def test_rows_are_sourced_and_in_range(row: Accelerator) -> None:
    assert "data sheet" in row.source or "technical brief" in row.source
    assert row.vendor.upper() in row.source.upper()
    assert 24e9 <= row.memory_bytes <= 200e9
    # From full memory to one pass over it in 10 to 100 ms on all of them: catches a wrong unit.
    assert 0.01 < row.memory_bytes / row.bandwidth < 0.1


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA L4", "L4"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("AMD Instinct MI300X OAM", "MI300X"),
    ],
)
def test_find_accelerator_by_device_name(device: str, name: str) -> None:
    assert find_accelerator(device) is ACCELERATORS[name]


@pytest.mark.parametrize("device", ["NVIDIA L40S", "NVIDIA A10", "Tesla V100-SXM2-16GB", "cpu", ""])
def test_find_accelerator_of_other_hardware_is_none(device: str) -> None:
    assert find_accelerator(device) is None


@pytest.mark.parametrize(
    ("capability", "vendor", "name", "has", "lacks"),
    [
        ((6, 1), "nvidia", "Pascal or older", "fp64", "fp16"),
        ((7, 0), "nvidia", "Volta", "fp16", "bf16"),
        ((8, 6), "nvidia", "Ampere", "tf32", "e4m3"),
        ((8, 9), "nvidia", "Ada", "e5m2", "e2m1"),
        ((9, 0), "nvidia", "Hopper", "e4m3", "e2m1"),
        ((10, 3), "nvidia", "Blackwell", "e2m1", "e4m3fnuz"),
        ((12, 1), "nvidia", "Blackwell (RTX)", "e3m2", "e8m0"),
        ((9, 0), "amd", "older than CDNA 3", "bf16", "e4m3fnuz"),
        ((9, 4), "amd", "CDNA 3", "e4m3fnuz", "e4m3"),
    ],
)
def test_generation_of_a_capability(
    capability: tuple[int, int], vendor: str, name: str, has: str, lacks: str
) -> None:
    row = generation(capability, vendor)
    assert row.name == name
    assert has in row.formats
    assert lacks not in row.formats


def test_generation_multiplies_a_format_whatever_its_name() -> None:
    custom = FloatFormat(exponent=4, mantissa=3, specials="nan")
    assert generation((9, 0)).multiplies(custom)
    assert generation((9, 0)).multiplies(FORMATS["e4m3"])
    assert not generation((9, 0)).multiplies(FloatFormat(exponent=4, mantissa=3))
    assert not generation((9, 0)).multiplies(FORMATS["e2m1"])
    assert generation((10, 0)).multiplies(FORMATS["e2m1"])


def test_generation_names_are_unique_and_formats_known() -> None:
    assert len({(row.vendor, row.name) for row in GENERATIONS}) == len(GENERATIONS)
    assert all(row.formats <= set(FORMATS) for row in GENERATIONS)


def test_generation_refuses_an_unknown_vendor() -> None:
    with pytest.raises(ValueError, match="vendor: got 'intel'; the table has nvidia and amd"):
        generation((1, 0), "intel")


def cut_sum(terms: list[float]) -> float:
    """Terms cut toward zero to multiples of 2^(e - 13), e the largest exponent, and added."""
    step = 2.0 ** (max(math.frexp(term)[1] for term in terms if term) - 1 - 13)
    return sum(math.trunc(term / step) for term in terms) * step


@pytest.mark.parametrize("share", [1.0, 0.05])
def test_bound_on_the_sums_of_hopper_holds_for_the_model_behind_it(share: float) -> None:
    assert "132 * 2^-13 * scale * sum|a||b|" in generation((9, 0)).fp8_sums
    draw = random.Random(0)
    values = [value for value in code_values(FORMATS["e4m3"]) if math.isfinite(value)]
    for _ in range(50):
        large = draw.choices(values, k=256)
        products = [a * b for a, b in zip(large, draw.choices(values, k=256), strict=True)]
        # many small products after one large: what a short accumulator loses most of
        products = [p if i % 128 == 0 else p * share for i, p in enumerate(products)]
        total = 0.0
        for slab in (products[:128], products[128:]):
            part = 0.0
            for start in range(0, 128, 32):
                part = cut_sum([part, *slab[start : start + 32]])
            total += part
        error = abs(Fraction(total) - sum(map(Fraction, products)))
        bound = Fraction(132, 2**13) * sum(abs(Fraction(product)) for product in products)
        assert Fraction(1, 2**24) * bound < error <= bound
