"""Measures against values worked out by hand."""

from __future__ import annotations

import contextlib
import math
import struct

import pytest
import torch

from mixprec import measure
from mixprec.formats import get_format

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FARTHEST = 2**63 - 1


@pytest.mark.parametrize(
    ("reference", "approx", "decibels"),
    [
        ([10.0, 0.0], [10.0, 1.0], 20.0),
        ([1.0, 1.0], [0.0, 0.0], 0.0),
        ([1.0], [11.0], -20.0),
        ([3.0, -2.0], [3.0, -2.0], math.inf),
        ([0.0, 0.0], [0.0, -0.0], math.inf),
        ([0.0], [1.0], -math.inf),
        ([], [], math.inf),
    ],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_sqnr_db_exact(
    reference: list[float], approx: list[float], decibels: float, dtype: torch.dtype
) -> None:
    pair = (torch.tensor(values, dtype=dtype) for values in (reference, approx))
    assert measure.sqnr_db(*pair) == decibels


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["reference", "approx"])
def test_sqnr_db_of_non_finite_is_nan(bad: float, where: str) -> None:
    pair = {"reference": torch.tensor([1.0, 2.0]), "approx": torch.tensor([1.0, 2.0])}
    pair[where][0] = bad
    assert math.isnan(measure.sqnr_db(**pair))


def test_sqnr_db_takes_float64_sums_and_the_tensors_of_a_graph() -> None:
    reference = torch.full((3,), 1e30, requires_grad=True)
    assert measure.sqnr_db(reference, reference * 1.5) == pytest.approx(6.0206, abs=1e-4)


def test_sqnr_db_refuses_to_broadcast() -> None:
    with pytest.raises(
        ValueError, match=r"approx: got shape \(1,\); must be the reference's \(2,\)"
    ):
        measure.sqnr_db(torch.ones(2), torch.ones(1))


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulp_distance_counts_neighbours(dtype: torch.dtype) -> None:
    one = torch.ones(2, 1, dtype=dtype)
    towards = torch.full_like(one, 2.0)
    near = one
    for count in range(4):
        assert measure.ulp_distance(one, near).tolist() == [[count], [count]]
        assert measure.ulp_distance(near, one).tolist() == [[count], [count]]
        near = torch.nextafter(near, towards)


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulp_distance_across_zero_and_to_infinity(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    a = torch.tensor([0.0, -info.smallest_normal, info.max, math.nan, math.nan], dtype=dtype)
    b = torch.tensor([-0.0, info.smallest_normal, math.inf, math.nan, 1.0], dtype=dtype)
    across = 2 * round(1 / info.eps)
    assert measure.ulp_distance(a, b).tolist() == [0, across, 1, 0, FARTHEST]


def test_ulp_distance_of_float64_does_not_wrap() -> None:
    def bits(value: float) -> int:
        return struct.unpack("<q", struct.pack("<d", value))[0]

    big = torch.tensor([1e308, 1e-308, 3.0], dtype=torch.float64)
    small = torch.tensor([-1e308, -1e-308, -0.0], dtype=torch.float64)
    expected = [FARTHEST, 2 * bits(1e-308), bits(3.0)]
    assert measure.ulp_distance(big, small).tolist() == expected


def test_ulp_distance_reads_strided_tensors() -> None:
    a = torch.arange(12.0).reshape(3, 4)
    assert measure.ulp_distance(a.t()[::2], a.t()[::2].contiguous()).sum() == 0


@pytest.mark.parametrize(
    ("a", "b"), [(torch.float32, torch.float64), (torch.int32, torch.int32)], ids=str
)
def test_ulp_distance_refuses_other_types(a: torch.dtype, b: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"a, b: got {a} and {b}; must be one floating-point"):
        measure.ulp_distance(torch.ones(1, dtype=a), torch.ones(1, dtype=b))


def test_ulp_distance_refuses_to_broadcast() -> None:
    with pytest.raises(ValueError, match=r"approx: got shape \(1,\)"):
        measure.ulp_distance(torch.ones(2), torch.ones(1))


def test_underflow_share_counts_what_became_zero() -> None:
    reference = torch.tensor([0.0, 1e-9, -1e-9, 1.0, math.nan, math.inf, -0.0, 2.0])
    approx = torch.tensor([0.0, 0.0, -0.0, 1.0, 0.0, 0.0, 0.0, 1.5])
    assert measure.underflow_share(reference, approx) == 2 / 8
    assert measure.underflow_share(torch.ones(0), torch.ones(0)) == 0


@pytest.mark.parametrize(
    ("fmt", "kept", "clamped"),
    [
        ("e4m3", [448.0, 464.0, -464.0], [464.00003, -480.0, 1e30]),
        ("e5m2", [57344.0, 61439.996], [61440.0, -61440.0]),
        ("e2m1", [6.0, 6.999], [7.0, -100.0]),
        ("e4m3fnuz", [240.0, 247.999], [248.0]),
    ],
)
def test_saturation_share_limit(fmt: str, kept: list[float], clamped: list[float]) -> None:
    scaled = torch.tensor([*kept, *clamped, math.inf, -math.inf, math.nan])
    expected = len(clamped) / (len(kept) + len(clamped) + 3)
    assert measure.saturation_share(scaled, get_format(fmt)) == expected
    assert measure.saturation_share(scaled[:0], get_format(fmt)) == 0


def test_saved_bytes_of_a_linear_layer() -> None:
    layer = torch.nn.Linear(8, 4, bias=False)
    x = torch.randn(3, 8, requires_grad=True)
    with measure.saved_bytes() as saved:
        layer(x).sum()
    assert (saved.activation_bytes, saved.parameter_bytes) == (3 * 8 * 4 + 4 * 8 * 4, 0)
    with measure.saved_bytes(layer.parameters()) as saved:
        layer(x).sum()
    assert (saved.activation_bytes, saved.parameter_bytes) == (3 * 8 * 4, 4 * 8 * 4)


def test_saved_bytes_counts_a_storage_once_and_whole() -> None:
    x = torch.randn(6, 10, requires_grad=True).clone()
    with measure.saved_bytes() as saved:
        kept = (x[0] * x[1], x[:2].exp().log(), x * x)
    assert len(kept) == 3
    storages = {tensor.bytes for tensor in saved.tensors}
    assert storages == {6 * 10 * 4, 2 * 10 * 4}
    assert saved.activation_bytes == 6 * 10 * 4 + 2 * 10 * 4
    assert not any(tensor.is_parameter for tensor in saved.tensors)


def test_saved_bytes_sees_every_step_though_memory_is_reused() -> None:
    x = torch.randn(1000, requires_grad=True)
    with measure.saved_bytes() as saved:
        for _ in range(5):
            (x * 2).square().sum().backward()
    assert saved.activation_bytes == 5 * 4000


def test_saved_bytes_reports_types_and_leaves_gradients_alone() -> None:
    x = torch.randn(7, dtype=torch.float16, requires_grad=True)
    with measure.saved_bytes() as saved:
        x.square().sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach(), rtol=0, atol=0)
    assert [(tensor.shape, tensor.dtype) for tensor in saved.tensors] == [((7,), torch.float16)]


def test_saved_bytes_stops_with_the_block_even_after_an_error() -> None:
    x = torch.randn(5, requires_grad=True)
    saved = measure.saved_bytes()
    with contextlib.suppress(ZeroDivisionError), saved:
        x.square().sum().item() / 0
    x.exp()
    assert saved.activation_bytes == 20


def test_interleaved_medians_and_ratios(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    durations = {"a": iter([99.0, 1.0, 2.0, 4.0]), "b": iter([99.0, 3.0, 4.0, 20.0])}
    order: list[str] = []

    def contender(name: str) -> None:
        nonlocal now
        order.append(name)
        now += next(durations[name])

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    timing = measure.interleaved(
        {"a": lambda: contender("a"), "b": lambda: contender("b")}, rounds=3
    )
    assert timing.seconds == {"a": 2.0, "b": 4.0}
    assert timing.ratios == {"a": 1.0, "b": 3.0}
    assert "".join(order) == "baabbaab"


def test_interleaved_refuses_nothing_to_do() -> None:
    with pytest.raises(ValueError, match="contenders: got none"):
        measure.interleaved({}, rounds=1)
    with pytest.raises(ValueError, match="rounds: got 0; must be at least 1"):
        measure.interleaved({"a": int}, rounds=0)
