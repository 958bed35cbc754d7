"""quantization.py: values that serve a second product, transposed or made again."""

from __future__ import annotations

import pytest
import torch

from mixprec.formats import FORMATS, FloatFormat
from mixprec.quantization import QuantSpec, quantize, requantize

E2M1 = FORMATS["e2m1"]
FORMATS_TRIED = [
    *(FORMATS[name] for name in ("e4m3", "e5m2", "e4m3fnuz", "e3m2", "e2m3", "e2m1")),
    FloatFormat(exponent=3, mantissa=4, specials="ieee"),
    FloatFormat(exponent=4, mantissa=2),
]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("shape", [(6, 10), (5, 7), (1, 3), (0, 4)], ids=str)
def test_packed_codes_transpose(shape: tuple[int, int]) -> None:
    q = quantize(torch.randn(shape), E2M1)
    assert torch.equal(q.t().codes, quantize(q.dequantize().t().contiguous(), E2M1).codes)
    assert torch.equal(q.t().dequantize(), q.dequantize().t())
    assert torch.equal(q.t().t().codes, q.codes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", FORMATS_TRIED, ids=str)
def test_requantizing_gives_the_same_codes(fmt: FloatFormat, dtype: torch.dtype) -> None:
    # between float32 numbers: a float64 source has to pass through float32 both times
    x = (torch.randn(33, 65, dtype=torch.float64) + 1e-12).to(dtype)
    q = quantize(x, QuantSpec(format=fmt))
    again = requantize(
        x, q.spec, scale=q.scale, encode=q.encode, amax=q.amax, tensor_amax=q.tensor_amax
    )
    assert torch.equal(again.packed().codes, q.codes)
    assert torch.equal(again.dequantize(), q.dequantize())
