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
from oracles import assert_same, code_bits, decode_array, draw, round_fraction, top_code, unit
from oracles import code_value as value_of_code
from torch import Tensor

from mixprec.formats import FloatFormat
from mixprec.gemm import GemmSpec
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor, QuantSpec
from mixprec.recipes import Recipe

FLT_MAX = Fraction(2**24 - 1) * Fraction(2) ** 104
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


def floor_log2(x: Fraction) -> int:
    """The exponent of a positive number."""
    guess = x.numerator.bit_length() - x.denominator.bit_length()
    return guess if Fraction(2) ** guess <= x else guess - 1


def to_float32(x: Fraction) -> Fraction:
    """Rounded to an IEEE single, ties to even; unbounded above."""
    if x == 0:
        return x
    step = Fraction(2) ** (max(floor_log2(abs(x)), -126) - 23)
    return round(x / step) * step


def encode_factor(rule: str, amax: Fraction, fmt: FloatFormat) -> Fraction:
    """What values are multiplied by, for a positive finite amax."""
    largest = Fraction(value_of_code(fmt, top_code(fmt)))
    encode = min(to_float32(largest / amax), FLT_MAX)
    return {"real": encode, "pow2": Fraction(2) ** floor_log2(encode)}[rule]


def block_scale(numbers: list[float], spec: QuantSpec) -> tuple[Fraction | None, float, float]:
    """Encode (None: no finite one), scale and amax of the numbers of one block."""
    if not all(map(math.isfinite, numbers)):
        has_nan = any(map(math.isnan, numbers))
        return None, math.nan, math.nan if has_nan else math.inf
    amax = max(map(abs, numbers), default=0.0)
    floored = max(Fraction(amax), Fraction(spec.min_amax))
    encode = encode_factor(spec.scale_rule, floored, spec.format) if floored else Fraction(1)
    return encode, float(to_float32(1 / encode)), amax


@dataclass(frozen=True)
class Quantized:
    """The oracle's answer: values [rows, columns], scale and amax [free, contraction blocks]."""

    values: np.ndarray
    scale: np.ndarray
    amax: np.ndarray


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


def quantize_exactly(x: Tensor, spec: QuantSpec, noise: Noise | None = None) -> Quantized:
    """The definition of a dynamic scale, block by block."""
    matrix = as_matrix(x)
    rows, columns = (
        spans(length, size) for length, size in zip(matrix.shape, spec.block, strict=True)
    )
    values = np.zeros(matrix.shape)
    scale, amax = np.zeros((len(rows), len(columns))), np.zeros((len(rows), len(columns)))
    missing = math.nan if spec.format.specials != "none" else 0.0
    for i, free in enumerate(rows):
        for j, contraction in enumerate(columns):
            places = [(r, c) for r in free for c in contraction]
            numbers = [float(matrix[place]) for place in places]
            encode, scale[i, j], amax[i, j] = block_scale(numbers, spec)
            for (r, c), number in zip(places, numbers, strict=True):
                index = r * matrix.shape[1] + c
                values[r, c] = (
                    missing if encode is None else round_scaled(number, encode, spec, index, noise)
                )
    return Quantized(values, scale, amax)


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
    assert_same(decoded(q), want.values, as_matrix(x))
    assert_same(q.values.reshape(want.values.shape).numpy(), want.values)
    assert q.shape == x.shape
    assert q.spec == spec
    assert q.scale is not None
    assert q.amax is not None
    assert q.scale.dtype == q.amax.dtype == torch.float32
    assert_same(q.scale.numpy(), want.scale)
    assert_same(q.amax.numpy(), want.amax)
    with np.errstate(over="ignore", invalid="ignore"):
        back = want.values.astype(np.float32) * repeated(want.scale, spec, want.values.shape)
    assert_same(q.dequantize().reshape(want.values.shape).numpy(), back)


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
    return values * torch.from_numpy(
        repeated(x.scale.numpy(), x.spec, tuple(values.shape)).astype(np.float64)
    )


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
    yield QuantSpec(format=fmt, block=(1, -1), min_amax=1e-12)
    yield QuantSpec(format=fmt, block=(1, -1), scale_rule="pow2", min_amax=0.5)
