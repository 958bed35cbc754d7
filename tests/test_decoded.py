"""Values in place of codes, on the way to one product: those that the codes would decode to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import mixprec
from mixprec import linear_products, scaling
from mixprec.autograd import linear
from mixprec.codes import decode, round_to_codes
from mixprec.formats import FORMATS, FloatFormat
from mixprec.gemm.api import decodes_at_once
from mixprec.linear_products import HeldWeight, LinearState
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor, QuantSpec, can_be_decoded, quantize, requantize
from mixprec.recipes import RECIPES, Recipe
from mixprec.rounding import round_in_range

SPECS = sorted({s for r in RECIPES.values() for s in r.specs if s is not None}, key=str)
DECODED = [spec for spec in SPECS if can_be_decoded(spec)]
NARROW = [FORMATS[name] for name in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")]
STATELESS = [r for r in RECIPES.values() if not any(s and s.is_delayed for s in r.specs)]


def around_every_value(fmt: FloatFormat) -> Tensor:
    """Values, midpoints, their neighbours in float32, and numbers below the smallest step."""
    codes = torch.arange(1 << fmt.bits, dtype=torch.uint8)
    values = decode(codes, fmt)
    values = values[values.isfinite()].sort().values
    points = torch.cat((values, (values[1:] + values[:-1]) / 2, values.sign() * 1e-30))
    near = [points.nextafter(points.new_full((), side * torch.inf)) for side in (-1, 1)]
    return torch.cat((points, *near)).clamp(-fmt.max, fmt.max)


@pytest.mark.parametrize("is_stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", NARROW, ids=str)
def test_values_are_those_of_the_codes(fmt: FloatFormat, is_stochastic: bool) -> None:
    x = around_every_value(fmt)
    draws = Noise(seed=5).draws((1, len(x)))[0] if is_stochastic else None
    want = decode(round_to_codes(x.clone(), fmt, draws), fmt)
    assert torch.equal(round_in_range(x.clone(), fmt, draws), want)
    place = torch.empty_like(x)
    assert round_in_range(x.clone(), fmt, draws, place) is place
    assert torch.equal(place, want)


def assert_same(mine: Tensor, want: Tensor) -> None:
    """To the bit, but for the payload of NaN and the sign of zero."""
    assert torch.equal(mine.isnan(), want.isnan())
    assert torch.equal(mine.nan_to_num(nan=0.0), want.nan_to_num(nan=0.0))


@pytest.mark.parametrize("is_turned", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("spec", DECODED, ids=str)
def test_a_decoded_operand_has_the_values_of_the_coded_one(
    spec: QuantSpec, is_turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(300, 250) * torch.logspace(-40, 37, 300)[:, None]
    x[150], x[100, 1], x[75, 3], x[60, -1] = 0, -0.0, torch.nan, torch.inf
    x = x.t() if is_turned else x
    noise = Noise(seed=3, step=1, row=7) if spec.is_stochastic else None
    coded = quantize(x, spec, noise=noise, packed=False)
    want = coded.dequantize()
    for large in (scaling._LARGE, 1 << 12):
        monkeypatch.setattr(scaling, "_LARGE", large)
        monkeypatch.setattr(scaling, "cached_elements", lambda: 1 << 12)
        decoded = quantize(x, spec, noise=noise, decoded=True)
        assert decoded.is_decoded
        assert_same(decoded.dequantize(), want)
        assert_same(decoded.t().dequantize(), want.t())
    if spec.is_symmetric:
        made = {name: getattr(coded, name) for name in ("scale", "encode", "amax", "tensor_amax")}
        assert_same(requantize(x, spec, **made, decoded=True).dequantize(), want)


def test_a_scale_from_a_history_keeps_codes() -> None:
    spec = RECIPES["fp8_delayed"].output.a
    assert spec is not None
    state = scaling.delayed_state(4)
    assert not quantize(torch.randn(4, 4), spec, state=state, decoded=True).is_decoded


def results(recipe: Recipe, impl: str = "auto", held: HeldWeight | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, w, b = (
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((96, 80), (48, 80), (48,))
    )
    noise = Noise(seed=2, step=torch.tensor(3))
    state = LinearState(held=held)
    if held is not None:
        held.check(w)
    outs = [linear(x, w, b, recipe=recipe, noise=noise, impl=impl, state=state) for _ in range(2)]
    torch.autograd.backward(outs, [torch.randn(96, 48, generator=generator)] * 2)
    assert x.grad is not None
    assert w.grad is not None
    return [*(out.detach() for out in outs), x.grad, w.grad]


@pytest.mark.parametrize("recipe", STATELESS, ids=str)
def test_products_are_those_of_codes(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = [results(recipe), results(recipe, held=HeldWeight())]
    monkeypatch.setattr(linear_products, "decodes_at_once", lambda x, impl: False)
    want = results(recipe)
    for found in mine:
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize(
    ("impl", "device", "is_decoded"),
    [
        ("auto", "cpu", True),
        ("emulated", "cpu", True),
        ("scaled_mm", "cpu", False),
        ("auto", "meta", False),
    ],
)
def test_only_the_emulation_is_given_values(impl: str, device: str, is_decoded: bool) -> None:
    assert decodes_at_once(torch.empty(1, device=device), impl) == is_decoded


def test_what_outlives_its_product_has_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[QuantizedTensor] = []

    def recording(*args: Any, **options: Any) -> QuantizedTensor:
        made.append(quantize(*args, **options))
        return made[-1]

    monkeypatch.setattr(linear_products, "quantize", recording)
    layer = torch.nn.Linear(16, 16)
    mixprec.convert(layer, "fp8_rowwise")
    layer(torch.randn(16, 16, requires_grad=True)).sum().backward()
    assert [q.is_decoded for q in made] == [True, True, False, True, True, True]
