"""Infinities, NaN, zeros, subnormals and the largest numbers in ``matmul``; the known cases."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from exact_products import GENERATORS, LARGEST, excess, grade, product
from torch import Tensor

from mixprec import fp64

INF, NAN = math.inf, math.nan
SCHEMES = ["slices", "residues"]
ENGINES = ["float64", "float32", "int8"]
WAYS = [(scheme, engine) for scheme in SCHEMES for engine in ENGINES]
each_way = pytest.mark.parametrize(("scheme", "engine"), WAYS)


def tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def same(found: Tensor, expected: Tensor) -> bool:
    """Equal values, NaN equal to NaN."""
    return torch.equal(
        torch.nan_to_num(found, nan=1.25), torch.nan_to_num(expected, nan=1.25)
    ) and (torch.equal(found.isnan(), expected.isnan()))


@each_way
def test_an_infinity_times_zero_and_the_rows_beside_it(scheme: str, engine: str) -> None:
    a, b = tensor([[INF, 1], [1, 1]]), tensor([[0, 1], [1, 1]])
    found, report = fp64.matmul(a, b, scheme=scheme, engine=engine, report=True)
    assert same(found, tensor([[NAN, INF], [1, 2]]))
    assert (report.special_rows, report.special_columns) == (1, 0)
    assert torch.equal(report.error_bound[0], torch.zeros(2, dtype=torch.float64))


@each_way
@pytest.mark.parametrize("value", [INF, -INF, NAN])
def test_special_values_touch_their_row_and_column_alone(
    value: float, scheme: str, engine: str
) -> None:
    a, b = (x.clone() for x in GENERATORS["phi 1"](6, 30, 5))
    options = {"scheme": scheme, "engine": engine, "bits": 63}
    clean = fp64.matmul(a, b, **options)
    a[2, 7], b[4, 3] = value, -value
    found, report = fp64.matmul(a, b, report=True, **options)
    rest = [0, 1, 3, 4, 5]
    keep = torch.tensor([0, 1, 2, 4])
    assert torch.equal(found[rest][:, keep], clean[rest][:, keep])
    assert same(found[2], (a @ b)[2])
    assert same(found[:, 3], (a @ b)[:, 3])
    assert (report.special_rows, report.special_columns) == (1, 1)


SPECIAL_SUMS = [
    ([INF, -INF], [1.0, 1.0], NAN),
    ([INF, -INF], [1.0, -1.0], INF),
    ([INF, 1.0], [-2.0, 5.0], -INF),
    ([INF, 1.0], [0.0, 5.0], NAN),
    ([NAN, 1.0], [0.0, 5.0], NAN),
    ([NAN, INF], [1.0, 1.0], NAN),
    ([1.0, 2.0], [INF, 3.0], INF),
    ([1.0, 0.0], [INF, INF], NAN),
    ([INF, 2.0], [INF, 3.0], INF),
    ([INF, 2.0], [-INF, 3.0], -INF),
    # finite products that overflow beside an infinity do not turn it into NaN
    ([INF, LARGEST], [1.0, -LARGEST], INF),
    ([-INF, LARGEST, LARGEST], [1.0, LARGEST, LARGEST], -INF),
    ([5e-324, INF], [5e-324, 5e-324], INF),
]


@pytest.mark.parametrize("output", ["float64", "double_double", "nearest"])
@pytest.mark.parametrize(("row", "column", "expected"), SPECIAL_SUMS)
def test_sums_with_special_values(
    row: list[float], column: list[float], expected: float, output: str
) -> None:
    a, b = tensor([row, [1.0] * len(row)]), tensor([column]).mT
    found = fp64.matmul(a, b, output=output)
    if output == "double_double":
        found, low = found
        assert low[0, 0].item() == 0
    assert same(found[:1], tensor([[expected]]))


@each_way
def test_complex_special_values_touch_their_row_alone(scheme: str, engine: str) -> None:
    a, b = (torch.randn(*shape, dtype=torch.complex128) for shape in ((4, 3), (3, 5)))
    options = {"scheme": scheme, "engine": engine, "bits": 63}
    clean = fp64.matmul(a, b, **options)
    a[1, 2] = complex(NAN, 1)
    b[0, 4] = complex(1, INF)
    found, report = fp64.matmul(a, b, report=True, **options)
    assert torch.equal(found[[0, 2, 3], :4], clean[[0, 2, 3], :4])
    assert not bool(torch.isfinite(torch.view_as_real(found[1])).any())
    assert not bool(torch.isfinite(torch.view_as_real(found[:, 4])).any())
    assert (report.special_rows, report.special_columns) == (1, 1)


@each_way
@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        (5e-324, 1.0, 5e-324),
        (5e-324, 2.0**1023, 4.440892098500626e-16),
        (-5e-324, 2.0**1023, -4.440892098500626e-16),
        (LARGEST, 1.0, LARGEST),
        (LARGEST, -1.0, -LARGEST),
        (LARGEST, 0.5, LARGEST / 2),
        (LARGEST, 2.0, INF),
        (LARGEST, LARGEST, INF),
        (LARGEST, -LARGEST, -INF),
        (2.0**-1022, 2.0**-52, 5e-324),
        (2.0**-1022, 2.0**-54, 0.0),
        (5e-324, 5e-324, 0.0),
        (2.0**1023, 2.0**-1074, 2.0**-51),
        (1 - 2.0**-53, 1.0, 1 - 2.0**-53),
    ],
)
def test_ends_of_the_range(x: float, y: float, expected: float, scheme: str, engine: str) -> None:
    found = fp64.matmul(tensor([[x]]), tensor([[y]]), scheme=scheme, engine=engine)
    assert found.item() == expected


@each_way
def test_zero_rows_and_subnormal_matrices(scheme: str, engine: str) -> None:
    options = {"scheme": scheme, "engine": engine}
    a, b = (x.clone() for x in GENERATORS["randn"](4, 6, 3))
    a[1], b[:, 2] = -0.0, 0.0
    found = fp64.matmul(a, b, **options)
    assert torch.equal(found[1], torch.zeros(3).double())
    assert not bool(torch.signbit(found[1]).any())
    assert not bool(torch.signbit(found[:, 2]).any())
    tiny = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(2, 3) * 5e-324
    assert torch.equal(fp64.matmul(tiny, torch.eye(3).double(), **options), tiny)
    assert torch.equal(fp64.matmul(tiny, tiny.mT, **options), torch.zeros(2, 2).double())
    wide = fp64.matmul(tiny, torch.full((3, 1), 2.0**1023, dtype=torch.float64), **options)
    assert wide.flatten().tolist() == [6 * 2.0**-51, 15 * 2.0**-51]


@each_way
def test_overflow_on_the_way_is_exact(scheme: str, engine: str) -> None:
    options = {"scheme": scheme, "engine": engine}
    row, column = tensor([[1e200, -1e200]]), tensor([[1e200], [1e200]])
    assert fp64.matmul(row, column, **options).item() == 0.0
    # and in a row that is done natively for the sake of another element
    a = tensor([[1e200, -1e200, 1e-200]])
    b = tensor([[1e200, 0], [1e200, 0], [0, 1e-10]])
    found = fp64.matmul(a, b, **options)
    assert found[0, 0].item() == 0.0
    assert abs(found[0, 1].item() / 1e-210 - 1) < 1e-15


@each_way
def test_small_beside_large_that_cancel(scheme: str, engine: str) -> None:
    a = tensor([[1e16, 1.0, -1e16]])
    found, report = fp64.matmul(
        a, torch.ones(3, 1).double(), report=True, scheme=scheme, engine=engine
    )
    assert abs(found.item() - 1) <= 3 * 2.0**-52 * 2e16
    assert excess(found, product(a, torch.ones(3, 1).double()), report.error_bound) == []


@each_way
def test_fractions_are_not_cut_to_integers(scheme: str, engine: str) -> None:
    options = {"scheme": scheme, "engine": engine}
    a, b = torch.rand(2, 64, 64, dtype=torch.float64)
    assert grade(fp64.matmul(a, b, **options), a, b) <= 1
    third = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    assert abs(fp64.matmul(third, third, **options)[0, 0].item() - 1 / 3) <= 2.0**-54


@each_way
@pytest.mark.parametrize("generator", GENERATORS)
def test_the_identity_changes_no_bit(generator: str, scheme: str, engine: str) -> None:
    a, _ = GENERATORS[generator](5, 10, 2)
    eye = torch.eye(10, dtype=torch.float64)
    assert torch.equal(fp64.matmul(a, eye, scheme=scheme, engine=engine), a)
    assert torch.equal(fp64.matmul(eye, a.mT, scheme=scheme, engine=engine), a.mT)


@pytest.mark.parametrize(
    ("engine", "output"),
    [
        ("float64", "float64"),
        ("float64", "nearest"),
        ("int8", "float64"),
        ("float32", "float64"),
        pytest.param("int8", "nearest", marks=pytest.mark.slow),
        pytest.param("float32", "nearest", marks=pytest.mark.slow),
    ],
)
def test_contractions_longer_than_an_accumulator(engine: str, output: str) -> None:
    k = 200_000
    ones = torch.ones(1, k, dtype=torch.float64)
    assert fp64.matmul(ones, ones.mT, engine=engine, output=output).item() == k
    assert fp64.matmul(-ones, ones.mT, engine=engine, output=output).item() == -k
    third = torch.full((k, 1), 1 / 3, dtype=torch.float64)
    found = fp64.matmul(ones, third, engine=engine, output=output).item()
    assert found == float(k * Fraction(1 / 3))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_lowest_integers_over_a_long_contraction(scheme: str) -> None:
    # elements whose slices are -128 each
    k = 140_000
    value = -sum(128 * 2.0 ** (-8 * p) for p in range(1, 7))
    a = torch.full((1, k), value, dtype=torch.float64)
    expected = float(k * Fraction(value) ** 2)
    found = fp64.matmul(a, a.mT.clone(), scheme=scheme, engine="int8", bits=111)
    assert found.item() == expected


def test_no_copy_is_written_into() -> None:
    a, b = tensor([[INF, 1.0], [2.0, 3.0]]), tensor([[1.0, NAN], [0.0, 1.0]])
    before = a.clone(), b.clone()
    for output in ("float64", "double_double", "nearest"):
        fp64.matmul(a, b, output=output)
        fp64.matmul(a, b, output=output, scheme="residues")
    assert same(a, before[0])
    assert same(b, before[1])
