"""hadamard.py: each sum against single numbers, the product that it leaves, and the way back."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from block_oracles import transform
from oracles import assert_same
from quant_oracles import as_matrix

from mixprec.hadamard import SIGNS, SIZE, hadamard, inverse_hadamard, padded_length

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LENGTHS = (0, 1, 15, 16, 17, 31, 33, 96)


def integers(rows: int, columns: int) -> torch.Tensor:
    """Multiples of 4 so small that every sum of the transform is exact."""
    return 4.0 * torch.randint(-99, 100, (rows, columns))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_sum_is_one_of_single_precision(length: int, dtype: torch.dtype) -> None:
    x = (torch.randn(4, length) * torch.logspace(-4, 4, max(length, 1))[:length]).to(dtype)
    got = hadamard(x)
    assert got.dtype == (torch.float32 if dtype == torch.float64 else dtype)
    assert got.shape == (4, padded_length(length))
    assert_same(got.double().numpy(), transform(as_matrix(x), dtype))


def test_matrix_is_that_of_the_signs_of_common_bits() -> None:
    rows = hadamard(torch.eye(SIZE)) * 4
    want = [[SIGNS[i] * (-1) ** bin(i & j).count("1") for j in range(SIZE)] for i in range(SIZE)]
    assert rows.tolist() == want
    assert len(SIGNS) == 16


@pytest.mark.parametrize("length", LENGTHS)
def test_product_of_two_transformed_operands_is_unchanged(length: int) -> None:
    a, b = integers(5, length), integers(7, length)
    product = hadamard(a).double() @ hadamard(b).double().t()
    assert torch.equal(product, a.double() @ b.double().t())


def test_product_of_real_numbers_changes_by_rounding_alone() -> None:
    a, b = torch.randn(32, 512), torch.randn(48, 512)
    exact = a.double() @ b.double().t()
    product = hadamard(a).double() @ hadamard(b).double().t()
    size = a.double().norm(dim=1)[:, None] * b.double().norm(dim=1)
    # each transformed number passes four sums
    assert ((product - exact).abs() <= 2 * 5 * 2.0**-24 * size).all()
    assert (product - exact).any()


@pytest.mark.parametrize("length", LENGTHS)
def test_inverse_restores(length: int) -> None:
    x = integers(6, length)
    assert torch.equal(inverse_hadamard(hadamard(x), length), x)
    x = torch.randn(6, length)
    error = (inverse_hadamard(hadamard(x), length) - x).abs()
    assert error.numel() == 0 or error.max() <= 2.0**-20


def test_transform_spreads_an_outlier_over_its_block_alone() -> None:
    x = torch.zeros(1, 48)
    x[0, 20] = 64.0
    spread = hadamard(x)
    assert spread.abs().tolist() == [[0.0] * 16 + [16.0] * 16 + [0.0] * 16]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_number_that_is_not_finite_stays_in_its_block(bad: float) -> None:
    x = torch.randn(2, 48)
    x[0, 20] = bad
    lost = torch.zeros(2, 48, dtype=torch.bool)
    lost[0, 16:32] = True
    assert torch.equal(~hadamard(x).isfinite(), lost)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter_and_the_argument_stays(dtype: torch.dtype) -> None:
    x = torch.randn(32, 48).to(dtype)
    before = x.clone()
    for view in (x, x.t(), x[::2, 1::3], x[:1].expand(5, 48), x[:, :1].expand(32, 16), x.flip(1)):
        got, want = hadamard(view), hadamard(view.contiguous())
        assert_same(got.double().numpy(), want.double().numpy())
    assert torch.equal(x, before)


def test_sums_beyond_single_precision_are_infinite_as_defined() -> None:
    x = torch.full((1, 16), 3e38) * torch.tensor(SIGNS)
    got = hadamard(x).double().numpy()
    assert np.isinf(got[0, 0])
    assert_same(got, transform(as_matrix(x), torch.float32))
