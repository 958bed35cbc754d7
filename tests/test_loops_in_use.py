"""Compiled loops are taken for large matrices in plain memory, where numba is there."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch
from numba.core.caching import IndexDataCacheFile
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
        "zeros without memory": torch._efficientzerotensor(large.shape),
        "sparse": large.to_sparse(),
        "in another order": large.to_mkldnn(),
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
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.warns(RuntimeWarning, match="NUMBA_DISABLE_JIT is set"):
        assert not loops.serves(torch.randn(256, 256))


@pytest.mark.parametrize("fault", ["no room", "damaged"])
def test_loops_that_cannot_be_kept_are_compiled_all_the_same(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mixprec import compiled_transforms
    from mixprec.compiled_calls import Loop

    function, record = compiled_transforms.decode._function, compiled_transforms.decode.record
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    if fault == "no room":
        monkeypatch.setattr(IndexDataCacheFile, "_save_data", no_room)
    else:
        assert Loop(function, record).address
        for kept in tmp_path.rglob("*.nb?"):
            kept.write_bytes(kept.read_bytes()[:50])
    monkeypatch.setattr(compiled_transforms, "decode", Loop(function, record))
    codes, table = torch.arange(1 << 16).byte().view(256, 256), torch.arange(256.0)
    with pytest.warns(RuntimeWarning, match=r"cannot be kept \(.*set NUMBA_CACHE_DIR to a folder"):
        found = loops.decoded(codes, table)
    assert torch.equal(found, codes.float())


def no_room(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_converting_a_small_model_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_is_available", lambda: pytest.fail("asked for numba"))
    for recipe in RECIPES:
        mixprec.convert(torch.nn.Linear(8, 8), recipe)
