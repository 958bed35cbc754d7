"""Emulated products on a GPU: the bits of the CPU's, by every engine that is exact there."""

from __future__ import annotations

import pytest
import torch
from exact_products import GENERATORS
from torch import Tensor

from mixprec import fp64
from mixprec.fp64.engines import get_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def engine_or_skip(name: str) -> str:
    try:
        get_engine(name, torch.device("cuda", 0))
    except ValueError as error:
        pytest.skip(str(error))
    return name


def operands(generator: str) -> tuple[Tensor, Tensor]:
    return GENERATORS[generator](40, 300, 50)


@pytest.mark.parametrize("engine", ["float64", "float32", "int8", "fp8"])
@pytest.mark.parametrize("generator", GENERATORS)
def test_correctly_rounded_products_have_the_bits_of_the_cpu(generator: str, engine: str) -> None:
    a, b = operands(generator)
    found = fp64.matmul(a.cuda(), b.cuda(), output="nearest", engine=engine_or_skip(engine))
    assert torch.equal(found.cpu(), fp64.matmul(a, b, output="nearest"))


@pytest.mark.parametrize("scheme", ["slices", "residues"])
@pytest.mark.parametrize("output", ["float64", "double_double"])
def test_fixed_bits_have_the_bits_of_the_cpu(output: str, scheme: str) -> None:
    a, b = operands("randn")
    options = {"bits": 79, "engine": "int8", "scheme": scheme, "output": output}
    found = fp64.matmul(a.cuda(), b.cuda(), **options)
    expected = fp64.matmul(a, b, **options)
    if output == "float64":
        found, expected = (found,), (expected,)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(found, expected, strict=True))


def test_int8_is_the_engine_of_gpus() -> None:
    a, b = operands("randn")
    _, report = fp64.matmul(a.cuda(), b.cuda(), report=True)
    assert report.engine == "int8"


def test_backward_in_the_threads_of_autograd_is_emulated() -> None:
    a, b = (x.cuda().requires_grad_() for x in operands("randn"))
    with fp64.emulate() as done:
        (a @ b).square().sum().backward()
    assert done.to_dict()["operations"]["mm"]["emulated"] == 3


def test_sparse_product_has_the_bits_of_the_cpu() -> None:
    a, b = operands("randn")
    sparse = a.masked_fill(a.abs() < 1, 0.0).to_sparse_csr()
    assert torch.equal(fp64.spmm(sparse.cuda(), b.cuda()).cpu(), fp64.spmm(sparse, b))
