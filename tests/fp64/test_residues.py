"""Residues: coprime moduli, exact products of them, and the integers they stand for."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from exact_products import GENERATORS, excess, product
from torch import Tensor

from mixprec import fp64
from mixprec.fp64 import residues
from mixprec.fp64.arithmetic import power_of_two
from mixprec.fp64.engines import Engine
from mixprec.fp64.residues import Norms
from mixprec.fp64.slices import row_exponents

WIDTHS = [5, 8, 21]


def integers(x: Tensor) -> np.ndarray:
    array = np.empty(x.numel(), dtype=object)
    array[:] = [int(value) for value in x.flatten().tolist()]
    return array.reshape(tuple(x.shape))


@pytest.mark.parametrize("width", WIDTHS)
def test_moduli_are_coprime_and_fit(width: int) -> None:
    found = residues.coprime(width)
    assert list(found) == sorted(found, reverse=True)
    assert found[0] == 1 << width
    assert all(math.gcd(p, q) == 1 for p, q in itertools.combinations(found, 2))


def test_moduli_of_eight_bits_are_the_known_ones() -> None:
    known = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193, 191)
    assert residues.moduli(8, 17).values == known
    for count in range(1, 18):
        half = math.isqrt(math.prod(known[:count]) // 2)
        found = residues.moduli(8, count).norm_bits
        # norms below the square root of half the product, and not much below
        assert 0 < math.log2(half + 1) - found < 2.0**-8 + 2 / half


@pytest.mark.parametrize("width", WIDTHS)
def test_the_fewest_moduli_are_taken(width: int) -> None:
    for bits in (21, 22.5):
        count = residues.moduli_for(bits, width)
        assert count is not None
        assert residues.moduli(width, count).norm_bits >= bits
        assert residues.moduli(width, count - 1).norm_bits < bits


def test_too_many_bits_have_no_moduli() -> None:
    assert residues.moduli_for(30, 5) is None
    with pytest.raises(
        ValueError, match=r"^scheme: got 'residues'; .* more moduli of 5 bits than there are; use"
    ):
        fp64.matmul(
            torch.ones(1, 1).double(),
            torch.ones(1, 1).double(),
            bits=55,
            scheme="residues",
            engine=narrow(),
        )


def narrow() -> str:
    """A name of an engine of 5 bits that runs everywhere."""
    engine = dataclasses.replace(
        fp64.ENGINES["float64"], name="narrow", width=5, largest_sum=1 << 24
    )
    fp64.ENGINES["narrow"] = engine
    return "narrow"


@pytest.fixture(autouse=True)
def _engines_as_before() -> object:
    before = dict(fp64.ENGINES)
    yield
    fp64.ENGINES.clear()
    fp64.ENGINES.update(before)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [2, 5, 9])
def test_remaindering_finds_every_integer(width: int, count: int) -> None:
    used = residues.moduli(width, count)
    whole = math.prod(used.values)
    limit = whole // 2 - whole // 1000 - 1
    values = [0, 1, -1, limit, -limit, limit - 1, whole // 4, whole // 3]
    values += [(-1) ** p * (p + q) for p, q in zip(used.values, used.values[1:], strict=False)]
    values += [(-1) ** i * limit * i // 50 + i for i in range(50)]
    values = [v for v in values if abs(v) <= limit]
    reduced = [[(v + p // 2) % p - p // 2 for v in values] for p in used.values]
    c = torch.tensor(reduced, dtype=torch.float64).reshape(count, 1, 1, -1)
    terms = residues.remaindered(c, used)
    found = [0] * len(values)
    for term in terms:
        part = term.integer.flatten().tolist()
        found = [f + (int(v) << term.exponent) for f, v in zip(found, part, strict=True)]
    assert found == values


@pytest.mark.parametrize("p", [3, 29, 255, 256, (1 << 21) - 1, 1 << 21])
def test_reduce_is_symmetric(p: int) -> None:
    x = torch.randint(-(1 << 40), 1 << 40, (1000,))
    x[:4] = torch.tensor([p // 2, -(p // 2), p, -p])
    found = residues.reduce(x.to(torch.float64), torch.tensor(float(p)))
    assert bool(((found >= -p / 2) & (found < p / 2)).all())
    assert all((int(r) - v) % p == 0 for r, v in zip(found, x.tolist(), strict=True))


def blocked(engine: Engine, capacity: int | None) -> Engine:
    if capacity is None:
        return engine
    return dataclasses.replace(engine, largest_sum=capacity * 4 ** (engine.width - 1))


def digits(used: residues.Moduli, *shape: int) -> Tensor:
    """Residues of every size, the lowest often."""
    parts = []
    for p in used.values:
        part = torch.randint(-(p // 2), (p + 1) // 2, (1, *shape))
        part[..., ::3] = -(p // 2)
        parts.append(part)
    return torch.stack(parts).to(torch.float64)


def assert_congruent(found: Tensor, expected: list[np.ndarray], used: residues.Moduli) -> None:
    for part, wanted, p in zip(found, expected, used.values, strict=True):
        off = integers(part[0]) - wanted
        assert not any(value % p for value in off.flat)
        assert bool((part.abs() <= p / 2).all())


@pytest.mark.parametrize("name", ["float64", "float32", "int8"])
@pytest.mark.parametrize("capacity", [None, 10])
def test_products_are_exact_modulo_each(name: str, capacity: int | None) -> None:
    engine = blocked(fp64.ENGINES[name], capacity)
    used = residues.moduli(engine.width, 6)
    a, b = digits(used, 4, 200), digits(used, 3, 200)
    found = residues.multiply(a, b, used, engine)
    expected = [integers(x[0]).dot(integers(y[0]).T) for x, y in zip(a, b, strict=True)]
    assert_congruent(found, expected, used)


@pytest.mark.parametrize("name", ["float64", "float32"])
def test_products_of_the_longest_blocks_are_exact(name: str) -> None:
    engine = fp64.ENGINES[name]
    used = residues.moduli(engine.width, 3)
    k = 2 * engine.capacity + 1
    a, b = digits(used, 1, k), digits(used, 2, k)
    found = residues.multiply(a, b, used, engine)
    expected = [integers(x[0]).dot(integers(y[0]).T) for x, y in zip(a, b, strict=True)]
    assert_congruent(found, expected, used)


@pytest.mark.parametrize("name", ["float64", "int8"])
def test_complex_products_are_exact_modulo_each(name: str) -> None:
    engine = fp64.ENGINES[name]
    used = residues.moduli(8, 14)
    engine = dataclasses.replace(engine, width=8)
    a, b = [(digits(used, rows, 50), digits(used, rows, 50)) for rows in (3, 2)]
    real, imaginary = residues.multiply_complex(a, b, used, engine)
    exact = [[integers(part[t][0]) for part in (*a, *b)] for t in range(14)]
    assert_congruent(real, [p.dot(r.T) - q.dot(s.T) for p, q, r, s in exact], used)
    assert_congruent(imaginary, [p.dot(s.T) + q.dot(r.T) for p, q, r, s in exact], used)


def test_roots_of_minus_one() -> None:
    used = residues.moduli(8, 14)
    for p, root in zip(used.values, used.roots, strict=True):
        every = [j for j in range(p) if (j * j + 1) % p == 0]
        assert (root in every) if p % 2 and every else root is None
    assert sum(root is not None for root in used.roots) == 3


def scaled(x: Tensor, used: residues.Moduli, width: int) -> tuple[Tensor, np.ndarray]:
    """The exponents of rows and the integers they make."""
    exponent = row_exponents(x.abs().amax(-1), width)
    mu = residues.exponents(Norms.of(x, exponent), exponent, used, x.shape[-1])
    found = residues.residues(x, mu, used, width)
    terms = residues.remaindered(found, used)
    total = sum(integers(term.integer[0]) * (1 << term.exponent) for term in terms)
    return mu, np.asarray(total, dtype=object)


@pytest.mark.parametrize("width", [8, 21])
@pytest.mark.parametrize("generator", GENERATORS)
def test_integers_are_the_rounded_elements_and_their_norms_fit(generator: str, width: int) -> None:
    a, _ = GENERATORS[generator](5, 40, 2)
    used = residues.moduli(width, 16 if width == 8 else 6)
    mu, found = scaled(a.unsqueeze(0), used, width)
    for row, values, exponent in zip(found, a.tolist(), mu[0].tolist(), strict=True):
        assert sum(int(v) ** 2 for v in row) * 2 < math.prod(used.values)
        for integer, value in zip(row, values, strict=True):
            numerator, denominator = value.as_integer_ratio()
            numerator <<= max(exponent, 0)
            denominator <<= max(-exponent, 0)
            # within a half
            assert abs(2 * (int(integer) * denominator - numerator)) <= denominator


@pytest.mark.parametrize("width", [8, 21])
def test_parallel_rows_reach_the_limit_but_do_not_wrap(width: int) -> None:
    # Cauchy and Schwarz with equality, in every place between two powers of two
    for scale in torch.linspace(1, 2, 17).tolist():
        a = torch.full((1, 37), scale, dtype=torch.float64)
        for bits in (21, 30, 55):
            found = fp64.matmul(a, a.mT, scheme="residues", bits=bits)
            exact = 37 * scale * scale
            assert abs(found.item() - exact) <= exact * 2.0 ** (4 - bits)


@pytest.mark.parametrize("spread", [100, 300])
def test_wide_spans_are_done_or_refused(spread: int) -> None:
    for _ in range(30):
        a, b = (
            torch.randn(shape, dtype=torch.float64)
            * power_of_two(torch.randint(-spread, spread + 1, shape))
            for shape in ((3, 70), (70, 3))
        )
        options = {"scheme": "residues", "output": "double_double", "rtol": 0.45}
        try:
            found, report = fp64.matmul(a, b, report=True, **options)
        except ValueError as error:
            refusal = str(error)
        else:
            refusal = None
            assert excess(found, product(a, b), report.error_bound) == []
        assert refusal is None or "more moduli of 21 bits than there are" in refusal


@pytest.mark.parametrize("name", ["float32", "int8"])
def test_one_product_a_modulus(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    k, lengths = 40, []
    engine = fp64.ENGINES[name]

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        lengths.append(a.shape[0] * a.shape[-1])
        return engine.multiply(a, b)

    counting = dataclasses.replace(engine, name="counting", multiply=multiply)
    # the products by which an engine is tested would be counted
    monkeypatch.setattr("mixprec.fp64.engines._fault", lambda engine, device: None)
    monkeypatch.setitem(fp64.ENGINES, "counting", counting)
    a, b = GENERATORS["randn"](6, k, 6)
    options = {"bits": 55, "scheme": "residues", "engine": "counting", "report": True}
    _, report = fp64.matmul(a, b, **options)
    assert (report.parts, report.products, sum(lengths)) == (15, 15, 15 * k)
    lengths.clear()
    _, report = fp64.matmul(torch.complex(a, a), torch.complex(b, b), **options)
    # 241, 233, 229 and 197 of them have a root of -1
    assert (report.parts, report.products) == (15, 3 * 15 - 4)
    assert sum(lengths) == (3 * 15 - 4) * k
