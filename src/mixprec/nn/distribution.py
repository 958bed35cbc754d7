"""Telling converted layers which axes of their products are spread over ranks."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist
from torch import nn

from mixprec.nn.layer import QuantizedLayer
from mixprec.nn.wrapping import leave_out_of_broadcasts
from mixprec.sharding import spread_over


def distribute(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """The rows of this model's training batches are spread over the ranks of a group.

    Data parallelism, by DDP, FSDP2 or by hand: a recipe then means what it means in one process.
    In training, forward and backward, an operand that a rank has a part of is scaled by the largest
    magnitude of all parts wherever a scale covers several ranks' rows, and stochastic rounding
    draws by the row's place in the whole batch. numerics.md, section 7, says for which operands,
    and what stays different.

    Call it on all ranks, after ``mixprec.convert``, which forgets it, and before or after DDP or
    ``fully_shard``. Gradients are left to whoever brings them together: bit-equal operands need
    them summed over ranks, of losses divided by the rows of the whole batch.

    Args:
        model: A model with converted layers; others are left alone.
        group: The process group; by default all ranks. Of a device mesh, ``mesh.get_group()``.

    Raises:
        ValueError: ``torch.distributed`` is not initialised.

    Edge cases: one rank is one process. In evaluation nothing is exchanged. A rank without rows
    passes an empty batch: all ranks have to run the same layers in the same order, forward and
    backward. A layer that some ranks pass by is left out by calling this for the others. Who
    quantises operands again, as ``mixprec.watch`` does, does so on all ranks.
    """
    rows = spread_over(group)
    leave_out_of_broadcasts(model)
    for module in model.modules():
        if isinstance(module, QuantizedLayer):
            module.sharding = replace(module.sharding, rows=rows)
