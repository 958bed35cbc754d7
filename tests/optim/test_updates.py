"""updates.py: what each way of holding a narrow parameter keeps, loads and stores."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from oracles import assert_same, critical, draw_array, round_array
from torch import Tensor

from mixprec.formats import FORMATS
from mixprec.gemm.widening import NARROW
from mixprec.noise import Noise
from mixprec.optim.updates import UPDATES, float32_at_least
from mixprec.rounding import SOURCE_FORMATS

NOISE = Noise(seed=3, step=4, stream=5)
narrow = pytest.mark.parametrize("dtype", NARROW, ids=str)


def hard_values(dtype: torch.dtype) -> Tensor:
    """float32 values on, beside and between all values of a format."""
    return torch.from_numpy(critical(SOURCE_FORMATS[dtype], np.float32).astype(np.float32))


def after_store(update: str, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    parameter = torch.zeros(value.shape, dtype=dtype)
    kept = UPDATES[update].start(parameter, parameter)
    UPDATES[update].store(parameter, value, kept, NOISE)
    return parameter, kept


def exact(x: Tensor) -> list[Fraction]:
    return [Fraction(each) for each in x.double().flatten().tolist()]


@narrow
@pytest.mark.parametrize("update", ["masters", "compensated", "plain"])
def test_stored_is_the_nearest_and_overflow_is_inf(update: str, dtype: torch.dtype) -> None:
    value = hard_values(dtype)
    parameter, _ = after_store(update, value, dtype)
    want = round_array(value.numpy(), SOURCE_FORMATS[dtype], "nearest_even", saturate=False)
    assert_same(parameter.double().numpy(), want, value.numpy())


@narrow
def test_stored_stochastically_is_the_rounding_by_the_noise(dtype: torch.dtype) -> None:
    value = hard_values(dtype)
    value = value[: len(value) // 7 * 7].reshape(-1, 7)
    parameter, kept = after_store("stochastic", value, dtype)
    draws = draw_array(3, 4, 5, *value.shape)
    want = round_array(value.numpy(), SOURCE_FORMATS[dtype], "stochastic", draws=draws)
    assert_same(parameter.double().numpy(), want, value.numpy())
    assert kept is None


@narrow
@pytest.mark.parametrize("update", UPDATES)
def test_what_is_not_changed_is_stored_as_it_was(update: str, dtype: torch.dtype) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    parameter = every[~every.isnan()].clone()
    before = parameter.clone()
    kept = UPDATES[update].start(parameter, parameter)
    value = UPDATES[update].load(parameter, kept)
    assert value.dtype == torch.float32
    assert torch.equal(value.double(), before.double())
    UPDATES[update].store(parameter, value, kept, NOISE)
    assert torch.equal(parameter, before)


@narrow
def test_parameter_and_compensation_are_the_value_but_for_their_own_rounding(
    dtype: torch.dtype,
) -> None:
    fmt = FORMATS["fp16" if dtype == torch.float16 else "bf16"]
    value = torch.randn(20_000) * torch.logspace(-6, 3, 20_000)
    parameter, kept = after_store("compensated", value, dtype)
    assert kept is not None
    assert kept.dtype == dtype
    smallest = Fraction(2) ** (fmt.min_exponent - fmt.mantissa)
    rows = zip(exact(value), exact(parameter), exact(kept), strict=True)
    for v, p, c in rows:
        # Half a unit in the last place of what the first rounding lost, which is exact.
        assert abs(v - p - c) <= max(abs(v - p) / 2 ** (fmt.mantissa + 1), smallest / 2)
    loaded = UPDATES["compensated"].load(parameter, kept)
    pairs = zip(exact(parameter), exact(kept), strict=True)
    want = [float(np.float32(float(p + c))) for p, c in pairs]
    assert loaded.tolist() == want


@narrow
def test_a_compensation_of_half_a_step_is_kept(dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    # Just under the middle above an odd number: what is lost rounds to half a step itself.
    value = torch.tensor([1 + step]) + step * (0.5 - 2.0**-13)
    parameter, kept = after_store("compensated", value, dtype)
    assert kept is not None
    assert (parameter.item(), kept.item()) == (1 + step, step / 2)
    assert UPDATES["compensated"].load(parameter, kept).item() == 1 + 1.5 * step


@narrow
def test_a_compensation_that_cannot_be_the_parameters_is_forgotten(dtype: torch.dtype) -> None:
    value = torch.tensor([1000.3, 1000.3, 1000.3, -1000.3])
    parameter, kept = after_store("compensated", value, dtype)
    assert kept is not None
    lost = kept.float()
    outside = torch.tensor([parameter[0].item(), 0.001, 0.0, math.nan]).to(dtype)
    parameter.copy_(outside)
    want = torch.stack([outside[0].float() + lost[0], *outside[1:].float()])
    loaded = UPDATES["compensated"].load(parameter, kept)
    assert torch.allclose(loaded, want, rtol=0, atol=0, equal_nan=True)
    assert lost[0] != 0


def test_an_overflow_stays_inf() -> None:
    for update in ("masters", "compensated", "plain"):
        parameter = torch.zeros(2, dtype=torch.float16)
        kept = UPDATES[update].start(parameter, parameter)
        for _ in range(2):
            UPDATES[update].store(parameter, torch.tensor([1e6, -1e6]), kept, NOISE)
            loaded = UPDATES[update].load(parameter, kept)
            assert parameter.tolist() == [math.inf, -math.inf]
        assert loaded.sign().tolist() == [1, -1]


@narrow
def test_a_master_gives_way_where_the_parameter_was_changed(dtype: torch.dtype) -> None:
    value = torch.tensor([0.1, 0.2, 0.3, 0.4, -0.0])
    parameter, _ = after_store("plain", value, dtype)
    master = value.clone()
    parameter[1], parameter[3] = 7.0, math.nan
    loaded = UPDATES["masters"].load(parameter, master)
    want = torch.stack([value[0], torch.tensor(7.0), value[2], torch.tensor(math.nan), value[4]])
    assert torch.allclose(loaded, want, rtol=0, atol=0, equal_nan=True)
    assert loaded is master


@narrow
def test_what_is_kept_starts_from_the_values_before_narrowing(dtype: torch.dtype) -> None:
    value = torch.randn(1000) * 0.02
    parameter = value.to(dtype)
    master = UPDATES["masters"].start(parameter, value)
    assert master is not None
    assert torch.equal(master, value)
    lost = UPDATES["compensated"].start(parameter, value)
    assert lost is not None
    assert torch.equal(lost, (value.double() - parameter.double()).to(dtype))
    # Copies of the narrow values would differ from nearly all of them.
    assert (parameter.float() != value).float().mean() > 0.99


@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.complex64, torch.complex64),
    ],
    ids=str,
)
def test_float32_at_least(dtype: torch.dtype, want: torch.dtype) -> None:
    assert float32_at_least(dtype) == want
