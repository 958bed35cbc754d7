"""Cholesky: A - L L^H in exact arithmetic beside the native one, products counted, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from exact_matrices import backward_error
from gradient_cases import gradient_cases
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from mixprec import fp64
from mixprec.fp64.cholesky import cholesky

DTYPES = [torch.float64, torch.complex128]


def definite(n: int, kind: str, dtype: torch.dtype) -> Tensor:
    """A Hermitian positive definite matrix: random, graded over 24 decades, or nearly singular."""
    x = torch.randn(n, n, dtype=dtype)
    a = x @ x.mH + torch.eye(n)
    if kind == "graded":
        scale = torch.logspace(0, 12, n, dtype=torch.float64)
        a = a * scale * scale.unsqueeze(-1)
    if kind == "ill":
        q = torch.linalg.qr(x)[0]
        a = q @ (torch.logspace(0, -11, n, dtype=torch.float64).unsqueeze(-1) * q.mH)
    return (a + a.mH) / 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "graded", "ill"])
def test_backward_error_is_at_most_one_and_a_half_native_ones(
    kind: str, dtype: torch.dtype
) -> None:
    a = definite(40 if dtype.is_complex else 80, kind, dtype)
    factor, native = cholesky(a, block_size=16), torch.linalg.cholesky(a)
    found, limit = (backward_error(a, x, x.mH) for x in (factor, native))
    assert found <= max(1.0, 1.5 * limit)


@pytest.mark.parametrize("block_size", [1, 3, 7, 50, 1000])
def test_block_sizes_that_do_not_divide_give_as_small_an_error(block_size: int) -> None:
    a = definite(50, "random", torch.float64)
    factor = cholesky(a, block_size=block_size)
    assert torch.equal(factor, factor.tril())
    assert bool((factor.diagonal() > 0).all())
    limit = backward_error(a, native := torch.linalg.cholesky(a), native.mT)
    assert backward_error(a, factor, factor.mT) <= max(1.0, 1.5 * limit)


def test_products_go_through_the_emulation_and_updates_are_symmetric() -> None:
    a = definite(50, "random", torch.float64)
    with fp64.record() as products:
        cholesky(a, block_size=16, bits=55, engine="float64")
    # four blocks: a residual and an update for all but the last
    assert len(products) == 3 + 3
    updates = products[1::2]
    parts = {product.parts for product in updates}
    assert len(parts) == 1
    pairs = parts.pop()
    # pairs of slices and their mirror images are one product
    assert all(product.products < pairs * (pairs + 1) // 2 for product in updates)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("upper", [False, True])
def test_only_the_named_triangle_is_read(upper: bool, dtype: torch.dtype) -> None:
    a = definite(9, "random", dtype)
    native = torch.linalg.cholesky(a, upper=upper)
    other = torch.ones(9, 9, dtype=torch.bool)
    dirty = a.masked_fill(other.tril(-1) if upper else other.triu(1), math.nan)
    factor = cholesky(dirty, upper=upper, block_size=4)
    torch.testing.assert_close(factor, native, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(0, 0), (2, 0, 0), (0, 3, 3), (1, 1), (2, 3, 4, 4)])
def test_shapes_are_those_of_the_native_function(shape: tuple[int, ...]) -> None:
    a = 4 * torch.eye(shape[-1], dtype=torch.float64).expand(shape)
    assert torch.equal(cholesky(a, block_size=3), torch.linalg.cholesky(a))


def test_strides_and_conjugate_views_do_not_matter() -> None:
    a = definite(9, "random", torch.complex128)
    first = cholesky(a, block_size=4)
    assert torch.equal(cholesky(a.mT.contiguous().mT, block_size=4), first)
    assert torch.equal(cholesky(a.conj().resolve_conj().conj(), block_size=4), first)
    wide = torch.zeros(18, 18, dtype=torch.complex128)
    wide[::2, ::2] = a
    assert torch.equal(cholesky(wide[::2, ::2], block_size=4), first)


@pytest.mark.parametrize(("bad", "order"), [(0, 1), (3, 4), (6, 7)])
def test_what_is_not_positive_definite_is_refused_with_its_minor(bad: int, order: int) -> None:
    a = torch.eye(7, dtype=torch.float64)
    a[bad, bad] = -1
    with pytest.raises(torch.linalg.LinAlgError, match=rf"A: got .* minor of order {order} is not"):
        cholesky(a, block_size=3)
    batch = torch.stack([torch.eye(7, dtype=torch.float64), a])
    with pytest.raises(torch.linalg.LinAlgError, match=rf"order {order} of batch element 1 is"):
        cholesky(batch, block_size=3)


@pytest.mark.parametrize("position", [(0, 0), (5, 1), (6, 6)])
def test_nan_counts_as_not_positive_definite_as_natively(position: tuple[int, int]) -> None:
    a = torch.eye(7, dtype=torch.float64)
    a[position] = math.nan
    for factor in (torch.linalg.cholesky, lambda x: cholesky(x, block_size=3)):
        with pytest.raises(torch.linalg.LinAlgError, match=r"not positive.definite"):
            factor(a)


def test_an_infinite_diagonal_stays_visible() -> None:
    a = torch.eye(7, dtype=torch.float64)
    a[1, 1] = math.inf
    assert cholesky(a, block_size=3)[1, 1] == math.inf


@pytest.mark.parametrize(("upper", "dtype", "is_fast"), gradient_cases((False, True)))
def test_first_and_second_gradients(upper: bool, dtype: torch.dtype, is_fast: bool) -> None:
    # blocks do not show in gradients, and complex products take long
    block_size = 4 if dtype.is_complex else 2
    a = definite(3 if dtype.is_complex else 4, "random", dtype).requires_grad_()

    def factor(a: Tensor) -> Tensor:
        return cholesky((a + a.mH) / 2, upper=upper, block_size=block_size)

    assert gradcheck(factor, (a,), fast_mode=is_fast)
    if not (is_fast and dtype.is_complex):
        assert gradgradcheck(factor, (a,), fast_mode=is_fast or dtype.is_complex)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_is_hermitian_and_that_of_the_native_function(dtype: torch.dtype) -> None:
    a = definite(6, "random", dtype)
    weight = torch.randn(6, 6, dtype=dtype)
    grads = []
    for factor in (lambda x: cholesky(x, block_size=4), torch.linalg.cholesky):
        leaf = a.clone().requires_grad_()
        (factor(leaf) * weight).real.sum().backward()
        grads.append(leaf.grad)
    # the native one adds a part that no Hermitian change of A meets
    native = (grads[1] + grads[1].mH) / 2
    torch.testing.assert_close(grads[0], native, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(grads[0], grads[0].mH, rtol=1e-13, atol=1e-13)


def test_compiled_and_mapped_give_the_same() -> None:
    a = torch.stack([definite(6, "random", torch.float64) for _ in range(3)])

    def double(a: Tensor) -> Tensor:
        return cholesky(a, block_size=4) * 2

    wanted = double(a)
    assert torch.equal(torch.compile(double, backend="aot_eager", fullgraph=True)(a), wanted)
    assert torch.equal(torch.vmap(double)(a), wanted)


def test_operator_passes_torchs_own_checks() -> None:
    a = definite(5, "random", torch.float64).requires_grad_()
    torch.library.opcheck(torch.ops.mixprec.fp64_cholesky.default, (a, None, "auto", 2))


@pytest.mark.parametrize(
    ("a", "error", "message"),
    [
        (torch.eye(2), TypeError, r"A: got torch\.float32; emulated solves take float64"),
        (torch.ones(2, 3).double(), ValueError, r"A: got matrices of 2 x 3; they must be square"),
        (torch.ones(3).double(), ValueError, r"A: got shape \(3,\); matrices have at least 2"),
    ],
)
def test_refusals_say_what_they_got(a: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cholesky(a)
