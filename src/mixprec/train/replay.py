"""A step that failed, taken again and looked at: where its first NaN or infinity came from.

What a step depends on is there when it fails: nothing was updated, its data and its dropout follow
from (seed, step), and its noise from counts that one more pass over it gives back.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mixprec.amp.inputs import cast_inputs
from mixprec.amp.setup import region
from mixprec.inspection.nonfinite import NonFinite, first_nonfinite
from mixprec.nn.state import converted_layers
from mixprec.train import checkpoint
from mixprec.train.splits import Batch, stream_seed
from mixprec.train.trainer import Trainer


def replay(trainer: Trainer, step: int) -> NonFinite | None:
    """Take a failed step again, eagerly, and name what its first non-finite result came from.

    Args:
        trainer: As the failure left it.
        step: The step of the ``NonFiniteError``: the one after those done, or, where an evaluation
            or a parameter was at fault, the last one done.

    Returns:
        None where no loss or gradient is found that is not finite.

    Edge cases: parameters, buffers, optimizer, loss scale and generators are left as they were, and
    gradients None, as the next step makes them. On a GPU the step is the same as far as its kernels
    are deterministic.
    """
    with checkpoint.isolated_generators(trainer.device), _as_it_is(trainer):
        if step <= trainer.done:
            return _evaluation(trainer)
        batches = trainer.batches(trainer.done)
        _rewind_noise(trainer, batches)
        names = ("the batch", *(f"batch {i}" for i in range(2, len(batches) + 1)))
        inputs = {name: batch[0] for name, batch in zip(names, batches, strict=True)}
        return first_nonfinite(trainer.model, lambda: _step(trainer, batches), inputs)


def _step(trainer: Trainer, batches: list[Batch]) -> list[Tensor]:
    """The step's gradients, or the losses that are not finite."""
    scale = trainer.loss_scale or 1.0
    rows = sum(len(targets) for _, targets in batches)
    seed = stream_seed("step", trainer.config.train.seed, trainer.done)
    checkpoint.seed_step(seed, trainer.device)
    bad = []
    for inputs, targets in batches:
        loss = _loss(trainer, inputs, targets) * (len(targets) / rows)
        if not math.isfinite(loss.item()):
            bad.append(loss.detach())
        (loss * scale).backward()
    return bad or [p.grad for p in trainer.model.parameters() if p.grad is not None]


def _loss(trainer: Trainer, inputs: Tensor, targets: Tensor) -> Tensor:
    # the model itself, since compiled code shows no operations
    with region(trainer.recipe):
        output = trainer.model(cast_inputs(inputs, trainer.recipe.parameters))
        return trainer.criterion(output, targets)


def _rewind_noise(trainer: Trainer, batches: list[Batch]) -> None:
    """Set the counts of noise back to those that the step began with.

    It counted as often as it does when it is taken once more.
    """
    counts = [
        buffer
        for _, layer in converted_layers(trainer.model)
        for buffer in layer.numerics_buffers().values()
        if not buffer.is_floating_point()
    ]
    if not counts:
        return
    after = [count.clone() for count in counts]
    _step(trainer, batches)
    with torch.no_grad():
        for count, old in zip(counts, after, strict=True):
            count.copy_(2 * old - count)
    trainer.optimizer.zero_grad()


def _evaluation(trainer: Trainer) -> NonFinite | None:
    trainer.model.eval()
    try:
        for (inputs, targets), _ in trainer.evaluation_batches():
            with torch.no_grad():
                fault = first_nonfinite(
                    trainer.model,
                    lambda: [_loss(trainer, inputs, targets)],  # noqa: B023, called at once
                    {"the batch": inputs},
                )
            if fault is not None:
                return fault
        return None
    finally:
        trainer.model.train()


@contextmanager
def _as_it_is(trainer: Trainer) -> Iterator[None]:
    """A stretch after which buffers hold what they held, and no gradient is left."""
    buffers = [(buffer, buffer.clone()) for buffer in trainer.model.buffers()]
    trainer.optimizer.zero_grad()
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        trainer.optimizer.zero_grad()
