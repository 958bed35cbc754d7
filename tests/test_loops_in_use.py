"""Compiled loops are taken for large matrices in plain memory, where numba is there."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import mixprec
from mixprec import loops
from mixprec.quantization import quantize
from mixprec.recipes import RECIPES


def test_another_default_device_is_of_no_matter() -> None:
    x, spec = torch.randn(256, 256), RECIPES["mxfp8"].output.a
    want = quantize(x, spec)
    with torch.device("meta"):
        assert quantize(x, spec).equal(want)


class Watching(TorchDispatchMode):
    """Looks on, and does nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_what_is_no_large_matrix_in_plain_memory_is_left_to_torch() -> None:
    large = torch.zeros(1 << 8, 1 << 8)
    assert loops.serves(large)
    assert loops.serves(large.t())
    refused = {
        "small": large[:127],
        "strided": torch.zeros(1 << 9, 1 << 9)[:, ::2],
        "three axes": large.reshape(2, 1 << 7, 1 << 8),
        "another type": torch.zeros(1 << 8, 1 << 8, dtype=torch.float64),
        "no memory": large.to("meta"),
        "a subclass": torch.nn.Parameter(large),
        "negated by a bit": torch._neg_view(large),
    }
    assert [name for name, x in refused.items() if loops.serves(x)] == []
    with Watching():
        assert not loops.serves(large)
    seen = []
    torch.func.vmap(lambda x: seen.append(loops.serves(x)) or x)(large[None])
    torch.func.grad(lambda x: seen.append(loops.serves(x.detach())) or x.sum())(large)
    assert seen == [False, False]


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What was found out about numba is found out anew."""
    loops._is_available.cache_clear()
    yield
    loops._is_available.cache_clear()


@pytest.mark.usefixtures("forgotten")
def test_without_numba_torch_does_it_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x, spec = torch.randn(256, 256), RECIPES["mxfp8"].output.a
    assert spec is not None
    want = quantize(x, spec)
    loops._is_available.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.warns(RuntimeWarning, match=r"numba cannot be imported.*pip install numba"):
        assert not loops.serves(x)
    assert quantize(x, spec).equal(want)


@pytest.mark.usefixtures("forgotten")
def test_loops_that_would_not_be_compiled_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.warns(RuntimeWarning, match="NUMBA_DISABLE_JIT is set"):
        assert not loops.serves(torch.randn(256, 256))


def test_converting_a_small_model_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_is_available", lambda: pytest.fail("asked for numba"))
    for recipe in RECIPES:
        mixprec.convert(torch.nn.Linear(8, 8), recipe)
