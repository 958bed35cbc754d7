"""quantized_tensor.py: an operand sliced, compared, printed, saved and loaded."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

from mixprec.formats import FORMATS, FloatFormat
from mixprec.gemm import GemmSpec, quantized_matmul
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor, QuantSpec, quantize
from mixprec.recipes import RECIPES
from mixprec.scaling import delayed_state

E2M1, E4M3 = FORMATS["e2m1"], FORMATS["e4m3"]
MX = QuantSpec(format=E4M3, block=(1, 32), scale_rule="e8m0_rceil")
TENSOR = QuantSpec(format=E4M3)
NVFP4 = QuantSpec(format=E2M1, block=(1, 16), scale_rule="nvfp4")
SQUARE = replace(NVFP4, block=(16, 16))
SPECS = sorted({s for r in RECIPES.values() for s in r.specs if s is not None}, key=str)
CUSTOM = QuantSpec(format=FloatFormat(exponent=3, mantissa=1, name="own"), block=(2, 8))


def quantized(x: Tensor, spec: QuantSpec) -> QuantizedTensor:
    noise = Noise(seed=3, step=1) if spec.is_stochastic else None
    state = delayed_state(spec.amax_history_len) if spec.is_delayed else None
    return quantize(x, spec, noise=noise, state=state)


def through_torch(q: QuantizedTensor, folder: Path) -> QuantizedTensor:
    tensors, metadata = q.to_tensors()
    torch.save({"tensors": tensors, "metadata": metadata}, folder / "q.pt")
    found = torch.load(folder / "q.pt", weights_only=True)
    return QuantizedTensor.from_tensors(**found)


def through_safetensors(q: QuantizedTensor, folder: Path) -> QuantizedTensor:
    tensors, metadata = q.to_tensors()
    safetensors.torch.save_file(tensors, folder / "q.safetensors", metadata)
    with safetensors.safe_open(folder / "q.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}
        return QuantizedTensor.from_tensors(found, file.metadata())


def through_pickle(q: QuantizedTensor, folder: Path) -> QuantizedTensor:
    return pickle.loads(pickle.dumps(q))


def through_copy(q: QuantizedTensor, folder: Path) -> QuantizedTensor:
    return copy.deepcopy(q)


def through_torch_whole(q: QuantizedTensor, folder: Path) -> QuantizedTensor:
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = [through_torch, through_safetensors, through_pickle, through_copy, through_torch_whole]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("spec", [*SPECS, CUSTOM], ids=str)
def test_what_is_saved_comes_back_bit_for_bit(
    spec: QuantSpec, way: Callable[[QuantizedTensor, Path], QuantizedTensor], tmp_path: Path
) -> None:
    x = torch.randn(6, 33)
    x[0, 3] = torch.nan if spec.format.has_nan or spec.scale_rule != "none" else 0.0
    q = quantized(x, spec)
    back = way(q, tmp_path)
    assert back is not q
    assert back.equal(q)
    assert q.equal(back)
    assert back.nbytes == q.nbytes
    assert repr(back) == repr(q)
    want = q.dequantize(torch.float64).view(torch.int64)
    assert torch.equal(back.dequantize(torch.float64).view(torch.int64), want)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (0, 16), (4, 0), (2, 3, 17), (3, 1)], ids=str)
@pytest.mark.parametrize("spec", [NVFP4, MX, TENSOR], ids=str)
def test_any_shape_is_saved(spec: QuantSpec, shape: tuple[int, ...], tmp_path: Path) -> None:
    q = quantize(torch.randn(shape), spec)
    assert through_safetensors(q, tmp_path).equal(q)


def test_transposed_operand_is_saved_in_its_own_order(tmp_path: Path) -> None:
    q = quantize(torch.randn(32, 48), SQUARE).t()
    back = through_safetensors(q, tmp_path)
    assert back.equal(q)
    assert torch.equal(back.dequantize(), q.dequantize())


def test_loaded_operand_multiplies_as_the_saved_one(tmp_path: Path) -> None:
    q, other = quantize(torch.randn(16, 64), NVFP4), quantize(torch.randn(8, 64), NVFP4)
    gemm = GemmSpec(a=NVFP4, b=NVFP4)
    back = through_torch(q, tmp_path)
    assert torch.equal(quantized_matmul(back, other, gemm), quantized_matmul(q, other, gemm))


def test_several_operands_share_a_file_under_their_prefixes(tmp_path: Path) -> None:
    kept = {"first.": quantize(torch.randn(4, 32), MX), "second.": quantize(torch.ones(2), TENSOR)}
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for prefix, q in kept.items():
        mine, strings = q.to_tensors(prefix)
        tensors, metadata = tensors | mine, metadata | strings
    safetensors.torch.save_file(tensors, tmp_path / "both", metadata)
    for prefix, q in kept.items():
        assert QuantizedTensor.from_tensors(tensors, metadata, prefix).equal(q)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t, m: t.pop("codes"), "codes: got no entry"),
        (lambda t, m: m.pop("shape"), "shape: got no entry"),
        (
            lambda t, m: t.pop("scale"),
            r"scale: got none; spec and shape ask for torch.uint8 \(4, 2",
        ),
        (lambda t, m: t.pop("tensor_amax"), "tensor_amax: got none"),
        (lambda t, m: t.update(scale=t["scale"].float()), "scale: got torch.float32"),
        (lambda t, m: t.update(scale=t["scale"][:2]), r"scale: got torch.uint8 \(2, 2\)"),
        (lambda t, m: m.update(shape="[4, 30]"), r"codes: got torch.uint8 \(4, 16\)"),
        (lambda t, m: m.update(spec='{"format": "e2m1", "blok": 1}'), "unknown key 'blok'"),
    ],
)
def test_damaged_entries_are_refused_by_name(change: Callable, match: str) -> None:
    tensors, metadata = quantize(torch.randn(4, 32), NVFP4).to_tensors()
    change(tensors, metadata)
    with pytest.raises(ValueError, match=match):
        QuantizedTensor.from_tensors(tensors, metadata)


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.is_delayed], ids=str)
def test_sliced_rows_are_the_rows_of_the_whole(spec: QuantSpec) -> None:
    q = quantized(torch.randn(256 + 40, 48), spec)
    for rows in (slice(128, 256), slice(None, 128), slice(256, None), slice(128, 128)):
        part = q[rows]
        assert part.shape == q.dequantize()[rows].shape
        assert torch.equal(part.dequantize(), q.dequantize()[rows])
        tensors, metadata = part.to_tensors()
        assert QuantizedTensor.from_tensors(tensors, metadata).equal(part)


def test_a_slice_of_blocks_without_a_tensor_factor_is_the_quantised_slice() -> None:
    x = torch.randn(64, 96)
    part = quantize(x, MX)[17:40]
    want = quantize(x[17:40], MX)
    assert part.equal(want)
    assert torch.equal(part.amax, want.amax)
    assert torch.equal(part.encode, want.encode)


def test_a_slice_shares_memory() -> None:
    q = quantize(torch.randn(8, 32), MX)
    assert q[2:4].codes.data_ptr() == q.codes[2:4].data_ptr()


def test_one_row_of_a_first_axis_is_as_many_as_the_inner_axes_hold() -> None:
    q = quantize(torch.randn(4, 8, 32), SQUARE)
    assert torch.equal(q[2:4].dequantize(), q.dequantize()[2:4])
    with pytest.raises(ValueError, match=r"rows: got an end at row 8 of the operand; blocks of"):
        q[1:3]


def test_the_amax_of_a_whole_axis_is_not_known_of_its_rows() -> None:
    q = quantize(torch.randn(8, 32), TENSOR)
    assert q.amax is not None
    assert q[:4].amax is None
    assert q[:4].scale is q.scale


@pytest.mark.parametrize(
    ("rows", "error", "match"),
    [
        (slice(0, 8), ValueError, r"end at row 8 .* share their scale over 16 rows; use multiples"),
        (slice(8, 32), ValueError, "end at row 8"),
        (slice(0, 32, 2), ValueError, "rows: got step 2"),
        (3, TypeError, "rows: got int"),
        (torch.tensor([1, 2]), TypeError, "rows: got Tensor"),
    ],
    ids=str,
)
def test_rows_that_cut_a_block_or_are_no_slice_are_refused(
    rows: object, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        quantize(torch.randn(40, 32), SQUARE)[rows]


def test_the_contraction_alone_is_not_sliced() -> None:
    with pytest.raises(ValueError, match="the contraction, its only axis, is not sliced"):
        quantize(torch.randn(32), MX)[:16]


def test_a_short_last_block_is_sliced_whole() -> None:
    q = quantize(torch.randn(40, 32), SQUARE)
    assert torch.equal(q[32:].dequantize(), q.dequantize()[32:])
    assert torch.equal(q[32:40].dequantize(), q.dequantize()[32:])


def test_equal_ignores_packing_and_memory_layout() -> None:
    x = torch.randn(16, 32)
    q = quantize(x, SQUARE)
    assert q.equal(quantize(x, SQUARE, packed=False))
    assert q.equal(q.t().t())
    assert q.equal(replace(q, amax=None, encode=None))


def test_equal_sees_every_difference() -> None:
    x = torch.randn(16, 32)
    q = quantize(x, NVFP4)
    codes, scale = q.codes.clone(), q.scale.clone()
    codes[3, 4] ^= 8
    scale[2, 1] ^= 1
    others = [
        replace(q, codes=codes),
        replace(q, scale=scale),
        replace(q, tensor_amax=q.tensor_amax.nextafter(torch.tensor(9.0))),
        replace(q, spec=replace(q.spec, rounding="stochastic")),
        quantize(x[:8], NVFP4),
        quantize(x, SQUARE),
    ]
    assert [other.equal(q) for other in others] == [False] * len(others)
    assert [q.equal(other) for other in others] == [False] * len(others)


def test_equal_compares_bits_so_that_nan_is_itself_and_zero_has_a_sign() -> None:
    x = torch.tensor([[0.0, 1.0], [torch.nan, 1.0]])
    spec = replace(TENSOR, block=(1, -1))
    assert quantize(x, spec).equal(quantize(x, spec))
    assert not quantize(x[:1], spec).equal(quantize(x[:1] * torch.tensor([-1.0, 1.0]), spec))


def test_equal_takes_only_its_like_and_operands_stay_hashable() -> None:
    q = quantize(torch.ones(2, 2), TENSOR)
    with pytest.raises(TypeError, match="other: got Tensor"):
        q.equal(torch.ones(2, 2))
    assert len({q, q, quantize(torch.ones(2, 2), TENSOR)}) == 2


def test_repr_names_what_it_is_without_codes() -> None:
    q = quantize(torch.randn(128, 64), replace(NVFP4, hadamard=True))
    assert repr(q) == (
        "QuantizedTensor(e2m1, shape=(128, 64), block=(1, 16), scale_rule='nvfp4', hadamard=True, "
        "nbytes=4612)"
    )
    assert not re.search("tensor\\(", repr(quantize(torch.ones(2), TENSOR)))


def test_nbytes_counts_codes_scales_and_the_tensor_factor() -> None:
    assert quantize(torch.randn(8, 33), NVFP4).nbytes == 8 * 17 + 8 * 3 + 4
    assert quantize(torch.randn(8, 64), MX).nbytes == 8 * 64 + 8 * 2
    assert quantize(torch.randn(8, 64), TENSOR).nbytes == 8 * 64 + 4
    assert quantize(torch.randn(8, 64), "bf16").nbytes == 8 * 64 * 2
