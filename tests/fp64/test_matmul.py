"""``matmul`` against exact products: accuracy, bounds, engines, shapes, factors, refusals."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from exact_products import (
    GENERATORS,
    UNIT,
    Exact,
    complex_excess,
    errors,
    excess,
    magnitudes,
    product,
    shares,
)
from torch import Tensor

from mixprec import fp64

SCHEMES = ["slices", "residues"]
ENGINES = ["float64", "float32", "int8"]


@functools.cache
def case(name: str) -> tuple[Tensor, Tensor, Exact, Exact]:
    """A, B, their exact product and |A||B|."""
    a, b = GENERATORS[name](12, 64, 10)
    return a, b, product(a, b), magnitudes(a, b)


def relative(bound: Tensor, sums: Exact) -> float:
    """The largest bound / |A||B| where that is not 0."""
    known = Exact(sums.integers, sums.exponent)
    zeros = torch.tensor([not total for total in known.integers.flat]).reshape(bound.shape)
    return max(shares(errors(torch.where(zeros, 0.0, bound), zero_like(sums)), sums)) * UNIT


def zero_like(sums: Exact) -> Exact:
    return Exact(sums.integers * 0, sums.exponent)


def identical(left: Any, right: Any) -> bool:
    pairs = zip(left, right, strict=True) if isinstance(left, tuple) else [(left, right)]
    return all(torch.equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scheme", [*SCHEMES, "auto"])
@pytest.mark.parametrize("generator", GENERATORS)
def test_auto_is_at_least_as_good_as_native(generator: str, scheme: str, engine: str) -> None:
    a, b, exact, sums = case(generator)
    found, report = fp64.matmul(a, b, scheme=scheme, engine=engine, report=True)
    native = max(shares(errors(a @ b, exact), sums))
    assert max(shares(errors(found, exact), sums)) <= max(1.0, native)
    assert excess(found, exact, report.error_bound) == []


@pytest.mark.slow
@pytest.mark.parametrize("generator", GENERATORS)
def test_auto_is_at_least_as_good_as_native_for_long_sums(generator: str) -> None:
    a, b = GENERATORS[generator](32, 1024, 32)
    exact, sums = product(a, b), magnitudes(a, b)
    native = max(shares(errors(a @ b, exact), sums))
    for scheme, engine in itertools.product(SCHEMES, ENGINES):
        found, report = fp64.matmul(a, b, scheme=scheme, engine=engine, report=True)
        assert max(shares(errors(found, exact), sums)) <= max(1.0, native)
        assert excess(found, exact, report.error_bound) == []


FIXED = [
    ("float64", 1),
    ("float64", 55),
    ("float64", 150),
    ("int8", 23),
    ("int8", 79),
    ("float32", 55),
]


@pytest.mark.parametrize("output", ["float64", "double_double"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("generator", GENERATORS)
def test_fixed_bits_are_within_the_bound(generator: str, scheme: str, output: str) -> None:
    a, b, exact, _ = case(generator)
    for engine, bits in FIXED:
        options = {"scheme": scheme, "engine": engine, "bits": bits, "output": output}
        found, report = fp64.matmul(a, b, report=True, **options)
        assert excess(found, exact, report.error_bound) == [], (engine, bits)
        assert (report.native_rows, report.native_columns) == (0, 0)
        assert report.bits >= bits


@pytest.mark.parametrize("k", [1, 10])
@pytest.mark.parametrize("parts", range(1, 7))
def test_the_worst_slices_come_close_to_their_bound(parts: int, k: int) -> None:
    # the largest digits throughout, and a rest of almost half a unit
    digits = [126.0] + [127.0] * (parts - 1)
    value = sum(d / 128 * 2.0 ** (-8 * p) for p, d in enumerate(digits))
    value += 0.49 / 128 * 2.0 ** (-8 * (parts - 1))
    a = torch.full((1, k), value, dtype=torch.float64)
    options = {"engine": "int8", "scheme": "slices", "bits": 8 * parts - 1}
    found, report = fp64.matmul(a, a.mT.clone(), report=True, **options)
    (error,) = errors(found, product(a, a.mT)).fractions()
    assert report.parts == parts
    assert 0.85 * report.error_bound.item() < error <= report.error_bound.item()


def test_the_worst_residues_come_close_to_their_bound() -> None:
    a, b = torch.rand(2, 40, 1, dtype=torch.float64) + 1
    options = {"engine": "int8", "scheme": "residues", "bits": 25}
    found, report = fp64.matmul(a, b.mT, report=True, **options)
    shared = [
        float(error) / bound
        for error, bound in zip(
            errors(found, product(a, b.mT)).fractions(),
            report.error_bound.flatten().tolist(),
            strict=True,
        )
    ]
    assert 0.85 < max(shared) <= 1


@pytest.mark.parametrize("generator", GENERATORS)
def test_double_double_is_within_its_bound_and_the_promise(generator: str) -> None:
    a, b, exact, sums = case(generator)
    for scheme, engine in itertools.product(["slices", "auto"], ENGINES):
        options = {"scheme": scheme, "engine": engine, "output": "double_double"}
        (high, low), report = fp64.matmul(a, b, report=True, **options)
        assert excess((high, low), exact, report.error_bound) == []
        assert torch.equal(high, high + low)
        # as a product in double-double arithmetic; the bound of adding up is a wide one
        assert max(shares(errors((high, low), exact), sums)) * UNIT <= 512 * 2.0**-104
        assert relative(report.error_bound, sums) <= 16 * 512 * 2.0**-104


@pytest.mark.parametrize("generator", GENERATORS)
def test_rtol_is_kept_by_the_reported_bound(generator: str) -> None:
    a, b, exact, sums = case(generator)
    for rtol in (1.5 * UNIT, 1e-15, 1e-12, 65 * UNIT, 1e-6, 0.1):
        for scheme in ("auto", *SCHEMES):
            found, report = fp64.matmul(a, b, rtol=rtol, scheme=scheme, report=True)
            assert excess(found, exact, report.error_bound) == []
            if not report.native_rows + report.native_columns or report.scheme == "native":
                assert relative(report.error_bound, sums) <= rtol
    for rtol in (1e-12, 1e-25, 1e-29):
        found, report = fp64.matmul(a, b, rtol=rtol, output="double_double", report=True)
        assert excess(found, exact, report.error_bound) == []
        assert relative(report.error_bound, sums) <= rtol


def test_rtol_says_what_was_chosen() -> None:
    a, b, _, _ = case("randn")
    _, loose = fp64.matmul(a, b, rtol=1e-10, report=True)
    assert (loose.scheme, loose.parts, loose.products, loose.native_rows) == ("native", 0, 0, 12)
    assert "1e-10" in loose.reason
    _, tight = fp64.matmul(a, b, rtol=2 * UNIT, report=True)
    assert tight.scheme in SCHEMES
    assert tight.products > 0
    _, sliced = fp64.matmul(a, b, rtol=1e-10, scheme="slices", engine="int8", report=True)
    _, finer = fp64.matmul(a, b, rtol=1e-14, scheme="slices", engine="int8", report=True)
    assert sliced.parts < finer.parts


@pytest.mark.parametrize("rtol", [1e-30, 2.0**-53, 0.0, 1.0, -1e-3, float("nan")])
def test_rtol_out_of_range(rtol: float) -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"rtol: got {rtol}; must be between 1.11e-16"):
        fp64.matmul(one, one, rtol=rtol)


def test_double_double_refuses_what_two_float64_do_not_hold() -> None:
    one = torch.ones(1, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="rtol: got 1e-40; must be between"):
        fp64.matmul(one, one, rtol=1e-40, output="double_double")


def with_capacity(name: str, capacity: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """An engine that is the other but for shorter sums."""
    engine = fp64.ENGINES[name]
    short = dataclasses.replace(
        engine, name=f"{name} {capacity}", largest_sum=capacity * 4 ** (engine.width - 1)
    )
    monkeypatch.setitem(fp64.ENGINES, short.name, short)
    return short.name


@pytest.mark.parametrize("output", ["float64", "double_double"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("generator", ["phi 4", "cancelling", "circular shifts 30"])
def test_engines_of_one_width_and_all_blocks_agree(
    generator: str, scheme: str, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, _, _ = case(generator)
    names = ["float32", "int8", with_capacity("float32", 20, monkeypatch)]
    wide = dataclasses.replace(
        fp64.ENGINES["float64"], name="float64 8", width=8, largest_sum=1 << 24
    )
    monkeypatch.setitem(fp64.ENGINES, wide.name, wide)
    for bits in (55, 79, 120):
        options = {"bits": bits, "scheme": scheme, "output": output}
        first, *others = (fp64.matmul(a, b, engine=e, **options) for e in [*names, wide.name])
        assert all(identical(first, other) for other in others)
    names = ["float64", with_capacity("float64", 17, monkeypatch)]
    for bits in (55, 120):
        first, other = (
            fp64.matmul(a, b, engine=e, bits=bits, scheme=scheme, output=output) for e in names
        )
        assert identical(first, other)


@pytest.mark.parametrize("engine", ["float32", "int8", "float64"])
@pytest.mark.parametrize("bits", [55, 79, 120])
def test_the_own_transpose_agrees_with_a_copy(
    bits: int, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = GENERATORS["phi 2"](12, 700, 1)[0]
    for name in (engine, with_capacity(engine, 50, monkeypatch)):
        options = {"bits": bits, "engine": name, "output": "double_double", "scheme": "slices"}
        own = fp64.matmul(a, a.mT, **options)
        assert identical(own, fp64.matmul(a, a.mT.clone(), **options))
        assert torch.equal(own[0], own[0].mT)


@pytest.mark.parametrize("options", [{"bits": 55}, {"output": "double_double"}, {}])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("generator", ["randn", "phi 4", "cancelling"])
def test_order_threads_and_runs_change_nothing(
    generator: str, scheme: str, options: dict[str, Any]
) -> None:
    a, b, _, _ = case(generator)
    first = fp64.matmul(a, b, scheme=scheme, **options)
    order = torch.randperm(64)
    assert identical(first, fp64.matmul(a[:, order], b[order], scheme=scheme, **options))
    for _ in range(3):
        assert identical(first, fp64.matmul(a, b, scheme=scheme, **options))
    torch.set_num_threads(2)
    assert identical(first, fp64.matmul(a, b, scheme=scheme, **options))


@pytest.mark.parametrize("output", ["float64", "double_double"])
@pytest.mark.parametrize("size", [63, 64, 65])
def test_rows_alone_and_batches_apart_are_the_same_for_fixed_bits(size: int, output: str) -> None:
    a, b = GENERATORS["phi 1"](size, size, size)
    options = {"bits": 79, "output": output}
    whole = fp64.matmul(a, b, **options)
    for i in (0, 1, size - 1):
        row = fp64.matmul(a[i : i + 1], b, **options)
        parts = whole if isinstance(whole, tuple) else (whole,)
        alone = row if isinstance(row, tuple) else (row,)
        assert all(torch.equal(x[i : i + 1], y) for x, y in zip(parts, alone, strict=True))
    batch = fp64.matmul(torch.stack([a, a.flip(0)]), b, **options)
    parts = tuple(x[0] for x in batch) if isinstance(batch, tuple) else batch[0]
    assert identical(parts, whole)


def test_pairs_do_not_depend_on_what_shares_their_batch() -> None:
    a, b = GENERATORS["randn"](6, 40, 5)
    wide = torch.stack([a, a * 2.0 ** torch.arange(-60, 60, 3, dtype=torch.float64)])
    for right in (b, torch.stack([b, b])):
        batch, report = fp64.matmul(wide, right, output="double_double", report=True)
        apart = [
            fp64.matmul(x, y, output="double_double", report=True)
            for x, y in zip(wide, right.expand(2, -1, -1), strict=True)
        ]
        assert apart[0][1].parts < apart[1][1].parts == report.parts
        assert report.products == sum(alone.products for _, alone in apart)
        for i, (pair, alone) in enumerate(apart):
            assert identical(tuple(x[i] for x in batch), pair)
            assert torch.equal(report.error_bound[i], alone.error_bound)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_complex_products_are_within_the_bound(scheme: str) -> None:
    for name in ("randn", "phi 2", "cancelling", "graded"):
        a, b, _, _ = case(name)
        a, b = torch.complex(a, a.flip(1)), torch.complex(b.flip(0), b)
        for options in ({}, {"bits": 30}, {"bits": 55, "engine": "int8"}, {"rtol": 1e-13}):
            found, report = fp64.matmul(a, b, scheme=scheme, report=True, **options)
            assert found.dtype == torch.complex128
            assert complex_excess(found, a, b, report.error_bound) == []


@pytest.mark.parametrize("rtol", [9.1 * UNIT, 2 * UNIT, 1e-12])
def test_complex_rtol_is_kept_by_the_reported_bound(rtol: float) -> None:
    a = torch.full((2, 4), 1 + 1j, dtype=torch.complex128)
    _, report = fp64.matmul(a, a.mT, rtol=rtol, report=True)
    assert bool((report.error_bound <= rtol * (a.abs() @ a.mT.abs()) * (1 + 1e-12)).all())
