"""``matmul``'s arguments: shapes and views as torch's, factors, ``out``, reports, refusals."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import pytest
import torch
from exact_products import GENERATORS, rounded
from torch import Tensor

from mixprec import fp64

NAN = float("nan")


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype)


SHAPES = [
    ((3, 4), (4, 5)),
    ((4,), (4,)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((3, 1, 8, 5), (4, 5, 6)),
    ((2, 3, 4), (4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 5)),
    ((2, 1, 3, 4), (1, 3, 4, 5)),
    ((1, 1), (1, 1)),
    # nothing along one axis or another
    ((2, 0), (0, 3)),
    ((0, 3), (3, 2)),
    ((2, 3), (3, 0)),
    ((0,), (0,)),
    ((2, 3, 0), (0, 4)),
    ((2, 3, 0), (2, 0, 4)),
    ((2, 0, 3), (2, 3, 4)),
    ((2, 0, 3), (3, 4)),
    ((2, 3, 4), (2, 4, 0)),
    ((0, 2, 3), (0, 3, 4)),
    ((0, 2, 3), (3, 4)),
    ((0, 2, 3), (3,)),
    ((0, 1, 2, 3), (4, 3, 2)),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("scheme", ["slices", "residues"])
@pytest.mark.parametrize(("left", "right"), SHAPES)
def test_shapes_are_those_of_torch(
    left: tuple[int, ...], right: tuple[int, ...], scheme: str, dtype: torch.dtype
) -> None:
    a, b = randn(*left, dtype=dtype), randn(*right, dtype=dtype)
    expected = a @ b
    found, report = fp64.matmul(a, b, scheme=scheme, report=True)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    assert report.error_bound.shape == expected.shape
    assert report.error_bound.dtype == torch.float64
    high, low = fp64.matmul(a, b, output="double_double")
    assert high.shape == low.shape == expected.shape
    assert fp64.matmul(a, b, output="nearest").shape == expected.shape


VIEWS = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "sliced": lambda x: torch.repeat_interleave(x, 2, 0)[::2],
    "columns": lambda x: torch.repeat_interleave(x, 3, 1)[:, ::3],
    "flipped": lambda x: x.flip(0).contiguous().flip(0),
    "offset": lambda x: torch.cat([x.new_full((1, x.shape[1]), NAN), x])[1:],
}


@pytest.mark.parametrize("scheme", ["slices", "residues"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_multiply_as_their_copies(view: str, scheme: str) -> None:
    make = VIEWS[view]
    for dtype in (torch.float64, torch.complex128):
        a, b = randn(6, 8, dtype=dtype), randn(8, 4, dtype=dtype)
        expected = fp64.matmul(a, b, scheme=scheme)
        assert torch.equal(fp64.matmul(make(a), make(b), scheme=scheme), expected)


def test_expanded_operands() -> None:
    row, matrix = randn(8), randn(8, 5)
    expected = fp64.matmul(row.repeat(4, 1), matrix)
    assert torch.equal(fp64.matmul(row.expand(4, -1), matrix), expected)
    one = randn(1, 1)
    expected = fp64.matmul(one.repeat(3, 4), one.repeat(4, 2))
    assert torch.equal(fp64.matmul(one.expand(3, 4), one.expand(4, 2)), expected)


@pytest.mark.parametrize("scheme", ["slices", "residues"])
def test_conjugated_and_negated_views(scheme: str) -> None:
    a, b = randn(3, 5, dtype=torch.complex128), randn(5, 4, dtype=torch.complex128)
    options = {"scheme": scheme, "bits": 79}
    expected = fp64.matmul(a.conj().resolve_conj(), b, **options)
    assert a.conj().is_conj()
    assert torch.equal(fp64.matmul(a.conj(), b, **options), expected)
    assert torch.equal(fp64.matmul(b.mT, a.mH, **options), expected.mT)
    negated = a.conj().imag
    assert negated.is_neg()
    found = fp64.matmul(negated, b.real, **options)
    assert torch.equal(found, fp64.matmul(-a.imag, b.real.contiguous(), **options))


def test_the_own_transpose_with_negative_and_conjugate_bits() -> None:
    a = randn(4, 6, dtype=torch.complex128)
    imaginary = a.conj().imag
    expected = fp64.matmul(-a.imag, a.imag.mT.clone(), bits=79)
    assert torch.equal(fp64.matmul(imaginary, a.imag.mT, bits=79), expected)
    torch.testing.assert_close(fp64.matmul(a, a.mH), a @ a.mH)
    torch.testing.assert_close(fp64.matmul(a, a.mT), a @ a.mT)


def test_overlapping_memory_is_not_taken_for_a_transpose() -> None:
    x = randn(40)
    a = x.as_strided((4, 4), (5, 1))
    b = x.as_strided((4, 4), (1, 4))
    expected = fp64.matmul(a.clone(), b.clone(), bits=79)
    assert torch.equal(fp64.matmul(a, b, bits=79), expected)
    stack = randn(3, 4, 4)
    expected = fp64.matmul(stack.clone(), stack.flip(0).mT.clone(), bits=79)
    assert torch.equal(fp64.matmul(stack, stack.flip(0).mT, bits=79), expected)


def test_gram_matrices_of_a_batch() -> None:
    stack = randn(3, 5, 7)
    expected = torch.stack([rounded(x, x.mT) for x in stack])
    assert torch.equal(fp64.matmul(stack, stack.mT, output="nearest"), expected)


def test_factors() -> None:
    a, b, c = randn(3, 4), randn(4, 2), randn(3, 2)
    plain = fp64.matmul(a, b)
    assert torch.equal(fp64.matmul(a, b, c=c, beta=1), plain + c)
    assert torch.equal(fp64.matmul(a, b, alpha=3.0), plain * 3.0)
    assert torch.equal(fp64.matmul(a, b, alpha=0.5, beta=2.0, c=c), plain * 0.5 + c * 2.0)
    assert torch.equal(fp64.matmul(a, b, beta=-1.5, c=c[:1]), plain - 1.5 * c[:1])
    assert torch.equal(fp64.matmul(a, b, beta=0), plain)


def test_what_a_zero_factor_leaves_unread() -> None:
    bad, ones = torch.full((2, 2), NAN, dtype=torch.float64), torch.ones(2, 2).double()
    assert torch.equal(fp64.matmul(ones, ones, beta=0, c=bad), 2 * ones)
    assert torch.equal(fp64.matmul(bad, ones, alpha=0, beta=1, c=ones), ones)
    assert torch.equal(fp64.matmul(bad, bad * 2, alpha=0), torch.zeros(2, 2).double())
    none = torch.zeros(1, 0, dtype=torch.float64)
    assert fp64.matmul(none, none.mT, beta=2, c=torch.ones(1, 1).double()).item() == 2.0


def test_complex_factors() -> None:
    a, b = (randn(2, 2, dtype=torch.complex128) for _ in "ab")
    plain = fp64.matmul(a, b)
    found = fp64.matmul(a, b, alpha=1 + 2j, beta=-1j, c=b)
    assert torch.equal(found, plain * (1 + 2j) + b * -1j)


FACTORS: list[dict[str, Any]] = [
    {"alpha": 1 / 3},
    {"alpha": -1e10, "beta": 1 / 7},
    {"beta": 1.0},
    {"alpha": 0, "beta": 1 / 3},
    {"alpha": 2.0**-1070, "beta": 0},
    {"alpha": 2.0**-1060, "beta": 2.0**-1070},
]


@pytest.mark.parametrize("factors", FACTORS)
def test_the_bound_covers_the_factors(factors: dict[str, Any]) -> None:
    a, b = GENERATORS["cancelling"](4, 20, 3)
    c = randn(4, 3)
    found, report = fp64.matmul(a, b, bits=45, c=c, report=True, **factors)
    alpha, beta = (Fraction(factors.get(name, 1)) for name in ("alpha", "beta"))
    for i in range(4):
        for j in range(3):
            pairs = zip(a[i].tolist(), b[:, j].tolist(), strict=True)
            exact = alpha * sum(Fraction(x) * Fraction(y) for x, y in pairs)
            exact += beta * Fraction(c[i, j].item())
            off = abs(Fraction(found[i, j].item()) - exact)
            assert off <= Fraction(report.error_bound[i, j].item())


def test_out_is_written_and_returned() -> None:
    a, b = randn(3, 4), randn(4, 3)
    expected = fp64.matmul(a, b)
    out = torch.empty(3, 3, dtype=torch.float64).mT
    assert fp64.matmul(a, b, out=out) is out
    assert torch.equal(out, expected)
    found, report = fp64.matmul(a, b, out=out, report=True)
    assert found is out
    assert report.products > 0


def test_out_may_be_an_operand() -> None:
    a, b = randn(4, 4), randn(4, 4)
    expected = fp64.matmul(a, b, beta=2, c=b)
    fp64.matmul(a, b, beta=2, c=b, out=b)
    assert torch.equal(b, expected)


def test_reports_and_records() -> None:
    a, b = randn(3, 4), randn(4, 2)
    with fp64.record() as outer:
        fp64.matmul(a, b, bits=55, engine="int8")
        with fp64.record() as inner:
            fp64.matmul(a, b, bits=79, engine="int8", scheme="slices")
        _, report = fp64.matmul(a, b, bits=55, engine="int8", scheme="residues", report=True)
    assert [(r.scheme, r.parts, r.products) for r in outer] == [
        ("slices", 7, 28),
        ("slices", 10, 55),
        ("residues", 15, 15),
    ]
    assert len(inner) == 1
    assert [r.error_bound is None for r in outer[:2]] == [True, True]
    assert (report.engine, report.bits, report.native_rows, report.special_rows) == (
        "int8",
        58,
        0,
        0,
    )
    fp64.matmul(a, b)
    assert len(outer) == 3


@pytest.mark.parametrize("engine", ["int8", "float32"])
def test_auto_takes_the_scheme_of_fewer_products_where_products_decide(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_SLICE_OVERHEAD", "_RESIDUE_OVERHEAD"):
        monkeypatch.setattr(f"mixprec.fp64.plan.{name}", 0)
    a, b = randn(20, 300), randn(300, 20)
    reports = {
        scheme: fp64.matmul(a, b, scheme=scheme, engine=engine, report=True)[1]
        for scheme in ("slices", "residues", "auto")
    }
    fewest = min(reports["slices"].products, reports["residues"].products)
    assert reports["auto"].products == fewest
    assert reports["residues"].products == reports["residues"].parts


ONE = torch.ones(2, 2, dtype=torch.float64)
REFUSALS: list[tuple[tuple[Any, Any], dict[str, Any], type[Exception], str]] = [
    ((ONE.float(), ONE), {}, TypeError, "a: got torch.float32; only float64 and complex128"),
    ((ONE, ONE.half()), {}, TypeError, "b: got torch.float16; only float64 and complex128"),
    ((ONE, ONE.long()), {}, TypeError, "b: got torch.int64; only"),
    ((ONE.to(torch.complex64), ONE), {}, TypeError, "a: got torch.complex64; only"),
    (
        (ONE, ONE.to(torch.complex128)),
        {},
        TypeError,
        "b: got torch.complex128 beside torch.float64",
    ),
    (([[1.0]], ONE), {}, TypeError, "a: got list; must be a tensor"),
    ((ONE, 3.0), {}, TypeError, "b: got float; must be a tensor"),
    ((ONE, torch.ones(3, 2).double()), {}, ValueError, "b: got shapes (2, 2) and (3, 2); a's last"),
    ((ONE[0], torch.ones(3).double()), {}, ValueError, "b: got shapes (2,) and (3,); a's last"),
    ((ONE, ONE[0, 0]), {}, ValueError, "b: got shapes (2, 2) and (); both need an axis"),
    ((ONE, ONE), {"scheme": "ozaki"}, ValueError, "scheme: got 'ozaki'; must be one of auto, "),
    ((ONE, ONE), {"output": "quad"}, ValueError, "output: got 'quad'; must be one of float64, "),
    ((ONE, ONE), {"engine": "fp4"}, ValueError, "engine: got 'fp4'; must be one of auto, "),
    ((ONE, ONE), {"bits": 0}, ValueError, "bits: got 0; must be from 1 to 300"),
    ((ONE, ONE), {"bits": 301}, ValueError, "bits: got 301; must be from 1 to 300"),
    ((ONE, ONE), {"bits": 55.0}, TypeError, "bits: got 55.0; must be a whole number or 'auto'"),
    ((ONE, ONE), {"bits": True}, TypeError, "bits: got True; must be a whole number"),
    ((ONE, ONE), {"bits": "many"}, TypeError, "bits: got 'many'; must be a whole number"),
    ((ONE, ONE), {"bits": 55, "rtol": 1e-9}, ValueError, "rtol: got 1e-09 beside bits=55; one"),
    ((ONE, ONE), {"output": "nearest", "bits": 55}, ValueError, "output: got 'nearest' with bits"),
    ((ONE, ONE), {"output": "nearest", "rtol": 0.1}, ValueError, "output: got 'nearest' with bits"),
    (
        (ONE, ONE),
        {"output": "double_double", "alpha": 2},
        ValueError,
        "output: got 'double_double'",
    ),
    ((ONE, ONE), {"output": "nearest", "c": ONE}, ValueError, "output: got 'nearest' with alpha"),
    ((ONE, ONE), {"out": torch.empty(3, 2).double()}, ValueError, "out: got torch.float64 (3, 2)"),
    (
        (ONE, ONE),
        {"out": torch.empty(2, 2)},
        ValueError,
        "out: got torch.float32 (2, 2); the result",
    ),
    (
        (ONE, ONE),
        {"out": torch.empty(2, 2).double(), "output": "double_double"},
        ValueError,
        "out: got one for a pair",
    ),
    (
        (ONE.clone().requires_grad_(), ONE),
        {"out": torch.empty(2, 2).double()},
        ValueError,
        "out: got a tensor where gradients are recorded",
    ),
]


@pytest.mark.parametrize(("operands", "options", "error", "message"), REFUSALS)
def test_refusals_say_what_was_given(
    operands: tuple[Any, Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match="^" + re.escape(message)):
        fp64.matmul(*operands, **options)


def test_batches_that_do_not_broadcast() -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"batch|broadcast|Shape mismatch"):
        fp64.matmul(randn(2, 3, 4), randn(3, 4, 5))


@pytest.mark.parametrize("c", [torch.ones(2, 2), torch.ones(2, 2, dtype=torch.complex128)])
def test_c_of_another_type_is_refused(c: Tensor) -> None:
    with pytest.raises(TypeError, match=f"^c: got {c.dtype} beside torch.float64"):
        fp64.matmul(ONE, ONE, c=c)
    with pytest.raises((TypeError, ValueError), match=r"^alpha: got 1j"):
        fp64.matmul(ONE, ONE, alpha=1j)


def test_c_that_would_enlarge_the_result_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^c: got shape \(3, 2, 2\)"):
        fp64.matmul(ONE, ONE, c=torch.ones(3, 2, 2).double())
