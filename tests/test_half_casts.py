"""Rounding to 16 bits without a scale, overflow to infinity: every code, and what lies between.

What is right is known by construction: a code stays, the middle of two becomes the even one, and
what lies next to the middle goes to the nearer one. The array model has to agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import assert_same, decode_array, round_array, round_fraction, top_code
from torch import Tensor

from mixprec import encode, round_to_format
from mixprec.formats import FORMATS, FloatFormat
from mixprec.quantization import QuantSpec, quantize

BF16, FP16 = FORMATS["bf16"], FORMATS["fp16"]
# known by its values, not by its name
OWN = FloatFormat(exponent=5, mantissa=10, specials="ieee", name="mine")
CASES = [(fmt, dtype) for fmt in (BF16, FP16, OWN) for dtype in (np.float32, np.float64)]
SMALLEST_NORMAL = 2.0**-126


def spec_of(fmt: FloatFormat) -> QuantSpec:
    return QuantSpec(format=fmt, scale_rule="none", saturate=False)


def values(fmt: FloatFormat) -> np.ndarray:
    """All non-negative finite numbers of the format, and the one that would follow."""
    finite = decode_array(np.arange(top_code(fmt) + 1, dtype=np.uint16), fmt)
    return np.append(finite, 2 * finite[-1] - finite[-2])


def between(fmt: FloatFormat, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and the codes that they become, without signs: numbers, middles, their neighbours."""
    numbers = values(fmt)
    codes = np.arange(len(numbers) - 1)
    middles = ((numbers[:-1] + numbers[1:]) / 2).astype(dtype)
    assert (middles.astype(np.float64) * 2 == numbers[:-1] + numbers[1:]).all()
    top = dtype(np.inf)
    inputs = (
        numbers[:-1].astype(dtype),
        np.nextafter(middles, dtype(0)),
        middles,
        np.nextafter(middles, top),
    )
    return np.concatenate(inputs), np.concatenate((codes, codes, codes + codes % 2, codes + 1))


def signed(inputs: np.ndarray, codes: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Both signs of inputs, and their codes as bit patterns."""
    both = np.concatenate((inputs, -inputs))
    patterns = np.concatenate((codes, codes | 1 << 15)).astype(np.uint16)
    return torch.from_numpy(both), patterns


def assert_rounds(x: Tensor, patterns: np.ndarray, fmt: FloatFormat) -> None:
    """Every way to the format gives these bit patterns, and the numbers that they stand for."""
    want = decode_array(patterns, fmt)
    q = quantize(x, spec_of(fmt))
    assert q.scale is None
    assert (q.codes.view(torch.int16).numpy().view(np.uint16) == patterns).all()
    assert_same(q.values.double().numpy(), want, x.double().numpy())
    assert_same(q.dequantize().double().numpy(), want)
    codes = encode(x, fmt, saturate=False)
    assert (codes.view(torch.int16).numpy().view(np.uint16) == patterns).all()
    rounded = round_to_format(x, fmt, saturate=False)
    assert rounded.dtype == x.dtype
    assert_same(rounded.double().numpy(), want, x.double().numpy())


@contextmanager
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(("fmt", "dtype"), CASES, ids=str)
def test_every_code_and_what_lies_between(fmt: FloatFormat, dtype: type) -> None:
    inputs, codes = between(fmt, dtype)
    x, patterns = signed(inputs, codes)
    assert_rounds(x, patterns, fmt)
    assert_same(decode_array(patterns, fmt), round_array(x.numpy(), fmt, "nearest_even", False))


@pytest.mark.parametrize(("fmt", "dtype"), CASES, ids=str)
def test_random_numbers_equal_fractions(fmt: FloatFormat, dtype: type) -> None:
    scale = 2.0 ** torch.randint(-150, 129, (2000,)).double()
    near = 2.0 ** torch.randint(-26, 18, (2000,)).double()
    x = torch.randn(2000, dtype=torch.float64)
    numbers = torch.cat((x * scale, x * near)).to(torch.from_numpy(np.zeros(0, dtype)).dtype)
    want = [round_fraction(number, fmt, "nearest_even", False) for number in numbers.tolist()]
    got = round_to_format(numbers, fmt, saturate=False)
    assert_same(got.double().numpy(), np.array(want), numbers.double().numpy())
    assert_same(quantize(numbers, spec_of(fmt)).values.double().numpy(), np.array(want))


@pytest.mark.parametrize(("fmt", "dtype"), CASES, ids=str)
def test_beyond_the_range_and_not_finite(fmt: FloatFormat, dtype: type) -> None:
    largest = values(fmt)[-2]
    last_kept = np.nextafter(dtype(values(fmt)[-2:].mean()), dtype(0))
    far = float(np.finfo(dtype).max)
    x = torch.from_numpy(np.array([last_kept, far, math.inf, math.nan, -far, -math.inf], dtype))
    want = [largest, math.inf, math.inf, math.nan, -math.inf, -math.inf]
    assert_same(round_to_format(x, fmt, saturate=False).double().numpy(), np.array(want))
    assert_same(quantize(x, spec_of(fmt)).values.double().numpy(), np.array(want))
    kept = [largest, largest, math.inf, math.nan, -largest, -math.inf]
    saturating = replace(spec_of(fmt), saturate=True)
    assert_same(quantize(x, saturating).values.double().numpy(), np.array(kept))


@pytest.mark.parametrize("fmt", [BF16, FP16, OWN], ids=str)
def test_float64_is_rounded_once(fmt: FloatFormat) -> None:
    # in float32 each of these would be the middle first, and then go to the even number below
    step = 2.0**-fmt.mantissa
    x = torch.tensor([1 + step / 2 + 2.0**-40, -1 - step / 2 - 2.0**-40], dtype=torch.float64)
    assert (x.float().double() == torch.tensor([1 + step / 2, -1 - step / 2])).all()
    for got in (round_to_format(x, fmt, saturate=False), quantize(x, spec_of(fmt)).values):
        assert got.tolist() == [1 + step, -1 - step]


@pytest.mark.parametrize("fmt", [BF16, FP16, OWN], ids=str)
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_source(source: torch.dtype, fmt: FloatFormat) -> None:
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(source)
    want = round_array(x.double().numpy(), fmt, "nearest_even", False)
    assert_same(quantize(x, spec_of(fmt)).values.double().numpy(), want, x.double().numpy())


@pytest.mark.parametrize(("fmt", "dtype"), CASES, ids=str)
def test_flush_to_zero_changes_nothing_where_the_source_is_normal(
    fmt: FloatFormat, dtype: type
) -> None:
    inputs, codes = between(fmt, dtype)
    if dtype is np.float32:
        is_kept = (inputs == 0) | (inputs >= SMALLEST_NORMAL)
        inputs, codes = inputs[is_kept], codes[is_kept]
    x, patterns = signed(inputs, codes)
    want = decode_array(patterns, fmt)
    with flushing():
        q = quantize(x, spec_of(fmt))
        rounded = round_to_format(x, fmt, saturate=False)
        held = q.values
    assert (q.codes.view(torch.int16).numpy().view(np.uint16) == patterns).all()
    assert_same(held.double().numpy(), want, x.double().numpy())
    assert_same(rounded.double().numpy(), want, x.double().numpy())


def test_strides_and_empty_tensors() -> None:
    x = torch.randn(40, 30) * 1e5
    for fmt in (BF16, FP16):
        whole = round_to_format(x, fmt, saturate=False)
        assert torch.equal(round_to_format(x.t()[::2], fmt, saturate=False), whole.t()[::2])
        assert torch.equal(quantize(x.t()[::2], spec_of(fmt)).values, whole.t()[::2])
        assert quantize(x[:0], spec_of(fmt)).values.shape == (0, 30)
