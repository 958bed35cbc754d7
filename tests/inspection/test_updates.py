"""updates.py: which weight updates are lost to rounding, counted element by element."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from mixprec.amp import GradScaler
from mixprec.inspection.updates import UpdateStatistics, UpdateWatch, num_lost
from mixprec.optim import MixedPrecision

HALF_ULP = 2.0**-8
"""Of bfloat16 numbers from 1 up to 2: 7 digits after the point."""


class Weights(nn.Module):
    """Weights 1 whose gradients are given."""

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count, dtype=dtype))


def looked_at(
    gradients: list[float],
    dtype: torch.dtype = torch.bfloat16,
    update: str | None = None,
    lr: float = 1.0,
) -> tuple[UpdateStatistics, ...]:
    """One step of SGD from weights 1 by these gradients."""
    model = Weights(len(gradients), dtype)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    if update is not None:
        optimizer = MixedPrecision(optimizer, update=update, float32_gradients=False)
    with UpdateWatch(model, optimizer) as watch:
        watch.ask()
        model.weight.grad = torch.tensor(gradients, dtype=dtype)
        optimizer.step()
        return watch.take()


GRADIENTS = [0.0, 0.5, -HALF_ULP / 2, -HALF_ULP * 0.99, -HALF_ULP * 1.01, -HALF_ULP, 1e-8]
LOST = 4
"""Below half an ulp; exactly half of it is a tie, which goes to the even 1."""


@pytest.mark.parametrize(
    ("update", "lost"),
    [(None, LOST), ("plain", LOST), ("masters", 1), ("compensated", 1), ("stochastic", 0)],
)
def test_lost_updates_of_16_bit_weights(update: str | None, lost: int) -> None:
    # what float32 (and a bfloat16 compensation of an untouched weight) loses is 1e-8 alone
    gradients = GRADIENTS if update != "compensated" else [*GRADIENTS[:-1], 1e-12]
    (found,) = looked_at(gradients, update=update)
    assert found == UpdateStatistics(
        parameter="weight",
        format="bfloat16",
        elements=7,
        moving=6,
        lost=lost,
        largest_gradient=0.5,
    )
    assert found.lost_share == lost / 6


def test_lost_updates_of_float32_weights() -> None:
    (found,) = looked_at([1e-3, 1e-7, 1e-9, 0.0], torch.float32)
    assert (found.moving, found.lost) == (3, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_count_is_that_of_half_ulps(dtype: torch.dtype) -> None:
    # away from powers of two, below which ulps are smaller
    before = (1.1 + 0.8 * torch.rand(2000)).to(dtype)
    ulp = torch.finfo(dtype).eps
    update = (torch.rand(2000, dtype=torch.float64) * ulp).to(dtype)
    after = (before.double() - update.double()).to(dtype)
    expected = int(((update > 0) & (update.double() < ulp / 2)).sum())
    assert 500 < expected < 1500
    ties = int((update.double() == ulp / 2).sum())
    assert expected <= num_lost(before, after, update) <= expected + ties


def test_only_the_step_that_was_asked_for_and_taken() -> None:
    model = Weights(2, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = UpdateWatch(model, optimizer)
    scaler = GradScaler(init_scale=2.0**20)

    def step(factor: float) -> tuple[UpdateStatistics, ...]:
        optimizer.zero_grad()
        scaler.scale((model.weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        return watch.take()

    assert step(1.0) == ()
    watch.ask()
    assert step(1e35) == ()
    (found,) = step(3.0)
    # after unscaling
    assert (found.largest_gradient, found.lost) == (3.0, 0)
    assert step(1.0) == ()
    watch.ask()
    watch.close()
    assert step(1.0) == ()


def test_what_does_not_move_is_left_out() -> None:
    assert looked_at([1.0], torch.float32, lr=0.0) == ()
    (rests,) = looked_at([0.0, 0.0])
    assert (rests.moving, rests.lost, rests.lost_share) == (0, 0, 0.0)
    model = Weights(1, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with UpdateWatch(model, optimizer) as watch:
        watch.ask()
        optimizer.step()
        assert watch.take() == ()


def test_a_weight_that_is_not_finite_is_not_lost() -> None:
    weight = Tensor([math.nan, 1.0])
    assert num_lost(weight, weight.clone(), Tensor([1.0, 1e-12])) == 1
