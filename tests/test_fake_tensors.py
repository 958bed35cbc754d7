"""Tensors without numbers: they take the memory of real ones, and a tracer misses nothing."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mixprec import loops
from mixprec.memory import live_bytes
from mixprec.noise import Noise
from mixprec.planning.stand_ins import stand_ins
from mixprec.quantization import quantize
from mixprec.recipes import RECIPES

CPU = torch.device("cpu")


@pytest.fixture(params=["loops", "passes"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "passes":
        monkeypatch.setattr(loops, "serves", lambda x, dtype=torch.float32: False)


def peak(name: str) -> int:
    """Of quantising a gradient by a recipe."""
    spec = RECIPES[name].grad_input.a
    x = torch.ones(1024, 1024)
    with live_bytes() as counted:
        quantize(x, spec, noise=Noise(seed=1), packed=False)
    return counted.peak


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("name", ["fp8_rowwise", "mxfp8", "nvfp4"])
def test_they_take_the_memory_of_real_ones(name: str) -> None:
    with stand_ins(torch.nn.Identity(), CPU):
        planned = peak(name)
    assert planned == peak(name)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("is_early", [False, True], ids=["below autograd", "above it"])
@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_traced_graph_has_all_of_it(mode: str, is_early: bool) -> None:
    spec = RECIPES["fp8_rowwise"].output.a
    x, y = torch.randn(1024, 1024), torch.randn(1024, 1024)
    traced = make_fx(lambda x: quantize(x, spec).codes, tracing_mode=mode, pre_dispatch=is_early)(x)
    assert torch.equal(traced(y), quantize(y, spec).codes)
