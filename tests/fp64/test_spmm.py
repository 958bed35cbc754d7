"""The sparse product against exact fractions, whatever the order, the pattern and the exponents."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from gradient_cases import gradient_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from mixprec.fp64.segments import sums_of_products
from mixprec.fp64.sparse import spmm

LARGEST = torch.finfo(torch.float64).max
SPMM = torch.ops.mixprec.fp64_spmm


# torch says so once a process
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


def nearest(value: Fraction) -> float:
    """The float64 nearest to a fraction, by Python's division of integers."""
    try:
        return value.numerator / value.denominator
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def expected(a: Tensor, dense: Tensor) -> Tensor:
    """Each element from the entries of its row, in fractions."""
    out = torch.zeros(a.shape[0], dense.shape[1], dtype=torch.float64)
    offsets, columns, values = a.crow_indices().tolist(), a.col_indices().tolist(), a.values()
    for row in range(a.shape[0]):
        entries = range(offsets[row], offsets[row + 1])
        for column in range(dense.shape[1]):
            total = Fraction(0)
            for p in entries:
                total += Fraction(values[p].item()) * Fraction(dense[columns[p], column].item())
            out[row, column] = nearest(total)
    return out


def random_csr(rows: int, columns: int, spread: float = 0.0, share: float = 0.3) -> Tensor:
    x = torch.randn(rows, columns, dtype=torch.float64)
    x = x * torch.exp(spread * torch.randn_like(x)) * (torch.rand_like(x) < share)
    return x.to_sparse_csr()


def csr(offsets: list[int], columns: list[int], values: list[float], width: int) -> Tensor:
    shape = (len(offsets) - 1, width)
    data = torch.tensor(values, dtype=torch.float64)
    index = (torch.tensor(part, dtype=torch.int64) for part in (offsets, columns))
    return torch.sparse_csr_tensor(*index, data, shape, check_invariants=False)


def assert_same(actual: Tensor, wanted: Tensor) -> None:
    """Equal bits, so that zeros have the sign wanted; NaN where NaN."""
    assert actual.dtype == wanted.dtype
    assert torch.equal(torch.isnan(actual), torch.isnan(wanted))
    kept = ~torch.isnan(wanted)
    assert torch.equal(actual[kept].view(torch.int64), wanted[kept].view(torch.int64))


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0, 4.0, 40.0])
def test_every_element_is_the_nearest_to_the_exact_sum(spread: float) -> None:
    a = random_csr(24, 31, spread)
    dense = random_csr(31, 5, spread, 1.0).to_dense()
    assert_same(spmm(a, dense), expected(a, dense))


def test_cancelled_sums_are_rounded_from_their_exact_value() -> None:
    # rows of x, -x and something smaller by up to 2^-300
    big = torch.randn(6, dtype=torch.float64)
    small = 2.0 ** torch.tensor([-60.0, -120.0, -300.0, 0.0, -90.0, -1000.0], dtype=torch.float64)
    values = torch.stack([big, small, -big], -1).flatten()
    a = csr([0, 3, 6, 9, 12, 15, 18], [0, 1, 2] * 6, values.tolist(), 3)
    dense = torch.tensor([[1 / 3, 1.0], [1.0, 1 / 7], [1 / 3, 1.0]], dtype=torch.float64)
    assert_same(spmm(a, dense), torch.stack([small, small * dense[1, 1]], -1))


@pytest.mark.parametrize(
    ("rest", "rounded"),
    [(0.0, 1.0), (2.0**-200, 1 + 2.0**-52), (-(2.0**-200), 1.0), (2.0**-900, 1 + 2.0**-52)],
    ids=["tie", "above", "below", "far above"],
)
def test_ties_go_to_even_and_the_least_rest_decides(rest: float, rounded: float) -> None:
    a = csr([0, 3], [0, 1, 2], [1.0, 2.0**-53, rest], 3)
    assert spmm(a, torch.ones(3, 1, dtype=torch.float64)).item() == rounded


def test_subnormal_results_are_rounded_once() -> None:
    least = 2.0**-1074
    a = csr([0, 1, 2, 4, 5], [0, 1, 0, 1, 0], [2.0**-600, 1.5 * least, 1.0, 1.0, least], 2)
    dense = torch.tensor([[1.25 * 2.0**-474, 1.0], [0.5, -1.0]], dtype=torch.float64)
    assert_same(spmm(a, dense), expected(a, dense))
    assert spmm(a, dense)[1].tolist() == [least, -2 * least]


def test_results_beyond_the_largest_are_infinite_and_intermediate_ones_are_not() -> None:
    ends = [LARGEST, LARGEST, -LARGEST, LARGEST, LARGEST]
    a = csr([0, 3, 5], [0, 1, 2, 0, 1], ends, 3)
    dense = torch.tensor([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]], dtype=torch.float64)
    wanted = [[LARGEST, math.inf], [math.inf, math.inf]]
    assert spmm(a, dense).tolist() == wanted


def test_infinities_and_nan_reach_their_rows_and_columns_alone() -> None:
    inf, nan = math.inf, math.nan
    a = csr([0, 2, 3, 5, 6, 6], [0, 1, 1, 0, 2, 3], [inf, 1.0, 1.0, 0.0, 1.0, 5.0], 4)
    dense = torch.tensor(
        [[1.0, 0.0, inf], [1.0, 1.0, -inf], [1.0, 2.0, 3.0], [7.0, nan, -1e300]],
        dtype=torch.float64,
    )
    wanted = [
        [inf, nan, nan],
        [1.0, 1.0, -inf],
        [1.0, 2.0, nan],
        [35.0, nan, -5e300],
        [0.0, 0.0, 0.0],
    ]
    assert_same(spmm(a, dense), torch.tensor(wanted, dtype=torch.float64))


def test_an_absent_entry_does_not_multiply_and_a_stored_zero_does() -> None:
    dense = torch.tensor([[math.inf], [1.0]], dtype=torch.float64)
    assert spmm(csr([0, 1], [1], [2.0], 2), dense).tolist() == [[2.0]]
    assert math.isnan(spmm(csr([0, 2], [0, 1], [0.0, 2.0], 2), dense).item())


def test_the_order_of_entries_and_threads_do_not_matter() -> None:
    a = random_csr(40, 50, 4.0)
    dense = random_csr(50, 9, 4.0, 1.0).to_dense()
    first = spmm(a, dense)
    offsets = a.crow_indices()
    rows = torch.arange(40).repeat_interleave(offsets.diff())
    order = torch.argsort(rows + torch.rand(rows.numel()) * 0.9)
    shuffled = torch.sparse_csr_tensor(
        offsets, a.col_indices()[order], a.values()[order], a.shape, check_invariants=False
    )
    assert not torch.equal(shuffled.col_indices(), a.col_indices())
    torch.set_num_threads(2)
    for _ in range(3):
        assert_same(spmm(shuffled, dense), first)
    assert_same(torch.cat([spmm(a, dense[:, i : i + 1]) for i in range(9)], -1), first)


def test_repeated_entries_add() -> None:
    a = csr([0, 3], [1, 1, 1], [1.0, 2.0**-53, 2.0**-53], 2)
    assert spmm(a, torch.ones(2, 1, dtype=torch.float64)).item() == 1 + 2.0**-52


@pytest.mark.parametrize("shape", [(0, 3, 2), (3, 0, 2), (3, 4, 0), (0, 0, 0), (1, 1, 1)])
def test_empty_and_smallest_shapes(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a = torch.full((m, k), 3.0, dtype=torch.float64).to_sparse_csr()
    dense = torch.full((k, n), 0.5, dtype=torch.float64)
    assert_same(spmm(a, dense), torch.full((m, n), 1.5 * k, dtype=torch.float64))


def test_strided_operands_and_narrow_indices_give_the_same() -> None:
    a = random_csr(6, 8)
    dense = torch.randn(10, 16, dtype=torch.float64)[::2, ::2].mT
    assert not dense.is_contiguous()
    first = spmm(a, dense.contiguous())
    assert_same(spmm(a, dense), first)
    narrow = torch.sparse_csr_tensor(
        a.crow_indices().int(), a.col_indices().int(), a.values(), a.shape, check_invariants=True
    )
    assert_same(spmm(narrow, dense), first)


def test_blocks_of_rows_and_columns_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    a = random_csr(30, 40, 2.0, 0.5)
    dense = random_csr(40, 11, 2.0, 1.0).to_dense()
    first = spmm(a, dense)
    for columns, products in ((4, 8), (3, 100), (1, 1)):
        monkeypatch.setattr("mixprec.fp64.segments._BLOCK_COLUMNS", columns)
        monkeypatch.setattr("mixprec.fp64.segments._BLOCK_PRODUCTS", products)
        assert_same(spmm(a, dense), first)


def test_complex_parts_are_each_the_nearest() -> None:
    real, imaginary = random_csr(7, 9, 1.0, 1.0).to_dense(), random_csr(7, 9, 1.0, 1.0).to_dense()
    a = (torch.complex(real, imaginary) * (torch.rand(7, 9) < 0.6)).to_sparse_csr()
    dense = torch.randn(9, 4, dtype=torch.complex128)
    out = spmm(a, dense.conj().resolve_conj().conj())
    whole = a.to_dense()
    both = torch.cat([dense.real, dense.imag])
    wanted_real = torch.cat([whole.real, -whole.imag], -1).to_sparse_csr()
    wanted_imaginary = torch.cat([whole.imag, whole.real], -1).to_sparse_csr()
    assert_same(out.real, expected(wanted_real, both))
    assert_same(out.imag, expected(wanted_imaginary, both))


floats = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=150)
@given(st.lists(st.tuples(floats, floats), max_size=7))
def test_any_sum_of_products_is_the_nearest(pairs: list[tuple[float, float]]) -> None:
    x, y = (
        torch.tensor([pair[i] for pair in pairs], dtype=torch.float64).unsqueeze(-1) for i in (0, 1)
    )
    total = sum((Fraction(a) * Fraction(b) for a, b in pairs), Fraction(0))
    index, ends = torch.arange(len(pairs)), torch.tensor([0, len(pairs)])
    wanted = torch.tensor([[nearest(total)]], dtype=torch.float64)
    assert_same(sums_of_products(x, y, index, ends), wanted)


@pytest.mark.parametrize(("dtype", "is_fast"), gradient_cases())
def test_first_and_second_gradients(dtype: torch.dtype, is_fast: bool) -> None:
    a = (torch.randn(5, 4, dtype=dtype) * (torch.rand(5, 4) < 0.6)).to_sparse_csr()
    values = a.values().clone().requires_grad_()
    dense = torch.randn(4, 3, dtype=dtype, requires_grad=True)

    def product(values: Tensor, dense: Tensor) -> Tensor:
        return SPMM(a.crow_indices(), a.col_indices(), values, dense, 5, 4)

    assert gradcheck(product, (values, dense), fast_mode=is_fast)
    assert gradgradcheck(product, (values, dense), fast_mode=is_fast)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_gradient_of_the_sparse_operand_has_its_pattern(dtype: torch.dtype) -> None:
    whole = torch.randn(5, 4, dtype=dtype) * (torch.rand(5, 4) < 0.6)
    dense, weight = torch.randn(4, 3, dtype=dtype), torch.randn(5, 3, dtype=dtype)
    found = []
    for product in (spmm, torch.sparse.mm):
        a, b = whole.to_sparse_csr().requires_grad_(), dense.clone().requires_grad_()
        (product(a, b) * weight).abs().sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.layout == torch.sparse_csr
        assert torch.equal(a.grad.col_indices(), a.col_indices())
        found.append((a.grad.values().clone(), b.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-13, atol=1e-13)


def test_gradients_are_correctly_rounded_too() -> None:
    a, dense = random_csr(8, 9, 2.0), random_csr(9, 5, 2.0, 1.0).to_dense()
    grad = random_csr(8, 5, 2.0, 1.0).to_dense()
    a.requires_grad_()
    dense.requires_grad_()
    spmm(a, dense).backward(grad)
    with torch.no_grad():
        rows = torch.arange(8).repeat_interleave(a.crow_indices().diff())
        wanted = expected(grad.to_sparse_csr(), dense.mT)[rows, a.col_indices()]
        assert_same(a.grad.values(), wanted)
        assert_same(dense.grad, expected(a.to_dense().mT.to_sparse_csr(), grad))


def test_operators_pass_torchs_own_checks() -> None:
    a = random_csr(5, 4, share=0.6)
    values = a.values().clone().requires_grad_()
    dense = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(SPMM, (a.crow_indices(), a.col_indices(), values, dense, 5, 4))


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("strided", TypeError, r"a: got layout torch\.strided; spmm takes CSR"),
        ("single", TypeError, r"a: got torch\.float32; spmm takes float64"),
        ("mixed", TypeError, r"dense: got torch\.float32; a is torch\.float64"),
        ("wide", ValueError, r"dense: got shape \(2, 2\); a of 2 x 3 needs \[3, n\]"),
        ("vector", ValueError, r"dense: got shape \(2,\); a of 2 x 2"),
        ("sparse", TypeError, r"dense: got layout torch\.sparse_csr"),
    ],
)
def test_refusals_say_what_they_got(name: str, error: type[Exception], message: str) -> None:
    single, double = torch.eye(2), torch.eye(2).double()
    operands = {
        "strided": (double, double),
        "single": (single.to_sparse_csr(), single),
        "mixed": (double.to_sparse_csr(), single),
        "wide": (torch.ones(2, 3).double().to_sparse_csr(), double),
        "vector": (double.to_sparse_csr(), double[0]),
        "sparse": (double.to_sparse_csr(), double.to_sparse_csr()),
    }
    with pytest.raises(error, match=message):
        spmm(*operands[name])
