"""A model of one's own: a function of the options that returns the model, or it and its loss.

In a configuration, where this folder is the current one:

    model = "own_model:network"

    [model_options]
    width = 64
"""

import torch
from torch import Tensor, nn

from mixprec.train.config import from_dict
from mixprec.train.trainer import Trainer


class Mixer(nn.Module):
    """Digits [N, 1, 28, 28] to logits [N, 10]: their rows are mixed, then their columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rows = nn.Linear(28, width)
        self.columns = nn.Linear(28, width)
        self.head = nn.Linear(width * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.rows(images.squeeze(1)))
        x = torch.relu(self.columns(x.transpose(1, 2)))
        return self.head(x.flatten(1))


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    """Without a loss of its own a model gets the cross-entropy."""
    return nn.functional.cross_entropy(logits, targets, label_smoothing=0.05)


def network(width: int = 32) -> tuple[nn.Module, object]:
    """What a configuration names."""
    return Mixer(width), smoothed


if __name__ == "__main__":
    config = from_dict(
        {
            "model": "own_model:network",
            "model_options": {"width": 24},
            "recipe": "fp8_rowwise",
            "optimizer": {"name": "adamw", "lr": 3e-3},
            "train": {"steps": 60},
        }
    )
    trainer = Trainer(config)
    print(trainer.report)
    while trainer.done < trainer.total:
        record = trainer.step()
        if record.step % 20 == 0 or record.step == 1:
            print(f"step {record.step}: loss {record.loss:.4f}")
    print(f"accuracy {100 * trainer.evaluate().accuracy:.1f} %")
