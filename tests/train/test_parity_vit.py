"""ViT-tiny on digits: the loss after 150 steps of each recipe beside FP32's, from one seed."""

from __future__ import annotations

import pytest
import torch

from .parity import COMPARED, MARGIN, VIT, bits, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def losses() -> dict[str, tuple[float, float]]:
    torch.set_num_threads(1)
    return run(VIT, ["fp32", *COMPARED])


def test_fp32_learns(losses: dict[str, tuple[float, float]]) -> None:
    first, last = losses["fp32"]
    assert last < 0.7 * first


@pytest.mark.parametrize("recipe", COMPARED)
def test_the_final_loss_is_near_fp32s(recipe: str, losses: dict[str, tuple[float, float]]) -> None:
    expected = losses["fp32"][1]
    assert losses[recipe][1] != expected
    assert abs(losses[recipe][1] - expected) <= MARGIN[bits(recipe)] * expected
