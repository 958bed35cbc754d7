"""What several ranks are refused, and a model's file on a disk that is full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mixprec.recipes import RECIPES
from mixprec.train import parallel
from mixprec.train.distributed import Ranks

CPU = torch.device("cpu")


def test_statistics_of_batches_are_refused_on_several_ranks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with pytest.raises(ValueError, match="model: got 1, a BatchNorm1d, on several ranks"):
        parallel.spread(model, Ranks(device=CPU, size=2, strategy="ddp"), RECIPES["fp32"])
    parallel.spread(model, Ranks(device=CPU), RECIPES["fp32"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_of_as_the_system_does() -> None:
    with pytest.raises(OSError, match="No space left"):
        parallel.save(nn.Linear(64, 64).state_dict(), Ranks(device=CPU), Path("/dev/full"))
