"""What ranks take from the first of them, and a model's file on a disk that is full."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from mixprec.train import parallel
from mixprec.train.distributed import Ranks

CPU = torch.device("cpu")


def test_running_statistics_are_found_and_nothing_else() -> None:
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.LayerNorm(4))
    found = parallel.statistics(model)
    assert list(map(id, found)) == list(map(id, norm.buffers()))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_of_as_the_system_does() -> None:
    with pytest.raises(OSError, match="No space left"):
        parallel.save(nn.Linear(64, 64).state_dict(), Ranks(device=CPU), Path("/dev/full"))
