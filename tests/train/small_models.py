"""Models that take a step in milliseconds, in the place of the configuration's."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from mixprec.train import models
from mixprec.train.models import ModelEntry
from mixprec.train.splits import Dataset, Split


class SmallNet(nn.Module):
    """One module of each kind that the policy of 16 bits treats in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=3)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.1)
        self.fc1 = nn.Linear(324, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv(x))).flatten(1)
        return F.log_softmax(self.fc2(F.relu(self.fc1(self.dropout(x)))), dim=1)


class Slope(nn.Module):
    """Its loss, the mean output, has the mean input as gradient, whatever the weight is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


def slope_data() -> Dataset:
    """Rows of 16 halves: the gradient of ``Slope`` has norm 2."""
    rows = Split(inputs=Tensor([[0.5] * 16] * 8), targets=Tensor([0] * 8).long())
    return Dataset(train=rows, evaluation=rows)


SMALL_NET = ModelEntry(build=SmallNet, loss=F.nll_loss)
SLOPE = ModelEntry(build=Slope, loss=lambda output, _: output.float().mean())


def use(monkeypatch: pytest.MonkeyPatch, entry: ModelEntry) -> None:
    """Have a configuration's model be that one."""
    monkeypatch.setattr(models, "MODELS", {"mnist_cnn": entry})
