"""Exact models of scales, quantised operands and products, one number at a time in fractions.

Of the package only the stored fields of formats and specs are read. Rows are the free axis, the
contraction is last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from block_oracles import (
    E8M0_RULES,
    kept_factors,
    scales_of,
    tensor_factor,
    to_float32,
    transform,
)
from oracles import assert_same, code_bits, decode_array, draw, round_fraction, unit
from torch import Tensor

from mixprec.formats import FloatFormat
from mixprec.gemm import GemmSpec
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor, QuantSpec
from mixprec.recipes import Recipe

HALF_ULP = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
}
HALF_SMALLEST = {
    torch.float64: 2.0**-150,
    torch.float32: 2.0**-150,
    torch.bfloat16: 2.0**-134,
    torch.float16: 2.0**-25,
}


@dataclass(frozen=True)
class Quantized:
    """The oracle's answer.

    values [rows, columns]; for each block [free, contraction blocks] what is kept, the factor that
    it stands for and amax; the amax of the tensor where the rule has one.
    """

    values: np.ndarray
    kept: np.ndarray
    scale: np.ndarray
    amax: np.ndarray
    tensor_amax: float | None


def spans(length: int, size: int) -> list[range]:
    """The index ranges of blocks along an axis; an empty axis that is one block has one."""
    if size == -1:
        return [range(length)]
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def round_scaled(
    number: float, encode: Fraction, spec: QuantSpec, index: int, noise: Noise | None
) -> float:
    """One element: the product in single precision, then one rounding to the format."""
    bits = draw(noise.seed, noise.step, noise.stream, index) if noise is not None else 0
    size = float(to_float32(Fraction(number) * encode))
    scaled = math.copysign(size, number) if size == 0 else size
    return round_fraction(scaled, spec.format, spec.rounding, draw=bits)


def as_matrix(x: Tensor) -> np.ndarray:
    """The numbers of an operand as float64, exact; a float64 operand rounded to float32 first."""
    wide = x.detach().float() if x.dtype == torch.float64 else x.detach()
    columns = x.shape[-1] if x.ndim else 1
    rows = x.shape[:-1].numel() if x.ndim else 1
    return wide.double().numpy().reshape(rows, columns)


def amax_of(numbers: np.ndarray) -> float:
    """The largest magnitude of a block: NaN beats inf, an empty block has 0."""
    sizes = [abs(float(number)) for number in numbers.flat]
    return math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)


def quantize_exactly(x: Tensor, spec: QuantSpec, noise: Noise | None = None) -> Quantized:
    """The definition of a dynamic scale, block by block."""
    matrix = as_matrix(x)
    if spec.hadamard:
        matrix = transform(matrix, x.dtype)
    rows, columns = (
        spans(length, size) for length, size in zip(matrix.shape, spec.block, strict=True)
    )
    blocks = [np.ix_(free, contraction) for free in rows for contraction in columns]
    amax = [amax_of(matrix[block]) for block in blocks]
    scales, tensor_amax = scales_of(amax, spec)
    missing = math.nan if spec.format.specials != "none" else 0.0
    values = np.zeros(matrix.shape)
    for block, scale in zip(blocks, scales, strict=True):
        for r in block[0].flat:
            for c in block[1].flat:
                index, number = int(r) * matrix.shape[1] + int(c), float(matrix[r, c])
                values[r, c] = (
                    missing
                    if scale.encode is None
                    else round_scaled(number, scale.encode, spec, index, noise)
                )
    shape = (len(rows), len(columns))
    return Quantized(
        values=values,
        kept=np.array([scale.kept for scale in scales]).reshape(shape),
        scale=np.array([scale.factor for scale in scales]).reshape(shape),
        amax=np.array(amax).reshape(shape),
        tensor_amax=tensor_amax,
    )


def unpacked_codes(q: QuantizedTensor) -> np.ndarray:
    """The codes of every element as a matrix; of packed ones the padding has to be 0."""
    codes = q.codes.numpy()
    if code_bits(q.spec.format) != 4:
        return codes.reshape(q.matrix_shape)
    rows, columns = q.matrix_shape
    nibbles = np.stack((codes & 15, codes >> 4), axis=-1).reshape(rows, columns + columns % 2)
    assert (nibbles[:, columns:] == 0).all()
    return nibbles[:, :columns]


def decoded(q: QuantizedTensor) -> np.ndarray:
    """The values that the codes stand for, by the oracle's table."""
    return decode_array(np.ascontiguousarray(unpacked_codes(q)), q.spec.format)


def assert_quantized(
    q: QuantizedTensor, x: Tensor, spec: QuantSpec, noise: Noise | None = None
) -> None:
    """Values, scales and amaxes equal the oracle's to the bit, and so does what decodes."""
    want = quantize_exactly(x, spec, noise)
    assert_same(decoded(q), want.values)
    assert_same(q.values.reshape(want.values.shape).numpy(), want.values)
    has_columns = x.ndim > 0 or spec.hadamard
    assert q.shape == ((*x.shape[:-1], want.values.shape[1]) if has_columns else ())
    assert q.spec == spec
    assert_scales(q, want)
    with np.errstate(over="ignore", invalid="ignore"):
        back = want.values.astype(np.float32) * repeated(want.scale, spec, want.values.shape)
        if want.tensor_amax is not None:
            back = back * np.float32(tensor_factor(want.tensor_amax))
    assert_same(q.dequantize().reshape(want.values.shape).numpy(), back)


def assert_scales(q: QuantizedTensor, want: Quantized) -> None:
    """What is kept of each block, the factors that it gives, and the amaxes."""
    assert q.scale is not None
    assert q.amax is not None
    has_codes = q.spec.scale_rule in E8M0_RULES or want.tensor_amax is not None
    assert q.scale.dtype == (torch.uint8 if has_codes else torch.float32)
    assert q.amax.dtype == q.block_scale.dtype == torch.float32
    assert_same(q.scale.numpy(), want.kept)
    assert_same(q.block_scale.numpy(), want.scale)
    assert_same(q.amax.numpy(), want.amax)
    assert (q.tensor_amax is None) == (q.tensor_scale is None) == (want.tensor_amax is None)
    if q.tensor_amax is not None and q.tensor_scale is not None:
        assert q.tensor_amax.shape == q.tensor_scale.shape == (1, 1)
        assert q.tensor_amax.item() == want.tensor_amax
        assert q.tensor_scale.item() == tensor_factor(q.tensor_amax.item())


def repeated(per_block: np.ndarray, spec: QuantSpec, shape: tuple[int, ...]) -> np.ndarray:
    """A float32 for each element from one for each block."""
    sizes = [length if size == -1 else size for size, length in zip(spec.block, shape, strict=True)]
    per_row = np.repeat(per_block, max(sizes[0], 1), 0)[: shape[0]]
    return np.repeat(per_row, max(sizes[1], 1), 1)[:, : shape[1]].astype(np.float32)


def exact_operand(x: QuantizedTensor | Tensor) -> Tensor:
    """The numbers [rows, columns] that a product multiplies, scales included, exact in float64."""
    if isinstance(x, Tensor):
        return x.detach().double().reshape(x.shape[:-1].numel(), x.shape[-1])
    values = torch.from_numpy(decoded(x))
    if x.scale is None:
        return values
    factors = repeated(kept_factors(x), x.spec, tuple(values.shape)).astype(np.float64)
    whole = 1.0 if x.tensor_amax is None else tensor_factor(x.tensor_amax.item())
    return values * torch.from_numpy(factors) * whole


def assert_product(
    result: Tensor,
    a: QuantizedTensor | Tensor,
    b: QuantizedTensor | Tensor,
    bias: Tensor | None = None,
    out: QuantSpec | None = None,
) -> None:
    """|result - exact| <= (K + 3) * 2^-24 * sum|a||b|, plus half an ulp of the result's type.

    A bias adds one rounding of the sum in single precision, and so does a format that the result is
    rounded to before it is held in its type; every element then lies on that format's grid. NaN has
    to stand where it stands in exact arithmetic, and nowhere else.
    """
    a_MK, b_NK = exact_operand(a), exact_operand(b)
    exact, magnitude = a_MK @ b_NK.t(), a_MK.abs() @ b_NK.abs().t()
    allowed = (a_MK.shape[1] + 3) * 2.0**-24 * magnitude
    if bias is not None:
        exact = exact + bias.double()
        allowed = allowed + 2.0**-24 * (exact.abs() + allowed)
    if out is not None:
        allowed = allowed + 2.0 ** (-1 - out.format.mantissa) * (exact.abs() + allowed)
        allowed = allowed + float(unit(out.format)) / 2
        assert_on_grid(result, out.format)
    allowed = allowed + HALF_ULP[result.dtype] * (exact.abs() + allowed)
    allowed = allowed + HALF_SMALLEST[result.dtype]
    got = result.detach().double().reshape(exact.shape)
    assert torch.equal(got.isnan(), exact.isnan())
    worst = ((got - exact).abs() - allowed).nan_to_num(nan=-1.0)
    assert not worst.numel() or worst.max() <= 0, f"{worst.max():.3g} beyond the bound"


def assert_on_grid(x: Tensor, fmt: FloatFormat) -> None:
    """Every finite element is a number of the format, whatever type holds it."""
    finite = x.detach().double().flatten()
    finite = finite[finite.isfinite()].numpy()
    smallest_normal = float(unit(fmt)) * 2.0**fmt.mantissa
    place = np.frexp(np.maximum(np.abs(finite), smallest_normal))[1] - 1
    steps = np.ldexp(finite, fmt.mantissa - place)
    assert (steps == np.round(steps)).all(), f"{finite[steps != np.round(steps)][:5]} are not {fmt}"


def with_distinct_products(recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Of recipes whose products are the same, the one with FP32 parameters, or the first."""
    found: dict[tuple[GemmSpec, ...], str] = {}
    for name in sorted(recipes, key=lambda name: recipes[name].parameters != "fp32"):
        recipe = recipes[name]
        found.setdefault((recipe.output, recipe.grad_input, recipe.grad_weight), name)
    return {name: recipe for name, recipe in recipes.items() if name in found.values()}


def specs_of(fmt: FloatFormat) -> Iterator[QuantSpec]:
    """Every kind of block with every rule, and a floor under amax."""
    for block in ((-1, -1), (1, -1), (-1, 1), (1, 4), (1, 32), (16, 16), (3, -1), (-1, 5)):
        for rule in ("real", "pow2"):
            yield QuantSpec(format=fmt, block=block, scale_rule=rule)
    for rule in E8M0_RULES:
        yield QuantSpec(format=fmt, block=(1, 32), scale_rule=rule)
    yield QuantSpec(format=fmt, block=(16, 16), scale_rule="e8m0_rceil")
    yield QuantSpec(format=fmt, block=(1, -1), min_amax=1e-12)
    yield QuantSpec(format=fmt, block=(1, -1), scale_rule="pow2", min_amax=0.5)
