"""LU: A[order] - L U in exact arithmetic beside the native one, pivots, products, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from exact_matrices import backward_error, matrix
from gradient_cases import gradient_cases
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from mixprec import fp64
from mixprec.fp64.lu import lu

DTYPES = [torch.float64, torch.complex128]
SHAPES = [(7, 7), (9, 4), (4, 9), (1, 1), (1, 5), (5, 1), (0, 0), (0, 3), (3, 0)]


def grade(a: Tensor, p: Tensor, lower: Tensor, upper: Tensor) -> float:
    return backward_error(p.mT @ a if p.numel() else a, lower, upper)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "graded", "ill"])
@pytest.mark.parametrize("shape", [(60, 60), (70, 40), (40, 70)])
def test_backward_error_is_at_most_one_and_a_half_native_ones(
    shape: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    rows, columns = (size // 2 for size in shape) if dtype.is_complex else shape
    a = matrix(rows, columns, kind, dtype)
    found, limit = grade(a, *lu(a, block_size=16)), grade(a, *torch.linalg.lu(a))
    assert found <= max(1.0, 1.5 * limit)


@pytest.mark.parametrize("block_size", [1, 3, 7, 50, 1000])
def test_block_sizes_that_do_not_divide_give_as_small_an_error(block_size: int) -> None:
    a = matrix(50, 50, "random", torch.float64)
    p, lower, upper = lu(a, block_size=block_size)
    native = torch.linalg.lu(a)
    assert torch.equal(p, native[0])
    assert torch.equal(lower, lower.tril())
    assert torch.equal(lower.diagonal(), torch.ones(50, dtype=torch.float64))
    assert torch.equal(upper, upper.triu())
    assert bool((lower.abs() <= 1).all())
    assert grade(a, p, lower, upper) <= max(1.0, 1.5 * grade(a, *native))


def test_products_go_through_the_emulation() -> None:
    a = matrix(50, 50, "random", torch.float64)
    with fp64.record() as products:
        lu(a, block_size=16)
    # four blocks: a residual and an update for all but the last
    assert len(products) == 3 + 3
    assert all(product.products > 0 for product in products)
    with fp64.record() as products:
        lu(a, block_size=16, bits=39, engine="float64")
    assert {product.engine for product in products} == {"float64"}
    assert max(product.bits for product in products[1::2]) < 53


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (2,), (2, 0)])
@pytest.mark.parametrize("shape", SHAPES)
def test_factors_are_those_of_the_native_function(
    shape: tuple[int, int], batch: tuple[int, ...], dtype: torch.dtype
) -> None:
    a = torch.randn(*batch, *shape, dtype=dtype)
    for found, native in zip(lu(a, block_size=3), torch.linalg.lu(a), strict=True):
        torch.testing.assert_close(found, native, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_pivots_the_rows_keep_their_order(shape: tuple[int, int]) -> None:
    a = torch.randn(2, *shape, dtype=torch.float64) + 4 * torch.eye(*shape)
    p, lower, upper = lu(a, pivot=False, block_size=3)
    assert p.shape == (0,)
    torch.testing.assert_close(lower @ upper, a, rtol=1e-13, atol=1e-13)
    assert torch.equal(lower, lower.tril())
    assert torch.equal(upper, upper.triu())


def test_a_zero_pivot_is_visible_without_exchanges_and_none_with() -> None:
    a = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    assert not bool(torch.isfinite(lu(a, pivot=False)[1]).all())
    p, lower, upper = lu(a)
    assert torch.equal(p @ lower @ upper, a)


def test_singular_matrices_are_factored() -> None:
    a = torch.ones(9, 9, dtype=torch.float64)
    p, lower, upper = lu(a, block_size=4)
    assert torch.equal(p @ lower @ upper, a)
    assert upper.diagonal().tolist() == [1.0] + [0.0] * 8
    zero = lu(torch.zeros(5, 5, dtype=torch.float64), block_size=2)
    assert torch.equal(zero[1], torch.eye(5, dtype=torch.float64))
    assert not zero[2].any()


def test_non_finite_values_stay_visible() -> None:
    for value in (math.inf, math.nan):
        a = matrix(9, 9, "random", torch.float64)
        a[6, 7] = value
        _, lower, upper = lu(a, block_size=4)
        assert not bool(torch.isfinite(upper).all())
        assert bool(torch.isfinite(lower[:, :7]).all())


def test_strides_and_conjugate_views_do_not_matter() -> None:
    a = matrix(9, 6, "random", torch.complex128)
    first = lu(a, block_size=4)
    for other in (a.mT.contiguous().mT, a.conj().resolve_conj().conj(), a.repeat(2, 2)[:9, :6]):
        for found, wanted in zip(lu(other, block_size=4), first, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("shape", "pivot", "dtype", "is_fast"), gradient_cases(((4, 3), (4, 4), (3, 4)), (True, False))
)
def test_first_and_second_gradients(
    shape: tuple[int, int], pivot: bool, dtype: torch.dtype, is_fast: bool
) -> None:
    # blocks do not show in gradients, and complex products take long
    block_size = 4 if dtype.is_complex else 2
    rows, columns = shape if is_fast else (shape[0] - 1, shape[1] - 1)
    a = (torch.randn(rows, columns, dtype=dtype) + 2 * torch.eye(rows, columns)).requires_grad_()

    def factors(a: Tensor) -> tuple[Tensor, Tensor]:
        _, lower, upper = lu(a, pivot=pivot, block_size=block_size)
        return lower, upper

    assert gradcheck(factors, (a,), fast_mode=is_fast)
    if pivot and not (is_fast and dtype.is_complex):
        assert gradgradcheck(factors, (a,), fast_mode=is_fast or dtype.is_complex)


def test_compiled_and_mapped_give_the_same() -> None:
    a = torch.randn(3, 6, 5, dtype=torch.float64)

    def factors(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return lu(a, block_size=4)

    wanted = factors(a)
    compiled = torch.compile(factors, backend="aot_eager", fullgraph=True)(a)
    for result in (compiled, torch.vmap(factors)(a)):
        assert all(torch.equal(x, y) for x, y in zip(result, wanted, strict=True))


def test_operator_passes_torchs_own_checks() -> None:
    a = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    # its check of dynamic shapes adds up all outputs, and pivots are integers
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = torch.ops.mixprec.fp64_lu.default
    torch.library.opcheck(operator, (a, True, None, "auto", 2), test_utils=checks)


@pytest.mark.parametrize(
    ("a", "error", "message"),
    [
        (torch.eye(2), TypeError, r"A: got torch\.float32; emulated solves take float64"),
        (torch.ones(3).double(), ValueError, r"A: got shape \(3,\); matrices have at least 2"),
    ],
)
def test_refusals_say_what_they_got(a: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lu(a)
