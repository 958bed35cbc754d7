"""Slices: what they hold, what they leave out, and products of them in exact integers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact_products import GENERATORS
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mixprec import fp64
from mixprec.fp64 import slices
from mixprec.fp64.engines import Engine

WIDTHS = [3, 5, 8, 13, 21]


def whole(terms: list[slices.Term]) -> list[Fraction]:
    """The sum of terms, element by element."""
    sums = [Fraction(0)] * terms[0].integer.numel()
    for term in terms:
        values = term.integer.flatten().tolist()
        unit = Fraction(2) ** term.exponent
        sums = [s + Fraction(v) * unit for s, v in zip(sums, values, strict=True)]
    return sums


def integer_array(x: Tensor) -> np.ndarray:
    array = np.empty(x.numel(), dtype=object)
    array[:] = [int(value) for value in x.flatten().tolist()]
    return array.reshape(tuple(x.shape))


def held(x: Tensor, width: int, parts: int) -> tuple[np.ndarray, list[Fraction], int]:
    """Digits [parts, k], their sum and the exponent, for one row."""
    exponent = slices.row_exponents(x.abs().amax(-1)[None, None], width)
    cut = slices.cut(x[None, None], exponent, width, parts)
    digits = integer_array(cut.digits.reshape(parts, -1))
    e = int(exponent)
    sums = [
        sum(
            (Fraction(int(d)) * Fraction(2) ** (e - width + 1 - width * p))
            for p, d in enumerate(column)
        )
        for column in digits.T
    ]
    return digits, [Fraction(s) for s in sums], e


def just_below(width: int) -> st.SearchStrategy[float]:
    """Values whose leading or later slices are all ones, or halves of a unit."""

    def make(sign: int, bits: int, tail: int, exponent: int) -> float:
        return sign * math.ldexp(1 - 2.0**-bits + tail * 2.0**-53, exponent)

    return st.builds(
        make,
        st.sampled_from([-1, 1]),
        st.integers(1, 53),
        st.integers(-2, 0),
        st.integers(-3 * width, 0),
    )


@settings(max_examples=150)
@given(st.data(), st.sampled_from(WIDTHS), st.integers(1, 12))
def test_digits_fit_and_leave_out_half_a_unit(data: st.DataObject, width: int, parts: int) -> None:
    element = st.one_of(
        just_below(width), st.floats(-1, 1), st.just(0.0), st.floats(-1e-300, 1e-300)
    )
    shift = data.draw(st.sampled_from([-1021, -300, 0, 300, 1023]))
    row = data.draw(st.lists(element, min_size=1, max_size=5))
    x = torch.tensor([math.ldexp(v, shift) for v in row], dtype=torch.float64)
    digits, sums, e = held(x, width, parts)
    assert digits.min() >= -(1 << width - 1)
    assert digits.max() <= (1 << width - 1) - 1
    rest = Fraction(2) ** (e - width * parts)
    for value, total in zip(x.tolist(), sums, strict=True):
        assert abs(Fraction(value)) < Fraction(2) ** e
        assert abs(Fraction(value) - total) <= rest


@pytest.mark.parametrize("width", WIDTHS)
def test_enough_slices_hold_every_bit(width: int) -> None:
    x = torch.randn(50, dtype=torch.float64) * 2.0 ** torch.randint(-40, 1, (50,))
    _, sums, _ = held(x, width, slices.parts_for(110, width))
    assert sums == [Fraction(v) for v in x.tolist()]


def test_a_carry_reaches_through_all_slices() -> None:
    # 0.0111..1 with all slices below 128 but the last, which rounds up
    x = torch.tensor([0.5 - 2.0**-53, -0.5 + 2.0**-53, 0.75], dtype=torch.float64)
    for parts in range(1, 9):
        digits, sums, e = held(x, 8, parts)
        assert digits.max() <= 127
        rest = Fraction(2) ** (e - 8 * parts)
        assert all(abs(Fraction(v) - s) <= rest for v, s in zip(x.tolist(), sums, strict=True))


@pytest.mark.parametrize(("bits", "parts"), [(39, 5), (47, 6), (55, 7), (63, 8), (71, 9), (79, 10)])
def test_bits_are_those_of_cublas(bits: int, parts: int) -> None:
    assert slices.parts_for(bits, 8) == parts
    assert slices.parts_for(bits + 1, 8) == parts + 1
    assert slices.parts_for(bits - 7, 8) == parts


def test_the_exponent_is_one_more_where_the_leading_slice_would_not_fit() -> None:
    values = [127 / 128, 126.999 / 128, 1.0, 1 - 2.0**-53, 0.0, 5e-324, 1.75e308, 1.79e308]
    found = slices.row_exponents(torch.tensor([values], dtype=torch.float64), 8)
    assert found.dtype == torch.int64
    # 1.75e308 is 0.973 * 2^1024, and 1.79e308 is 0.996
    assert found.tolist() == [[1, 0, 1, 1, 0, -1073, 1024, 1025]]


def operands(width: int, parts: int, k: int, m: int = 4, n: int = 3) -> tuple[slices.Slices, ...]:
    low, high = -(1 << width - 1), 1 << width - 1
    digits = [torch.randint(low, high, (1, rows, parts * k)).double() for rows in (m, n)]
    return tuple(slices.Slices(x, parts) for x in digits)


def pair_sums(a: slices.Slices, b: slices.Slices, width: int) -> list[Fraction]:
    """All pairs p + p' <= s + 1, one by one."""
    left = integer_array(a.digits[0].unflatten(-1, (a.parts, -1)))
    right = integer_array(b.digits[0].unflatten(-1, (b.parts, -1)))[:, ::-1]
    total = np.zeros((left.shape[0], right.shape[0]), dtype=object)
    top = 2 * (a.parts - 1)
    for p in range(a.parts):
        for q in range(a.parts - p):
            total = total + left[:, p].dot(right[:, q].T) * (1 << width * (top - p - q))
    return [Fraction(int(v), 1 << width * top) for v in total.flat]


def smaller(engine: Engine, capacity: int) -> Engine:
    return dataclasses.replace(engine, largest_sum=capacity * 4 ** (engine.width - 1))


@pytest.mark.parametrize("name", ["float64", "float32", "int8"])
@pytest.mark.parametrize(("parts", "k"), [(1, 5), (3, 7), (7, 1), (7, 90)])
@pytest.mark.parametrize("capacity", [None, 1, 16, 100])
def test_products_are_the_pairs_of_slices(
    name: str, parts: int, k: int, capacity: int | None
) -> None:
    engine = fp64.ENGINES[name] if capacity is None else smaller(fp64.ENGINES[name], capacity)
    a, b = operands(engine.width, parts, k)
    typed = [slices.Slices(x.digits.to(engine.dtype), parts) for x in (a, b)]
    assert whole(slices.multiply(typed[0], typed[1], engine)) == pair_sums(a, b, engine.width)


@pytest.mark.parametrize("parts", [1, 2, 7, 10])
@pytest.mark.parametrize("capacity", [None, 16, 400])
def test_products_with_the_own_transpose_are_the_same(parts: int, capacity: int | None) -> None:
    engine = fp64.ENGINES["float32"]
    engine = engine if capacity is None else smaller(engine, capacity)
    a, _ = operands(8, parts, 60)
    mirrored = torch.cat(list(a.digits.split(60, -1))[::-1], -1)
    b = slices.Slices(mirrored, parts)
    typed = [slices.Slices(x.digits.to(engine.dtype), parts) for x in (a, b)]
    assert whole(slices.multiply_by_own(typed[0], typed[1], engine)) == pair_sums(a, b, 8)


@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_sums_of_blocks_depend_on_the_sum_alone(count: int) -> None:
    largest = 1 << 53
    integers = torch.randint(-largest, largest + 1, (count, 5))
    integers[:, 0] = largest
    integers[:, 1] = torch.arange(count) % 2 * 2 * largest - largest
    expected = [sum(column) for column in integers.T.tolist()]
    for order in (torch.arange(count), torch.randperm(count)):
        blocks = list(integers[order].to(torch.float64).unbind())
        rest, total = slices.exact_sum(blocks, False)
        assert total.tolist() == [float(value) for value in expected]
        found = [int(t) + int(r) for t, r in zip(total, rest, strict=True)]
        assert found == expected


def test_sums_that_fit_are_one_term() -> None:
    blocks = [torch.tensor([3.0, -5.0]).double(), torch.tensor([2.0**52, 5.0]).double()]
    (total,) = slices.exact_sum(blocks, True)
    assert total.tolist() == [2.0**52 + 3, 0.0]


def test_products_beyond_the_capacity_keep_their_rest() -> None:
    k = 40_000
    engine = fp64.ENGINES["float64"]
    a = torch.full((1, 1, k), -float(1 << 20), dtype=torch.float64)
    b = a.clone()
    b[..., -1] = 1
    expected = (k - 1) * (1 << 40) - (1 << 20)
    assert whole(slices.multiply(slices.Slices(a, 1), slices.Slices(b, 1), engine)) == [expected]


def counting(engine: Engine, k: int) -> tuple[Engine, Callable[[], float]]:
    """An engine that counts products of one slice pair or modulus."""
    lengths: list[int] = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        lengths.append(a.shape[0] * a.shape[-1])
        return engine.multiply(a, b)

    counted = dataclasses.replace(engine, name="counting", multiply=multiply)
    return counted, lambda: sum(lengths) / k


@pytest.mark.parametrize(
    ("bits", "products", "symmetric"), [(55, 28, 16), (63, 36, 20), (79, 55, 30), (47, 21, 12)]
)
@pytest.mark.parametrize("name", ["float32", "int8"])
def test_number_of_products(
    bits: int, products: int, symmetric: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    k = 40
    engine, count = counting(fp64.ENGINES[name], k)
    # the products by which an engine is tested would be counted
    monkeypatch.setattr("mixprec.fp64.engines._fault", lambda engine, device: None)
    monkeypatch.setitem(fp64.ENGINES, "counting", engine)
    a, b = GENERATORS["randn"](6, k, 6)
    options = {"bits": bits, "engine": "counting", "report": True, "scheme": "slices"}
    _, report = fp64.matmul(a, b, **options)
    assert (report.products, count()) == (products, products)
    _, report = fp64.matmul(a, a.mT, **options)
    assert (report.products, count()) == (symmetric, products + symmetric)
    _, report = fp64.matmul(torch.complex(a, a), torch.complex(b, b), **options)
    assert report.products == 4 * products
    # the real form of m rows and k columns has 2 m rows and 2 k columns
    assert count() == products + symmetric + 2 * products
