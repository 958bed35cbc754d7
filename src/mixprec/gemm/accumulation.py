"""How products are added up: in FP32, as matrix units add that keep fewer bits, or exactly.

    hopper:  acc' = cut(acc) + cut(p_1) + ... + cut(p_32)
             cut(t) = t toward zero to a multiple of 2^(e - 13), e the exponent of the largest

``hopper_promoted`` adds acc to an FP32 sum after every 128 elements of the contraction and clears
it. Both are models of Hopper's FP8 units after published measurements, not a vendor's statement.
``exact`` is of two operands in high precision: a product in float64 made of exact ones of small
integers (``fp64.matmul``), no element of which is further off than a native DGEMM's may be.

Exactness: the models bit for bit, for operands of at most 24 digits each. Products and sums are
computed in float64, where 33 multiples of 2^(e - 13) below 2^(e + 1) add exactly in any order.

Sources: DeepSeek-V3 report (arXiv 2412.19437, section 3.3.2); Khattak and Mikaitis, Accurate Models
of NVIDIA Tensor Cores (arXiv 2512.07004).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, cast, get_args

import torch
from torch import Tensor

Accumulate = Literal["fp32", "hopper", "hopper_promoted", "exact"]
FP32: Accumulate = "fp32"
EXACT: Accumulate = "exact"

_INSTRUCTION = 32
_KEPT_BITS = 13
_PROMOTION = 128
# the products of one tile, 512 KiB, stay in a processor's cache
_TILE_ELEMENTS = 1 << 16
_EXPONENT_FIELD = 0x7FF << 52
# exponents of numbers that are not 0, inf or NaN: products of FP32 numbers, and sums of them
_SMALLEST, _LARGEST = 2.0**-400, 2.0**400


def _hopper(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    return _tiled(a_MK, b_NK, promotion=max(a_MK.shape[1], 1))


def _hopper_promoted(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    return _tiled(a_MK, b_NK, promotion=_PROMOTION)


MODELS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"hopper": _hopper, "hopper_promoted": _hopper_promoted}
)
"""Sums a_MK @ b_NK.T by the name of their model: float32 [M, N]; NaN and inf as in FP32."""


def check_accumulate(name: str) -> Accumulate:
    """The name itself, if it is ``fp32``, ``exact`` or one of ``MODELS``."""
    for known in get_args(Accumulate):
        if name == known:
            return cast(Accumulate, known)
    known = ", ".join(get_args(Accumulate))
    raise ValueError(f"accumulate: got {name!r}; must be one of {known}")


def _tiled(a_MK: Tensor, b_NK: Tensor, promotion: int) -> Tensor:
    """Tile by tile of the result, so that the products of one instruction stay in the cache."""
    if torch.compiler.is_compiling():
        # a graph would hold a copy of the loop's body for each of its turns
        torch._dynamo.graph_break(msg="a model of sums runs tile by tile")
    a_KM, b_KN = (x.t().to(torch.float64).contiguous() for x in (a_MK, b_NK))
    (rows, _), columns = a_MK.shape, b_NK.shape[0]
    out = torch.zeros(rows, columns, dtype=torch.float32, device=a_MK.device)
    width = min(columns, _TILE_ELEMENTS // _INSTRUCTION)
    height = max(1, _TILE_ELEMENTS // (_INSTRUCTION * max(width, 1)))
    for row in range(0, rows, height):
        for column in range(0, columns, max(width, 1)):
            tile = slice(row, row + height), slice(column, column + width)
            _add_up(out[tile], a_KM[:, tile[0]], b_KN[:, tile[1]], promotion)
    return out


def _add_up(out: Tensor, a_KM: Tensor, b_KN: Tensor, promotion: int) -> None:
    """One tile, into its place: instruction by instruction, promotion by promotion."""
    length = a_KM.shape[0]
    for start in range(0, length, promotion):
        end = min(start + promotion, length)
        acc = torch.zeros_like(out, dtype=torch.float64)
        for first in range(start, end, _INSTRUCTION):
            part = slice(first, min(first + _INSTRUCTION, end))
            acc = _instruction(acc, a_KM[part, :, None] * b_KN[part, None, :])
        out += acc.to(torch.float32)


def _instruction(acc: Tensor, products: Tensor) -> Tensor:
    """acc and the products of one instruction, [at most 32, M, N], cut and added."""
    largest = torch.maximum(products.amax(0), products.amin(0).neg_())
    largest = torch.maximum(largest, acc.abs()).clamp_(_SMALLEST, _LARGEST)
    # a number without its mantissa is 2^e; NaN becomes inf, and everything it is added to is NaN
    power = (largest.view(torch.int64) & _EXPONENT_FIELD).view(torch.float64)
    unit = power * 2.0**-_KEPT_BITS
    per_unit = unit.reciprocal()
    total = products.mul_(per_unit).trunc_().sum(0)
    return total.add_(acc.mul_(per_unit).trunc_()).mul_(unit)
