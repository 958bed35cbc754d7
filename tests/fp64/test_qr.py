"""QR: A - Q R and I - Q^H Q in exact arithmetic beside the native ones, products, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from exact_matrices import backward_error, matrix
from gradient_cases import gradient_cases
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from mixprec import fp64
from mixprec.fp64.qr import qr

DTYPES = [torch.float64, torch.complex128]
SHAPES = [(7, 7), (9, 4), (4, 9), (1, 1), (1, 5), (5, 1), (0, 0), (0, 3), (3, 0)]


def errors(a: Tensor, q: Tensor, r: Tensor) -> tuple[float, float]:
    """Backward and orthogonality errors in units of 2^-53."""
    identity = torch.eye(q.shape[-1], dtype=q.dtype)
    return backward_error(a, q, r), backward_error(identity, q.mH, q)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "graded", "ill"])
@pytest.mark.parametrize("shape", [(60, 60), (70, 40), (40, 70)])
def test_errors_are_at_most_twice_the_native_ones(
    shape: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    rows, columns = (size // 2 for size in shape) if dtype.is_complex else shape
    a = matrix(rows, columns, kind, dtype)
    found, limit = errors(a, *qr(a, block_size=16)), errors(a, *torch.linalg.qr(a))
    assert found[0] <= 2 * limit[0]
    assert found[1] <= 2 * limit[1]


@pytest.mark.parametrize("block_size", [1, 3, 7, 34, 1000])
def test_block_sizes_that_do_not_divide_give_as_small_errors(block_size: int) -> None:
    a = matrix(34, 34, "random", torch.float64)
    q, r = qr(a, block_size=block_size)
    assert torch.equal(r, r.triu())
    found, limit = errors(a, q, r), errors(a, *torch.linalg.qr(a))
    assert found[0] <= 2 * limit[0]
    assert found[1] <= 2 * limit[1]


def test_products_go_through_the_emulation() -> None:
    a = matrix(50, 50, "random", torch.float64)
    with fp64.record() as products:
        qr(a, block_size=16)
    # four blocks: V^H V; three products on the rest of A for all but the last; three on Q
    assert len(products) == 4 + 3 * 3 + 4 * 3
    assert all(product.products > 0 for product in products)
    with fp64.record() as products:
        qr(a, "r", block_size=16, bits=39, engine="float64")
    assert len(products) == 4 + 3 * 3
    assert {product.engine for product in products} == {"float64"}
    assert max(product.bits for product in products) < 53


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (2,), (2, 0)])
@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_factors_are_those_of_the_native_function(
    mode: str, batch: tuple[int, ...], dtype: torch.dtype
) -> None:
    for shape in SHAPES:
        a = torch.randn(*batch, *shape, dtype=dtype)
        for found, native in zip(qr(a, mode, block_size=3), torch.linalg.qr(a, mode), strict=True):
            torch.testing.assert_close(found, native, rtol=1e-12, atol=1e-12)


def test_dependent_and_zero_columns_are_factored() -> None:
    for a in (torch.ones(9, 7, dtype=torch.float64), torch.zeros(9, 7, dtype=torch.float64)):
        q, r = qr(a, block_size=3)
        torch.testing.assert_close(q @ r, a, rtol=1e-14, atol=1e-14)
        eye = torch.eye(7, dtype=torch.float64)
        torch.testing.assert_close(q.mT @ q, eye, rtol=1e-14, atol=1e-14)


def test_non_finite_values_stay_visible() -> None:
    for value in (math.inf, math.nan):
        a = matrix(9, 9, "random", torch.float64)
        a[6, 7] = value
        q, r = qr(a, block_size=4)
        assert not bool(torch.isfinite(r[:, 7]).all())
        assert not bool(torch.isfinite(q).all())
        assert bool(torch.isfinite(r[:4, :4]).all())


def test_strides_and_conjugate_views_do_not_matter() -> None:
    a = matrix(9, 6, "random", torch.complex128)
    first = qr(a, block_size=4)
    for other in (a.mT.contiguous().mT, a.conj().resolve_conj().conj(), a.repeat(2, 2)[:9, :6]):
        for found, wanted in zip(qr(other, block_size=4), first, strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("shape", "mode", "dtype", "is_fast"), gradient_cases(((4, 3), (3, 4), (3, 3)), ("reduced",))
)
def test_first_and_second_gradients(
    shape: tuple[int, int], mode: str, dtype: torch.dtype, is_fast: bool
) -> None:
    # blocks do not show in gradients, and complex products take long
    block_size = 4 if dtype.is_complex else 2
    rows, columns = shape if is_fast else (shape[0] - 1, shape[1] - 1)
    a = torch.randn(rows, columns, dtype=dtype, requires_grad=True)

    def factors(a: Tensor) -> tuple[Tensor, Tensor]:
        return qr(a, mode, block_size=block_size)

    assert gradcheck(factors, (a,), fast_mode=is_fast)
    if not (is_fast and dtype.is_complex):
        assert gradgradcheck(factors, (a,), fast_mode=is_fast or dtype.is_complex)


def test_where_there_is_no_gradient_backward_says_so() -> None:
    a = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="mode: got 'r'; the gradient needs Q"):
        qr(a, "r")[1].sum().backward()
    with pytest.raises(RuntimeError, match="mode: got 'complete' for more rows than columns"):
        qr(a, "complete")[1].sum().backward()


def test_compiled_and_mapped_give_the_same() -> None:
    a = torch.randn(3, 6, 5, dtype=torch.float64)

    def factors(a: Tensor) -> tuple[Tensor, Tensor]:
        return qr(a, block_size=4)

    wanted = factors(a)
    compiled = torch.compile(factors, backend="aot_eager", fullgraph=True)(a)
    for result in (compiled, torch.vmap(factors)(a)):
        assert all(torch.equal(x, y) for x, y in zip(result, wanted, strict=True))


def test_operator_passes_torchs_own_checks() -> None:
    a = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.mixprec.fp64_qr.default, (a, "reduced", None, "auto", 2))


@pytest.mark.parametrize(
    ("a", "mode", "error", "message"),
    [
        (torch.eye(2), "r", TypeError, r"A: got torch\.float32; emulated solves take float64"),
        (torch.ones(3).double(), "r", ValueError, r"A: got shape \(3,\); matrices have at least 2"),
        (torch.eye(2).double(), "full", ValueError, "mode: got 'full'; it is one of reduced, comp"),
    ],
)
def test_refusals_say_what_they_got(
    a: Tensor, mode: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        qr(a, mode)
