"""Quantising in pieces, and compiled, gives the bits of quantising whole and eagerly."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mixprec import scaling
from mixprec.formats import FORMATS
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor, QuantSpec, quantize
from mixprec.recipes import RECIPES
from mixprec.scaling import delayed_state, pieces

SPECS = sorted({s for r in RECIPES.values() for s in r.specs if s is not None}, key=str)
MX = RECIPES["mxfp8"].output.a
COMPILED = [
    MX,
    RECIPES["nvfp4"].output.a,
    RECIPES["nvfp4"].output.b,
    RECIPES["mxfp6_e2m3"].output.a,
    replace(MX, format=FORMATS["e5m2"], scale_rule="e8m0_floor"),
    RECIPES["fp8_blockwise"].output.b,
]


def quantized(x: Tensor, spec: QuantSpec) -> QuantizedTensor:
    noise = Noise(seed=3, step=1, row=7) if spec.is_stochastic else None
    state = delayed_state(spec.amax_history_len) if spec.is_delayed else None
    return quantize(x, spec, noise=noise, state=state)


def difficult(rows: int, columns: int) -> Tensor:
    """All magnitudes, zeros, and a block with a NaN or an inf."""
    x = torch.randn(rows, columns) * torch.logspace(-40, 37, rows)[:, None]
    x[:, columns // 2 :] *= 1e-3
    x[rows // 2] = 0
    x[rows // 3, 1] = -0.0
    x[rows // 4, 3], x[rows // 5, columns - 1] = torch.nan, torch.inf
    return x


def assert_same_values(q: QuantizedTensor, want: QuantizedTensor) -> None:
    """To the bit, but for which of its NaN a format has."""
    mine, theirs = q.dequantize(), want.dequantize()
    assert torch.equal(mine.isnan(), theirs.isnan())
    assert torch.equal(*(x.nan_to_num(nan=0.0).view(torch.int32) for x in (mine, theirs)))


@pytest.mark.parametrize("columns", [256, 250])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_pieces_are_the_whole(
    spec: QuantSpec, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = difficult(300, columns)
    whole = quantized(x, spec)
    monkeypatch.setattr(scaling, "_LARGE", 1 << 12)
    monkeypatch.setattr(scaling, "cached_elements", lambda: 1 << 12)
    assert pieces(x, 1) == (1 << 12) // columns
    assert quantized(x, spec).equal(whole)
    # in the memory of the transpose no piece is taken, and of three axes the rows are
    assert_same_values(quantized(x.t().contiguous().t(), spec), whole)
    assert torch.equal(quantized(x.reshape(3, 100, columns), spec).codes.flatten(0, 1), whole.codes)


def test_pieces_hold_whole_blocks_and_small_or_transposed_matrices_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scaling, "cached_elements", lambda: 1 << 17)
    large = torch.empty(4096, 4096)
    assert pieces(large, 1) == 32
    assert pieces(large, 96) == 96
    assert pieces(large, 20) == 20
    assert pieces(large, 4096) is None
    assert pieces(large.t(), 1) is None
    assert pieces(torch.empty(512, 512), 1) is None
    assert pieces(torch.empty(0, 1 << 23), 1) is None
    # a GPU has no such cache, and a launch for each piece would take longer than the work
    assert pieces(large.to("meta"), 1) is None


def test_pieces_grow_with_the_cores_at_work() -> None:
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert pieces(torch.empty(4096, 4096), 1) == 32 * count
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("spec", COMPILED, ids=str)
def test_compiled_codes_and_scales_have_the_bits_of_eager_ones(spec: QuantSpec) -> None:
    def parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q = quantize(x, spec)
        return q.codes, q.scale, q.tensor_amax

    x = difficult(256, 256)
    codes, scale, whole = torch.compile(parts, fullgraph=True, dynamic=False)(x)
    eager = quantize(x, spec)
    compiled = replace(eager, codes=codes, scale=scale, tensor_amax=whole)
    is_number = ~eager.values.isnan()
    assert torch.equal(compiled.values[is_number], eager.values[is_number])
    assert replace(compiled, codes=eager.codes).equal(eager)
    assert_same_values(compiled, eager)
