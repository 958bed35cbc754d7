"""Powers of two, scaling, exponents and sums with their error, against Python's own numbers."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from exact_products import LARGEST, nearest
from hypothesis import given
from hypothesis import strategies as st

from mixprec.fp64.arithmetic import exponent_of, fast_two_sum, power_of_two, scale, two_sum

FINITE = st.floats(allow_nan=False, allow_infinity=False)
MODERATE = st.floats(min_value=-1e290, max_value=1e290)


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_powers_are_exact_over_the_whole_range() -> None:
    exponents = range(-1074, 1024)
    expected = tensor(*(math.ldexp(1.0, e) for e in exponents))
    assert torch.equal(power_of_two(torch.tensor(exponents)), expected)


def test_powers_beyond_the_range_are_zero_and_infinite() -> None:
    found = power_of_two(torch.tensor([-5000, -1076, 1024, 5000]))
    assert torch.equal(found, tensor(0.0, 0.0, math.inf, math.inf))


@given(FINITE, st.integers(-1000, 2200))
def test_scale_rounds_once(value: float, exponent: int) -> None:
    expected = nearest(Fraction(value) * Fraction(2) ** exponent)
    assert scale(tensor(value), torch.tensor([exponent])).item() == expected


@given(
    st.floats(min_value=2.0**-400, max_value=LARGEST),
    st.sampled_from([-1, 1]),
    st.integers(1, 2200),
)
def test_scale_rounds_once_down_to_subnormals(value: float, sign: int, exponent: int) -> None:
    expected = nearest(Fraction(sign * value) / 2**exponent)
    assert scale(tensor(sign * value), torch.tensor([-exponent])).item() == expected


@given(FINITE, st.integers(1001, 2200))
def test_scale_of_small_values_is_within_its_bound(value: float, exponent: int) -> None:
    found = Fraction(scale(tensor(value), torch.tensor([-exponent])).item())
    exact = Fraction(value) / 2**exponent
    assert abs(found - exact) <= max(Fraction(2) ** -1073, abs(exact) / 2**53)


def test_one_large_exponent_does_not_change_the_other_elements() -> None:
    x, exponents = tensor(1.5, -3.0, 5e-324), torch.tensor([-1060, 3, 2000])
    expected = tensor(1.5 * 2.0**-1060, -24.0, 2.0**926)
    assert torch.equal(scale(x, exponents), expected)


def test_scale_of_nothing() -> None:
    assert scale(torch.empty(0, 3).double(), torch.empty(0, 1).long()).shape == (0, 3)


@given(FINITE)
def test_exponents_are_those_of_frexp(value: float) -> None:
    assert exponent_of(tensor(value)).item() == math.frexp(value)[1]


def test_exponents_of_what_has_none_are_zero() -> None:
    assert exponent_of(tensor(0.0, -0.0, math.inf, -math.inf, math.nan)).tolist() == [0] * 5


@given(MODERATE, MODERATE)
def test_two_sum_is_exact(a: float, b: float) -> None:
    total, error = (part.item() for part in two_sum(tensor(a), tensor(b)))
    assert total == a + b
    assert Fraction(total) + Fraction(error) == Fraction(a) + Fraction(b)


@given(MODERATE, MODERATE)
def test_fast_two_sum_is_exact_for_the_larger_first(a: float, b: float) -> None:
    a, b = sorted((a, b), key=abs, reverse=True)
    total, error = (part.item() for part in fast_two_sum(tensor(a), tensor(b)))
    assert Fraction(total) + Fraction(error) == Fraction(a) + Fraction(b)


@pytest.mark.parametrize("value", [1.0, 2.0**-30, -7.25])
def test_fast_two_sum_takes_a_first_zero(value: float) -> None:
    total, error = fast_two_sum(tensor(0.0), tensor(value))
    assert (total.item(), error.item()) == (value, 0.0)
