"""quantization.py: codes, scales and amaxes against exact arithmetic, element by element."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import CUSTOM, assert_same, code_bits, critical, decode_array, draw, round_fraction
from quant_oracles import assert_quantized, decoded, quantize_exactly, specs_of
from torch import Tensor

from mixprec import encode
from mixprec.formats import FORMATS, FloatFormat
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor, QuantSpec, quantize
from mixprec.scaling import DelayedState, delayed_state, record_amax, roll_history

E4M3, E5M2, E2M1 = (FORMATS[name] for name in ("e4m3", "e5m2", "e2m1"))
NARROW = [FORMATS[n] for n in ("e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e3m2", "e2m3", "e2m1")]
FORMATS_TRIED = [*NARROW, FORMATS["fp16"], *(fmt for fmt in CUSTOM[:4])]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NOISE = Noise(seed=1234, step=17, stream=5)
TENSOR, ROW = QuantSpec(format=E4M3), QuantSpec(format=E4M3, block=(1, -1), scale_rule="pow2")


def name(spec: QuantSpec) -> str:
    return f"{spec.format}-{spec.block}-{spec.scale_rule}"


def check(x: Tensor, spec: QuantSpec) -> None:
    """Quantising x gives what the definition gives, to the bit."""
    noise = NOISE if spec.is_stochastic else None
    assert_quantized(quantize(x, spec, noise=noise), x, spec, noise)


def mixed(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different size, one of them zero, with signed zeros and exact repeats."""
    x = torch.randn(rows, columns) * torch.logspace(-4, 4, rows)[:, None]
    x[rows // 2] = 0
    x[0, : columns // 4] = -0.0
    return x.to(dtype)


@pytest.mark.parametrize("fmt", FORMATS_TRIED, ids=str)
def test_every_block_and_rule_equals_the_definition(fmt: FloatFormat) -> None:
    for spec in specs_of(fmt):
        check(mixed(5, 37), spec)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=str)
def test_every_source_type_equals_the_definition(fmt: FloatFormat, dtype: torch.dtype) -> None:
    for spec in specs_of(fmt):
        check(mixed(6, 20, dtype), spec)


@pytest.mark.parametrize("block", [(1, 32), (16, 16), (128, 128)], ids=str)
@pytest.mark.parametrize(
    "shape", [(33, 65), (130, 40), (16, 32), (1, 1), (15, 129), (128, 16)], ids=str
)
def test_ragged_blocks(block: tuple[int, int], shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * 10
    check(x, QuantSpec(format=E4M3, block=block, scale_rule="pow2"))


@pytest.mark.parametrize("rounding", ["toward_zero", "nearest_away", "stochastic"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=str)
def test_every_rounding(fmt: FloatFormat, rounding: str) -> None:
    for block, rule in (((-1, -1), "real"), ((1, -1), "pow2"), ((1, 16), "real")):
        check(mixed(7, 33), QuantSpec(format=fmt, block=block, scale_rule=rule, rounding=rounding))


@pytest.mark.parametrize("rule", ["real", "pow2"])
@pytest.mark.parametrize("fmt", NARROW, ids=str)
@pytest.mark.parametrize(
    "row",
    [
        [6.3e-38, 0, -3e-38, 1e-40],
        [1e-45, 0, -1e-45, 0],
        [1.3e-36, 1.317e-36, -1e-37, 0],
        [3.4028234e38, -1e38, 1, 0],
        [448.0, 464, -447, 449],
    ],
    ids=str,
)
def test_ends_of_the_range(row: list[float], fmt: FloatFormat, rule: str) -> None:
    spec = QuantSpec(format=fmt, scale_rule=rule)
    check(torch.tensor([row]), spec)
    if max(row) < 2.0**127:
        assert quantize(torch.tensor([row]), spec).dequantize().isfinite().all()


@pytest.mark.parametrize("block", [(-1, -1), (1, -1), (1, 32), (16, 16), (128, 128)], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1, FORMATS["e4m3fnuz"]], ids=str)
def test_zeros_come_back_with_their_sign_and_scale_one(
    fmt: FloatFormat, block: tuple[int, int]
) -> None:
    x = torch.zeros(4, 32)
    x[1] = -0.0
    q = quantize(x, QuantSpec(format=fmt, block=block))
    assert (q.scale == 1).all()
    assert (q.amax == 0).all()
    assert_same(q.dequantize().numpy(), (x + 0.0 if fmt.specials == "fnuz" else x).numpy())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_non_finite_element_makes_exactly_its_block_nan(fmt: FloatFormat, bad: float) -> None:
    x = mixed(3, 96)
    x[0, 40] = bad
    for block in ((1, 32), (1, -1), (-1, -1), (2, 32)):
        check(x, QuantSpec(format=fmt, block=block, scale_rule="pow2"))
    q = quantize(x, QuantSpec(format=fmt, block=(1, 32)))
    clean = quantize(torch.where(x.isfinite(), x, 0.0), q.spec)
    lost = torch.zeros(3, 96, dtype=torch.bool)
    lost[0, 32:64] = True
    back = q.dequantize()
    assert torch.equal(back.isnan(), lost)
    assert torch.equal(back[~lost], clean.dequantize()[~lost])
    assert q.scale is not None
    assert q.scale.isnan().nonzero().tolist() == [[0, 1]]


def test_float64_is_rounded_to_float32_before_its_amax_is_taken() -> None:
    x = torch.tensor([[1 + 2.0**-40, 0.5 - 2.0**-50], [1e300, 1.0]], dtype=torch.float64)
    check(x, replace(ROW, scale_rule="real"))
    assert torch.equal(quantize(x[:1], TENSOR).codes, quantize(x[:1].float(), TENSOR).codes)
    assert quantize(x[1:], TENSOR).dequantize().isnan().all()


def test_amax_of_bfloat16_is_taken_without_rounding() -> None:
    x = torch.tensor([[2 - 2.0**-9, 0.3]])
    spec = replace(ROW, scale_rule="pow2")
    assert quantize(x, spec).scale.item() == 2.0**-7  # type: ignore[union-attr]
    assert quantize(x, spec).dequantize()[0, 0] == 2.0
    check(x, spec)
    check(x.bfloat16(), spec)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (0,), (0, 32), (4, 0), (2, 3, 5), (2, 0, 4)])
@pytest.mark.parametrize("spec", [TENSOR, ROW, QuantSpec(format=E2M1, block=(2, 3))], ids=name)
def test_any_number_of_axes_and_elements(spec: QuantSpec, shape: tuple[int, ...]) -> None:
    check(torch.randn(shape), spec)


@pytest.mark.parametrize("spec", [TENSOR, ROW, QuantSpec(format=E5M2, block=(4, 8))], ids=name)
def test_strides_do_not_matter(spec: QuantSpec) -> None:
    x = torch.randn(24, 40)
    views = [x.t(), x[::2, 1::3], x[:1].expand(8, 40), x[:, :1].expand(24, 9), x.flip(0), x[3]]
    for view in [*views, x.reshape(4, 6, 40).transpose(0, 1), torch.randn(()).expand(5, 6)]:
        check(view, spec)


def test_result_is_detached_from_the_graph() -> None:
    q = quantize(torch.randn(4, 4, requires_grad=True) * 2, ROW)
    assert not q.dequantize().requires_grad
    assert q.amax is not None
    assert not q.amax.requires_grad


@pytest.mark.parametrize("rounding", ["nearest_even", "toward_zero", "nearest_away", "stochastic"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2, *NARROW[2:], CUSTOM[0], CUSTOM[5]], ids=str)
def test_codes_with_scale_one_equal_those_of_encode(
    fmt: FloatFormat, dtype: torch.dtype, rounding: str
) -> None:
    numbers = critical(fmt, np.float16 if dtype == torch.float16 else np.float32)
    numbers = numbers[np.abs(numbers) <= fmt.max]
    x = torch.from_numpy(np.append(numbers, numbers.dtype.type(fmt.max))).reshape(1, -1)
    noise = NOISE if rounding == "stochastic" else None
    q = quantize(x, QuantSpec(format=fmt, rounding=rounding), noise=noise)
    assert q.scale is not None
    assert q.scale.item() == 1
    want = encode(x, fmt, rounding=rounding, noise=noise).numpy()
    assert_same(decoded(q), decode_array(want, fmt), x.double().numpy())


def after(*amaxes: float, length: int = 4) -> DelayedState:
    """A state in which each amax was recorded in a step of its own."""
    state = delayed_state(length)
    for amax in amaxes:
        state = roll_history(record_amax(state, torch.tensor([[amax]])))
    return state


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", [E4M3, E5M2, FORMATS["e4m3fnuz"], CUSTOM[1]], ids=str)
def test_delayed_codes_equal_those_of_encode(fmt: FloatFormat, dtype: torch.dtype) -> None:
    source = np.float16 if dtype == torch.float16 else np.float32
    x = torch.from_numpy(critical(fmt, source)).to(dtype).reshape(1, -1)
    spec = QuantSpec(format=fmt, amax_history_len=4)
    q = quantize(x, spec, state=after(fmt.max))
    assert q.scale is not None
    assert q.scale.item() == 1
    want = encode(x.float(), fmt).numpy()
    assert_same(decoded(q), decode_array(want, fmt), x.double().numpy())


def test_delayed_scale_comes_from_the_history_and_amax_from_the_data() -> None:
    spec = QuantSpec(format=E4M3, amax_history_len=4)
    x = torch.tensor([[1.0, -3.0, 700.0]])
    for algo, scale in (("max", 2.0), ("most_recent", 1.0)):
        q = quantize(x, replace(spec, amax_compute_algo=algo), state=after(896.0, 448.0))
        assert q.scale is not None
        assert q.amax is not None
        assert (q.scale.item(), q.amax.item()) == (scale, 700.0)
        assert q.dequantize().tolist() == [[1.0, -3.0, 704.0 if scale == 2 else 448.0]]


@pytest.mark.parametrize(("fmt", "kept"), [(E4M3, math.nan), (E5M2, math.inf)], ids=str)
def test_under_a_delayed_scale_only_the_element_itself_is_not_finite(
    fmt: FloatFormat, kept: float
) -> None:
    spec = QuantSpec(format=fmt, amax_history_len=4)
    x = torch.tensor([[1.0, math.inf, math.nan, -math.inf, 1e9, -1e9]])
    q = quantize(x, spec, state=after(fmt.max))
    assert_same(q.dequantize().numpy(), np.array([[1, kept, math.nan, -kept, fmt.max, -fmt.max]]))
    assert q.scale is not None
    assert q.scale.isfinite().all()


@pytest.mark.parametrize("fmt", [E4M3, E5M2, FORMATS["e4m3fnuz"]], ids=str)
@pytest.mark.parametrize("past", [1e-45, 1e-38, 1e-30])
def test_finite_values_saturate_however_small_the_history(fmt: FloatFormat, past: float) -> None:
    spec = QuantSpec(format=fmt, amax_history_len=4)
    values = quantize(torch.tensor([[3e38, -10.0, 0.0]]), spec, state=after(past)).values
    assert values.tolist() == [[fmt.max, -fmt.max, 0.0]]


def test_first_use_of_a_delayed_scale_is_its_own_amax() -> None:
    spec = QuantSpec(format=E4M3, amax_history_len=16)
    x, state = torch.randn(8, 8) * 1e4, delayed_state(16)
    q, dynamic = quantize(x, spec, state=state), quantize(x, TENSOR)
    assert torch.equal(q.codes, dynamic.codes)
    assert torch.equal(q.scale, dynamic.scale)
    assert state.history.tolist() == [0.0] * 16
    assert state.pending.item() == 0


@pytest.mark.parametrize("fmt", [E4M3, E2M1], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns"), [((0, 3), (0, 10)), ((2, 6), (0, 10)), ((1, 5), (4, 9))]
)
def test_shard_draws_the_noise_of_its_place_in_the_whole(
    fmt: FloatFormat, rows: tuple[int, int], columns: tuple[int, int]
) -> None:
    # the floor under amax gives every shard the scale of the whole
    spec = QuantSpec(format=fmt, rounding="stochastic", min_amax=8.0)
    x = torch.randn(6, 10)
    place = replace(NOISE, row=rows[0], column=columns[0], columns=10)
    shard = quantize(x[slice(*rows), slice(*columns)], spec, noise=place)
    whole = quantize(x, spec, noise=NOISE)
    assert torch.equal(shard.values, whole.values[slice(*rows), slice(*columns)])
    assert not torch.equal(whole.values, quantize(x, spec, noise=replace(NOISE, step=18)).values)


def test_noise_counts_rows_over_the_leading_axes() -> None:
    spec = QuantSpec(format=E2M1, rounding="stochastic")
    x = torch.randn(2, 3, 8)
    flat = quantize(x.reshape(6, 8), spec, noise=NOISE)
    assert torch.equal(quantize(x, spec, noise=NOISE).values, flat.values.reshape(2, 3, 8))
    drawn = draw(NOISE.seed, NOISE.step, NOISE.stream, 3 * 8 + 2)
    assert flat.scale is not None
    scaled = float((x.reshape(6, 8) * (6 / x.abs().max().double()).float())[3, 2])
    assert flat.values[3, 2] == round_fraction(scaled, E2M1, "stochastic", draw=drawn)


def test_mean_of_stochastic_rounding_is_the_number() -> None:
    x = torch.full((1000, 100), 2.25)
    x[0, 0] = 6.0
    spec = QuantSpec(format=E2M1, rounding="stochastic")
    values = quantize(x, spec, noise=NOISE).values.flatten()[1:]
    assert set(values.tolist()) == {2.0, 3.0}
    sigma = math.sqrt(0.25 * 0.75 / values.numel())
    assert abs((values == 3).double().mean().item() - 0.25) < 3 * sigma
    exact = torch.tensor([[0.0, -0.0, 6, -3, 0.5, 1.5]]).repeat(50, 1)
    assert torch.equal(quantize(exact, spec, noise=NOISE).values, exact)


def test_unscaled_rule_rounds_the_value_itself() -> None:
    x = torch.randn(4, 9) * 1e3
    for name in ("tf32", "bf16", "e5m2"):
        spec = QuantSpec(format=FORMATS[name], scale_rule="none")
        q = quantize(x, spec)
        assert q.scale is None
        assert q.amax is None
        want = [round_fraction(float(v), spec.format, "nearest_even") for v in x.flatten()]
        assert_same(q.dequantize().flatten().numpy(), np.array(want))
    wide = torch.tensor([1 + 2.0**-30], dtype=torch.float64)
    tie = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64)
    assert quantize(wide, QuantSpec(format=FORMATS["fp64"], scale_rule="none")).values == wide
    assert quantize(tie, QuantSpec(format=E4M3, scale_rule="none")).values.item() == 1.125


@pytest.mark.parametrize("columns", [1, 2, 7, 16])
def test_packed_codes_hold_the_even_index_in_the_low_nibble(columns: int) -> None:
    x = torch.randn(3, columns)
    q = quantize(x, QuantSpec(format=E2M1, block=(1, -1)))
    assert q.codes.shape == (3, (columns + 1) // 2)
    want = encode(torch.from_numpy(quantize_exactly(x, q.spec).values).float(), E2M1)
    assert torch.equal(q.codes[:, 0] & 15, want[:, 0])
    assert q.codes.nbytes + 12 == q.nbytes


def test_transposing_moves_codes_scales_and_blocks() -> None:
    x = torch.randn(6, 10)
    for spec in (TENSOR, ROW, QuantSpec(format=E4M3, block=(2, 3))):
        q = quantize(x, spec)
        assert torch.equal(q.t().dequantize(), q.dequantize().t())
        assert q.t().spec.block == spec.block[::-1]
        assert q.t().shape == (10, 6)
        assert torch.equal(q.t().t().dequantize(), q.dequantize())
    with pytest.raises(ValueError, match=r"shape: got \(2, 3, 4\); only a matrix"):
        quantize(torch.randn(2, 3, 4), ROW).t()


def test_format_stands_for_one_scale_a_tensor() -> None:
    x = torch.randn(4, 8)
    for named in ("e4m3", "float8_e4m3fn", E4M3):
        assert quantize(x, named).spec == TENSOR
        assert torch.equal(quantize(x, named).codes, quantize(x, TENSOR).codes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_rounds_once_from_float32(dtype: torch.dtype) -> None:
    q = quantize(torch.randn(5, 7), TENSOR)
    assert q.dequantize(dtype).dtype == dtype
    assert torch.equal(q.dequantize(dtype), q.dequantize().to(dtype))


def test_scale_a_tensor_loses_a_small_part_that_scales_a_row_keep() -> None:
    parts = torch.cat([torch.randn(32, 32) * std for std in (1.0, 1.0, 1e-6)])
    assert not quantize(parts, TENSOR).dequantize()[64:].any()
    error = quantize(parts, ROW).dequantize() - parts
    for part in range(3):
        rows = slice(32 * part, 32 * part + 32)
        assert 0.02 < error[rows].norm() / parts[rows].norm() < 0.03


def test_every_code_fits_its_width() -> None:
    for fmt in [*NARROW, CUSTOM[0], CUSTOM[14]]:
        codes: QuantizedTensor = quantize(mixed(5, 16), fmt)
        if code_bits(fmt) != 4:
            assert codes.codes.dtype == torch.uint8
            assert int(codes.codes.max()) < 2 ** code_bits(fmt)


@pytest.mark.parametrize(
    ("x", "options", "error", "match"),
    [
        (torch.ones(2, dtype=torch.int64), {}, TypeError, r"x: got torch.int64; must be a float16"),
        (torch.ones(2, dtype=torch.complex64), {}, TypeError, r"x: got torch.complex64"),
        (torch.ones(2, dtype=torch.bool), {}, TypeError, r"x: got torch.bool"),
        ([1.0], {}, TypeError, r"x: got list; must be"),
        (torch.ones(2), {"rounding": "stochastic"}, ValueError, r"noise: got None; stochastic"),
        (torch.ones(2), {"amax_history_len": 4}, ValueError, r"state: got None; delayed scaling"),
    ],
)
def test_quantize_names_what_it_cannot_do(
    x: Tensor, options: dict[str, object], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        quantize(x, replace(TENSOR, **options))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"format": FORMATS["e8m0"]}, r"format: got .*must be a signed FloatFormat"),
        ({"format": "e4m3"}, r"format: got 'e4m3'; must be a signed FloatFormat"),
        ({"block": (0, 1)}, r"block: got \(0, 1\); must be two sizes"),
        ({"block": (1,)}, r"block: got \(1,\)"),
        ({"block": (-2, 1)}, r"block: got \(-2, 1\)"),
        ({"scale_rule": "power"}, r"scale_rule: got 'power'; must be one of none, real, pow2"),
        ({"rounding": "up"}, r"rounding: got 'up'; must be one of nearest_even"),
        ({"min_amax": -1.0}, r"min_amax: got -1.0; must be finite"),
        ({"min_amax": math.inf}, r"min_amax: got inf"),
        ({"min_amax": math.nan}, r"min_amax: got nan"),
        ({"amax_history_len": -1}, r"amax_history_len: got -1; must be at least 0"),
        ({"amax_compute_algo": "mean"}, r"amax_compute_algo: got 'mean'; must be one of max"),
        ({"amax_history_len": 4, "block": (1, -1)}, r"delayed scaling keeps one scale a tensor"),
        ({"amax_history_len": 4, "scale_rule": "none"}, r"delayed scaling keeps one scale"),
        ({"scale_rule": "none", "block": (1, -1)}, r"without a scale they have no meaning"),
        ({"scale_rule": "none", "min_amax": 1.0}, r"without a scale they have no meaning"),
    ],
)
def test_spec_refuses_what_does_not_go_together(fields: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        QuantSpec(**{"format": E4M3} | fields)
