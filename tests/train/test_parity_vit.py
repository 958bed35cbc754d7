"""ViT-tiny on digits: the loss after 150 steps of recipes with one scale a tensor or row."""

from __future__ import annotations

import pytest

from .parity import TENSORS_AND_ROWS, VIT, assert_near_fp32


@pytest.mark.slow
@pytest.mark.long
def test_each_recipe_ends_near_fp32() -> None:
    assert_near_fp32(VIT, TENSORS_AND_ROWS)
