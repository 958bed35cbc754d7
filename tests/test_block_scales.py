"""Scales kept as codes, one a block: every rule against exact arithmetic, at every magnitude."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from block_oracles import E8M0_RULES, scales_of
from oracles import assert_same
from quant_oracles import assert_quantized
from torch import Tensor

from mixprec.formats import FORMATS, FloatFormat
from mixprec.noise import Noise
from mixprec.quantization import QuantSpec, quantize
from mixprec.scale_rules import SCALE_RULES, make_scales

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import ml_dtypes

E4M3, E5M2, E2M1 = (FORMATS[name] for name in ("e4m3", "e5m2", "e2m1"))
ELEMENTS = [FORMATS[name] for name in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
MX = QuantSpec(format=E4M3, block=(1, 32), scale_rule="e8m0_rceil")
NV = QuantSpec(format=E2M1, block=(1, 16), scale_rule="nvfp4")
SPECS = {
    **{str(fmt): replace(MX, format=fmt) for fmt in ELEMENTS},
    **{rule: replace(MX, format=E2M1, scale_rule=rule) for rule in E8M0_RULES},
    "slab": replace(MX, block=(1, 128), scale_rule="pow2"),
    "tile": replace(MX, block=(128, 128), scale_rule="pow2"),
    "square": replace(MX, block=(16, 16)),
    "columns": replace(MX, block=(32, 1)),
    "nvfp4": NV,
    "nvfp4 square": replace(NV, block=(16, 16)),
    "nvfp4 columns": replace(NV, block=(16, 1)),
    "transformed": replace(NV, hadamard=True),
    "transformed mx": replace(MX, format=E2M1, hadamard=True),
    "stochastic": replace(NV, rounding="stochastic"),
    "stochastic mx": replace(MX, format=E2M1, rounding="stochastic"),
    "all": replace(NV, rounding="stochastic", hadamard=True),
}
NOISE = Noise(seed=1234, step=17, stream=5)
TAILS = (1, 15, 17, 31, 33)


def check(x: Tensor, spec: QuantSpec) -> None:
    """Quantising x gives what the definition gives, to the bit."""
    noise = NOISE if spec.is_stochastic else None
    assert_quantized(quantize(x, spec, noise=noise), x, spec, noise)


def mixed(rows: int, columns: int) -> Tensor:
    """Blocks of very different size, some of them zero, with zeros of both signs."""
    x = torch.randn(rows, columns) * torch.logspace(-3, 3, columns)
    x[rows // 2, : columns // 2] = 0
    x[0, ::3] = -0.0
    return x


def sweep(step: int) -> list[float]:
    """Powers of two and 1.75 times them from the smallest FP32 number up, with their neighbours."""
    powers = np.ldexp(np.float32(1), np.arange(-149, 128, step)).astype(np.float32)
    here = np.concatenate([powers, powers * np.float32(1.75)])
    around = [np.nextafter(here, np.float32(end)) for end in (0, np.finfo(np.float32).max)]
    return np.unique(np.concatenate([here, *around, [np.float32(0)]])).tolist()


@pytest.mark.parametrize("rule", E8M0_RULES)
@pytest.mark.parametrize("fmt", ELEMENTS, ids=str)
def test_code_of_every_magnitude(fmt: FloatFormat, rule: str) -> None:
    amaxes = sweep(1)
    found = make_scales(torch.tensor(amaxes), rule, fmt)
    want, _ = scales_of(amaxes, QuantSpec(format=fmt, scale_rule=rule))
    assert found.scale.dtype == torch.uint8
    assert found.tensor_amax is None
    assert found.scale.tolist() == [scale.kept for scale in want]
    factors = SCALE_RULES[rule].block_scale(found.scale)
    assert factors.tolist() == [scale.factor for scale in want]
    # a block of zeros is times anything
    assert found.encode.tolist()[1:] == [float(scale.encode or 0) for scale in want][1:]


@pytest.mark.parametrize("name", SPECS)
def test_elements_of_every_magnitude(name: str) -> None:
    sizes = torch.tensor(sweep(16))[:, None]
    parts = torch.tensor([1.0, -0.4, 0.0, 0.26, -0.125, 2.0**-9, -(2.0**-11)])
    check(sizes * parts, SPECS[name])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_every_source_type(name: str, dtype: torch.dtype) -> None:
    check(mixed(5, 50).to(dtype), SPECS[name])


@pytest.mark.parametrize("name", SPECS)
def test_short_last_blocks_on_both_axes(name: str) -> None:
    for tail in TAILS:
        check(mixed(3, tail), SPECS[name])
        check(mixed(tail, 5), SPECS[name])
        check(mixed(2, 64 + tail), SPECS[name])


@pytest.mark.parametrize("name", [name for name in SPECS if not SPECS[name].hadamard])
def test_padding_changes_neither_amax_nor_codes(name: str) -> None:
    spec = SPECS[name]
    noise = replace(NOISE, columns=160) if spec.is_stochastic else None
    for tail in TAILS:
        x = torch.randn(3, 96 + tail) + 4
        padded = torch.nn.functional.pad(x, (0, 64 - tail))
        q, whole = (quantize(y, spec, noise=noise, packed=False) for y in (x, padded))
        assert torch.equal(q.codes, whole.codes[:, : 96 + tail])
        assert q.scale is not None
        assert whole.scale is not None
        assert torch.equal(q.scale, whole.scale[:, : q.scale.shape[1]])
        assert torch.equal(q.dequantize(), whole.dequantize()[:, : 96 + tail])


@pytest.mark.parametrize("name", SPECS)
def test_strides_and_axes_do_not_matter(name: str) -> None:
    x = mixed(20, 40)
    views = [x.t(), x[::2, 1::3], x[:1].expand(3, 40), x[:, :1].expand(20, 9), x.flip(1)]
    for view in [*views, x[3], x.reshape(4, 5, 40).transpose(0, 1), torch.randn(())]:
        check(view, SPECS[name])


@pytest.mark.parametrize("shape", [(0,), (0, 32), (4, 0), (2, 0, 16)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_no_elements(name: str, shape: tuple[int, ...]) -> None:
    check(torch.zeros(shape), SPECS[name])


@pytest.mark.parametrize("name", SPECS)
def test_zeros_keep_their_sign_and_scale_code_zero(name: str) -> None:
    x = torch.zeros(4, 32)
    check(x, SPECS[name])
    if not SPECS[name].hadamard:
        q = quantize(-x, SPECS[name], noise=NOISE)
        check(-x, SPECS[name])
        assert_same(q.dequantize().numpy(), (-x).numpy())
        assert q.scale is not None
        assert (q.scale == (0 if q.scale.dtype == torch.uint8 else 1)).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", SPECS)
def test_number_that_is_not_finite_makes_exactly_its_block_nan(name: str, bad: float) -> None:
    spec = SPECS[name]
    x = mixed(33, 96)
    x[0, 40] = bad
    check(x, spec)
    free, contraction = spec.block
    lost = torch.zeros(33, 96, dtype=torch.bool)
    start = 40 // contraction * contraction
    lost[:free, start : start + contraction] = True
    back = quantize(x, spec, noise=NOISE).dequantize()
    assert torch.equal(back.isnan(), lost)
    x[lost] = 0
    assert torch.equal(back[~lost], quantize(x, spec, noise=NOISE).dequantize()[~lost])


def test_codes_of_scales_that_are_easily_got_wrong() -> None:
    codes = torch.tensor([0, 1, 127, 134, 254, 255], dtype=torch.uint8)
    values = SCALE_RULES["e8m0_rceil"].block_scale(codes).tolist()
    assert values[:5] == [2.0**-127, 2.0**-126, 1.0, 128.0, 2.0**127]
    assert math.isnan(values[5])


def test_block_of_the_smallest_scale_comes_back() -> None:
    x = torch.full((1, 32), 2.0**-127)
    q = quantize(x, MX)
    assert q.scale is not None
    assert q.scale.tolist() == [[0]]
    assert torch.equal(q.dequantize(), x)


def test_encode_of_the_largest_scale_is_not_zero() -> None:
    encode = make_scales(torch.tensor([3e38]), "e8m0_ceil", FloatFormat(exponent=1, mantissa=2))
    assert encode.scale.item() >= 253
    assert encode.encode.item() == 2.0 ** (127 - encode.scale.item())


def test_floor_saturates_where_the_others_do_not() -> None:
    x = torch.full((1, 32), 2 - 2.0**-9)
    back = {rule: quantize(x, replace(MX, scale_rule=rule)) for rule in E8M0_RULES}
    assert back["e8m0_floor"].block_scale.item() == 2.0**-8
    assert back["e8m0_floor"].dequantize()[0, 0] == 1.75
    for rule in ("e8m0_rceil", "e8m0_even", "e8m0_ceil"):
        assert back[rule].block_scale.item() == 2.0**-7
        assert back[rule].dequantize()[0, 0] == 2
    # rounded to bf16 first it is 2
    assert quantize(x.bfloat16(), replace(MX, scale_rule="e8m0_floor")).dequantize()[0, 0] == 2


@pytest.mark.parametrize("fmt", ELEMENTS, ids=str)
def test_rceil_never_saturates_and_never_wastes_a_binade(fmt: FloatFormat) -> None:
    amax = torch.tensor(sweep(1), dtype=torch.float64)[400:]
    found = make_scales(amax, "e8m0_rceil", fmt)
    largest = Fraction(fmt.max)
    for size, encode in zip(amax.tolist(), found.encode.tolist(), strict=True):
        # amax * (1 / max) is rounded: one ulp beyond the largest value rounds to it
        scaled = Fraction(size) * Fraction(encode)
        assert largest * Fraction(1, 2) <= scaled * (1 + Fraction(1, 2**22))
        assert scaled <= largest * (1 + Fraction(1, 2**22))


def test_rceil_of_the_largest_number_decodes_to_infinity() -> None:
    x = torch.full((1, 4), torch.finfo(torch.float32).max)
    assert (quantize(x, MX).dequantize() == math.inf).all()
    assert quantize(x, replace(MX, scale_rule="e8m0_floor")).dequantize().isfinite().all()


@pytest.mark.parametrize(
    ("fmt", "theirs"),
    [
        (FORMATS["e2m1"], ml_dtypes.float4_e2m1fn),
        (FORMATS["e2m3"], ml_dtypes.float6_e2m3fn),
        (FORMATS["e3m2"], ml_dtypes.float6_e3m2fn),
    ],
    ids=str,
)
def test_elements_equal_ml_dtypes(fmt: FloatFormat, theirs: type) -> None:
    x = torch.randn(64, 64) * torch.logspace(-3, 3, 64)[:, None]
    q = quantize(x, replace(MX, format=fmt), packed=False)
    assert q.encode is not None
    scaled = (x * q.encode.repeat_interleave(32, 1)).numpy()
    assert np.array_equal(q.codes.numpy(), scaled.astype(theirs).view(np.uint8))


@pytest.mark.parametrize("name", SPECS)
def test_thread_count_changes_no_bit(name: str) -> None:
    x = torch.randn(200, 517)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        q = quantize(x, SPECS[name], noise=NOISE)
        found.append((q.codes, q.scale))
    for codes, scale in found[1:]:
        assert torch.equal(codes, found[0][0])
        assert torch.equal(scale, found[0][1])


@pytest.mark.parametrize("name", ["stochastic", "stochastic mx", "all"])
def test_shards_draw_what_the_whole_draws(name: str) -> None:
    # the same largest number in every shard: the scale of the tensor is that of the whole
    spec = SPECS[name]
    x = torch.randn(12, 128)
    x[::4, ::32] = 8.0
    whole = quantize(x, spec, noise=NOISE).dequantize()
    for start in (0, 4, 8):
        rows = slice(start, start + 4)
        shard = quantize(x[rows], spec, noise=replace(NOISE, row=start, columns=128))
        columns = slice(8 * start, 8 * start + 32)
        place = replace(NOISE, column=columns.start, columns=128)
        if not spec.hadamard:
            assert torch.equal(shard.dequantize(), whole[rows])
        other = quantize(x[:, columns], spec, noise=place)
        if not spec.hadamard or other.tensor_amax == quantize(x, spec, noise=NOISE).tensor_amax:
            assert torch.equal(other.dequantize(), whole[:, columns])
