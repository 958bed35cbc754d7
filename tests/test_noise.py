"""noise.py: the generator, its shards, and the rounding it drives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from oracles import (
    DRAWS,
    WORD,
    assert_same,
    draw,
    draw_array,
    index_of_draw,
    round_array,
    round_fraction,
)

from mixprec.codes import decode, encode
from mixprec.formats import FORMATS, FloatFormat
from mixprec.noise import Noise
from mixprec.rounding import round_to_format

# seed, step, stream, index, draw
TABLE = [
    (0, 0, 0, 0, 5127321),
    (0, 0, 0, 1, 16749495),
    (0, 0, 0, 2, 3896191),
    (1, 0, 0, 0, 11752131),
    (0, 1, 0, 0, 3650696),
    (0, 0, 1, 0, 14348131),
    (1234, 17, 5, 1000, 3000837),
    (1234, 17, 5, 2**32 - 1, 6641107),
    (1234, 17, 5, 2**32, 8130380),
    (1234, 17, 5, 2**33 + 7, 5656288),
]


def one_draw(seed: int, step: int, stream: int, index: int, columns: int = 2**40) -> int:
    """The package's draw at an index of a wide operand, from a shard of one element."""
    row, column = divmod(index, columns)
    noise = Noise(seed=seed, step=step, stream=stream, row=row, column=column, columns=columns)
    return noise.draws((1, 1)).item()


@pytest.mark.parametrize(("seed", "step", "stream", "index", "want"), TABLE)
def test_draws_of_the_table(seed: int, step: int, stream: int, index: int, want: int) -> None:
    assert draw(seed, step, stream, index) == want
    for columns in (2**40, 1, 1000, 2**32):
        assert one_draw(seed, step, stream, index, columns) == want


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 5, 2**63, 2**64 - 1])
@pytest.mark.parametrize(("step", "stream"), [(0, 0), (1, 0), (0, 1), (123456, 8 * 77 + 5)])
def test_draws_equal_the_reference(seed: int, step: int, stream: int) -> None:
    draws = Noise(seed=seed, step=step, stream=stream).draws((7, 45))
    assert draws.dtype == torch.int32
    assert draws.shape == (7, 45)
    want = [draw(seed, step, stream, index) for index in range(7 * 45)]
    assert draws.flatten().tolist() == want
    assert draw_array(seed, step, stream, 7, 45).flatten().tolist() == want


def test_many_draws_equal_the_reference() -> None:
    draws = Noise(seed=3, step=4, stream=5).draws((1024, 1000))
    assert np.array_equal(draws.numpy(), draw_array(3, 4, 5, 1024, 1000))


@pytest.mark.parametrize("step", [0, 17, 2**40])
def test_step_may_be_a_tensor(step: int) -> None:
    draws = Noise(seed=9, step=torch.tensor(step), stream=2).draws((3, 5))
    assert torch.equal(draws, Noise(seed=9, step=step, stream=2).draws((3, 5)))


@pytest.mark.parametrize("columns", [2**16 + 3, 2**31, 2**32 + 1])
def test_draws_across_the_32_bit_boundary(columns: int) -> None:
    row = WORD // columns
    column = WORD - row * columns - 2
    if column < 0:
        row, column = row - 1, column + columns
    noise = Noise(seed=5, step=6, stream=7, row=row, column=column, columns=columns)
    index = row * columns + column
    want = [[draw(5, 6, 7, index + r * columns + c) for c in range(5)] for r in range(3)]
    assert noise.draws((3, 5)).tolist() == want


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_draws_of_nothing(shape: tuple[int, int]) -> None:
    assert Noise(seed=1).draws(shape).shape == shape


@pytest.mark.parametrize("rows", [slice(0, 3), slice(3, 8)])
@pytest.mark.parametrize("columns", [slice(0, 5), slice(5, 12)])
def test_shards_draw_the_bits_of_the_whole(rows: slice, columns: slice) -> None:
    place = {"seed": 11, "step": 2, "stream": 3}
    shard = Noise(**place, row=rows.start, column=columns.start, columns=12)
    shape = (rows.stop - rows.start, columns.stop - columns.start)
    whole = Noise(**place).draws((8, 12))
    assert torch.equal(shard.draws(shape), whole[rows, columns])
    x = torch.randn(8, 12)
    options = {"rounding": "stochastic"}
    want = encode(x, "e4m3", noise=Noise(**place), **options)
    assert torch.equal(
        encode(x[rows, columns], "e4m3", noise=shard, **options), want[rows, columns]
    )


def test_leading_axes_are_rows() -> None:
    x = torch.randn(2, 3, 5)
    noise = Noise(seed=1)
    flat = encode(x.reshape(6, 5), "e2m1", rounding="stochastic", noise=noise)
    assert torch.equal(encode(x, "e2m1", rounding="stochastic", noise=noise), flat.reshape(2, 3, 5))


def test_an_expanded_tensor_draws_for_every_element() -> None:
    x = torch.tensor(2.25).expand(64, 64)
    values = round_to_format(x, "e2m1", rounding="stochastic", noise=Noise(seed=1))
    assert set(values.flatten().tolist()) == {2.0, 3.0}


def test_draws_are_uniform() -> None:
    draws = Noise(seed=42, step=1).draws((1000, 1000)).double() / DRAWS
    assert abs(draws.mean().item() - 0.5) < 4 / math.sqrt(12 * draws.numel())
    counts = torch.histc(draws, 64, 0, 1)
    expected = draws.numel() / 64
    # chi-square with 63 degrees of freedom: mean 63, standard deviation 11.2
    assert ((counts - expected) ** 2 / expected).sum().item() < 63 + 4 * 11.3


@pytest.mark.parametrize("change", [{"seed": 8}, {"step": 1}, {"stream": 1}])
def test_neighbouring_keys_are_uncorrelated(change: dict[str, int]) -> None:
    first = Noise(seed=7).draws((1, 100_000)).double().flatten()
    second = Noise(**{"seed": 7, **change}).draws((1, 100_000)).double().flatten()
    correlation = torch.corrcoef(torch.stack([first, second]))[0, 1].item()
    assert abs(correlation) < 4 / math.sqrt(100_000)


def test_global_generators_are_untouched() -> None:
    before = torch.get_rng_state()
    encode(torch.randn(0, 4) + 1, "e4m3", rounding="stochastic", noise=Noise(seed=1))
    round_to_format(torch.ones(4, 4) * 1.1, "e4m3", rounding="stochastic", noise=Noise(seed=1))
    assert torch.equal(torch.get_rng_state(), before)


def test_the_global_seed_does_not_matter() -> None:
    x = torch.full((100,), 1.1)
    first = round_to_format(x, "e4m3", rounding="stochastic", noise=Noise(seed=1))
    torch.manual_seed(12345)
    assert torch.equal(
        round_to_format(x, "e4m3", rounding="stochastic", noise=Noise(seed=1)), first
    )
    other = round_to_format(x, "e4m3", rounding="stochastic", noise=Noise(seed=1, step=1))
    assert not torch.equal(other, first)


@pytest.mark.parametrize("x", [2.25, -2.25, 0.1, 5.9])
def test_mean_is_the_number(x: float) -> None:
    values = round_to_format(
        torch.full((1, 100_000), x, dtype=torch.float64),
        "e2m1",
        rounding="stochastic",
        noise=Noise(seed=0),
    )
    low, high = sorted(set(values.flatten().tolist()))
    share = (x - low) / (high - low)
    sigma = (high - low) * math.sqrt(share * (1 - share) / values.numel())
    assert abs(values.mean().item() - x) < 3 * sigma


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.bits <= 16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_exact_values_never_move(name: str, seed: int) -> None:
    fmt = FORMATS[name]
    codes = torch.arange(2**fmt.bits, dtype=torch.int32).to(
        torch.uint8 if fmt.bits <= 8 else torch.int16
    )
    values = decode(codes, name)
    noise = Noise(seed=seed)
    rounded = round_to_format(values, name, rounding="stochastic", noise=noise)
    assert_same(rounded.double().numpy(), values.double().numpy())


def test_stochastic_saturates() -> None:
    x = torch.tensor([6.0, 6.1, 7.0, -8.0, 1e30, math.nan, math.inf])
    for seed in range(20):
        got = round_to_format(x, "e2m1", rounding="stochastic", noise=Noise(seed=seed))
        assert_same(got.numpy(), [6, 6, 6, -6, 6, math.nan, math.nan])
        got = round_to_format(
            torch.tensor([449.0, -1e30, math.inf]),
            "e4m3",
            rounding="stochastic",
            saturate=False,
            noise=Noise(seed=seed),
        )
        assert_same(got.numpy(), [448, -448, math.nan])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fmt", [*FORMATS.values()], ids=str)
@pytest.mark.parametrize("wanted", [0, 1, 2**23, 2**24 - 1])
def test_noise_is_compared_not_added(fmt: FloatFormat, dtype: torch.dtype, wanted: int) -> None:
    index = index_of_draw(wanted, 3, 1, 4)
    assert draw(3, 1, 4, index) == wanted
    noise = Noise(seed=3, step=1, stream=4, column=index, columns=2**40)
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    around = [1.0, 1.5, fmt.smallest_normal, fmt.smallest_subnormal, fmt.max / 2]
    for number in (*around, tiny):
        here = torch.tensor(number, dtype=dtype)
        for toward in (0.0, math.inf):
            x = here.nextafter(torch.tensor(toward, dtype=dtype))
            got = decode(
                encode(x, fmt, rounding="stochastic", noise=noise), fmt, torch.float64
            ).item()
            want = round_fraction(x.item(), fmt, "stochastic", draw=wanted)
            assert_same([got], [want], np.array([x.item()]))


@pytest.mark.parametrize("wanted", [0, 1, 12345, 2**24 - 2])
def test_a_number_goes_up_above_its_draw(wanted: int) -> None:
    index = index_of_draw(wanted, 0, 0, 0)
    noise = Noise(seed=0, column=index, columns=2**33)
    fmt = FloatFormat(exponent=4, mantissa=2)
    equal = torch.tensor([[4 + wanted * 2.0**-24]], dtype=torch.float64)
    above = equal.nextafter(torch.tensor(9.0, dtype=torch.float64))
    assert round_to_format(equal, fmt, rounding="stochastic", noise=noise).item() == 4
    assert round_to_format(above, fmt, rounding="stochastic", noise=noise).item() == 5


def test_fractions_of_more_bits_than_the_noise() -> None:
    x = torch.rand(500, 100, dtype=torch.float64)
    got = round_to_format(x, "bf16", rounding="stochastic", noise=Noise(seed=2))
    want = round_array(
        x.numpy(), FORMATS["bf16"], "stochastic", draws=draw_array(2, 0, 0, 500, 100)
    )
    assert_same(got.numpy(), want, x.numpy())
