"""torch's scaled product: on the CPU as it is, and on faked GPUs that refuse what CUDA refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gemm.bound import assert_within_bound
from gemm.fake_cuda import FakeCuda
from mixprec.formats import FORMATS, FloatFormat
from mixprec.gemm.impl import scaled_mm
from mixprec.quantization import QuantizedTensor, QuantSpec, quantize
from mixprec.scaling import delayed_state

E4M3, E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]
TENSOR = QuantSpec(format=E4M3)
ROW = QuantSpec(format=E4M3, block=(1, -1), scale_rule="pow2")
GRADIENT = QuantSpec(format=E5M2)
GRADIENT_ROW = QuantSpec(format=E5M2, block=(1, -1))
UNSCALED = QuantSpec(format=E4M3, scale_rule="none")
PAIRS = {
    "tensor": (TENSOR, TENSOR),
    "row": (ROW, ROW),
    "gradient": (GRADIENT, TENSOR),
    "gradient on the right": (TENSOR, GRADIENT),
    "row by tensor": (ROW, replace(TENSOR, scale_rule="pow2")),
    "tensor by row": (TENSOR, ROW),
    "rows of a gradient": (GRADIENT_ROW, ROW),
    "rows of a gradient on the right": (ROW, GRADIENT_ROW),
    "unscaled": (UNSCALED, ROW),
}
GPUS = {
    "Ada": FakeCuda((8, 9)),
    "Hopper": FakeCuda((9, 0)),
    "Hopper with an older cuBLAS": FakeCuda((9, 0), has_row_scales_in_cublas=False),
    "Blackwell": FakeCuda((10, 0)),
}
SIZES = [(1, 1, 1), (5, 7, 3), (16, 16, 16), (17, 33, 65)]
EMPTY = [(0, 16, 16), (16, 0, 16), (16, 16, 0), (0, 0, 0), (3, 5, 0)]
OUT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["cpu", *GPUS])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU, and each faked GPU in turn."""
    if request.param != "cpu":
        replace(GPUS[request.param], calls=[]).install(monkeypatch)
    return request.param


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda((9, 0)).install(monkeypatch)


def operands(
    pair: str, m: int = 32, n: int = 48, k: int = 64
) -> tuple[QuantizedTensor, QuantizedTensor]:
    spec_a, spec_b = PAIRS[pair]
    return quantize(torch.randn(m, k), spec_a), quantize(torch.randn(n, k), spec_b)


def with_scale(q: QuantizedTensor, scale: Tensor) -> QuantizedTensor:
    return replace(q, scale=scale)


def product(
    a: QuantizedTensor,
    b: QuantizedTensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    assert scaled_mm.why_not(a, b, out_dtype) is None
    return scaled_mm.matmul(a, b, bias=bias, out_dtype=out_dtype)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize(("m", "n", "k"), SIZES)
def test_matmul_is_within_the_bound(
    machine: str, m: int, n: int, k: int, pair: str, out_dtype: torch.dtype
) -> None:
    a, b = operands(pair, m, n, k)
    for bias in (None, torch.randn(n), torch.randn(n).to(out_dtype)):
        result = product(a, b, bias, out_dtype)
        assert result.dtype == out_dtype
        assert result.is_contiguous()
        assert_within_bound(result, a, b, bias)


@pytest.mark.parametrize("pair", ["tensor", "row"])
@pytest.mark.parametrize("m", [255, 256, 257, 8352])
def test_matmul_with_rows_beside_a_tile(hopper: FakeCuda, m: int, pair: str) -> None:
    a, b = operands(pair, m, 16, 64)
    if pair == "row":
        a = with_scale(a, torch.arange(1.0, m + 1)[:, None])
    assert_within_bound(product(a, b), a, b)
    assert_within_bound(product(a, b, out_dtype=torch.bfloat16), a, b)


def test_matmul_over_a_long_contraction(hopper: FakeCuda) -> None:
    a, b = operands("gradient", 16, 16, 8352)
    assert_within_bound(product(a, b), a, b)


@pytest.mark.parametrize("out_dtype", OUT_DTYPES, ids=str)
@pytest.mark.parametrize("pair", ["tensor", "row", "gradient"])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(0, 16, 16), (16, 0, 16), (16, 16, 0), (0, 0, 0), (3, 5, 0)]
)
def test_matmul_of_empty_operands(
    machine: str, m: int, n: int, k: int, pair: str, out_dtype: torch.dtype
) -> None:
    a, b = operands(pair, m, n, k)
    bias = torch.randn(n)
    assert torch.equal(product(a, b, None, out_dtype), torch.zeros(m, n, dtype=out_dtype))
    assert torch.equal(product(a, b, bias, out_dtype), bias.to(out_dtype).expand(m, n))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_row_carries_its_own_scale(machine: str, out_dtype: torch.dtype) -> None:
    """M = N, so that a scale along the wrong axis would broadcast without an error."""
    one_to_sixteen = torch.arange(1.0, 17.0)
    ones = replace(quantize(torch.ones(16, 16), UNSCALED), spec=ROW)
    a = with_scale(ones, one_to_sixteen[:, None])
    b = with_scale(ones, 2 * one_to_sixteen[:, None])
    expected = 32 * one_to_sixteen[:, None] * one_to_sixteen
    assert torch.equal(product(a, b, out_dtype=out_dtype), expected.to(out_dtype))


def test_scales_multiply_the_result(machine: str) -> None:
    ones = quantize(torch.ones(16, 16), UNSCALED)
    a, b = (with_scale(ones, torch.full((1, 1), value)) for value in (2.0, 3.0))
    assert product(a, b).eq(96).all()


def test_scales_that_no_power_of_two_is_near_are_not_truncated(machine: str) -> None:
    ones = quantize(torch.ones(5, 16), UNSCALED)
    a = with_scale(ones, torch.full((5, 1), 1.75))
    assert product(a, a).eq(16 * 1.75**2).all()


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_of_nan_stays_in_its_row(machine: str, out_dtype: torch.dtype) -> None:
    x, w = torch.randn(5, 32), torch.randn(8, 32)
    x[4] = torch.nan
    a, b = quantize(x, ROW), quantize(w, ROW)
    result = product(a, b, out_dtype=out_dtype)
    assert result[4].isnan().all()
    assert torch.equal(result[:4], product(quantize(x[:4], ROW), b, out_dtype=out_dtype))
    assert product(b, a, out_dtype=out_dtype)[:, 4].isnan().all()


def test_a_nan_scale_of_a_tensor_makes_all_nan(machine: str) -> None:
    x = torch.randn(16, 16)
    x[3, 5] = torch.inf
    assert product(quantize(x, TENSOR), quantize(torch.randn(16, 16), TENSOR)).isnan().all()


@pytest.mark.parametrize("pair", ["tensor", "row"])
def test_bias_is_added_in_float32_before_the_rounding(machine: str, pair: str) -> None:
    """1 + 2^-8 is a tie of bfloat16: rounding the sum or the bias first would give 1."""
    spec_a, spec_b = PAIRS[pair]
    a = quantize(torch.tensor([[1.0, 2.0**-8]]), replace(spec_a, scale_rule="pow2"))
    b = quantize(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), replace(spec_b, scale_rule="pow2"))
    bias = torch.tensor([2.0**-20, 2.0**-8 + 2.0**-20])
    assert torch.equal(
        product(a, b, bias, torch.bfloat16), torch.full((1, 2), 1.0 + 2.0**-7).bfloat16()
    )


@pytest.mark.parametrize("size", [(32, 48, 64), (17, 33, 65)])
@pytest.mark.parametrize("pair", PAIRS)
def test_operands_reach_torch_bit_for_bit(
    hopper: FakeCuda, pair: str, size: tuple[int, int, int]
) -> None:
    a, b = operands(pair, *size)
    product(a, b)
    (call,) = hopper.calls
    for q, given in ((a, call.a.view(torch.uint8)), (b, call.b.t().view(torch.uint8))):
        rows, columns = q.codes.shape
        assert torch.equal(given[:rows, :columns], q.codes)
        assert not given[rows:].any()
        assert not given[:, columns:].any()
    dtypes = {(4, 3): torch.float8_e4m3fn, (5, 2): torch.float8_e5m2}
    for q, given in ((a, call.a), (b, call.b)):
        assert given.dtype == dtypes[q.spec.format.exponent, q.spec.format.mantissa]


def test_codes_of_whole_multiples_are_not_copied(hopper: FakeCuda) -> None:
    a, b = operands("tensor")
    product(a, b)
    assert hopper.calls[0].a.data_ptr() == a.codes.data_ptr()
    assert hopper.calls[0].b.data_ptr() == b.codes.data_ptr()


@pytest.mark.parametrize("size", [16, 17, 1])
def test_transposed_and_shifted_codes_are_laid_out(machine: str, size: int) -> None:
    a, b = operands("tensor", 32, size, size)
    assert torch.equal(product(a, b), product(a, b.t().t()))
    transposed = b.t()
    a = quantize(torch.randn(32, size), TENSOR)
    assert_within_bound(product(a, transposed), a, transposed)
    assert_within_bound(product(transposed, a), transposed, a)
    shifted = replace(
        a, codes=torch.cat([torch.zeros(1).byte(), a.codes.reshape(-1)])[1:].view_as(a.codes)
    )
    assert torch.equal(product(shifted, b), product(a, b))
    rows = replace(a, codes=a.codes[::2], shape=torch.Size((16, size)))
    assert torch.equal(product(rows, b), product(a, b)[::2])


@pytest.mark.parametrize(
    ("pair", "bias", "out_dtype", "sizes", "given_dtype"),
    [
        ("tensor", False, torch.float32, (1, 1), torch.float32),
        ("tensor", False, torch.float16, (1, 1), torch.float16),
        ("tensor", True, torch.bfloat16, (1, 1), torch.float32),
        ("gradient on the right", False, torch.bfloat16, (1, 1), torch.bfloat16),
        ("row", False, torch.bfloat16, (32, 48), torch.bfloat16),
        ("row by tensor", False, torch.bfloat16, (32, 48), torch.bfloat16),
        ("tensor by row", False, torch.bfloat16, (32, 48), torch.bfloat16),
        ("row", True, torch.bfloat16, (1, 1), torch.float32),
        ("row", False, torch.float16, (1, 1), torch.float32),
        ("row", False, torch.float32, (1, 1), torch.float32),
        ("rows of a gradient on the right", False, torch.bfloat16, (1, 1), torch.float32),
    ],
)
def test_torch_applies_the_scales_where_that_is_the_definition(
    hopper: FakeCuda,
    pair: str,
    bias: bool,
    out_dtype: torch.dtype,
    sizes: tuple[int, int],
    given_dtype: torch.dtype,
) -> None:
    a, b = operands(pair)
    product(a, b, torch.randn(48) if bias else None, out_dtype)
    (call,) = hopper.calls
    assert tuple(scale.numel() for scale in call.scales) == sizes
    assert call.out_dtype == given_dtype


def test_row_scales_are_not_given_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 knows no row scales there."""
    a, b = operands("row")
    native_product, given = torch._scaled_mm, []

    def spy(*args: Tensor, **kwargs: object) -> Tensor:
        given.append(args[2:4])
        return native_product(*args, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    assert_within_bound(product(a, b, out_dtype=torch.bfloat16), a, b)
    assert [scale.numel() for scales in given for scale in scales] == [1, 1]


def test_rows_that_fill_up_have_scale_one(hopper: FakeCuda) -> None:
    a, b = operands("row", 5, 7, 16)
    product(a, b, out_dtype=torch.bfloat16)
    assert hopper.calls[0].scales[1][0, 7:].eq(1).all()


def test_delayed_operands_are_as_any_other(machine: str) -> None:
    spec = replace(TENSOR, amax_history_len=4)
    a = quantize(torch.randn(16, 32), spec, state=delayed_state(4))
    b = quantize(torch.randn(16, 32), TENSOR)
    assert_within_bound(product(a, b), a, b)


def test_formats_are_recognised_by_their_fields(machine: str) -> None:
    same = FloatFormat(exponent=4, mantissa=3, specials="nan", name="mine")
    a, b = operands("tensor")
    mine = quantize(a.dequantize(), replace(TENSOR, format=same))
    assert torch.equal(product(mine, b), product(quantize(a.dequantize(), TENSOR), b))


def test_every_product_of_two_codes_is_exact_on_the_cpu() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[:, None]
    one = torch.ones(1, 1)
    for fmt_a in (E4M3, E5M2):
        for fmt_b in (E4M3, E5M2):
            a, b = (
                QuantizedTensor(
                    codes=codes, scale=one, amax=None, spec=QuantSpec(format=fmt), shape=codes.shape
                )
                for fmt in (fmt_a, fmt_b)
            )
            expected = a.values.double() @ b.values.double().t()
            torch.testing.assert_close(
                product(a, b).double(), expected, rtol=0, atol=0, equal_nan=True
            )


def test_e5m2_twice_runs_on_the_cpu() -> None:
    a, b = (quantize(torch.randn(16, 16), GRADIENT) for _ in range(2))
    assert_within_bound(product(a, b), a, b)


def test_matmul_compiles_to_one_graph() -> None:
    a, b = operands("row", 5, 7, 16)
    bias = torch.randn(7)

    def step(codes_a: Tensor, codes_b: Tensor) -> Tensor:
        return product(replace(a, codes=codes_a), replace(b, codes=codes_b), bias, torch.bfloat16)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a.codes, b.codes), step(a.codes, b.codes))
