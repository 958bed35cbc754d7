"""Other libraries' rows: what is converted, in which region, and what if they are missing."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from mixprec.bench.peers import PEERS, joined

CPU = torch.device("cpu")


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 16), nn.Sequential(nn.Linear(16, 48), nn.Linear(48, 10)))


def test_torchao_is_emulated_on_a_cpu_and_converts_what_its_products_take() -> None:
    pytest.importorskip("torchao")
    peer = PEERS["torchao"]
    for recipe in peer.recipes:
        converted = model()
        region, impl = peer.prepare(peer.load(), converted, recipe)
        assert impl == "torchao emulated"
        kinds = [type(m).__name__ for m in converted.modules() if isinstance(m, nn.Linear)]
        assert kinds == ["Float8Linear", "Float8Linear", "Linear"]
        with region():
            converted(torch.randn(16, 32)).sum().backward()


def test_a_base_of_16_bits_is_torch_autocast_around_the_region() -> None:
    seen: list[tuple[str, bool]] = []

    @contextmanager
    def region() -> Iterator[None]:
        seen.append(("in", torch.is_autocast_enabled("cpu")))
        yield
        seen.append(("out", torch.is_autocast_enabled("cpu")))

    with joined(CPU, torch.bfloat16, region):
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    with joined(CPU, None, region):
        pass
    assert seen == [("in", True), ("out", True), ("in", False), ("out", False)]


def test_transformer_engine_gets_the_layers_with_their_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library needs a GPU; its names and signatures are imitated."""
    entered: list[object] = []

    class Linear(nn.Linear):
        def __init__(
            self, fan_in: int, fan_out: int, bias: bool, params_dtype: torch.dtype, device: str
        ) -> None:
            super().__init__(fan_in, fan_out, bias=bias, dtype=params_dtype, device=device)

    @contextmanager
    def fp8_autocast(enabled: bool, fp8_recipe: object) -> Iterator[None]:
        entered.append((enabled, fp8_recipe))
        yield

    library: Any = types.ModuleType("transformer_engine.pytorch")
    library.Linear, library.fp8_autocast = Linear, fp8_autocast
    recipe: Any = types.ModuleType("transformer_engine.common.recipe")
    recipe.DelayedScaling = lambda: "delayed"
    for module in (library, recipe):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    peer = PEERS["transformer_engine"]
    converted, plain = model(), model()
    converted.load_state_dict(plain.state_dict())
    x = torch.randn(2, 32)
    region, impl = peer.prepare(peer.load(), converted, "DelayedScaling")
    assert impl == "transformer_engine"
    with region():
        assert torch.equal(converted(x), plain(x))
    assert entered == [(True, "delayed")]
    kinds = [type(m) for m in converted.modules() if isinstance(m, nn.Linear)]
    assert kinds == [Linear, Linear, nn.Linear]


def test_a_library_that_is_not_there_or_broken_is_an_import_error_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ImportError, match=r"^torchao\.float8 cannot be imported: "):
        PEERS["torchao"].load()
