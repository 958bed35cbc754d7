"""Regions and torch.compile: the numbers of eager code, or a clear refusal."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from mixprec.amp import autocast

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
REGION = autocast("bf16")
Function = Callable[[nn.Module, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().sum()


def made_inside(model: nn.Module, x: Tensor) -> Tensor:
    with autocast("bf16"):
        return loss(model, x)


def made_outside(model: nn.Module, x: Tensor) -> Tensor:
    with REGION:
        return loss(model, x)


decorated = autocast("bf16")(loss)


def step(function: Function) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 8))
    out = function(model, torch.randn(4, 16))
    out.backward()
    return [out.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("function", [made_inside, made_outside, decorated])
def test_compiled_function_with_a_region_has_the_numbers_of_eager_code(function: Function) -> None:
    want = step(function)
    for got, reference in zip(
        step(torch.compile(function, backend="aot_eager")), want, strict=True
    ):
        assert got.dtype == reference.dtype
        assert torch.equal(got, reference)


def test_compiled_function_within_a_region_has_the_numbers_of_eager_code() -> None:
    compiled = torch.compile(loss, backend="aot_eager")
    with REGION:
        want, got = step(loss), step(compiled)
    for result, reference in zip(got, want, strict=True):
        assert torch.equal(result, reference)


def test_a_region_entered_within_one_graph_is_refused_clearly() -> None:
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="regions of 16 bits are entered by eager code"
    ):
        step(torch.compile(made_inside, fullgraph=True))
