"""Grouped products, as experts make them: each group of rows by its own weight, by a recipe.

output[rows of g] = a[rows of g, K] b[g, K, N]
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from mixprec.autograd import linear
from mixprec.linear_products import LinearState
from mixprec.noise import Noise
from mixprec.recipes import Recipe

_STREAMS_PER_GROUP = 8


def grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    *,
    recipe: str | Recipe,
    noise: Noise | None = None,
    impl: str = "auto",
    state: LinearState | None = None,
) -> Tensor:
    """``torch.nn.functional.grouped_mm``, each group a ``linear`` by a recipe, with gradients.

    Args:
        mat_a: [M, K], its rows cut into groups by offs; or [G, M, K].
        mat_b: [G, K, N].
        offs: int [G]: where each group's rows end, not decreasing; none with a 3-D mat_a. A group
            may be empty.
        bias: [G, N] or [N], added in FP32.
        out_dtype: Type of the result; mat_a's by default.
        recipe, noise, impl: As in ``mixprec.linear``; no delayed scaling.
        state: Of the first group's product, whose backward counts the noise step.

    Returns:
        [M, N] or [G, M, N]; rows behind the last group are 0.

    Raises:
        ValueError: Other shapes, which are no products of a forward pass; what ``linear`` refuses.

    Edge cases: an empty group's weight has a gradient of 0. Reading offs waits for the device.
    """
    if mat_b.dim() != 3 or mat_a.dim() not in (2, 3) or (mat_a.dim() == 2) != (offs is not None):
        raise ValueError(
            f"mat_a: got shapes {tuple(mat_a.shape)} and {tuple(mat_b.shape)}, "
            f"{'no ' if offs is None else ''}offs; must be [M, K] with offs or [G, M, K] without, "
            "and [G, K, N]; reshape them, or leave this module out (skip=)"
        )
    ends = [0, *offs.tolist()] if offs is not None else []
    if ends and (ends[-1] > len(mat_a) or len(ends) != len(mat_b) + 1 or ends != sorted(ends)):
        raise ValueError(
            f"offs: got {ends[1:]} for {len(mat_a)} rows and {len(mat_b)} groups; must be one "
            "end a group, not decreasing, within the rows; correct it"
        )
    rows = [mat_a[start:end] for start, end in pairwise(ends)] if ends else list(mat_a)
    parts = [
        linear(
            part,
            weight.mT,
            bias if bias is None or bias.dim() == 1 else bias[group],
            recipe=recipe,
            noise=noise and replace(noise, stream=noise.stream + _STREAMS_PER_GROUP * group),
            impl=impl,
            state=state.later() if state and group else state,
        )
        for group, (part, weight) in enumerate(zip(rows, mat_b, strict=True))
    ]
    if not ends:
        return torch.stack(parts).to(out_dtype or mat_a.dtype)
    rest = parts[0].new_zeros(len(mat_a) - ends[-1], mat_b.shape[-1])
    return torch.cat([*parts, rest]).to(out_dtype or mat_a.dtype)
