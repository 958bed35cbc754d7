"""Compiled loops give the bits of torch's passes, on any number of threads, or are not taken."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mixprec import loops, scaling
from mixprec.codes import decode
from mixprec.formats import FORMATS
from mixprec.gemm.impl import emulated
from mixprec.hadamard import hadamard
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor, QuantSpec, can_be_decoded, quantize
from mixprec.recipes import RECIPES
from mixprec.scale_rules import SCALE_RULES
from mixprec.scaling import block_amax, times_blocks

_ROW = QuantSpec(format=FORMATS["e4m3"], block=(1, -1), scale_rule="pow2")
_MX = QuantSpec(format=FORMATS["e4m3"], block=(1, 32), scale_rule="e8m0_floor")
_OTHERS = {
    replace(_ROW, format=FORMATS["e5m2"], scale_rule="real"),
    replace(_ROW, block=(-1, 1)),
    replace(_ROW, block=(5, 7)),
    replace(_MX, format=FORMATS["e5m2"]),
    replace(_MX, format=FORMATS["e3m2"], rounding="stochastic"),
    replace(_MX, format=FORMATS["e2m3"], block=(32, 1), rounding="stochastic"),
    replace(_MX, format=FORMATS["e2m1"], block=(-1, -1), scale_rule="real", rounding="stochastic"),
}
_OF_RECIPES = {s for r in RECIPES.values() for s in r.specs if s is not None}
SPECS = sorted(filter(can_be_decoded, _OF_RECIPES | _OTHERS), key=str)
BLOCKS = [(1, 16), (16, 1), (1, -1), (-1, 1), (16, 16), (128, 128), (2, 6), (3, 7), (-1, 24)]
TURNED = pytest.mark.parametrize("is_turned", [False, True], ids=["rows", "columns"])


def difficult(rows: int, columns: int) -> Tensor:
    """All magnitudes, subnormals too, zeros, and blocks with a NaN or an inf."""
    x = torch.randn(rows, columns) * torch.logspace(-44, 37, rows)[:, None]
    x[:, columns // 2 :] *= 1e-3
    x[rows // 2 : rows // 2 + 20] = 0
    x[rows // 3, 1] = -0.0
    x[rows // 4, 3], x[rows // 5, -1], x[rows // 6, 0] = torch.nan, torch.inf, -torch.inf
    return x


@contextlib.contextmanager
def threads(count: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So many threads, each with work of its own on small tensors too."""
    before = torch.get_num_threads()
    monkeypatch.setattr(loops, "_WORTH_A_THREAD", 1 << 10)
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_and_without(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """What is made in compiled loops, and what in torch's passes."""
    served: list[int] = []
    run = loops._run

    def counted(*arguments: Any, **numbers: Any) -> None:
        served.append(1)
        run(*arguments, **numbers)

    with monkeypatch.context() as patch:
        patch.setattr(loops, "SMALLEST", 1)
        patch.setattr(loops, "_run", counted)
        mine = make()
        assert served
        served.clear()
        patch.setattr(loops, "SMALLEST", sys.maxsize)
        want = make()
        assert not served
    return mine, want


def assert_same_bits(a: Tensor | None, b: Tensor | None) -> None:
    """To the bit, but for the payload of NaN; in one memory layout."""
    if a is None or b is None:
        assert a is b
        return
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert a.stride() == b.stride() or 1 in a.shape
    if a.is_floating_point():
        a, b = (x.masked_fill(x.isnan(), torch.nan).view(torch.int32) for x in (a, b))
    assert torch.equal(a, b)


def assert_same(mine: QuantizedTensor, want: QuantizedTensor) -> None:
    """Scales and codes, or values where they count."""
    for name in ("scale", "amax", "encode", "tensor_amax"):
        a, b = getattr(mine, name), getattr(want, name)
        assert a is b is None or torch.equal(a.nan_to_num(nan=-1.0), b.nan_to_num(nan=-1.0))
    codes = [mine.codes, want.codes]
    if mine.is_scaled and not want.is_scaled:
        codes[1] = times_blocks(want.codes, want.block_scale, want.spec.block)
    if mine.is_decoded:
        lost = mine.dequantize().isnan()
        assert torch.equal(lost, want.dequantize().isnan())
        codes = [values.masked_fill(lost, 0.0) for values in codes]
    assert_same_bits(*codes)


@pytest.mark.parametrize("asked", ["codes", "decoded", "held"])
@TURNED
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_quantising(
    spec: QuantSpec, is_turned: bool, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = Noise(seed=3, step=torch.tensor(5), stream=2, row=7) if spec.is_stochastic else None
    for shape in ((300, 256), (130, 47), (1, 32), (16, 1)):
        x = difficult(300, 256)[: shape[0], : shape[1]].clone()
        x = x.t().contiguous().t() if is_turned else x

        def make(x: Tensor = x) -> QuantizedTensor:
            more = {} if asked == "codes" else {asked: True}
            return quantize(x, spec, noise=noise, packed=False, **more)

        mine, want = with_and_without(make, monkeypatch)
        assert_same(mine, want)
        if mine.held is not None:
            lost = want.dequantize().isnan()
            values = [y.masked_fill(lost, 0.0) for y in (mine.held[0], want.values)]
            # but for the sign of 0, which no sum shows
            assert torch.equal(*values)
        assert (mine.held is None) == (
            asked != "held" or SCALE_RULES[spec.scale_rule].formula is None
        )


@TURNED
@pytest.mark.parametrize("spec", SPECS[::3], ids=str)
def test_quantising_where_subnormals_are_flushed(
    spec: QuantSpec, is_turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = difficult(256, 300).t() if is_turned else difficult(300, 256)
    x[x.abs() < torch.finfo(torch.float32).tiny] = 0
    noise = Noise(seed=3) if spec.is_stochastic else None
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        made = with_and_without(lambda: quantize(x, spec, noise=noise, packed=False), monkeypatch)
    finally:
        torch.set_flush_denormal(False)
    assert_same(*made)


@TURNED
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_block_amax(
    block: tuple[int, int], is_turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rows, columns in ((192, 96), (130, 47), (25, 5)):
        x = difficult(rows, columns)
        x = x.t().contiguous().t() if is_turned else x
        if block == (1, -1):
            # torch reads rows as fast
            monkeypatch.setattr(loops, "SMALLEST", 1)
            mine, want = loops.block_amax(x, (1, columns)), block_amax(x, block)
        else:
            mine, want = with_and_without(lambda x=x: block_amax(x, block), monkeypatch)
        assert torch.equal(mine.nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0))
        assert not (mine.view(torch.int32) < 0).any()


@TURNED
@pytest.mark.parametrize("min_amax", [0.0, 1e-12])
@pytest.mark.parametrize("rule", [name for name, rule in SCALE_RULES.items() if rule.formula])
def test_scales(
    rule: str, min_amax: float, is_turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fmt = FORMATS["e4m3"]
    powers = torch.arange(-149, 128).double().exp2().float()
    near = [powers.nextafter(powers.new_full((), side)) for side in (0.0, math.inf)]
    sixths = (powers.double() * fmt.max / 4).clamp(max=torch.finfo(torch.float32).max).float()
    x = torch.stack((powers, *near, sixths))
    x[0, :3] = torch.tensor([0.0, math.inf, math.nan])
    x = x.t().contiguous().t() if is_turned else x
    spec = QuantSpec(format=fmt, block=(1, 1), scale_rule=rule, min_amax=min_amax)
    mine, want = with_and_without(lambda: quantize(x, spec), monkeypatch)
    for name in ("amax", "scale", "encode"):
        assert_same_bits(getattr(mine, name), getattr(want, name))
    assert_same_bits(mine.codes, want.codes)


@TURNED
def test_hadamard(is_turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, columns in ((96, 160), (7, 16), (300, 40)):
        x = difficult(max(rows, 24), columns)[:rows]
        x[-1] = torch.finfo(torch.float32).max
        x = x.t().contiguous().t() if is_turned else x.contiguous()
        mine, want = with_and_without(lambda x=x: hadamard(x), monkeypatch)
        assert_same_bits(mine, want)


@TURNED
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1"])
def test_decoding(name: str, is_turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fmt = FORMATS[name]
    codes = torch.randint(1 << fmt.bits, (300, 130), dtype=torch.uint8)
    codes = codes.t().contiguous().t() if is_turned else codes
    spec, one = QuantSpec(format=fmt, block=(-1, -1)), torch.ones(1, 1)
    q = QuantizedTensor(codes=codes, scale=one, amax=None, spec=spec, shape=codes.shape)
    mine, want = with_and_without(lambda: torch.mul(*emulated._decoded(q)), monkeypatch)
    assert_same_bits(mine, decode(codes, fmt))
    assert_same_bits(mine, want)


def test_sums_times_scales_of_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = difficult(300, 64), difficult(280, 64)
    operands = [quantize(x, replace(_ROW, scale_rule="real"), decoded=True) for x in (a, b)]
    for pair in (operands, [operands[0][:1], operands[1]], [operands[0], operands[1][:1]]):
        made = with_and_without(
            lambda pair=pair: emulated.matmul(*pair, bias=None, out_dtype=torch.float32),
            monkeypatch,
        )
        assert_same_bits(*made)


@TURNED
def test_draws_where_an_index_passes_32_bits(
    is_turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(_ROW, format=FORMATS["e2m1"], block=(-1, -1), rounding="stochastic")
    x = torch.rand(90, 70).t().contiguous().t() if is_turned else torch.rand(90, 70)
    for place in (
        {"row": (1 << 25) - 40, "columns": 128, "column": 30},
        {"row": 1, "columns": (1 << 32) - 17, "column": 3},
        {"row": (1 << 40) + 3, "columns": 70},
        {"row": 0, "columns": 1 << 33, "column": (1 << 32) - 20},
    ):
        noise = Noise(seed=(1 << 64) - 1, step=9, stream=4, **place)
        made = with_and_without(
            lambda noise=noise: quantize(x, spec, noise=noise, packed=False), monkeypatch
        )
        assert_same(*made)


def parts(x: Tensor) -> list[QuantizedTensor]:
    """x under specs that take every loop."""
    recipe = RECIPES["nvfp4"]
    specs = (
        recipe.output.a,
        recipe.output.b,
        recipe.grad_input.a,
        _ROW,
        replace(_ROW, block=(-1, 1)),
    )
    noise = Noise(seed=4)
    return [
        quantize(view, spec, noise=noise, packed=False, decoded=decoded)
        for view in (x, x.t())
        for spec in specs
        for decoded in (False, True)
    ]


@pytest.mark.parametrize("shape", [(320, 208), (1, 66560), (3, 22400)])
@pytest.mark.parametrize("count", [2, 3])
def test_any_number_of_threads(
    count: int, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(shape)
    monkeypatch.setattr(loops, "SMALLEST", 1)
    alone = parts(x)
    with threads(count, monkeypatch):
        assert loops._team() is None or loops._num_parts(x) == count * loops._PARTS_A_THREAD
        for mine, want in zip(parts(x), alone, strict=True):
            assert_same(mine, want)


def test_several_callers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(320, 208)
    monkeypatch.setattr(loops, "SMALLEST", 1)
    want = parts(x)
    with threads(2, monkeypatch), ThreadPoolExecutor(3) as pool:
        for found in pool.map(parts, [x] * 9):
            for mine, theirs in zip(found, want, strict=True):
                assert_same(mine, theirs)


@pytest.mark.parametrize("count", [1, 2])
def test_each_part_is_done_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, powers = torch.ones(500, 40), torch.arange(500).remainder(7).exp2()
    with threads(count, monkeypatch):
        loops.times_rows_and_columns(x, powers[:, None], powers[None, :40].square())
        assert torch.equal(x, powers[:, None] * powers[None, :40].square())


def test_work_left_undone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "_team", lambda: lambda *arguments: None)
    with threads(2, monkeypatch), pytest.raises(RuntimeError, match=r"0 of 4 parts were done"):
        loops.block_amax(torch.randn(320, 208), (1, 16))


def test_an_operand_of_a_larger_one_checks_its_columns() -> None:
    spec = RECIPES["nvfp4"].grad_input.a
    assert spec is not None
    x = torch.randn(256, 256)
    assert loops.serves(x)
    with pytest.raises(ValueError, match="columns: got 3; the tensor alone has 256"):
        quantize(x, spec, noise=Noise(seed=1, columns=3))


def test_neighbours_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1"):
        fmt = FORMATS[name]
        spec = QuantSpec(format=fmt, block=(1, -1), scale_rule="e8m0_floor")
        steps = torch.arange(-4096, 4097) * (math.ldexp(fmt.max, -11))
        near = [steps.nextafter(torch.full_like(steps, side)) for side in (-math.inf, math.inf)]
        x = torch.stack((steps, *near, steps * 2.0**-7))
        made = with_and_without(lambda x=x, s=spec: quantize(x, s, packed=False), monkeypatch)
        assert_same(*made)
    assert scaling.block_amax(x, (1, -1)).isfinite().all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_memory_of_an_operand_can_still_be_let_go(spec: QuantSpec) -> None:
    x = torch.randn(512, 512)
    quantize(x, spec, noise=Noise(seed=0), decoded=True)
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
