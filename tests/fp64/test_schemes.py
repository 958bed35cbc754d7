"""The schemes where their parts meet: exponents of complex rows, and sums of several terms."""

from __future__ import annotations

import threading
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from exact_products import GENERATORS, complex_excess
from torch import Tensor

from mixprec import fp64
from mixprec.fp64 import engines, residues
from mixprec.fp64.residues import Moduli, Norms

F64 = torch.float64


def test_parts_of_a_complex_row_have_one_exponent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their norms are summed in another order, and may fall on two sides of a power of two."""
    own = residues.exponents

    def apart(norms: Norms, exponent: Tensor, used: Moduli, length: int) -> Tensor:
        mu = own(norms, exponent, used, length)
        if mu.shape[-1] == 2 * 7:
            mu[..., 7:] -= 1
        return mu

    monkeypatch.setattr(residues, "exponents", apart)
    a, b = GENERATORS["randn"](7, 40, 5)
    a, b = torch.complex(a, a.flip(1)), torch.complex(b.flip(0), b)
    found, report = fp64.matmul(a, b, scheme="residues", bits=55, report=True)
    assert complex_excess(found, a, b, report.error_bound) == []


@pytest.mark.parametrize("bits", [104, 125, 146, 167, 188])
def test_pairs_of_more_slices_are_within_their_bound(bits: int) -> None:
    """Products of four sizes, so that the low part of the sum rounds as it grows."""
    row = ["0x1.ee1985afb4f44p-1", "-0x1.8ce841b41a661p-1", "0x1.0fb8738826ba2p-21"]
    column = ["0x1.89548a3f63492p-1", "0x1.e9a591eaa226bp-1", "0x1.68560f34b1142p-21"]
    x = [float.fromhex(v) for v in [*row, "0x1.f40c511babb25p-34"]]
    y = [float.fromhex(v) for v in [*column, "0x1.344a80b253ccep-34"]]
    (high, low), report = fp64.matmul(
        torch.tensor([x], dtype=F64),
        torch.tensor([y], dtype=F64).mT,
        bits=bits,
        engine="float64",
        scheme="slices",
        output="double_double",
        report=True,
    )
    exact = sum(Fraction(v) * Fraction(w) for v, w in zip(x, y, strict=True))
    error = abs(Fraction(high.item()) + Fraction(low.item()) - exact)
    assert error <= Fraction(report.error_bound.item())


def test_records_are_of_all_threads_or_of_one() -> None:
    a, b = GENERATORS["randn"](3, 4, 5)
    with fp64.record() as every, fp64.record(of_this_thread=True) as own:
        thread = threading.Thread(target=fp64.matmul, args=(a, b))
        thread.start()
        thread.join()
        fp64.matmul(a, b)
    assert (len(every), len(own)) == (2, 1)


def test_engine_without_memory_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        calls.append(a)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("full")
        return a @ b.mT

    engine = engines.Engine(
        name="trial",
        width=8,
        largest_sum=1 << 20,
        dtype=F64,
        multiply=multiply,
        why_not=lambda device: None,
    )
    monkeypatch.setitem(fp64.ENGINES, "trial", engine)
    with pytest.raises(torch.OutOfMemoryError):
        engines.get_engine("trial", torch.device("cpu"))
    assert engines.get_engine("trial", torch.device("cpu")) is engine


def test_float64_units_that_cublas_emulates_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not = fp64.ENGINES["float64"].why_not
    monkeypatch.setenv("CUBLAS_EMULATE_DOUBLE_PRECISION", "1")
    assert "cuBLAS emulates FP64 products itself" in (why_not(torch.device("cuda")) or "")
    assert why_not(torch.device("cpu")) is None
    monkeypatch.setenv("CUBLAS_EMULATE_DOUBLE_PRECISION", "0")
    assert why_not(torch.device("cuda")) is None


def test_options_of_solves_are_checked_whatever_the_size() -> None:
    a = torch.eye(3, dtype=F64)
    solves: list[Callable[..., Any]] = [fp64.cholesky, fp64.lu, fp64.qr]
    for solve in solves:
        with pytest.raises(ValueError, match="engine: got 'nope'"):
            solve(a, engine="nope")
        with pytest.raises(ValueError, match="bits: got 4000"):
            solve(a, bits=4000)
        with pytest.raises(TypeError, match=r"bits: got 2\.5"):
            solve(a, bits=2.5)


@pytest.mark.parametrize("options", [{"groups": 0}, {"stride": 0}])
def test_convolutions_that_torch_refuses_are_refused_by_torch(options: dict[str, int]) -> None:
    x, weight = torch.randn(1, 2, 5, dtype=F64), torch.randn(2, 2, 3, dtype=F64)
    with pytest.raises(RuntimeError) as native:
        torch.conv1d(x, weight, **options)
    with fp64.emulate() as done, pytest.raises(RuntimeError) as emulated:
        torch.conv1d(x, weight, **options)
    assert str(emulated.value) == str(native.value)
    assert done.emulated == 0
