"""Which implementation runs where, and the reasons of those that do not."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from gemm.fake_cuda import FakeCuda
from mixprec.formats import FORMATS
from mixprec.gemm import GemmSpec, native, quantized_matmul, resolve
from mixprec.gemm.impl import scaled_mm
from mixprec.quantization import QuantizedTensor, QuantSpec, quantize

E4M3, E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]
TENSOR = QuantSpec(format=E4M3)
ROW = QuantSpec(format=E4M3, block=(1, -1), scale_rule="pow2")
GRADIENT = QuantSpec(format=E5M2)
FP16 = QuantSpec(format=FORMATS["fp16"], scale_rule="none")
PAIRS = {
    "tensor": (TENSOR, TENSOR),
    "row": (ROW, ROW),
    "gradient": (GRADIENT, TENSOR),
    "fp16": (FP16, FP16),
}


def operands(pair: str) -> list[QuantizedTensor]:
    return [quantize(torch.randn(16, 16), spec) for spec in PAIRS[pair]]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda((9, 0)).install(monkeypatch)


@pytest.mark.parametrize(
    ("a", "b", "out_dtype", "reason"),
    [
        (torch.ones(2, 2), None, torch.float32, "a: got a high-precision tensor"),
        (None, torch.ones(2, 2), torch.float32, "b: got a high-precision tensor"),
        (None, QuantSpec(format=FORMATS["e2m1"]), torch.float32, "b: got e2m1; the units multiply"),
        (QuantSpec(format=FORMATS["e4m3fnuz"]), None, torch.float32, "a: got e4m3fnuz"),
        (
            QuantSpec(format=E4M3, block=(1, 128)),
            None,
            torch.float32,
            r"a: got blocks of \(1, 128\)",
        ),
        (
            None,
            QuantSpec(format=E4M3, block=(128, -1)),
            torch.float32,
            r"b: got blocks of \(128, -1\)",
        ),
        (None, None, torch.float64, "out_dtype: got torch.float64"),
    ],
)
def test_why_not_names_the_operand_and_the_rule(
    a: QuantSpec | Tensor | None, b: QuantSpec | Tensor | None, out_dtype: torch.dtype, reason: str
) -> None:
    x = torch.ones(256, 256)
    given = [it if isinstance(it, Tensor) else quantize(x, it or TENSOR) for it in (a, b)]
    why = scaled_mm.why_not(*given, out_dtype)
    assert re.match(reason, why or "")


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (FakeCuda((8, 0)), r"device: compute capability 8\.0 \(Ampere\) has no FP8 units"),
        (FakeCuda((8, 6)), r"device: compute capability 8\.6 \(Ampere\) has no FP8 units"),
        (FakeCuda((7, 5)), r"device: compute capability 7\.5 \(Turing\) has no FP8 units"),
        (FakeCuda(kind="mps"), "device: got mps"),
        (FakeCuda(kind="rocm"), "device: got rocm"),
    ],
)
def test_why_not_names_the_device(
    fake: FakeCuda, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.install(monkeypatch)
    why = scaled_mm.why_not(*operands("tensor"), torch.float32)
    assert re.match(reason, why or "")


def test_e5m2_twice_is_refused_on_cuda_only(hopper: FakeCuda) -> None:
    a = b = quantize(torch.randn(16, 16), GRADIENT)
    assert scaled_mm.why_not(a, b, torch.float32) == (
        "a, b: got e5m2 twice; NVIDIA's units multiply e5m2 with e4m3 only"
    )


def test_why_slow_is_about_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = operands("tensor")
    assert "plain loop" in (scaled_mm.why_slow(a, b) or "")
    FakeCuda().install(monkeypatch)
    assert scaled_mm.why_slow(a, b) is None


@pytest.mark.parametrize(
    ("fake", "pair", "name", "reason"),
    [
        (FakeCuda((9, 0)), "row", "scaled_mm", "native"),
        (FakeCuda((8, 9)), "gradient", "scaled_mm", "native"),
        (FakeCuda((8, 0)), "row", "bf16_mm", r"device: compute capability 8\.0"),
        (FakeCuda((7, 5)), "tensor", "fp16_mm", r"device: compute capability 7\.5"),
        (FakeCuda((9, 0)), "fp16", "fp16_mm", "a: got fp16; its values are no BF16 numbers"),
        (FakeCuda((6, 1)), "fp16", "emulated", r"device: compute capability 6\.1"),
        (FakeCuda(kind="cpu"), "tensor", "emulated", "device: on a CPU .* plain loop"),
    ],
)
def test_auto_takes_the_units_that_are_there(
    fake: FakeCuda, pair: str, name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.install(monkeypatch)
    chosen, why = resolve(*operands(pair), torch.bfloat16)
    assert chosen == name
    assert re.match(rf".*{reason}", why)


def test_an_explicit_choice_never_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda((8, 0)).install(monkeypatch)
    spec = GemmSpec(a=ROW, b=ROW)
    x = torch.randn(16, 16)
    with pytest.raises(ValueError, match=r"impl: got 'scaled_mm'; device: .* 8\.0 \(Ampere\)"):
        quantized_matmul(x, x, spec, impl="scaled_mm")
    native_result = quantized_matmul(x, x, spec, impl="bf16_mm")
    torch.testing.assert_close(native_result, quantized_matmul(x, x, spec, impl="emulated"))


def test_device_facts_of_the_cpu() -> None:
    assert native.device_facts(torch.ones(1)) == ("cpu", None)
