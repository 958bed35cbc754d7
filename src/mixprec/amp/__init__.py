"""Mixed precision around a training step: regions, loss scaling, optimisation levels, inputs."""

from mixprec.amp.inputs import cast_inputs

__all__ = ["cast_inputs"]
