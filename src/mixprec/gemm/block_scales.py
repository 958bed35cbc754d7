"""Block scales as the units take them: which pairs of operands, where, and in which layout.

    1x32       e4m3 with e8m0 codes               capability 10.0 and above
    1x16       e2m1 with e4m3 codes               capability 10.0 and above
    1x128      e4m3 with float32, beside 1x128 or 128x128            capability 9.x alone

Codes of scales lie in tiles of 128 rows by 4 blocks, 512 bytes each, the tiles row by row; within
one the scale of (row, block) is at byte (row % 32) * 16 + (row // 32) * 4 + block, and what is
missing to whole tiles is filled up. float32 scales are column-major for 1x128; for 128x128 they are
row-major with rows filled up to multiples of 4.

Sources: PyTorch, ATen/native/cuda/ScaledBlas.cpp and ScaledBlasUtils.cpp (scaled_mm, version 2);
NVIDIA, cuBLAS library guide (narrow precision data types, scaling factors layouts).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad

from mixprec.formats import FORMATS, FloatFormat
from mixprec.gemm import native
from mixprec.hardware import generation
from mixprec.quant_spec import QuantSpec
from mixprec.quantization import Operand, QuantizedTensor
from mixprec.scaling import Block

_TILE_ROWS, _TILE_BLOCKS = 128, 4
_MULTIPLE_OF_BLOCKS = 4
_FIRST_WITH_CODES, _ONLY_WITH_FLOATS = (10, 0), 9


@dataclass(frozen=True, slots=True)
class BlockScaling:
    """One way in which torch takes the scales of an operand.

    Attributes:
        format: The elements' format.
        rules: The scale rules that make such scales.
        blocks: The blocks of operands that can be given so.
        torch_type: Name in torch's ``ScalingType``.
        code_type: Name of torch's type of the scales' codes; empty for float32.
        fill: Codes along the contraction are filled up to a multiple of this.
    """

    format: FloatFormat
    rules: tuple[str, ...]
    blocks: tuple[Block, ...]
    torch_type: str
    code_type: str
    fill: int

    @property
    def scaling_type(self) -> ScalingType:
        """torch's value of it."""
        return getattr(ScalingType, self.torch_type)

    def takes(self, spec: QuantSpec) -> bool:
        """Whether an operand quantised by a spec can be given so."""
        is_known = spec.block in self.blocks and spec.scale_rule in self.rules
        return is_known and spec.format == self.format


_E4M3, _E2M1 = FORMATS["e4m3"], FORMATS["e2m1"]
_E8M0_RULES = ("e8m0_rceil", "e8m0_floor", "e8m0_even", "e8m0_ceil")
_FLOAT_RULES = ("real", "pow2")
_BY_32 = BlockScaling(_E4M3, _E8M0_RULES, ((1, 32),), "BlockWise1x32", "float8_e8m0fnu", 32)
_BY_16 = BlockScaling(_E2M1, ("nvfp4",), ((1, 16), (16, 16)), "BlockWise1x16", "float8_e4m3fn", 32)
_BY_128 = BlockScaling(_E4M3, _FLOAT_RULES, ((1, 128),), "BlockWise1x128", "", 128)
_SQUARE = BlockScaling(_E4M3, _FLOAT_RULES, ((128, 128),), "BlockWise128x128", "", 128)
_SCALINGS = (_BY_32, _BY_16, _BY_128, _SQUARE)
_PAIRS = (
    (_BY_32, _BY_32),
    (_BY_16, _BY_16),
    (_BY_128, _BY_128),
    (_BY_128, _SQUARE),
    (_SQUARE, _BY_128),
)


def scaling_of(spec: QuantSpec) -> BlockScaling | None:
    """How torch takes the scales of an operand, or None where it does not."""
    return next((scaling for scaling in _SCALINGS if scaling.takes(spec)), None)


def are_in_blocks(a: Operand, b: Operand) -> bool:
    """Whether either operand has scales that cannot follow the sums."""
    return any(isinstance(x, QuantizedTensor) and not native.follows_sums(x) for x in (a, b))


def why_not_specs(a: QuantSpec, b: QuantSpec, capability: tuple[int, int]) -> str | None:
    """Why a GPU does not multiply operands quantised so, or None."""
    pair = scaling_of(a), scaling_of(b)
    for name, spec, scaling in zip("ab", (a, b), pair, strict=True):
        if scaling is None:
            return (
                f"{name}: got blocks of {spec.block} of {spec.format} scaled by "
                f"{spec.scale_rule}; torch has no product of them"
            )
    if pair not in _PAIRS:
        return f"a, b: got blocks of {a.block} and {b.block}; torch has no product of the two"
    unit = generation(capability)
    place = f"compute capability {capability[0]}.{capability[1]} ({unit.name})"
    if a.format == _E2M1 and not unit.multiplies(_E2M1):
        return f"device: {place} has no FP4 units; 10.0 has"
    if _BY_128 in pair:
        is_there = capability[0] == _ONLY_WITH_FLOATS
        return None if is_there else f"device: {place} has no blocks of 128; 9.0 alone has"
    if capability < _FIRST_WITH_CODES:
        return f"device: {place} has no blocks of {a.block[1]}; 10.0 has"
    return None


def elements(q: QuantizedTensor, *, fill_rows: bool) -> Tensor:
    """Codes in torch's type, row-major, filled up with zeros; 4-bit codes two a byte."""
    scaling = scaling_of(q.spec)
    assert scaling is not None
    per_byte = 8 // scaling.format.bits
    codes = q.packed().codes
    more_columns = -codes.shape[1] % (scaling.fill // per_byte)
    codes = pad(codes, (0, more_columns, 0, _missing_rows(q) if fill_rows else 0))
    dtype = torch.float4_e2m1fn_x2 if per_byte > 1 else torch.float8_e4m3fn
    return codes.contiguous().view(dtype)


def scales(q: QuantizedTensor, *, fill_rows: bool) -> Tensor:
    """The scales of an operand in the layout of its scaling, for as many rows as ``elements``."""
    scaling = scaling_of(q.spec)
    assert scaling is not None
    assert q.scale is not None
    scale = q.scale
    rows = q.codes.shape[0] + (_missing_rows(q) if fill_rows else 0)
    if scaling is _SQUARE:
        scale = pad(scale, (0, -scale.shape[1] % _MULTIPLE_OF_BLOCKS), value=1.0)
        # rows that were filled up belong to the last block, which takes up to 128
        return scale.contiguous().t()
    if q.spec.block[0] > 1:
        scale = scale.repeat_interleave(q.spec.block[0], 0)[: q.codes.shape[0]]
    scale = pad(scale, (0, 0, 0, rows - scale.shape[0]), value=1)
    if not scaling.code_type:
        return scale.t().contiguous().t()
    return tiled(scale).view(getattr(torch, scaling.code_type))


def tiled(codes: Tensor) -> Tensor:
    """Codes [rows, blocks] in tiles of 128 by 4, flat; filled up with 0."""
    codes = pad(codes, (0, -codes.shape[1] % _TILE_BLOCKS, 0, -codes.shape[0] % _TILE_ROWS))
    rows, blocks = codes.shape
    tiles = codes.reshape(rows // _TILE_ROWS, 4, 32, blocks // _TILE_BLOCKS, _TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).contiguous().flatten()


def swizzle(scaling: BlockScaling) -> SwizzleType:
    """torch's name of the layout of ``scales``."""
    return SwizzleType.SWIZZLE_32_4_4 if scaling.code_type else SwizzleType.NO_SWIZZLE


def _missing_rows(q: QuantizedTensor) -> int:
    return -q.codes.shape[0] % 16
