"""Figures of the operands and products of quantised layers: tensors in, numbers out.

    range_use  = max over blocks of amax * encode / format max
    saturation = |{x * encode beyond what rounds to the format's largest number}| / elements
    underflow  = |{x != 0, x quantised == 0}| / elements
    sqnr_db    = 10 log10(sum x^2 / sum (x quantised - x)^2)

A tally holds counts and sums, so that those of several calls, or of the groups of a convolution,
add up to one; a row of statistics holds what is read.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from mixprec.gemm.api import GemmSpec, multiply
from mixprec.measure import as_float64, decibels, num_saturated, num_underflowed, squares
from mixprec.quantization import as_matrix
from mixprec.quantized_tensor import QuantizedTensor
from mixprec.scaling import block_amax, times_blocks

_WHOLE = (-1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandStatistics:
    """One quantised operand of one product, over all of a step's calls of its layer.

    Attributes:
        layer: The layer's name in the model.
        product: ``output``, ``grad_input`` or ``grad_weight``.
        operand: ``a`` or ``b``, as in the recipe.
        name: Of the layer's products, in a layer with several ("q", "weight_hh_l0"); else "".
        format: The elements' format.
        amax: Largest magnitude of what is quantised (the transformed operand, where there is a
            transform).
        range_use: amax * encode / format max, the largest over the blocks: below 1 a part of the
            format's range lies idle, above 1 elements saturate.
        saturation: Share of the elements that the format's largest number stands in for.
        underflow: Share of the elements that were not zero and became zero.
        sqnr_db: Signal to quantisation noise, decibels; inf where nothing changed, NaN where an
            element or its square is not finite.
        scale: What values are multiplied by on the way back; of block scales the largest, 1
            without a scale.
        elements: Number of elements that the shares are of.
    """

    layer: str
    product: str
    operand: str
    name: str
    format: str
    amax: float
    range_use: float
    saturation: float
    underflow: float
    sqnr_db: float
    scale: float
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductStatistics:
    """One product: its error against the product of the unquantised operands, in float64.

    Attributes:
        layer, product, name: As in ``OperandStatistics``.
        operand: "", which tells it from the rows of its operands.
        sqnr_db: Of a sample of its elements, as the recipe multiplies and rounds.
    """

    layer: str
    product: str
    operand: str = ""
    name: str
    sqnr_db: float

    def __str__(self) -> str:
        place = " ".join(filter(None, (self.layer, self.name, self.product)))
        return f"SQNR {self.sqnr_db:.1f} dB: {place}"


Statistics = OperandStatistics | ProductStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatistics:
    """The rows of one sampled step; ``step`` counts from 1."""

    step: int
    rows: tuple[Statistics, ...]

    def to_record(self) -> dict[str, Any]:
        """As a line of ``metrics.jsonl`` has it, but for floats that are not finite."""
        return {"step": self.step, "statistics": [asdict(row) for row in self.rows]}

    @property
    def worst(self) -> ProductStatistics | None:
        """The product of the lowest SQNR; None without a known one."""
        products = [row for row in self.rows if isinstance(row, ProductStatistics)]
        known = [row for row in products if not math.isnan(row.sqnr_db)]
        return min(known, key=lambda row: row.sqnr_db, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTally:
    """sum x^2 and sum (x quantised - x)^2, in float64."""

    signal: float
    noise: float

    def __add__(self, other: ProductTally) -> ProductTally:
        return ProductTally(signal=self.signal + other.signal, noise=self.noise + other.noise)

    @property
    def sqnr_db(self) -> float:
        return decibels(self.signal, self.noise)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandTally:
    """Counts and sums of an operand's elements, and its largest figures."""

    amax: float
    range_use: float
    scale: float
    saturated: int
    underflowed: int
    elements: int
    error: ProductTally

    def __add__(self, other: OperandTally) -> OperandTally:
        return OperandTally(
            amax=_larger(self.amax, other.amax),
            range_use=_larger(self.range_use, other.range_use),
            scale=_larger(self.scale, other.scale),
            saturated=self.saturated + other.saturated,
            underflowed=self.underflowed + other.underflowed,
            elements=self.elements + other.elements,
            error=self.error + other.error,
        )

    def statistics(
        self, *, layer: str, product: str, operand: str, name: str, format: str
    ) -> OperandStatistics:
        """The row that these counts make, for the operand of this place."""
        count = max(self.elements, 1)
        return OperandStatistics(
            layer=layer,
            product=product,
            operand=operand,
            name=name,
            format=format,
            amax=self.amax,
            range_use=self.range_use,
            saturation=self.saturated / count,
            underflow=self.underflowed / count,
            sqnr_db=self.error.sqnr_db,
            scale=self.scale,
            elements=self.elements,
        )


def tally_operand(x: Tensor, q: QuantizedTensor, decoded: Tensor | None = None) -> OperandTally:
    """What quantising x to q did to it.

    Args:
        x: [free, contraction], what was quantised; float16, bfloat16, float32 or float64.
        q: ``quantize(x, spec, ...)``, with what that knows of it (amax and encode).
        decoded: ``q.dequantize()``, where it is at hand.

    Edge cases: an empty operand has amax 0 and no error. A block that is NaN throughout, because
    an element is not finite, neither saturates nor underflows.

    Exactness: counts are of all elements; sums are float64. With ``spec.hadamard`` the transformed
    x is the reference, as in ``quantize_error``.
    """
    fmt = q.spec.format
    matrix = as_matrix(x, q.spec)
    amax = block_amax(matrix, _WHOLE).float() if q.amax is None else q.amax
    blocks = amax if q.encode is None else amax * q.encode
    saturated = 0
    # rounding keeps order: no element of a block goes beyond its amax
    if not bool(blocks.isfinite().all()) or num_saturated(blocks, fmt):
        scaled = matrix if q.encode is None else times_blocks(matrix, q.encode, q.spec.block)
        saturated = num_saturated(scaled, fmt)
    reference = matrix if q.spec.hadamard else x
    decoded = q.dequantize() if decoded is None else decoded
    return OperandTally(
        amax=_largest(amax),
        range_use=_largest(blocks) / fmt.max,
        scale=_scale(q),
        saturated=saturated,
        underflowed=num_underflowed(reference, decoded),
        elements=reference.numel(),
        error=tally_product(reference, decoded),
    )


def tally_product(reference: Tensor, approx: Tensor) -> ProductTally:
    """The error of a result, or of a part of it, against the exact one."""
    signal, noise = squares(reference, approx)
    return ProductTally(signal=signal, noise=noise)


def tally_gemm(
    gemm: GemmSpec, exact: tuple[Tensor, Tensor], decoded: tuple[Tensor, Tensor], impl: str
) -> ProductTally:
    """The error of a product of quantised operands, before it is held in the result's type.

    Args:
        gemm: How it is added up and rounded.
        exact: a [M, K] and b [N, K] as they were; their product is float64.
        decoded: The same rows quantised and decoded, multiplied in float32 or wider.
        impl: As in ``quantized_matmul``.
    """
    dtype = torch.promote_types(decoded[0].dtype, decoded[1].dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    approx = multiply(
        decoded[0].to(dtype),
        decoded[1].to(dtype),
        bias=None,
        out_dtype=dtype,
        impl=impl,
        out=gemm.out,
        accumulate=gemm.accumulate,
    )
    return tally_product(as_float64(exact[0]) @ as_float64(exact[1]).t(), approx)


def evenly_apart(x: Tensor, most: int) -> Tensor:
    """Indices of at most so many rows of x, evenly apart."""
    count = min(len(x), most)
    return torch.arange(count, device=x.device) * len(x) // max(count, 1)


def _scale(q: QuantizedTensor) -> float:
    if q.scale is None:
        return 1.0
    whole = 1.0 if q.tensor_scale is None else float(q.tensor_scale)
    return _largest(q.block_scale) * whole


def _largest(per_block: Tensor) -> float:
    return float(per_block.amax()) if per_block.numel() else 0.0


def _larger(a: float, b: float) -> float:
    """The larger number; NaN if one is."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
