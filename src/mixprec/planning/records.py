"""What a plan says: frozen records, in bytes, seconds and shares."""

from __future__ import annotations

from dataclasses import dataclass

from mixprec.planning.qualification import LayerPlan
from mixprec.planning.roofline import Roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on each GPU at the plan's batch.

    Attributes:
        parameters, gradients: At the end of backward, in their types.
        masters: What is kept of 16-bit parameters for the update (``masters``, ``compensated``);
            with float32 parameters these are the masters, and this is 0.
        optimizer: The optimizer's own state.
        activations: Kept for backward by one batch, parameters apart.
        peak: The most alive at any time of a step, temporaries among it.
    """

    parameters: int
    gradients: int
    masters: int
    optimizer: int
    activations: int
    peak: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipePlan:
    """One recipe on the target.

    Attributes:
        recipe, base: Its label, and what all but converted layers run in.
        memory: At the plan's batch.
        fits: Whether the peak is within the target's memory.
        largest_batch: The largest batch of one GPU that fits; 0 where no row does; at most 2^20.
        layers: Every module that holds parameters or multiplies, in the model's order.
        roofline: None for a CPU, for which the hardware table has no rates.
    """

    recipe: str
    base: str
    memory: MemoryPlan
    fits: bool
    largest_batch: int
    layers: tuple[LayerPlan, ...]
    roofline: Roofline | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A training run on hardware that need not be there.

    Attributes:
        model: Its name in the configuration; parameters: how many it has.
        target: A GPU of the hardware table, or cpu; memory_bytes: what one has for the run.
        gpus: Over how many parameters, gradients, masters and state are divided.
        batch: Rows of one GPU's batch.
        torch: The release that layers are judged by.
        recipes: One entry a recipe.
        notes: What the figures do not say.
    """

    model: str
    parameters: int
    target: str
    memory_bytes: int
    gpus: int
    batch: int
    torch: str
    recipes: tuple[RecipePlan, ...]
    notes: tuple[str, ...]
