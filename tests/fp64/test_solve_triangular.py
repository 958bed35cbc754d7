"""Triangular solves: exact residuals beside native ones, products counted, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from exact_matrices import residual_grade
from gradient_cases import gradient_cases
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from mixprec import fp64
from mixprec.fp64.triangular import solve_triangular

DTYPES = [torch.float64, torch.complex128]
SIDES = [(upper, left) for upper in (False, True) for left in (False, True)]


def triangular(n: int, kind: str, dtype: torch.dtype, *, upper: bool) -> Tensor:
    """A triangular matrix: random (ill conditioned), graded by row, or well conditioned."""
    x = torch.randn(n, n, dtype=dtype)
    if kind == "graded":
        x = torch.logspace(0, 12, n, dtype=torch.float64).unsqueeze(-1) * (
            x / math.sqrt(n) + 2 * torch.eye(n)
        )
    if kind == "well":
        x = x / math.sqrt(n) + 3 * torch.eye(n)
    return x.triu() if upper else x.tril()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "graded", "well"])
@pytest.mark.parametrize(("upper", "left"), SIDES)
def test_residual_is_at_most_that_of_the_native_solve(
    upper: bool, left: bool, kind: str, dtype: torch.dtype
) -> None:
    n = 40 if dtype.is_complex else 70
    a = triangular(n, kind, dtype, upper=upper)
    b = torch.randn(n, 3, dtype=dtype)
    b = b if left else b.mT
    x = solve_triangular(a, b, upper=upper, left=left, block_size=16)
    native = torch.linalg.solve_triangular(a, b, upper=upper, left=left)
    system = (lambda y: (a, y, b)) if left else (lambda y: (a.mT, y.mT, b.mT))
    found, limit = residual_grade(*system(x)), residual_grade(*system(native))
    # one rounding of the product, one of the difference, and what the correction leaves
    assert found <= max(4.0, limit)


@pytest.mark.parametrize("block_size", [1, 3, 7, 50, 1000])
def test_block_sizes_that_do_not_divide_give_as_small_a_residual(block_size: int) -> None:
    a = triangular(50, "well", torch.float64, upper=False)
    b = torch.randn(50, 4, dtype=torch.float64)
    x = solve_triangular(a, b, upper=False, block_size=block_size)
    assert residual_grade(a, x, b) <= 4


def test_products_go_through_the_emulation() -> None:
    a = triangular(50, "well", torch.float64, upper=False)
    b = torch.randn(50, 4, dtype=torch.float64)
    with fp64.record() as products:
        solve_triangular(a, b, upper=False, block_size=16)
    # four blocks: one residual each, and a product for every block but the first
    assert len(products) == 4 + 3
    assert all(product.products > 0 for product in products)
    with fp64.record() as products:
        solve_triangular(a, b, upper=False, block_size=64)
    assert len(products) == 1


def test_bits_and_engine_reach_the_products() -> None:
    a = triangular(40, "well", torch.float64, upper=False)
    b = torch.randn(40, 4, dtype=torch.float64)
    with fp64.record() as products:
        solve_triangular(a, b, upper=False, block_size=20, bits=39, engine="float64")
    assert {product.engine for product in products} == {"float64"}
    assert min(product.bits for product in products) < 53


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unitriangular", [False, True])
@pytest.mark.parametrize(("upper", "left"), SIDES)
def test_only_the_named_triangle_is_read(
    upper: bool, left: bool, unitriangular: bool, dtype: torch.dtype
) -> None:
    a = torch.randn(7, 7, dtype=dtype) / 4 + 2 * torch.eye(7)
    b = torch.randn(3, 7, 2, dtype=dtype)
    b = b if left else b.mT
    options = {"upper": upper, "left": left, "unitriangular": unitriangular}
    native = torch.linalg.solve_triangular(a, b, **options)
    other = torch.ones(7, 7, dtype=torch.bool)
    other = other.tril(-1) if upper else other.triu(1)
    dirty = a.masked_fill(other, math.nan)
    if unitriangular:
        dirty.diagonal().fill_(math.inf)
    x = solve_triangular(dirty, b, **options, block_size=3)
    torch.testing.assert_close(x, native, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(0, 0), (0, 2), (3, 0), (1, 1)])
@pytest.mark.parametrize("batch", [(), (2,), (2, 0)])
def test_empty_and_smallest_shapes(shape: tuple[int, int], batch: tuple[int, ...]) -> None:
    n, k = shape
    a = torch.full((*batch, n, n), 2.0, dtype=torch.float64)
    b = torch.ones(n, k, dtype=torch.float64)
    x = solve_triangular(a, b, upper=True)
    native = torch.linalg.solve_triangular(a, b, upper=True)
    assert torch.equal(x, native)
    assert x.shape == native.shape


def test_batches_broadcast_and_strides_do_not_matter() -> None:
    a = (torch.randn(2, 1, 9, 9, dtype=torch.complex128) / 9 + torch.eye(9)).mT
    b = torch.randn(3, 8, 18, dtype=torch.complex128)[..., ::2].mH
    x = solve_triangular(a, b, upper=False, block_size=4)
    assert x.shape == (2, 3, 9, 8)
    again = solve_triangular(
        a.clone(memory_format=torch.contiguous_format), b.resolve_conj(), upper=False, block_size=4
    )
    assert torch.equal(x, again)
    single = solve_triangular(a[1, 0], b[2], upper=False, block_size=4)
    torch.testing.assert_close(x[1, 2], single, rtol=1e-14, atol=1e-14)


def test_non_finite_values_stay_visible() -> None:
    a = torch.eye(6, dtype=torch.float64)
    b = torch.ones(6, 3, dtype=torch.float64)
    b[1, 0], b[4, 1] = math.inf, math.nan
    x = solve_triangular(a, b, upper=False, block_size=2)
    assert x[1, 0] == math.inf
    assert torch.isnan(x[4, 1])
    assert torch.equal(x[:, 2], b[:, 2])
    singular = torch.diag(torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64))
    b = torch.tensor([[2.0], [1.0], [3.0]], dtype=torch.float64)
    x = solve_triangular(singular, b, upper=True, block_size=1)
    assert x.flatten().tolist() == [2.0, math.inf, 3.0] or bool(torch.isnan(x[0]))
    assert x[1] == math.inf
    assert x[2] == 3


@pytest.mark.parametrize(
    ("upper", "left", "dtype", "is_fast"), gradient_cases((False, True), (True, False))
)
def test_first_and_second_gradients(
    upper: bool, left: bool, dtype: torch.dtype, is_fast: bool
) -> None:
    # blocks do not show in gradients, and complex products take long
    block_size = 4 if dtype.is_complex else 2
    # every direction of one column, one direction of two
    n, columns = 4 if is_fast and not dtype.is_complex else 3, 2 if is_fast else 1
    a = (torch.randn(2, n, n, dtype=dtype) / 2 + 2 * torch.eye(n)).requires_grad_()
    b = torch.randn(*((n, columns) if left else (columns, n)), dtype=dtype)
    is_second_fast = is_fast or dtype.is_complex
    for unitriangular in (False, True):

        def solve(a: Tensor, b: Tensor, unitriangular: bool = unitriangular) -> Tensor:
            options = {"upper": upper, "left": left, "unitriangular": unitriangular}
            return solve_triangular(a, b, **options, block_size=block_size)

        assert gradcheck(solve, (a, b.requires_grad_()), fast_mode=is_fast)
        if unitriangular == upper and not (is_fast and dtype.is_complex):
            assert gradgradcheck(solve, (a, b.requires_grad_()), fast_mode=is_second_fast)


def test_compiled_and_mapped_give_the_same() -> None:
    a = torch.randn(3, 6, 6, dtype=torch.float64) / 6 + torch.eye(6)
    b = torch.randn(6, 2, dtype=torch.float64)

    def solve(a: Tensor, b: Tensor) -> Tensor:
        return solve_triangular(a, b, upper=True, block_size=4) * 2

    wanted = solve(a, b)
    compiled = torch.compile(solve, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(a, b), wanted)
    mapped = torch.vmap(solve, in_dims=(0, None))(a, b)
    assert torch.equal(mapped, wanted)


def test_operator_passes_torchs_own_checks() -> None:
    a = (torch.randn(5, 5, dtype=torch.float64) + 3 * torch.eye(5)).requires_grad_()
    b = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    operator = torch.ops.mixprec.fp64_solve_triangular.default
    torch.library.opcheck(operator, (a, b, True, False, None, "auto", 2))


@pytest.mark.parametrize(
    ("a", "b", "error", "message"),
    [
        (torch.eye(2), torch.eye(2), TypeError, r"A: got torch\.float32; emulated solves take"),
        (torch.eye(2).double(), torch.eye(2), TypeError, r"B: got torch\.float32"),
        (torch.ones(2, 3).double(), torch.eye(2).double(), ValueError, r"A: got matrices of 2 x 3"),
        (torch.eye(2).double(), torch.ones(2).double(), ValueError, r"B: got shape \(2,\)"),
        (torch.eye(2).double(), torch.eye(3).double(), ValueError, r"B: got 3 x 3 matrices; A X"),
        (torch.eye(2).double(), torch.eye(2).cfloat().to(torch.complex128), TypeError, r"A is to"),
    ],
)
def test_refusals_say_what_they_got(
    a: Tensor, b: Tensor, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        solve_triangular(a, b, upper=True)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"bits": 0}, ValueError, "bits: got 0; must be from 1 to"),
        ({"bits": "all"}, TypeError, "bits: got 'all'; must be a whole number or 'auto'"),
        ({"engine": "dd"}, ValueError, "engine: got 'dd'; must be one of auto, float64"),
        ({"block_size": 0}, ValueError, "block_size: got 0; panels have at least one column"),
    ],
)
def test_options_out_of_range_are_refused(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    one = torch.eye(2, dtype=torch.float64)
    with pytest.raises(error, match=message):
        solve_triangular(one, one, upper=True, **options)
