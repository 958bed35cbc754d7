"""``output="nearest"``: the correctly rounded product, whatever the scheme, engine or blocks."""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction

import pytest
import torch
from exact_products import GENERATORS, LARGEST, nearest, rounded
from fp64_elements import matrices
from hypothesis import given, settings
from torch import Tensor

from mixprec import fp64
from mixprec.fp64.engines import get_engine

SCHEMES = ["slices", "residues"]


def tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    off = (found != expected).nonzero()
    assert off.shape[0] == 0, [
        (place, found[tuple(place)].item().hex(), expected[tuple(place)].item().hex())
        for place in off.tolist()[:3]
    ]


@functools.cache
def case(name: str) -> tuple[Tensor, Tensor, Tensor]:
    a, b = GENERATORS[name](9, 40, 7)
    return a, b, rounded(a, b)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("engine", ["float64", "float32", "int8"])
@pytest.mark.parametrize("generator", GENERATORS)
def test_every_scheme_and_engine_round_correctly(generator: str, engine: str, scheme: str) -> None:
    a, b, expected = case(generator)
    assert_same(fp64.matmul(a, b, output="nearest", engine=engine, scheme=scheme), expected)


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_fp8_rounds_correctly_where_it_is_exact(generator: str) -> None:
    a, b, expected = case(generator)
    try:
        get_engine("fp8", a.device)
    except ValueError as error:
        pytest.skip(str(error))
    assert_same(fp64.matmul(a, b, output="nearest", engine="fp8", scheme="slices"), expected)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", [8, 13, 21])
@pytest.mark.parametrize("capacity", [5, 33])
def test_every_width_and_block_rounds_correctly(
    width: int, capacity: int, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = dataclasses.replace(
        fp64.ENGINES["float64"],
        name="blocked",
        width=width,
        largest_sum=capacity * 4 ** (width - 1),
    )
    monkeypatch.setitem(fp64.ENGINES, "blocked", engine)
    for generator in ("randn", "phi 4", "cancelling", "graded", "leading ones"):
        a, b, expected = case(generator)
        found = fp64.matmul(a, b, output="nearest", engine="blocked", scheme=scheme)
        assert_same(found, expected)


@pytest.mark.parametrize("generator", ["phi 2", "cancelling", "circular shifts 30"])
def test_threads_order_and_batches_change_nothing(generator: str) -> None:
    a, b, expected = case(generator)
    order = torch.randperm(a.shape[1])
    assert_same(fp64.matmul(a[:, order], b[order], output="nearest"), expected)
    row = torch.cat([fp64.matmul(a[i : i + 1], b, output="nearest") for i in range(9)])
    assert_same(row, expected)
    batch = fp64.matmul(a.expand(3, -1, -1), b.expand(3, -1, -1), output="nearest")
    assert_same(batch, expected.expand(3, -1, -1))
    torch.set_num_threads(2)
    assert_same(fp64.matmul(a, b, output="nearest"), expected)


def test_the_own_transpose_rounds_correctly() -> None:
    for generator in ("randn", "phi 4", "leading ones"):
        a, _, _ = case(generator)
        for engine in ("float64", "int8"):
            assert_same(fp64.matmul(a, a.mT, output="nearest", engine=engine), rounded(a, a.mT))


TIES = [
    # exactly between two float64, the lower and the upper of which is even
    ([1.0, 2.0**-53], [1.0, 1.0]),
    ([1.0 + 2.0**-52, 2.0**-53], [1.0, 1.0]),
    ([-1.0, -(2.0**-53)], [1.0, 1.0]),
    # a tie, and the least that decides it far below
    ([1.0, 2.0**-53, 2.0**-600], [1.0, 1.0, 2.0**-400]),
    ([1.0, 2.0**-53, -(2.0**-600)], [1.0, 1.0, 2.0**-400]),
    ([1.0 + 2.0**-52, 2.0**-53, -(2.0**-1074)], [1.0, 1.0, 1.0]),
    ([1.0, 2.0**-53, 2.0**-1074], [1.0, 1.0, 2.0**-1074]),
    # products of two that are next to a tie
    ([1 + 2.0**-27], [1 + 2.0**-26 - 2.0**-52]),
    ([(1 << 53) - 1.0], [(1 << 53) - 1.0]),
    # cancellation to nothing, and to the last bit
    ([1e200, -1e200], [1e200, 1e200]),
    ([1e200, -1e200, 5e-324], [1e200, 1e200, 1.0]),
    ([1e16, 1.0, -1e16], [1.0, 1.0, 1.0]),
    ([1 + 2.0**-52, -1.0], [1 + 2.0**-52, 1 + 2.0**-51]),
    # subnormal results: ties, and beside them
    ([5e-324], [0.5]),
    ([5e-324], [1.5]),
    ([5e-324], [0.5 + 2.0**-53]),
    ([5e-324, 2.0**-1074], [0.5, 2.0**-1074]),
    ([5e-324, -(2.0**-1074)], [1.5, 2.0**-1074]),
    ([3 * 2.0**-1074], [0.5]),
    ([-3 * 2.0**-1074], [0.5]),
    ([2.0**-1022], [1 - 2.0**-53]),
    ([2.0**-1021], [1 - 2.0**-53]),
    ([2.0**-600, 2.0**-1000], [2.0**-450 + 2.0**-502, 2.0**-76]),
    ([2.0**-1074, 7 * 2.0**-1023], [1.0, -7 * 2.0**-60]),
    # overflow, and just not
    ([LARGEST, 2.0**969], [1.0, 1.0]),
    ([LARGEST, 2.0**970], [1.0, 1.0]),
    ([LARGEST, 2.0**970, -(2.0**-1074)], [1.0, 1.0, 1.0]),
    ([-LARGEST, -(2.0**970)], [1.0, 1.0]),
    ([LARGEST, -LARGEST, LARGEST], [2.0, 2.0, 1.0]),
    ([LARGEST], [LARGEST]),
    ([LARGEST], [5e-324]),
    # small results of large and small factors
    ([2.0**-377, 0.0, 2.0**-900 * (4 / 3), 2.0**-1073], [0.0, 2.0**419, 2.0**200 / 3, 2.0**-400]),
]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("engine", ["float64", "int8"])
@pytest.mark.parametrize(("row", "column"), TIES)
def test_ties_subnormals_and_the_edge_of_overflow(
    row: list[float], column: list[float], engine: str, scheme: str
) -> None:
    exact = sum((Fraction(x) * Fraction(y) for x, y in zip(row, column, strict=True)), Fraction(0))
    found = fp64.matmul(
        tensor([row]), tensor([column]).mT, output="nearest", engine=engine, scheme=scheme
    ).item()
    assert found == nearest(exact)
    assert exact or math.copysign(1.0, found) == 1.0


def test_exact_zeros_are_positive() -> None:
    for a, b in (
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2, 3), -torch.ones(3, 2)),
        (torch.eye(3), -torch.eye(3)),
        (torch.tensor([[1.0, -1.0]]), torch.ones(2, 4)),
    ):
        found = fp64.matmul(a.double(), b.double(), output="nearest")
        assert torch.equal(found, a.double() @ b.double())
        assert not bool(torch.signbit(found[found == 0]).any())


def test_zero_rows_beside_others() -> None:
    a, b, _ = case("randn")
    a, b = a.clone(), b.clone()
    a[3], b[:, 2] = 0, 0
    assert_same(fp64.matmul(a, b, output="nearest"), rounded(a, b))


def test_special_values_stay_in_their_rows() -> None:
    a, b, expected = case("phi 1")
    a = a.clone()
    a[4, 5] = math.inf
    found = fp64.matmul(a, b, output="nearest")
    assert_same(torch.cat([found[:4], found[5:]]), torch.cat([expected[:4], expected[5:]]))
    assert torch.equal(found[4], torch.sign(b[5]) * math.inf)


def test_spans_of_more_than_a_thousand_bits() -> None:
    a, b = GENERATORS["circular shifts 250"](6, 30, 5)
    a, b = a * 2.0**-500, b * 2.0**300
    a[:, 7] *= 2.0**700
    b[3] *= 2.0**-600
    assert_same(fp64.matmul(a, b, output="nearest"), rounded(a, b))


def test_the_report_bounds_one_rounding() -> None:
    a, b, expected = case("phi 4")
    found, report = fp64.matmul(a, b, output="nearest", report=True)
    assert_same(found, expected)
    assert bool((report.error_bound <= expected.abs() * 2.0**-52 + 5e-324).all())


def test_complex_parts_round_correctly() -> None:
    a, b = torch.complex(*case("phi 2")[:1], case("randn")[0]), case("randn")[1]
    b = torch.complex(b, case("phi 2")[1])
    for scheme in SCHEMES:
        found = fp64.matmul(a, b, output="nearest", scheme=scheme)
        real = rounded(torch.cat([a.real, -a.imag], 1), torch.cat([b.real, b.imag]))
        imaginary = rounded(torch.cat([a.imag, a.real], 1), torch.cat([b.real, b.imag]))
        assert_same(found.real, real)
        assert_same(found.imag, imaginary)


def check(pair: tuple[Tensor, Tensor]) -> None:
    a, b = pair
    expected = rounded(a, b)
    for engine, scheme in (("float64", "slices"), ("int8", "slices"), ("float64", "residues")):
        assert_same(fp64.matmul(a, b, output="nearest", engine=engine, scheme=scheme), expected)


@settings(max_examples=60)
@given(matrices())
def test_any_elements_round_correctly(pair: tuple[Tensor, Tensor]) -> None:
    check(pair)


@pytest.mark.slow
@settings(max_examples=2000)
@given(matrices())
def test_many_elements_round_correctly(pair: tuple[Tensor, Tensor]) -> None:
    check(pair)
