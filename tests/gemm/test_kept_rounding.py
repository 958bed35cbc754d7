"""Casts whose rounding a compiler keeps: the bits of torch's casts, and gradients rounded too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mixprec.gemm.kept_rounding import narrow, nearest, widen

DTYPES = [torch.bfloat16, torch.float16]


def patterns(dtype: torch.dtype) -> Tensor:
    """Every 16-bit pattern as the high bits of a float32, and what lies around the midpoints."""
    dropped = {torch.bfloat16: 16, torch.float16: 13}[dtype]
    high = torch.arange(-(1 << (31 - dropped)), 1 << (31 - dropped)) << dropped
    half = 1 << (dropped - 1)
    low = torch.tensor([0, 1, half - 1, half, half + 1, (1 << dropped) - 1])
    return (high[:, None] + low).flatten().to(torch.int32).view(torch.float32)


def bits(x: Tensor) -> Tensor:
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_in_float32_has_the_bits_of_the_cast(dtype: torch.dtype) -> None:
    x = patterns(dtype)
    assert torch.equal(bits(nearest(x, dtype)), bits(x.to(dtype).float()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_rounded_as_those_of_casts_are(dtype: torch.dtype) -> None:
    x = torch.randn(50).to(dtype).requires_grad_()
    factor = torch.randn(50)
    (got,) = torch.autograd.grad((widen(x) * factor).sum(), x)
    assert got.dtype == dtype
    assert torch.equal(got, factor.to(dtype))
    y = torch.randn(50, requires_grad=True)
    (got,) = torch.autograd.grad(narrow(y, dtype), y, factor.to(dtype))
    assert torch.equal(got, factor.to(dtype).float())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inductor_keeps_the_rounding_in_both_directions(dtype: torch.dtype) -> None:
    def step(x: Tensor) -> Tensor:
        return widen(narrow(x * 1.5, dtype)) * 3.0

    torch._dynamo.reset()
    # not the last patterns: times 1.5 or 3.0 overflow to infinity in either order
    x = patterns(dtype)
    x = x[x.isfinite()][::101].clone()
    want, got = (
        (run(leaf := x.clone().requires_grad_()), leaf)
        for run in (step, torch.compile(step, fullgraph=True))
    )
    for out, _leaf in (want, got):
        out.backward(x)
    assert torch.equal(bits(got[0].detach()), bits(want[0].detach()))
    assert got[1].grad is not None
    assert want[1].grad is not None
    assert torch.equal(bits(got[1].grad), bits(want[1].grad))
