"""What torch's CUDA product of block-scaled operands checks, in its order, and what it computes.

The rules are those of torch.nn.functional.scaled_mm, read from ATen/native/cuda/ScaledBlas.cpp and
ScaledBlasUtils.cpp. Scales are read from memory by the layouts' formulas, element by element.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

FP4, FP8 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BY_16, BY_32 = ScalingType.BlockWise1x16, ScalingType.BlockWise1x32
BY_128, SQUARE = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
TILED = {BY_16: (FP4, torch.float8_e4m3fn, 16), BY_32: (FP8, torch.float8_e8m0fnu, 32)}
FLOATS = ((BY_128, BY_128), (BY_128, SQUARE), (SQUARE, BY_128))


def check(holds: bool, message: str, error: type[Exception] = ValueError) -> None:
    if not holds:
        raise error(message)


def up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def check_product(
    capability: tuple[int, int],
    a: Tensor,
    b: Tensor,
    scales: tuple[Tensor, Tensor],
    types: tuple[ScalingType, ScalingType],
    swizzles: tuple[SwizzleType | None, SwizzleType | None],
) -> None:
    """Raise as CUDA does for what it refuses; b is [N, K], transposed back."""
    per_byte = 2 if a.dtype == FP4 else 1
    rows, columns, length = a.shape[0], b.shape[0], a.shape[1] * per_byte
    check(capability >= (8, 9), "torch._scaled_mm is only supported on", NotImplementedError)
    check(length % 16 == 0, "Expected trailing dimension of mat1 to be divisible by 16")
    check(columns % 16 == 0, "mat2 shape must be divisible by 16")
    if types[0] in TILED and types[0] == types[1]:
        dtype, scale_dtype, size = TILED[types[0]]
        check(a.dtype == b.dtype == dtype, "Invalid scaling configuration")
        check(all(scale.dtype == scale_dtype for scale in scales), "Invalid scaling configuration")
        for scale, outer in zip(scales, (rows, columns), strict=True):
            count = up(outer, 128) * up(-(-length // size), 4)
            check(scale.numel() == count, f"scale should have {count} elements")
            check(scale.is_contiguous(), "both scales should be contiguous")
        check(swizzles == (SwizzleType.SWIZZLE_32_4_4,) * 2, "must be swizzled to SWIZZLE_32_4_4")
        check(capability >= (10, 0), "CUBLAS_STATUS_NOT_SUPPORTED", RuntimeError)
    else:
        check(types in FLOATS and a.dtype == b.dtype == FP8, "Invalid scaling configuration")
        check(capability[0] == 9, "scaling only supported in CUDA for SM90", NotImplementedError)
        for scale, outer, kind in zip(scales, (rows, columns), types, strict=True):
            blocks = -(-length // 128)
            shape = (outer, blocks) if kind == BY_128 else (up(blocks, 4), -(-outer // 128))
            check(scale.dtype == torch.float32, "scale must have Float elements")
            check(tuple(scale.shape) == shape, f"scale must have shape {shape}")
            strides = (shape[0], 1) if scale.shape[1] == 1 else (shape[0],)
            check(scale.stride(0) == 1 and scale.stride(1) in strides, "scale strides must be")
    for x in (a, b):
        is_row_major = x.stride() == (x.shape[1], 1)
        is_aligned = x.data_ptr() % 16 == 0 and x.shape[1] % 16 == 0
        check(is_row_major and is_aligned, "CUBLAS_STATUS_NOT_SUPPORTED", RuntimeError)


def decoded(x: Tensor, scale: Tensor, kind: ScalingType) -> Tensor:
    """[rows, K] in float64: each value times the scale that CUDA finds for it."""
    if x.dtype == FP4:
        table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)]).double()
        codes = x.view(torch.uint8).long()
        values = torch.stack((table[codes & 15], table[codes >> 4]), -1).flatten(-2)
    else:
        values = x.double()
    rows, columns = torch.meshgrid(*map(torch.arange, values.shape), indexing="ij")
    if kind == BY_128:
        return values * scale.double()[rows, columns // 128]
    if kind == SQUARE:
        return values * scale.double()[columns // 128, rows // 128]
    size = TILED[kind][2]
    block = columns // size
    tiles_in_a_row = up(-(-values.shape[1] // size), 4) // 4
    tile = (rows // 128) * tiles_in_a_row + block // 4
    byte = tile * 512 + (rows % 32) * 16 + (rows % 128 // 32) * 4 + block % 4
    return values * scale.flatten().float().double()[byte]
