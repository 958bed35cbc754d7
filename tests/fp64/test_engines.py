"""Engines: exact up to their capacity, refused where they are not, whatever the shapes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from mixprec import fp64
from mixprec.fp64.engines import Engine, get_engine

CPU = torch.device("cpu")
# the test of fp8 sums takes long on CPUs
ENGINES = ["float64", "float32", "int8", pytest.param("fp8", marks=pytest.mark.slow)]


def engine_or_skip(name: str) -> Engine:
    """The engine; fp8 where its own test passes on this machine."""
    if name != "fp8":
        return get_engine(name, CPU)
    try:
        return get_engine(name, CPU)
    except ValueError as error:
        pytest.skip(str(error))


def digits(engine: Engine, *shape: int, low: int | None = None) -> Tensor:
    lowest, highest = -(1 << engine.width - 1), (1 << engine.width - 1) - 1
    if low is not None:
        return torch.full(shape, low, dtype=torch.int64)
    return torch.randint(lowest, highest + 1, shape)


def exact(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([x @ y.mT for x, y in zip(a, b, strict=True)])


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 17, 3, 9), (3, 2, 33, 40), (2, 5, 7, 1000)])
def test_products_of_any_shape_are_exact(name: str, shape: tuple[int, ...]) -> None:
    engine = engine_or_skip(name)
    batch, m, n, k = shape
    a, b = digits(engine, batch, m, k), digits(engine, batch, n, k)
    found = engine.dot(a.to(engine.dtype), b.to(engine.dtype))
    assert found.dtype == torch.float64
    assert torch.equal(found, exact(a, b).double())


@pytest.mark.parametrize("name", ENGINES)
def test_the_capacity_is_exact_with_the_lowest_integers(name: str) -> None:
    engine = engine_or_skip(name)
    a = digits(engine, 1, 2, engine.capacity, low=-(1 << engine.width - 1))
    b = a.clone()
    b[..., -1] = 1
    a[..., 0] += 1
    found = engine.dot(a.to(engine.dtype), b.to(engine.dtype))
    assert torch.equal(found, exact(a, b).double())


@pytest.mark.parametrize("name", ENGINES)
def test_capacity_is_what_the_sums_hold(name: str) -> None:
    engine = fp64.ENGINES[name]
    largest = 4 ** (engine.width - 1)
    assert engine.capacity * largest <= engine.largest_sum < (engine.capacity + 1) * largest


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 0, 3, 4), (1, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing_to_multiply_gives_zeros(name: str, shape: tuple[int, ...]) -> None:
    engine = engine_or_skip(name)
    batch, m, n, k = shape
    a, b = (torch.zeros(batch, rows, k, dtype=engine.dtype) for rows in (m, n))
    assert torch.equal(engine.dot(a, b), torch.zeros(batch, m, n, dtype=torch.float64))


def test_views_multiply_as_their_copies() -> None:
    for name in ("float64", "float32", "int8"):
        engine = get_engine(name, CPU)
        a, b = digits(engine, 2, 40, 6).mT, digits(engine, 2, 80, 5).mT[..., 20:60]
        found = engine.dot(a.to(engine.dtype), b.to(engine.dtype))
        assert torch.equal(found, exact(a, b).double())


def test_auto_is_float64_on_cpus() -> None:
    assert get_engine("auto", CPU) is fp64.ENGINES["float64"]


def test_unknown_engine() -> None:
    with pytest.raises(ValueError, match="engine: got 'fp4'; must be one of auto, float64,"):
        get_engine("fp4", CPU)


def forgetful(dtype: torch.dtype) -> object:
    """A product whose sums are rounded to a type that is too short."""
    return lambda a, b: (a.to(torch.float64) @ b.to(torch.float64).mT).to(dtype)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("float64", {"multiply": forgetful(torch.float32)}),
        ("float32", {"multiply": forgetful(torch.float16)}),
        ("float32", {"multiply": forgetful(torch.bfloat16)}),
        pytest.param("int8", {"multiply": forgetful(torch.float32)}, marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_is_not_exact_is_refused(
    name: str, change: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dataclasses.replace(fp64.ENGINES[name], name="wrong", **change)
    monkeypatch.setitem(fp64.ENGINES, "wrong", wrong)
    with pytest.raises(ValueError, match="engine: got 'wrong'; its sums on cpu are not exact; or"):
        get_engine("wrong", CPU)


@pytest.mark.slow
def test_an_engine_that_wraps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    int8 = fp64.ENGINES["int8"]
    # one more than 32 bits hold: -128 * -128 * 131072 is -2147483648 there
    wrong = dataclasses.replace(int8, name="wrong", largest_sum=1 << 31)
    monkeypatch.setitem(fp64.ENGINES, "wrong", wrong)
    assert wrong.capacity == 131072
    with pytest.raises(ValueError, match="its sums on cpu are not exact"):
        get_engine("wrong", CPU)


def test_an_engine_that_fails_is_refused_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(a: Tensor, b: Tensor) -> Tensor:
        raise RuntimeError("no such unit")

    wrong = dataclasses.replace(fp64.ENGINES["float64"], name="wrong", multiply=fail)
    monkeypatch.setitem(fp64.ENGINES, "wrong", wrong)
    with pytest.raises(
        ValueError, match="engine: got 'wrong'; it does not run on cpu: no such unit"
    ):
        get_engine("wrong", CPU)


def test_float32_is_refused_where_fewer_bits_may_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    get_engine("float32", CPU)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with pytest.raises(ValueError, match="engine: got 'float32'; torch"):
            get_engine("float32", CPU)
    finally:
        torch.set_float32_matmul_precision(before)


def test_float32_is_refused_where_torch_cannot_say_its_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mixed() -> str:
        raise RuntimeError("backends are set apart")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    with pytest.raises(ValueError, match=r"^engine: got 'float32'; .* is 'mixed', which lets"):
        get_engine("float32", CPU)


def test_default_dtype_does_not_matter() -> None:
    a = torch.randn(3, 20, dtype=torch.float64)
    expected = fp64.matmul(a, a.mT, bits=55, engine="int8")
    try:
        torch.set_default_dtype(torch.float64)
        for name in ("int8", "float32"):
            assert torch.equal(fp64.matmul(a, a.mT, bits=55, engine=name), expected)
    finally:
        torch.set_default_dtype(torch.float32)
