"""Training: configuration, data, models, the loop, checkpoints, and comparisons of recipes."""

from mixprec.train.loop import run

__all__ = ["run"]
