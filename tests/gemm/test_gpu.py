"""The native implementations on a real GPU: the contract that the fake stands for."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gemm.bound import assert_within_bound
from mixprec.formats import FORMATS
from mixprec.gemm.accumulation import MODELS
from mixprec.gemm.impl import scaled_mm
from mixprec.gemm.impl.half_mm import BF16, FP16, HalfUnits
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor, QuantSpec, quantize
from mixprec.recipes import RECIPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

TENSOR = QuantSpec(format=FORMATS["e4m3"])
ROW = QuantSpec(format=FORMATS["e4m3"], block=(1, -1), scale_rule="pow2")
GRADIENT = QuantSpec(format=FORMATS["e5m2"])
PAIRS = {
    "tensor": (TENSOR, TENSOR),
    "row": (ROW, ROW),
    "gradient": (GRADIENT, TENSOR),
    "gradient on the right": (TENSOR, GRADIENT),
    "row by tensor": (ROW, replace(TENSOR, scale_rule="pow2")),
    "rows of a gradient on the right": (ROW, replace(GRADIENT, block=(1, -1))),
}
SIZES = [
    (1, 1, 1),
    (5, 7, 3),
    (16, 16, 16),
    (255, 64, 64),
    (257, 65, 33),
    (8352, 16, 64),
    (64, 64, 8352),
    (0, 16, 16),
    (16, 0, 16),
    (16, 16, 0),
]
Impl = ModuleType | HalfUnits
IMPLS = [scaled_mm, BF16, FP16]
OUT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def to_cpu(q: QuantizedTensor) -> QuantizedTensor:
    assert q.scale is not None
    whole = None if q.tensor_amax is None else q.tensor_amax.cpu()
    return replace(
        q, codes=q.codes.cpu(), scale=q.scale.cpu(), amax=None, encode=None, tensor_amax=whole
    )


def product(
    impl: Impl,
    a: QuantizedTensor,
    b: QuantizedTensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    reason = impl.why_not(a, b, out_dtype)
    if reason is not None:
        pytest.skip(reason)
    return impl.matmul(a, b, bias=bias, out_dtype=out_dtype)


def cut_of(impl: Impl) -> float:
    """Hopper's FP8 units cut 32 products and a running sum to 13 bits below the largest of them.

    The sum goes to float32 after 128 elements, four times 33 cuts, each at most 2^-13 of sum|a||b|.
    """
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    return 4 * 33 * 2.0**-13 if impl is scaled_mm and is_hopper else 0.0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_matmul_is_within_the_bound(impl: Impl, pair: str, out_dtype: torch.dtype) -> None:
    spec_a, spec_b = PAIRS[pair]
    for m, n, k in SIZES:
        a = quantize(torch.randn(m, k, device="cuda"), spec_a)
        b = quantize(torch.randn(n, k, device="cuda"), spec_b)
        for bias in (None, torch.randn(n, device="cuda")):
            result = product(impl, a, b, bias, out_dtype).cpu()
            on_cpu = None if bias is None else bias.cpu()
            assert_within_bound(result, to_cpu(a), to_cpu(b), on_cpu, cut_of(impl))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("pair", ["tensor", "row"])
@pytest.mark.parametrize("shift", [2.0**-20, 2.0**-8 + 2.0**-20])
def test_bias_is_added_in_float32_before_the_rounding(impl: Impl, pair: str, shift: float) -> None:
    """1 + 2^-8 is a tie of bfloat16: rounding the sum or the bias first would give 1."""
    spec_a, spec_b = (replace(spec, scale_rule="pow2") for spec in PAIRS[pair])
    x = torch.tensor([[1.0, 0.0 if shift > 2.0**-8 else 2.0**-8]], device="cuda")
    a, b = quantize(x, spec_a), quantize(torch.ones(1, 2, device="cuda"), spec_b)
    result = product(impl, a, b, torch.tensor([shift], device="cuda"), torch.bfloat16)
    assert result.item() == 1.0 + 2.0**-7


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
def test_every_row_carries_its_own_scale(impl: Impl, out_dtype: torch.dtype) -> None:
    one_to_sixteen = torch.arange(1.0, 17.0, device="cuda")
    ones = quantize(torch.ones(16, 16, device="cuda"), replace(TENSOR, scale_rule="none"))
    ones = replace(ones, spec=ROW)
    a = replace(ones, scale=one_to_sixteen[:, None])
    b = replace(ones, scale=2 * one_to_sixteen[:, None])
    expected = 32 * one_to_sixteen[:, None] * one_to_sixteen
    assert torch.equal(product(impl, a, b, out_dtype=out_dtype), expected.to(out_dtype))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_nan_stays_in_its_row(impl: Impl, out_dtype: torch.dtype) -> None:
    x, w = torch.randn(5, 32, device="cuda"), torch.randn(8, 32, device="cuda")
    x[4] = torch.nan
    b = quantize(w, ROW)
    result = product(impl, quantize(x, ROW), b, out_dtype=out_dtype)
    assert result[4].isnan().all()
    assert torch.equal(result[:4], product(impl, quantize(x[:4], ROW), b, out_dtype=out_dtype))


@pytest.mark.parametrize("impl", IMPLS)
def test_transposed_codes(impl: Impl) -> None:
    a = quantize(torch.randn(48, 32, device="cuda"), TENSOR).t()
    b = quantize(torch.randn(48, 64, device="cuda"), GRADIENT).t()
    assert_within_bound(product(impl, a, b).cpu(), to_cpu(a), to_cpu(b), cut=cut_of(impl))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("pair", ["tensor", "row"])
def test_compiled_matmul_is_within_the_bound(impl: Impl, pair: str) -> None:
    spec_a, spec_b = PAIRS[pair]
    a = quantize(torch.randn(64, 64, device="cuda"), spec_a)
    b = quantize(torch.randn(32, 64, device="cuda"), spec_b)

    product(impl, a, b)  # skips where the GPU lacks the units

    def step(codes_a: Tensor, codes_b: Tensor) -> Tensor:
        given = replace(a, codes=codes_a), replace(b, codes=codes_b)
        assert impl.why_not(*given, torch.float32) is None
        return impl.matmul(*given, bias=None, out_dtype=torch.float32)

    result = torch.compile(step, fullgraph=True)(a.codes, b.codes)
    assert_within_bound(result.cpu(), to_cpu(a), to_cpu(b), cut=cut_of(impl))


@pytest.mark.parametrize("impl", [scaled_mm, BF16], ids=["scaled_mm", "bf16_mm"])
@pytest.mark.parametrize("product", ["output", "grad_input", "grad_weight"])
@pytest.mark.parametrize("name", ["fp8_blockwise", "mxfp8", "mxfp6_e2m3", "mxfp4", "nvfp4"])
def test_block_scaled_products_are_within_the_bound(impl: Impl, product: str, name: str) -> None:
    gemm = getattr(RECIPES[name], product)
    for m, n, k in [(5, 7, 200), (33, 47, 300), (130, 260, 384), (1024, 512, 2048), (3, 5, 0)]:
        a = quantize(torch.randn(m, k, device="cuda"), gemm.a, noise=Noise(seed=1))
        b = quantize(torch.randn(n, k, device="cuda"), gemm.b, noise=Noise(seed=2))
        for out_dtype in (torch.float32, torch.bfloat16):
            result = product_of(impl, a, b, out_dtype)
            assert_within_bound(result.cpu(), to_cpu(a), to_cpu(b), cut=cut_of(impl))


def product_of(
    impl: Impl, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype
) -> Tensor:
    return product(impl, a, b, torch.zeros(b.shape[0], device="cuda"), out_dtype)


@pytest.mark.parametrize("k", [64, 4096])
def test_the_model_of_hopper_errs_as_the_units_do(k: int) -> None:
    """The error on the chip is of the size of the model's; printed for a look at both."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("no Hopper")
    spec = replace(TENSOR, scale_rule="none")
    a, b = (quantize(torch.rand(64, k, device="cuda") * 8, spec) for _ in range(2))
    seen = product(scaled_mm, a, b).cpu()
    a_values, b_values = a.values.cpu(), b.values.cpu()
    exact = a_values.double() @ b_values.double().t()
    model = MODELS["hopper_promoted"](a_values, b_values)
    seen_error = float((seen - exact).norm() / exact.norm())
    model_error = float((model - exact).norm() / exact.norm())
    print(f"K {k}: error on the chip {seen_error:.2e}, of the model {model_error:.2e}")
    assert seen_error < 4 * model_error + 1e-6
