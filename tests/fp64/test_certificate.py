"""Certificates: bounds on |A||B| from below, spans, and errors within what a report says."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from exact_products import GENERATORS, excess, magnitudes, product
from fp64_elements import matrices
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mixprec import fp64
from mixprec.fp64.certificate import bits_lost, exponent_span, least_sums
from mixprec.fp64.slices import row_exponents

SMALLEST = Fraction(1, 1 << 1074)


def tensor(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def exponents(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Those of A's rows and of B's columns, B given by columns."""
    return tuple(row_exponents(x.abs().amax(-1)[None], 8)[0] for x in (a, b))


def sums(a: Tensor, b: Tensor) -> list[list[Fraction]]:
    """|A||B| with the exponents of rows and columns taken off, B given by columns."""
    rows, columns = exponents(a, b)
    values = magnitudes(a, b.mT).fractions()
    pairs = itertools.product(rows.tolist(), columns.tolist())
    scaled = [v * Fraction(2) ** -(e + f) for v, (e, f) in zip(values, pairs, strict=True)]
    return [scaled[i : i + b.shape[0]] for i in range(0, len(scaled), b.shape[0])]


def check_lower_bounds(a: Tensor, b: Tensor) -> None:
    rows, columns = exponents(a, b)
    exact = sums(a, b)
    least = least_sums(a[None], b[None], rows[None], columns[None])
    lost = bits_lost(least.clone(), a[None], b[None], rows[None], columns[None])[0].tolist()
    for i, j in itertools.product(range(a.shape[0]), range(b.shape[0])):
        if exact[i][j] == 0:
            assert lost[i][j] == -math.inf
            continue
        if lost[i][j] < math.inf:
            # k / 2^lost is below the sum, but for the rounding of a float32 logarithm
            whole = math.floor(lost[i][j])
            factor = Fraction(2.0 ** (lost[i][j] - whole)) * Fraction(2) ** whole
            assert a.shape[1] <= exact[i][j] * factor * (1 + Fraction(1, 1 << 12))


@pytest.mark.parametrize("generator", GENERATORS)
def test_lost_bits_bound_the_sums(generator: str) -> None:
    a, b = GENERATORS[generator](5, 150, 6)
    check_lower_bounds(a, b.mT)


@settings(max_examples=100)
@given(matrices())
def test_lost_bits_bound_any_sums(pair: tuple[Tensor, Tensor]) -> None:
    check_lower_bounds(pair[0], pair[1].mT)


@settings(max_examples=60)
@given(st.floats(0.5, 1, exclude_max=True), st.integers(120, 152), st.integers(0, 30))
def test_sums_that_float32_rounds_up_are_bounded(value: float, down: int, k: int) -> None:
    row = [1.0] + [value * 2.0**-down] * (k + 1)
    check_lower_bounds(tensor([row]), tensor([[0.0, *[1.0] * (k + 1)]]))
    check_lower_bounds(tensor([row]), tensor([[2.0**-down, *[1.0] * (k + 1)]]))


def brute_span(x: list[float], y: list[float]) -> float:
    """rows + columns minus the largest exponent of a product, exponents rounded down."""
    pairs = zip(x, y, strict=True)
    found = [math.frexp(v)[1] + math.frexp(w)[1] - 2 for v, w in pairs if v and w]
    return max(found, default=-math.inf)


@pytest.mark.parametrize("k", [1, 63, 64, 65, 200])
def test_the_coarse_span_is_at_least_the_exact_one(k: int) -> None:
    a, b = (torch.randn(4, k).double() * 2.0 ** torch.randint(-60, 60, (4, k)) for _ in "ab")
    a[0, ::2], b[1, ::3], a[2], b[3, 1:] = 0, 0, 0, 0
    rows, columns = exponents(a, b)
    found = exponent_span(a, b, rows, columns)
    for i, j in itertools.product(range(4), range(4)):
        reached = brute_span(a[i].tolist(), b[j].tolist())
        if reached == -math.inf:
            assert found[i, j].item() == -math.inf
        else:
            assert found[i, j].item() >= int(rows[i] + columns[j]) - reached


def test_a_zero_is_no_small_number_in_a_span() -> None:
    # the block's largest elements meet zeros: only the small products are there
    a, b = tensor([[1.0, 2.0**-400]]), tensor([[0.0, 1.0]])
    rows, columns = exponents(a, b)
    assert exponent_span(a, b, rows, columns).item() >= 400


def error_allowed(a: Tensor, b: Tensor) -> list[Fraction]:
    """2^-53 |A B| + 2^-54 |A||B| and the last subnormal bits."""
    exact, whole = product(a, b).fractions(), magnitudes(a, b).fractions()
    unit = Fraction(1, 1 << 53)
    return [abs(c) * unit + s * unit / 2 + 2 * SMALLEST for c, s in zip(exact, whole, strict=True)]


def check(a: Tensor, b: Tensor, options: dict[str, object]) -> None:
    found, report = fp64.matmul(a, b, report=True, **options)
    bound = report.error_bound
    exact = product(a, b)
    assert bool((bound >= 0).all())
    assert excess(found, exact, bound) == []
    if options.get("bits", "auto") != "auto" or report.native_rows + report.native_columns:
        return
    if isinstance(found, tuple):
        return
    pairs = zip(found.flatten().tolist(), exact.fractions(), error_allowed(a, b), strict=True)
    for value, wanted, limit in pairs:
        if math.isinf(value):
            assert abs(wanted) + limit >= (1 << 1024) - (1 << 970)
        else:
            assert abs(Fraction(value) - wanted) <= limit


OPTIONS = st.fixed_dictionaries(
    {
        "scheme": st.sampled_from(["slices", "residues", "auto"]),
        "engine": st.sampled_from(["float64", "float64", "int8", "float32"]),
        "bits": st.sampled_from(["auto", "auto", 1, 8, 23, 55, 79, 170]),
        "output": st.sampled_from(["float64", "float64", "double_double"]),
    }
)


def is_beyond_residues(error: ValueError, options: dict[str, object]) -> bool:
    """Whether a refusal is that of residues, whose moduli have an end."""
    return options["scheme"] == "residues" and "moduli" in str(error)


def check_or_refuse(pair: tuple[Tensor, Tensor], options: dict[str, object]) -> None:
    try:
        check(*pair, options)
    except ValueError as error:
        if not is_beyond_residues(error, options):
            raise


@settings(max_examples=200)
@given(matrices(), OPTIONS)
def test_errors_are_within_the_report(
    pair: tuple[Tensor, Tensor], options: dict[str, object]
) -> None:
    check_or_refuse(pair, options)


@pytest.mark.slow
@settings(max_examples=3000)
@given(matrices(longest=9), OPTIONS)
def test_errors_of_many_are_within_the_report(
    pair: tuple[Tensor, Tensor], options: dict[str, object]
) -> None:
    check_or_refuse(pair, options)


@pytest.mark.parametrize("scheme", ["slices", "residues"])
@pytest.mark.parametrize("output", ["float64", "double_double"])
def test_an_overflow_has_an_infinite_bound(output: str, scheme: str) -> None:
    a, b = tensor([[1.0, 4.0], [1.0, 1.0]]), tensor([[1.0], [2.0**1022]])
    options = {"output": output, "scheme": scheme, "bits": 79}
    found, report = fp64.matmul(a, b, report=True, **options)
    high = found[0] if isinstance(found, tuple) else found
    assert high.flatten().tolist() == [math.inf, 2.0**1022]
    assert torch.isinf(report.error_bound).flatten().tolist() == [True, False]


@pytest.mark.parametrize("scheme", ["slices", "residues", "auto"])
@pytest.mark.parametrize("engine", ["float64", "int8"])
def test_the_subnormal_counterexample_has_the_right_sign(engine: str, scheme: str) -> None:
    # the span alone, without the subnormal's own exponent, gives -2^-1074
    x, y = tensor([[2.0**-1074, 7 * 2.0**-1023]]), tensor([[1.0], [-7 * 2.0**-60]])
    exact = product(x, y).fractions()[0]
    assert 0 < exact < SMALLEST
    for output in ("float64", "nearest"):
        options = {"scheme": scheme, "engine": engine, "output": output}
        found, report = fp64.matmul(x, y, report=True, **options)
        assert found.item() == 5e-324
        assert excess(found, product(x, y), report.error_bound) == []


@pytest.mark.parametrize("k", [1, 3, 64])
@pytest.mark.parametrize("engine", ["float64", "int8"])
def test_thirds_are_right_to_the_last_bit(k: int, engine: str) -> None:
    # automatic bits that were too few turned fractions into integers elsewhere
    a = torch.full((k, k), 1 / 3, dtype=torch.float64)
    found = fp64.matmul(a, torch.ones(k, k).double(), engine=engine, output="nearest")
    assert found[0, 0].item() == float(k * Fraction(1 / 3))
    auto = fp64.matmul(a, torch.ones(k, k).double(), engine=engine)
    assert abs(Fraction(auto[0, 0].item()) - k * Fraction(1 / 3)) <= Fraction(k, 1 << 53)


def test_native_rows_are_counted_and_only_those() -> None:
    a, b = GENERATORS["randn"](8, 40, 7)
    a, b = a.clone(), b.clone()
    # one row needs far more bits in one column: its large elements meet zeros
    a[2, :20] *= 2.0**200
    b[:20, 4] = 0
    found, report = fp64.matmul(a, b, report=True)
    assert report.native_rows + report.native_columns == 1
    assert "limit" in report.reason
    if report.native_rows:
        assert torch.equal(found[2:3], a[2:3] @ b)
    assert excess(found, product(a, b), report.error_bound) == []


def test_everything_beyond_the_limit_is_native() -> None:
    a, b = GENERATORS["circular shifts 250"](5, 40, 5)
    found, report = fp64.matmul(a, b, report=True)
    assert (report.scheme, report.products) == ("native", 0)
    assert torch.equal(found, a @ b)
    assert excess(found, product(a, b), report.error_bound) == []
