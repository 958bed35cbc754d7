"""Block-scaled operands on units that take their scales, on faked GPUs with CUDA's rules."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from gemm.bound import assert_within_bound
from gemm.fake_cuda import FakeCuda
from mixprec.formats import FORMATS
from mixprec.gemm import native, quantized_matmul, resolve, resolve_spec
from mixprec.gemm.block_scales import tiled
from mixprec.gemm.impl import scaled_mm
from mixprec.noise import Noise
from mixprec.quantization import QuantSpec, quantize
from mixprec.recipes import PRODUCTS, RECIPES

GPU = {"fp8_blockwise": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
CAPABILITIES = [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
SIZES = [(1, 1, 129), (5, 7, 200), (33, 47, 300), (130, 260, 384), (300, 140, 1040)]
EMPTY = [(0, 16, 256), (16, 0, 256), (3, 5, 0)]
NOISE = Noise(seed=5)


def install(name: str, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(GPU[name]).install(monkeypatch)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", GPU)
@pytest.mark.parametrize(("m", "n", "k"), [*SIZES, *EMPTY])
def test_matmul_is_within_the_bound(
    name: str, product: str, m: int, n: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(name, monkeypatch)
    gemm = getattr(RECIPES[name], product)
    a = quantize(torch.randn(m, k) * torch.randn(m, 1).exp(), gemm.a, noise=NOISE)
    b = quantize(torch.randn(n, k) * 30, gemm.b, noise=NOISE)
    for dtype in (torch.float32, torch.bfloat16):
        for bias in (None, torch.randn(n)):
            assert scaled_mm.why_not(a, b, dtype) is None
            result = scaled_mm.matmul(a, b, bias=bias, out_dtype=dtype)
            assert result.dtype == dtype
            assert result.is_contiguous()
            assert_within_bound(result, a, b, bias)


@pytest.mark.parametrize("name", GPU)
def test_a_block_with_nan_reaches_its_row_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(name, monkeypatch)
    gemm = RECIPES[name].output
    x, w = torch.randn(40, 300), torch.randn(48, 300)
    x[37, 290] = torch.nan
    a, b = quantize(x, gemm.a), quantize(w, gemm.b)
    result = scaled_mm.matmul(a, b, bias=None, out_dtype=torch.float32)
    assert result[37].isnan().all()
    assert result.isnan().sum() == 48


def test_blocks_of_128_on_either_side(monkeypatch: pytest.MonkeyPatch) -> None:
    install("fp8_blockwise", monkeypatch)
    gemm = RECIPES["fp8_blockwise"].output
    for k in (96, 600):
        a, b = quantize(torch.randn(200, k), gemm.b), quantize(torch.randn(150, k), gemm.a)
        assert scaled_mm.why_not(a, b, torch.float32) is None
        result = scaled_mm.matmul(a, b, bias=None, out_dtype=torch.float32)
        assert_within_bound(result, a, b)


def test_transposed_squares_are_multiplied_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fp8_blockwise", "nvfp4"):
        install(name, monkeypatch)
        gemm = RECIPES[name].grad_input
        a = quantize(torch.randn(20, 320), gemm.a, noise=NOISE)
        b = quantize(torch.randn(320, 200), gemm.b).t()
        assert scaled_mm.why_not(a, b, torch.float32) is None
        result = scaled_mm.matmul(a, b, bias=None, out_dtype=torch.float32)
        assert_within_bound(result, a, b)


def test_codes_of_scales_lie_in_tiles_of_128_rows_by_4_blocks() -> None:
    codes = torch.randint(0, 256, (200, 6), dtype=torch.uint8)
    flat = tiled(codes)
    assert flat.numel() == 256 * 8
    for row in range(256):
        for block in range(8):
            tile = (row // 128) * 2 + block // 4
            place = tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4
            inside = row < 200 and block < 6
            assert flat[place] == (codes[row, block] if inside else 0)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("name", [*GPU, "mxfp4", "mxfp6_e3m2"])
def test_auto_takes_the_units_where_they_are(
    name: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCuda(capability).install(monkeypatch)
    gemm = RECIPES[name].output
    a, b = torch.randn(32, 256), torch.randn(256, 256)
    chosen, reason = resolve(quantize(a, gemm.a), quantize(b, gemm.b), torch.float32)
    since = GPU.get(name, (99, 0))
    is_native = capability[0] == 9 if name == "fp8_blockwise" else capability >= since
    assert chosen == ("scaled_mm" if is_native else "bf16_mm")
    quantized_matmul(a, b, gemm)
    assert [call.name for call in fake.calls] == ["block_scaled_mm" if is_native else "mm"]
    assert ("FP8 sums" in reason) == (is_native and name == "fp8_blockwise")
    assert resolve_spec(gemm, "cpu", torch.float32) == (chosen, reason)


@pytest.mark.parametrize(
    ("a", "b", "capability", "reason"),
    [
        (
            "mxfp8",
            "mxfp8",
            (9, 0),
            r"device: compute capability 9\.0 \(Hopper\) has no blocks of 32",
        ),
        ("nvfp4", "nvfp4", (9, 0), r"device: .* 9\.0 \(Hopper\) has no FP4 units; 10\.0 has"),
        (
            "fp8_blockwise",
            "fp8_blockwise",
            (10, 0),
            r"device: .*\(Blackwell\) has no blocks of 128",
        ),
        ("mxfp8", "nvfp4", (10, 0), r"a, b: got blocks of \(1, 32\) and \(1, 16\)"),
        ("mxfp4", "mxfp4", (10, 0), r"a: got blocks of \(1, 32\) of e2m1 scaled by e8m0_rceil"),
        ("mxfp8", "fp8_rowwise", (10, 0), r"b: got blocks of \(1, -1\) of e4m3 scaled by pow2"),
    ],
)
def test_why_not_names_the_operand_and_the_rule(
    a: str, b: str, capability: tuple[int, int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(capability).install(monkeypatch)
    x = torch.randn(256, 256)
    left, right = quantize(x, RECIPES[a].output.a), quantize(x, RECIPES[b].output.a)
    why = scaled_mm.why_not(left, right, torch.float32)
    assert re.match(reason, why or "")


def test_on_a_cpu_and_for_float64_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = RECIPES["mxfp8"].output
    q = quantize(torch.randn(4, 64), gemm.a)
    assert (scaled_mm.why_not(q, q, torch.float32) or "").startswith(
        "a: got blocks of (1, 32) on cpu; torch's product of blocks is on cuda"
    )
    install("mxfp8", monkeypatch)
    assert "out_dtype: got torch.float64" in (scaled_mm.why_not(q, q, torch.float64) or "")


def test_two_squares_have_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    install("fp8_blockwise", monkeypatch)
    q = quantize(torch.randn(256, 256), RECIPES["fp8_blockwise"].output.b)
    assert "torch has no product of the two" in (scaled_mm.why_not(q, q, torch.float32) or "")


def test_float32_scales_need_not_be_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    install("fp8_blockwise", monkeypatch)
    spec = QuantSpec(format=FORMATS["e4m3"], block=(1, 128), scale_rule="real")
    a, b = (quantize(torch.randn(40, 300), spec) for _ in range(2))
    assert not native.follows_sums(a)
    result = scaled_mm.matmul(a, b, bias=None, out_dtype=torch.float32)
    assert_within_bound(result, a, b)
    square = replace(spec, block=(128, 128))
    assert scaled_mm.why_not(a, quantize(torch.randn(40, 300), square), torch.float32) is None
