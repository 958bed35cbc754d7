"""Linear systems: exact residuals beside native ones, shapes, products counted, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from exact_matrices import difference, residual_grade
from gradient_cases import gradient_cases
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from mixprec import fp64
from mixprec.fp64.solve import solve

DTYPES = [torch.float64, torch.complex128]


def matrix(n: int, kind: str, dtype: torch.dtype) -> Tensor:
    """Random; graded by rows and columns; or of condition 1e12."""
    x = torch.randn(n, n, dtype=dtype)
    if kind == "graded":
        across = torch.logspace(6, -6, n, dtype=torch.float64)
        return x * torch.logspace(0, 10, n, dtype=torch.float64).unsqueeze(-1) * across
    if kind == "ill":
        u, _, v = torch.linalg.svd(x)
        return (u * torch.logspace(0, -12, n, dtype=torch.float64)) @ v
    return x


def hpl_residual(a: Tensor, x: Tensor, b: Tensor) -> float:
    """|B - A X| / (eps (|A| |X| + |B|) n) in infinity norms; HPL passes below 16."""
    rest = torch.linalg.matrix_norm(difference(b, a, x), math.inf)
    norms = [torch.linalg.matrix_norm(y, math.inf) for y in (a, x, b)]
    return (rest / (2.0**-52 * (norms[0] * norms[1] + norms[2]) * a.shape[-1])).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "graded", "ill"])
def test_residual_is_below_the_native_one(kind: str, dtype: torch.dtype) -> None:
    n = 40 if dtype.is_complex else 80
    a, b = matrix(n, kind, dtype), torch.randn(n, 3, dtype=dtype)
    x, native = solve(a, b, block_size=16), torch.linalg.solve(a, b)
    assert hpl_residual(a, x, b) <= min(16.0, hpl_residual(a, native, b))
    # refined: small component by component, where the native solve has only a small norm
    assert residual_grade(a, x, b) <= 4
    assert residual_grade(a, x, b) <= residual_grade(a, native, b)


def test_refinement_makes_up_for_products_of_few_bits() -> None:
    a, b = matrix(60, "random", torch.float64), torch.randn(60, 2, dtype=torch.float64)
    x = solve(a, b, block_size=16, bits=39)
    assert hpl_residual(a, x, b) <= 1


@pytest.mark.parametrize("block_size", [1, 3, 7, 34, 1000])
def test_block_sizes_that_do_not_divide_give_as_small_a_residual(block_size: int) -> None:
    a, b = matrix(34, "random", torch.float64), torch.randn(34, 2, dtype=torch.float64)
    assert residual_grade(a, solve(a, b, block_size=block_size), b) <= 4


def test_products_go_through_the_emulation() -> None:
    a, b = matrix(50, "random", torch.float64), torch.randn(50, 2, dtype=torch.float64)
    with fp64.record() as products:
        solve(a, b, block_size=16)
    # LU: 3 residuals, 3 updates; two substitutions, each of two solves with 4 + 3; one residual
    assert len(products) == 6 + 2 * 2 * 7 + 1
    assert all(product.products > 0 for product in products)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("a_shape", "b_shape", "left"),
    [
        ((5, 5), (5,), True),
        ((5, 5), (5, 2), True),
        ((5, 5), (2, 5), False),
        ((3, 5, 5), (3, 5), True),
        ((3, 5, 5), (5, 2), True),
        ((2, 1, 5, 5), (3, 5, 2), True),
        ((2, 1, 5, 5), (3, 2, 5), False),
        ((3, 5, 5), (5,), True),
        ((0, 0), (0,), True),
        ((0, 0), (0, 3), True),
        ((4, 4), (4, 0), True),
        ((2, 0, 3, 3), (3, 2), True),
        ((1, 1), (1, 1), True),
    ],
)
def test_shapes_are_those_of_the_native_function(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...], left: bool, dtype: torch.dtype
) -> None:
    a = torch.randn(*a_shape, dtype=dtype) + 3 * torch.eye(a_shape[-1])
    b = torch.randn(*b_shape, dtype=dtype)
    native = torch.linalg.solve(a, b, left=left)
    found = solve(a, b, left=left, block_size=2)
    torch.testing.assert_close(found, native, rtol=1e-13, atol=1e-13)


def test_strides_and_conjugate_views_do_not_matter() -> None:
    a = torch.randn(6, 12, dtype=torch.complex128)[:, ::2].mH
    b = torch.randn(4, 6, dtype=torch.complex128).mH
    wanted = solve(a.resolve_conj().contiguous(), b.resolve_conj().contiguous(), block_size=4)
    assert torch.equal(solve(a, b, block_size=4), wanted)


def test_singular_matrices_are_refused() -> None:
    a = torch.ones(5, 5, dtype=torch.float64)
    with pytest.raises(torch.linalg.LinAlgError, match="A: got a singular matrix; a pivot is zero"):
        solve(a, torch.ones(5, dtype=torch.float64), block_size=2)
    batch = torch.stack([torch.eye(5, dtype=torch.float64), a])
    with pytest.raises(torch.linalg.LinAlgError, match="singular matrix in batch element 1"):
        solve(batch, torch.ones(5, 1, dtype=torch.float64))


def test_non_finite_values_stay_visible() -> None:
    a, b = torch.eye(5, dtype=torch.float64), torch.ones(5, 2, dtype=torch.float64)
    b[3, 0] = math.inf
    x = solve(a, b, block_size=2)
    assert not bool(torch.isfinite(x[3, 0]))
    assert torch.equal(x[:, 1], b[:, 1])
    a[2, 2] = math.nan
    assert bool(torch.isnan(solve(a, b, block_size=2)[2]).all())


@pytest.mark.parametrize(("left", "dtype", "is_fast"), gradient_cases((True, False)))
def test_first_and_second_gradients(left: bool, dtype: torch.dtype, is_fast: bool) -> None:
    # blocks do not show in gradients, and complex products take long
    block_size = 4 if dtype.is_complex else 2
    a = (torch.randn(3, 3, dtype=dtype) + 2 * torch.eye(3)).requires_grad_()
    # every direction of one column, one direction of two
    b = torch.randn(2, 3, 2 if is_fast else 1, dtype=dtype)
    b = (b if left else b.mT.contiguous()).requires_grad_()

    def system(a: Tensor, b: Tensor) -> Tensor:
        return solve(a, b, left=left, block_size=block_size)

    assert gradcheck(system, (a, b), fast_mode=is_fast)
    if not (is_fast and dtype.is_complex):
        assert gradgradcheck(system, (a, b), fast_mode=is_fast or dtype.is_complex)


def test_gradients_of_any_order_factor_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    native = torch.linalg.lu_factor_ex
    monkeypatch.setattr(torch.linalg, "lu_factor_ex", lambda x: calls.append(1) or native(x))
    a = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, dtype=torch.float64, requires_grad=True)
    (grad,) = torch.autograd.grad(solve(a, b).square().sum(), a, create_graph=True)
    grad.square().sum().backward()
    assert len(calls) == 1


def test_compiled_and_mapped_give_the_same() -> None:
    a = torch.randn(3, 6, 6, dtype=torch.float64)
    b = torch.randn(6, dtype=torch.float64)

    def system(a: Tensor, b: Tensor) -> Tensor:
        return solve(a, b.unsqueeze(-1), block_size=4) * 2

    wanted = system(a, b)
    assert torch.equal(torch.compile(system, backend="aot_eager", fullgraph=True)(a, b), wanted)
    assert torch.equal(torch.vmap(system, in_dims=(0, None))(a, b), wanted)


def test_operators_pass_torchs_own_checks() -> None:
    a = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    options = (None, "auto", 2)
    operators = torch.ops.mixprec
    factors = operators.fp64_solve_factors(a.detach(), *options)
    torch.library.opcheck(operators.fp64_solve.default, (a, b, *factors, False, *options))
    torch.library.opcheck(operators.fp64_solve_factors.default, (a.detach(), *options))


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (torch.eye(2), torch.ones(2), TypeError, r"A: got torch\.float32; emulated solves take"),
        (torch.eye(2).double(), torch.ones(2), TypeError, r"B: got torch\.float32"),
        (torch.ones(2, 3).double(), torch.ones(2).double(), ValueError, r"A: got matrices of 2 x"),
        (torch.eye(2).double(), torch.ones(3).double(), ValueError, r"B: got 3 x 1 matrices; A X"),
    ],
)
def test_refusals_say_what_they_got(
    a: Tensor, b: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        solve(a, b)
