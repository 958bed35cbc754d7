"""codes.py: codes of formats and back, packing, against exact oracles and ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from oracles import (
    EVERY_FORMAT,
    assert_same,
    code_bits,
    code_value,
    critical,
    decode_array,
    holds,
    modes,
    patterns,
)
from torch import Tensor

from mixprec.codes import decode, decode_unscaled, encode
from mixprec.formats import FORMATS, FloatFormat
from mixprec.noise import Noise
from mixprec.rounding import round_to_format

SOURCE_FORMAT = {
    torch.float16: FORMATS["fp16"],
    torch.bfloat16: FORMATS["bf16"],
    torch.float32: FORMATS["fp32"],
    torch.float64: FORMATS["fp64"],
}
NOISE = Noise(seed=1234, step=17, stream=5)
X = torch.ones(2, 7)
BYTES = torch.zeros(2, 7, dtype=torch.uint8)


def as_array(x: Tensor) -> np.ndarray:
    return x.double().numpy()


@pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=str)
def test_every_code_decodes_and_encodes_back(fmt: FloatFormat) -> None:
    bits = code_bits(fmt)
    if bits <= 16:
        codes = np.arange(2**bits).astype("u1" if bits <= 8 else "i2")
    else:
        edges = [start + k for start in (0, 2 ** (bits - 1), 2**bits - 64) for k in range(64)]
        draws = np.random.default_rng(0).integers(0, 2**64, 4000, np.uint64) >> np.uint64(64 - bits)
        unsigned = np.concatenate([np.array(edges, np.uint64), draws])
        codes = unsigned.astype("u4").view("i4") if bits <= 32 else unsigned.view("i8")
    want = decode_array(codes, fmt)
    if bits <= 16:
        pattern_of = codes.view(f"u{codes.itemsize}").tolist()
        assert_same(want, [code_value(fmt, code) for code in pattern_of])
    for dtype, source in SOURCE_FORMAT.items():
        if not holds(source, fmt):
            continue
        values = decode(torch.from_numpy(codes), fmt, dtype)
        assert values.dtype == dtype
        assert_same(as_array(values), want, codes)
        for mode, saturate in modes(fmt):
            noise = NOISE if mode == "stochastic" else None
            numbers = values[~values.isnan()]
            again = encode(numbers, fmt, rounding=mode, saturate=saturate, noise=noise).numpy()
            assert again.dtype == codes.dtype
            assert np.array_equal(again, codes[~np.isnan(want)])


ML_TYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "e3m4_ieee": ml_dtypes.float8_e3m4,
    "e4m3_ieee": ml_dtypes.float8_e4m3,
}


@pytest.mark.parametrize("fmt", [fmt for fmt in EVERY_FORMAT if str(fmt) in ML_TYPES], ids=str)
def test_equal_to_ml_dtypes(fmt: FloatFormat) -> None:
    theirs = ML_TYPES[str(fmt)]
    x = torch.cat(
        [
            torch.from_numpy(critical(fmt, np.float32)),
            torch.from_numpy(patterns(fmt, np.float32, 20_000)),
        ]
    )
    if fmt.specials == "none":
        x = x[x.isfinite()]  # they give -0 for NaN, and the largest number for inf
    if not fmt.signed:
        # they round ties up, and every float32 subnormal above 2^-127 too
        is_tie = x.frexp().mantissa == 0.75
        x = x[(x >= 2.0**-126) & ~is_tie | x.isnan() | (x == 2.0**-127)]
    with np.errstate(all="ignore"):
        want = x.numpy().astype(theirs)
        codes = encode(x, fmt, saturate=fmt.specials == "none").numpy()
        assert_same(codes.view(theirs), want, as_array(x))
        if code_bits(fmt) in (8, 16):
            every = np.arange(2 ** code_bits(fmt)).astype(codes.dtype)
            assert_same(as_array(decode(torch.from_numpy(every), fmt)), every.view(theirs), every)


def test_e8m0_of_a_number_and_of_its_bf16_rounding_differ() -> None:
    x = torch.tensor([2 - 2**-9])
    assert encode(x, "e8m0", rounding="toward_zero").tolist() == [127]
    assert encode(x.bfloat16(), "e8m0", rounding="toward_zero").tolist() == [128]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_decode_e8m0_has_no_zero_and_no_inf(dtype: torch.dtype) -> None:
    codes = torch.tensor([0, 1, 127, 134, 254, 255], dtype=torch.uint8)
    values = as_array(decode(codes, "e8m0", dtype))
    assert_same(values, [2**-127, 2**-126, 1, 128, 2**127, math.nan], codes.numpy())


@pytest.mark.parametrize(
    ("name", "code", "is_overflow"),
    [
        ("e4m3", 0x7F, True),
        ("e4m3", 0xFF, True),
        ("e4m3", 0x7E, False),
        ("e5m2", 0x7C, True),
        ("e5m2", 0xFD, True),
        ("e4m3fnuz", 0x80, True),
        ("e5m2fnuz", 0x80, True),
        ("e3m2", 0x3F, False),
        ("e2m1", 0x7, False),
        ("e8m0", 0xFF, True),
        ("e8m0", 0xFE, False),
    ],
)
def test_decoded_codes_tell_overflow(name: str, code: int, is_overflow: bool) -> None:
    values = decode(torch.tensor([code], dtype=torch.uint8), name)
    assert bool(values.isfinite().all()) is not is_overflow


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("e2m1", torch.uint8),
        ("e8m0", torch.uint8),
        ("bf16", torch.int16),
        ("fp16", torch.int16),
        ("tf32", torch.int32),
        ("fp32", torch.int32),
        ("fp64", torch.int64),
    ],
)
def test_encode_gives_bit_patterns(name: str, dtype: torch.dtype) -> None:
    codes = encode(torch.tensor([[1.0, 2.0]]), name)
    assert codes.dtype == dtype
    assert codes.shape == (1, 2)


def test_decode_accepts_float8_by_its_bytes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    want = as_array(decode(codes, "e4m3"))
    assert_same(as_array(decode(codes.view(torch.float8_e4m3fn), "e4m3")), want)


@pytest.mark.parametrize("fmt", [fmt for fmt in EVERY_FORMAT if code_bits(fmt) <= 8], ids=str)
def test_decode_unscaled_is_decode_up_to_a_factor(fmt: FloatFormat) -> None:
    codes = torch.arange(2 ** code_bits(fmt), dtype=torch.uint8)
    want = decode_array(codes.numpy(), fmt)
    codes, want = codes[torch.from_numpy(~np.isnan(want))], want[~np.isnan(want)]
    values, factor = decode_unscaled(codes, fmt)
    assert values.dtype == torch.float32
    assert math.frexp(factor)[0] == 0.5
    assert_same(as_array(values) * factor, want, codes.numpy())


def test_packed_puts_the_even_index_in_the_low_nibble() -> None:
    packed = encode(torch.tensor([0.5, 6.0, -0.0, -1.0]), "e2m1", packed=True)
    assert packed.tolist() == [0x71, 0xA8]


@pytest.mark.parametrize("shape", [(2, 8), (0, 16), (3, 0), (2,), (2, 3, 4)])
def test_packed_codes_come_back(shape: tuple[int, ...]) -> None:
    x = 3 * torch.randn(shape)
    packed = encode(x, "e2m1", packed=True)
    assert packed.shape == (*shape[:-1], shape[-1] // 2)
    assert packed.dtype == torch.uint8
    values = decode(packed, "e2m1", packed=True)
    assert_same(as_array(values), as_array(round_to_format(x, "e2m1")))


def test_packed_codes_of_a_transposed_tensor() -> None:
    x = (torch.arange(64.0).reshape(16, 4) / 8 - 3).t()
    packed = encode(x, "e2m1", packed=True)
    assert torch.equal(packed, encode(x.contiguous(), "e2m1", packed=True))
    values = decode(packed.t().contiguous().t(), "e2m1", packed=True)
    assert_same(as_array(values), as_array(round_to_format(x, "e2m1")))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["e2m1", "e3m2", "e2m3", FloatFormat(exponent=4, mantissa=2)])
def test_encode_refuses_what_has_no_code(name: str | FloatFormat, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^x: got NaN or inf; {name} has no code for them; "):
        encode(torch.tensor([1.0, value]), name)


@pytest.mark.parametrize(
    ("function", "x", "name", "message"),
    [
        (encode, X, "e4m3", r"packed: got True; e4m3 has 8 bits"),
        (decode, BYTES, "e4m3", r"packed: got True; e4m3 has 8 bits"),
        (encode, X, "e2m1", r"x: got 7 elements along axis 1; .*even"),
        (encode, torch.ones(1, 1), "e2m1", r"x: got 1 elements along axis 1; .*even"),
        (encode, torch.tensor(1.0), "e2m1", r"x: got no axis"),
    ],
)
def test_packed_refuses(function: object, x: Tensor, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        function(x, name, packed=True)


@pytest.mark.parametrize(
    ("codes", "name", "dtype", "error", "message"),
    [
        (
            BYTES,
            "bf16",
            torch.float32,
            TypeError,
            r"codes: got torch.uint8; codes of bf16 are torch.i",
        ),
        (BYTES.long(), "e4m3", torch.float32, TypeError, r"codes: got torch.int64; codes of e4m3"),
        (
            BYTES.float(),
            "e4m3",
            torch.float32,
            TypeError,
            r"codes: got torch.float32; codes of e4m3",
        ),
        (BYTES, "e4m3", torch.int8, ValueError, r"dtype: got torch.int8; .* e4m3; use"),
        (BYTES, "e8m0", torch.float16, ValueError, r"dtype: got torch.float16; .* e8m0; use"),
        (
            BYTES.long(),
            "fp64",
            torch.float32,
            ValueError,
            r"dtype: got torch.float32; .* fp64; use",
        ),
    ],
)
def test_decode_refuses(
    codes: Tensor, name: str, dtype: torch.dtype, error: type, message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        decode(codes, name, dtype)
