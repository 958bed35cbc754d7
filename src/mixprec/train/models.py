"""Models that a configuration can name.

`mnist_cnn` is the network of PyTorch's MNIST example, layer for layer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor, nn


class MnistCNN(nn.Module):
    """Two 3x3 convolutions, max pool, two linear layers; inputs [N, 1, 28, 28].

    Returns log-probabilities [N, 10], so its loss is the negative log-likelihood. 1,199,882
    parameters, 1,179,776 of them in `fc1`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """How to make a model and what it minimises.

    build: called with the global generator seeded; returns the model on the CPU.
    loss: (output [N, ...], targets [N]) -> the mean loss over N, a scalar tensor.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]


MODELS: Mapping[str, ModelEntry] = MappingProxyType(
    {"mnist_cnn": ModelEntry(build=MnistCNN, loss=F.nll_loss)}
)
