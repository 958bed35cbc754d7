"""The random Hadamard transform: it spreads an outlier over the elements beside it.

    t = H (d * x) / 4        for each 16 elements along the contraction, H the 16-point Hadamard
                             matrix, d fixed signs

H is orthogonal up to a factor and d is its own inverse, so a product is unchanged when both
operands are transformed along its contraction.

Source: NVIDIA Transformer Engine (the signs); Tseng et al., Training LLMs with MXFP4 (2025).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixprec import loops
from mixprec.noise import piece_starts
from mixprec.scaling import is_column_major, pieces

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def padded_length(length: int) -> int:
    """The contraction's length after the transform: a multiple of 16."""
    return -(-length // SIZE) * SIZE


def hadamard(x: Tensor) -> Tensor:
    """x with each 16 elements of its last axis transformed.

    Args:
        x: [rows, length], float16, bfloat16 or float32 (a float64 x is rounded to float32), any
            strides.

    Returns:
        [rows, length padded to a multiple of 16 with zeros], in x's type and memory layout. The
        padded places are data afterwards.

    Edge cases: NaN and inf make their 16 elements NaN or inf.

    Exactness: sums of the butterfly in float32, strides 1, 2, 4, 8 along the block, then times 1/4,
    rounded once to x's type.
    """
    x = _padded(x)
    if loops.serves(x):
        return loops.hadamard(x)
    signs = _signs(x.device).repeat(x.shape[-1] // SIZE)
    dtype = torch.float32 if x.dtype == torch.float64 else x.dtype
    axis = 0 if torch.compiler.is_compiling() else int(is_column_major(x))
    step = pieces(x.t() if axis else x, SIZE if axis else 1)
    if step is None:
        return _butterfly(x.float() * signs).to(dtype)
    out = torch.empty_like(x, dtype=dtype)
    for start in piece_starts(x, axis, step):
        length = min(step, x.shape[axis] - start)
        own = signs.narrow(0, start, length) if axis else signs
        part = x.narrow(axis, start, length).float() * own
        _butterfly(part, out.narrow(axis, start, length))
    return out


def inverse_hadamard(x: Tensor, length: int) -> Tensor:
    """What ``hadamard`` transformed, up to rounding: d * (H x) / 4, cut to ``length`` columns."""
    values = _butterfly(x.float()) * _signs(x.device).repeat(x.shape[-1] // SIZE)
    return values[..., :length].to(x.dtype)


def _padded(x: Tensor) -> Tensor:
    missing = padded_length(x.shape[-1]) - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _signs(device: torch.device) -> Tensor:
    return torch.tensor(SIGNS, dtype=torch.float32, device=device)


def _butterfly(x: Tensor, result: Tensor | None = None) -> Tensor:
    """The sums and differences; x is the caller's own, and holds them unless a place is given."""
    if torch.compiler.is_compiling():
        for stride in (1, 2, 4, 8):
            first, second = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
            x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        return x * 0.25
    spare = torch.empty_like(x)
    for stride in (1, 2, 4, 8):
        pairs, out = (y.unflatten(-1, (-1, 2, stride)) for y in (x, spare))
        torch.add(pairs[..., 0, :], pairs[..., 1, :], out=out[..., 0, :])
        torch.sub(pairs[..., 0, :], pairs[..., 1, :], out=out[..., 1, :])
        x, spare = spare, x
    return torch.mul(x, 0.25, out=x if result is None else result)
