"""ViT-tiny on digits: the loss after 150 steps of each recipe beside FP32's, from one seed."""

from __future__ import annotations

import pytest

from .parity import COMPARED, VIT, assert_near_fp32


@pytest.mark.slow
@pytest.mark.long
def test_each_recipe_ends_near_fp32() -> None:
    assert_near_fp32(VIT, COMPARED)
