"""Mixed precision around a training step: regions, loss scaling, optimisation levels, inputs."""

from mixprec.amp.autocast import autocast
from mixprec.amp.grad_scaler import GradScaler
from mixprec.amp.inputs import cast_inputs
from mixprec.amp.levels import initialize, loss_scalers, master_params, scale_loss
from mixprec.amp.loss_scale import CallOrderError
from mixprec.amp.scaler_state import StepOutcome

__all__ = [
    "CallOrderError",
    "GradScaler",
    "StepOutcome",
    "autocast",
    "cast_inputs",
    "initialize",
    "loss_scalers",
    "master_params",
    "scale_loss",
]
