"""rounding.py: every mode against exact oracles and gfloat, by values and through codes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gfloat
import numpy as np
import pytest
import torch
from gfloat import formats as gfloat_formats
from oracles import (
    DRAWS,
    EVERY_FORMAT,
    MODES,
    assert_same,
    code_bits,
    code_value,
    critical,
    decode_array,
    draw,
    draw_array,
    exponent_bias,
    holds,
    modes,
    patterns,
    round_array,
    round_fraction,
)
from torch import Tensor

from mixprec.codes import decode, encode
from mixprec.formats import FORMATS, FloatFormat
from mixprec.noise import Noise
from mixprec.rounding import round_to_format

NUMPY = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}
SOURCE_FORMAT = {
    torch.float16: FORMATS["fp16"],
    torch.bfloat16: FORMATS["bf16"],
    torch.float32: FORMATS["fp32"],
    torch.float64: FORMATS["fp64"],
}
SEED, STEP, STREAM = 1234, 17, 5
NOISE = Noise(seed=SEED, step=STEP, stream=STREAM)


def as_array(x: Tensor) -> np.ndarray:
    return x.double().numpy()


def check(x: Tensor, fmt: FloatFormat, mode: str, saturate: bool, want: np.ndarray) -> None:
    """``round_to_format`` and ``encode`` of x give the values ``want``."""
    options = {"rounding": mode, "saturate": saturate}
    if mode == "stochastic":
        options["noise"] = NOISE
    inputs = as_array(x)
    source = SOURCE_FORMAT[x.dtype]
    if holds(source, fmt) or holds(fmt, source):
        rounded = round_to_format(x, fmt, **options)
        assert rounded.dtype == x.dtype
        assert_same(as_array(rounded), want, inputs)
    if fmt.specials == "none":
        finite = x.isfinite()
        x, want = torch.where(finite, x, 0), np.where(finite.numpy(), want, 0.0)
    assert_same(decode_array(encode(x, fmt, **options).numpy(), fmt), want, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=str)
def test_critical_numbers_equal_fractions(fmt: FloatFormat, dtype: torch.dtype) -> None:
    x = torch.from_numpy(critical(fmt, NUMPY[dtype]))
    draws = [draw(SEED, STEP, STREAM, index) for index in range(x.numel())]
    for mode, saturate in modes(fmt):
        want = [
            round_fraction(number, fmt, mode, saturate, bits)
            for number, bits in zip(x.tolist(), draws, strict=True)
        ]
        check(x, fmt, mode, saturate, np.array(want))


def counts(everyday: int, slow: int) -> list[Any]:
    """A few patterns for every format, and many, marked slow, for those of the table."""
    many = [pytest.param(fmt, slow, marks=pytest.mark.slow) for fmt in FORMATS.values()]
    return [(fmt, everyday) for fmt in EVERY_FORMAT] + many


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("fmt", "count"), counts(200, 20_000), ids=str)
def test_random_patterns_equal_fractions(fmt: FloatFormat, dtype: torch.dtype, count: int) -> None:
    x = torch.from_numpy(patterns(fmt, NUMPY[dtype], count))
    draws = draw_array(SEED, STEP, STREAM, 1, x.numel())[0].tolist()
    for mode, saturate in modes(fmt):
        want = [
            round_fraction(number, fmt, mode, saturate, bits)
            for number, bits in zip(x.tolist(), draws, strict=True)
        ]
        check(x, fmt, mode, saturate, np.array(want))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("fmt", "count"), counts(20_000, 1_000_000), ids=str)
def test_random_patterns_equal_arrays(fmt: FloatFormat, dtype: torch.dtype, count: int) -> None:
    x = torch.from_numpy(patterns(fmt, NUMPY[dtype], count))
    draws = draw_array(SEED, STEP, STREAM, 1, x.numel())[0]
    for mode, saturate in modes(fmt):
        check(x, fmt, mode, saturate, round_array(x.numpy(), fmt, mode, saturate, draws))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", EVERY_FORMAT, ids=str)
def test_every_16_bit_source_equals_arrays(fmt: FloatFormat, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    draws = draw_array(SEED, STEP, STREAM, 1, x.numel())[0]
    for mode, saturate in modes(fmt):
        check(x, fmt, mode, saturate, round_array(as_array(x), fmt, mode, saturate, draws))


def gfloat_format(fmt: FloatFormat) -> gfloat.FormatInfo:
    """gfloat's own entry where it has one, else one from the stored fields."""
    own = {
        "fp16": "binary16",
        "fp32": "binary32",
        "bf16": "bfloat16",
        **{name: f"ocp_{name}" for name in ("e5m2", "e4m3", "e3m2", "e2m3", "e2m1", "e8m0")},
    }
    if str(fmt) in own:
        return getattr(gfloat_formats, f"format_info_{own[str(fmt)]}")
    nans = {"ieee": (1 << fmt.mantissa) - 1, "nan": 1, "fnuz": 0, "none": 0}
    return gfloat.FormatInfo(
        name=str(fmt),
        k=code_bits(fmt),
        precision=fmt.mantissa + 1,
        bias=exponent_bias(fmt),
        is_signed=fmt.signed,
        domain=gfloat.Domain.Extended if fmt.specials == "ieee" else gfloat.Domain.Finite,
        has_nz=fmt.signed and fmt.specials != "fnuz",
        num_high_nans=nans[fmt.specials],
        has_subnormals=fmt.signed,
        is_twos_complement=False,
    )


GFLOAT_MODES = {
    "nearest_even": gfloat.RoundMode.TiesToEven,
    "toward_zero": gfloat.RoundMode.TowardZero,
    "nearest_away": gfloat.RoundMode.TiesToAway,
    "stochastic": gfloat.RoundMode.StochasticFastest,
}


@pytest.mark.parametrize("fmt", [fmt for fmt in EVERY_FORMAT if code_bits(fmt) <= 32], ids=str)
def test_equal_to_gfloat(fmt: FloatFormat) -> None:
    theirs = gfloat_format(fmt)
    x = np.concatenate([critical(fmt, np.float64), patterns(fmt, np.float64, 20_000)])
    x = torch.from_numpy(x)
    # inf saturates there; numbers below the smallest of an unsigned format pass unchanged
    x = x[x.isfinite() & (fmt.signed | (x >= code_value(fmt, 0)))]
    draws = draw_array(SEED, STEP, STREAM, 1, x.numel())[0]
    # they go up on the carry of noise and the fraction's first 24 bits: below, where it has no more
    carry = {"srbits": DRAWS - 1 - draws, "srnumbits": 24}
    with np.errstate(over="ignore"):
        has_24_bits = x.numpy() == x.numpy().astype(np.float32)
    has_24_bits &= x.abs().numpy() >= code_value(fmt, 1 if fmt.signed else 0)
    for mode, saturate in modes(fmt):
        is_noisy = mode == "stochastic"
        settings = {"sat": saturate or is_noisy, **(carry if is_noisy else {})}
        with np.errstate(over="ignore"):
            want = gfloat.round_ndarray(theirs, x.numpy(), GFLOAT_MODES[mode], **settings)
        noise = NOISE if is_noisy else None
        got = as_array(round_to_format(x, fmt, rounding=mode, saturate=saturate, noise=noise))
        compared = has_24_bits if is_noisy else slice(None)
        assert_same(got[compared], want[compared], x.numpy()[compared])


CASES = [
    # e4m3: overflow and its limit, saturating and not
    ("e4m3", True, [448, 449, 464, 464.01, 465, 480, 1000, -1000], [448] * 7 + [-448]),
    ("e4m3", True, [math.inf, -math.inf, math.nan], [math.nan] * 3),
    ("e4m3", False, [448, 449, 464, 464.01, 465, 480, 1000, -1000], [448] * 3 + [math.nan] * 5),
    ("e4m3", False, [math.inf, -math.inf, math.nan], [math.nan] * 3),
    ("e5m2", True, [57344, 61439, 61440, 1e9, -1e9], [57344, 57344, 57344, 57344, -57344]),
    ("e5m2", False, [57344, 61439, 61440, -1e9], [57344, 57344, math.inf, -math.inf]),
    ("e5m2", True, [math.inf, -math.inf, math.nan], [math.inf, -math.inf, math.nan]),
    ("fp16", False, [65504, 65519.99, 65520, -65520], [65504, 65504, math.inf, -math.inf]),
    ("fp16", True, [65520, -1e30], [65504, -65504]),
    ("e4m3fnuz", False, [247.9, 248, 300, math.inf], [240, math.nan, math.nan, math.nan]),
    ("e4m3fnuz", True, [248, 300, -math.inf], [240, 240, math.nan]),
    ("e5m2fnuz", False, [61439, 61440], [57344, math.nan]),
    ("e2m1", True, [2.5, 3.5, 5, 7, -9, math.inf, math.nan], [2, 4, 4, 6, -6, math.nan, math.nan]),
    ("e3m2", True, [26, 30, -1e3, math.inf], [24, 28, -28, math.nan]),
    # zero and its sign
    ("e4m3", True, [-0.0, -1e-5, -(2**-11), 2**-11], [-0.0, -0.0, -0.0, 0.0]),
    ("e5m2", True, [-0.0, -1e-5, -(2**-11)], [-0.0, -(2**-16), -(2**-11)]),
    ("e4m3fnuz", True, [-0.0, -1e-5, -(2**-12)], [0.0, 0.0, 0.0]),
    ("e5m2fnuz", True, [-0.0, -1e-9], [0.0, 0.0]),
    ("e2m1", True, [-0.0, -0.25, -0.26], [-0.0, -0.0, -0.5]),
    # ties to even
    ("e4m3", True, [4.25, 4.75, 1.0625, 1.1875], [4, 5, 1, 1.25]),
    ("tf32", True, [1 + 2**-11, 1 + 3 * 2**-11], [1, 1 + 2**-9]),
    ("bf16", True, [1 + 2**-8, 1 + 3 * 2**-8], [1, 1 + 2**-6]),
    # e8m0: ties to the even code; no zero, no sign, nothing below code 0
    ("e8m0", True, [0.75, 1.5, 3, 6, 1.4999], [0.5, 2, 2, 8, 1]),
    ("e8m0", True, [0.0, -0.0, -2.0, math.nan, math.inf, -math.inf], [math.nan] * 6),
    ("e8m0", True, [2**-127, 2**-128, 2**-149, 2**127 * 1.5, 3e38], [2**-127] * 3 + [2**127] * 2),
    ("e8m0", False, [2**127 * 1.5, 3e38], [2**127, math.nan]),
]


@pytest.mark.parametrize(("name", "saturate", "inputs", "outputs"), CASES)
@pytest.mark.parametrize("copies", [1, 64], ids=["scalar", "vector"])
def test_cases(
    name: str, saturate: bool, inputs: list[float], outputs: list[float], copies: int
) -> None:
    x = torch.tensor(inputs, dtype=torch.float32).repeat(copies)
    want = np.tile(np.array(outputs, float), copies)
    assert_same(as_array(round_to_format(x, name, saturate=saturate)), want, as_array(x))
    if FORMATS[name].specials != "none" or x.isfinite().all():
        codes = encode(x, name, saturate=saturate)
        assert_same(as_array(decode(codes, name)), want, as_array(x))


@pytest.mark.parametrize(
    ("x", "name", "want"),
    [
        (torch.tensor(1.0625 + 2**-40, dtype=torch.float64), "e4m3", 1.125),
        (torch.tensor(1.0625 + 2**-12), "e4m3", 1.125),
        (torch.tensor(1 + 2**-8 + 2**-40, dtype=torch.float64), "bf16", 1 + 2**-7),
        (torch.tensor(1 + 2**-11 + 2**-40, dtype=torch.float64), "fp16", 1 + 2**-10),
        (torch.tensor(464 + 2**-40, dtype=torch.float64), "e4m3", math.nan),
    ],
)
def test_rounds_once(x: Tensor, name: str, want: float) -> None:
    assert_same(as_array(round_to_format(x, name, saturate=False)), want)
    assert_same(as_array(decode(encode(x, name, saturate=False), name)), want)


LAYOUTS = {
    "empty": lambda x: x[:0],
    "no columns": lambda x: x[:, :0],
    "1-D": lambda x: x[0],
    "0-d": lambda x: x[0, 0],
    "3-D": lambda x: x.reshape(4, 2, 16),
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, 1::3],
    "expanded": lambda x: x[:, :1].expand(8, 16),
    "one element": lambda x: x[0, 0].expand(8, 16),
}


@pytest.mark.parametrize("dtype", SOURCE_FORMAT, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_layouts(layout: str, dtype: torch.dtype, mode: str) -> None:
    whole = (100 * torch.randn(8, 16)).to(dtype)
    x, before = LAYOUTS[layout](whole), whole.clone()
    noise = NOISE if mode == "stochastic" else None
    rounded = round_to_format(x, "e4m3", rounding=mode, noise=noise)
    codes = encode(x, "e4m3", rounding=mode, noise=noise)
    assert (rounded.shape, rounded.dtype) == (x.shape, dtype)
    assert (codes.shape, codes.dtype) == (x.shape, torch.uint8)
    columns = x.shape[-1] if x.ndim else 1
    draws = draw_array(SEED, STEP, STREAM, x.numel() // max(columns, 1), columns).reshape(x.shape)
    want = round_array(as_array(x), FORMATS["e4m3"], mode, draws=draws)
    assert_same(as_array(rounded), want, as_array(x))
    assert_same(as_array(decode(codes, "e4m3")), want, as_array(x))
    assert torch.equal(whole, before)


@pytest.mark.parametrize("name", ["fp32", "fp64", "tf32"])
def test_a_wider_format_changes_nothing(name: str) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    for mode, saturate in modes(FORMATS[name]):
        got = round_to_format(x, name, rounding=mode, saturate=saturate, noise=NOISE)
        assert_same(as_array(got), as_array(x))


@contextmanager
def flushing_denormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("no flush-to-zero on this CPU")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


FLUSHED = [fmt for fmt in EVERY_FORMAT if code_value(fmt, 1 if fmt.signed else 0) >= 2.0**-126]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fmt", FLUSHED, ids=str)
def test_narrow_subnormals_survive_flush_to_zero(fmt: FloatFormat, dtype: torch.dtype) -> None:
    x = torch.from_numpy(critical(fmt, NUMPY[dtype]))
    x = x[x.isfinite() & ((x == 0) | (x.abs() >= 2.0**-126))]
    want = round_array(x.numpy(), fmt, "nearest_even")
    source = SOURCE_FORMAT[dtype]
    with flushing_denormals():
        codes = encode(x, fmt)
        values = decode(codes, fmt, dtype if holds(source, fmt) else torch.float64)
        rounded = round_to_format(x, fmt) if holds(source, fmt) or holds(fmt, source) else values
    assert_same(decode_array(codes.numpy(), fmt), want, as_array(x))
    assert_same(as_array(values), want, as_array(x))
    assert_same(as_array(rounded), want, as_array(x))


X = torch.ones(2, 7)


@pytest.mark.parametrize("function", [round_to_format, encode])
@pytest.mark.parametrize(
    ("x", "name", "options", "error", "message"),
    [
        (X, "e4m4", {}, ValueError, r"format: got 'e4m4'; unknown, did you mean .*e4m3"),
        (X, 8, {}, TypeError, r"format: got int; must be a name or a FloatFormat"),
        (X.int(), "e4m3", {}, TypeError, r"x: got torch.int32; must be .*; "),
        (X.bool(), "e4m3", {}, TypeError, r"x: got torch.bool; must be .*; "),
        (X.cfloat(), "e4m3", {}, TypeError, r"x: got torch.complex64; must be .*; "),
        (X.to(torch.float8_e5m2), "e4m3", {}, TypeError, r"x: got torch.float8_e5m2; must be .*; "),
        ([1.0], "e4m3", {}, TypeError, r"x: got list; must be .*; "),
        (X, "e4m3", {"rounding": "up"}, ValueError, r"rounding: got 'up'; must be .*nearest_away"),
        (
            X,
            "e2m1",
            {"saturate": False},
            ValueError,
            r"saturate: got False; e2m1 has neither .*; use",
        ),
        (
            X,
            "e4m3",
            {"rounding": "stochastic"},
            ValueError,
            r"noise: got None; stochastic .*; pass",
        ),
    ],
)
def test_bad_arguments(
    function: object, x: object, name: object, options: dict, error: type, message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        function(x, name, **options)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float16, "bf16"),
        (torch.bfloat16, "fp16"),
        (torch.float16, "e8m0"),
        (torch.float32, FloatFormat(exponent=8, mantissa=3)),
    ],
)
def test_round_to_format_refuses_a_type_that_cannot_hold_the_format(
    dtype: torch.dtype, name: str | FloatFormat
) -> None:
    with pytest.raises(ValueError, match=rf"^x: got {dtype}; .*{name}; "):
        round_to_format(X.to(dtype), name)


@pytest.mark.parametrize(("mode", "saturate"), modes(FORMATS["e4m3"]))
def test_equal_on_every_device(device: torch.device, mode: str, saturate: bool) -> None:
    x = torch.from_numpy(patterns(FORMATS["e4m3"], np.float32, 20_000))
    draws = draw_array(SEED, STEP, STREAM, 1, x.numel())[0]
    want = round_array(x.numpy(), FORMATS["e4m3"], mode, saturate, draws)
    options = {"rounding": mode, "saturate": saturate, "noise": NOISE}
    assert_same(as_array(round_to_format(x.to(device), "e4m3", **options).cpu()), want, as_array(x))
    codes = encode(x.to(device), "e4m3", **options)
    assert_same(as_array(decode(codes, "e4m3").cpu()), want, as_array(x))


COMPILED = [("e4m3", mode) for mode in MODES] + [("e8m0", "nearest_even"), ("bf16", "stochastic")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_compiled_equals_eager(dtype: torch.dtype) -> None:
    fmt = FORMATS["e4m3"]
    x = np.concatenate([critical(fmt, np.float64), patterns(fmt, np.float64, 4000)])
    x = torch.from_numpy(x).to(dtype)
    x = x[: x.numel() // 8 * 8].reshape(-1, 8)

    def every(x: Tensor, step: Tensor) -> list[Tensor]:
        noise = Noise(seed=SEED, step=step, stream=STREAM)
        codes = [
            encode(x, name, rounding=mode, saturate=False, noise=noise) for name, mode in COMPILED
        ]
        return [*codes, decode(codes[0], "e4m3"), round_to_format(x, "e4m3")]

    step = torch.tensor(STEP)
    compiled = torch.compile(every, fullgraph=True)(x, step)
    for got, want in zip(compiled, every(x, step), strict=True):
        assert got.dtype == want.dtype
        assert_same(as_array(got), as_array(want))
