"""ViT-tiny on digits: the loss after 150 steps of recipes with a scale a block."""

from __future__ import annotations

import pytest

from .parity import BLOCKS, VIT, assert_near_fp32


@pytest.mark.slow
@pytest.mark.long
def test_each_recipe_ends_near_fp32() -> None:
    assert_near_fp32(VIT, BLOCKS)
