"""Optimizers for parameters of 16 bits, and averages of parameters, in float32 arithmetic."""

from mixprec.optim.averages import ExponentialMovingAverage
from mixprec.optim.mixed_precision import MixedPrecision

__all__ = ["ExponentialMovingAverage", "MixedPrecision"]
