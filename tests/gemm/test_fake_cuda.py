"""The fake itself: each rule of CUDA's contract, broken once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gemm.fake_cuda import FakeCuda

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def ones(rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
    return torch.ones(rows, columns).to(dtype)


def arguments(**changes: Any) -> dict[str, Any]:
    """A product that CUDA takes, with changes."""
    good = {
        "mat1": ones(32, 16),
        "mat2": ones(48, 16).t(),
        "scale_a": torch.ones(1, 1),
        "scale_b": torch.ones(1, 1),
        "out_dtype": torch.float32,
    }
    return good | changes


ROWS = {"scale_a": torch.ones(32, 1), "scale_b": torch.ones(1, 48)}
SHIFTED = torch.ones(32 * 16 + 8).to(E4M3)[8:].view(32, 16)
REFUSED = {
    "old GPU": ((8, 6), {}, RuntimeError, "compute capability"),
    "Ampere": ((8, 0), {}, RuntimeError, "compute capability"),
    "1-D": ((9, 0), {"mat1": ones(1, 16)[0]}, RuntimeError, "mat1 must be a matrix"),
    "contraction": ((9, 0), {"mat1": ones(32, 32)}, RuntimeError, "cannot be multiplied"),
    "K": (
        (9, 0),
        {"mat1": ones(32, 24), "mat2": ones(48, 24).t()},
        RuntimeError,
        "mat1 to be divisible by 16",
    ),
    "N": ((9, 0), {"mat2": ones(40, 16).t()}, RuntimeError, "must be divisible by 16"),
    "type": ((9, 0), {"mat1": torch.ones(32, 16)}, RuntimeError, "Float8"),
    "e5m2 twice": (
        (9, 0),
        {"mat1": ones(32, 16, E5M2), "mat2": ones(48, 16, E5M2).t()},
        ValueError,
        "two Float8_e5m2",
    ),
    "row-major b": ((9, 0), {"mat2": ones(16, 48)}, RuntimeError, "row-major and column-major"),
    "column-major a": (
        (9, 0),
        {"mat1": ones(16, 32).t()},
        RuntimeError,
        "row-major and column-major",
    ),
    "address": ((9, 0), {"mat1": SHIFTED}, RuntimeError, "NOT_SUPPORTED"),
    "leading dimension": (
        (9, 0),
        {"mat1": ones(32, 24)[:, :16]},
        RuntimeError,
        "NOT_SUPPORTED",
    ),
    "scale type": (
        (9, 0),
        {"scale_a": torch.ones(1, 1, dtype=torch.float64)},
        RuntimeError,
        "Invalid scaling",
    ),
    "mixed scales": ((9, 0), {"scale_a": torch.ones(32, 1)}, RuntimeError, "Invalid scaling"),
    "1-D row scale": (
        (9, 0),
        ROWS | {"scale_a": torch.ones(32)},
        RuntimeError,
        "Invalid scaling",
    ),
    "strided row scale": (
        (9, 0),
        ROWS | {"scale_a": torch.ones(32, 2)[:, :1]},
        RuntimeError,
        "Invalid scaling",
    ),
    "swapped row scale": (
        (9, 0),
        ROWS | {"scale_b": torch.ones(48, 1)},
        RuntimeError,
        "Invalid scaling",
    ),
    "bias size": ((9, 0), {"bias": torch.ones(16)}, RuntimeError, "Bias must be size"),
    "bias with float32": (
        (9, 0),
        {"bias": torch.ones(48)},
        RuntimeError,
        "not supported when out_dtype is set to Float32",
    ),
    "float32 bias": (
        (9, 0),
        {"bias": torch.ones(48), "out_dtype": torch.bfloat16},
        RuntimeError,
        "Bias must be BFloat16 or Half",
    ),
    "bias of another type": (
        (9, 0),
        {"bias": torch.ones(48).half(), "out_dtype": torch.bfloat16},
        RuntimeError,
        "BFloat16 to compute",
    ),
    "float64 result": ((9, 0), {"out_dtype": torch.float64}, RuntimeError, "NOT_SUPPORTED"),
    "rows in float32, Ada": ((8, 9), ROWS, ValueError, "Only bf16 and fp16"),
    "rows in float32, Blackwell": ((10, 0), ROWS, ValueError, "Only bf16 and fp16"),
    "rows with e5m2 on the right": (
        (10, 0),
        ROWS | {"mat2": ones(48, 16, E5M2).t(), "out_dtype": torch.bfloat16},
        RuntimeError,
        "kFloat8_e4m3fn",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_scaled_mm_refuses_what_cuda_refuses(case: str) -> None:
    capability, changes, error, message = REFUSED[case]
    fake = FakeCuda(capability)
    with pytest.raises(error, match=message):
        fake.scaled_mm(**arguments(**changes))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_scaled_mm_computes_where_cuda_does(capability: tuple[int, int]) -> None:
    fake = FakeCuda(capability)
    scales = {"scale_a": torch.tensor(2.0), "scale_b": torch.tensor(3.0)}
    assert fake.scaled_mm(**arguments(**scales)).eq(96).all()
    rows = fake.scaled_mm(**arguments(**ROWS, out_dtype=torch.bfloat16))
    assert rows.dtype == torch.bfloat16
    assert rows.eq(16).all()


def test_row_scales_in_float32_need_the_newer_cublas_of_hopper() -> None:
    assert FakeCuda((9, 0)).scaled_mm(**arguments(**ROWS)).eq(16).all()
    with pytest.raises(ValueError, match="Only bf16 and fp16"):
        FakeCuda((9, 0), has_row_scales_in_cublas=False).scaled_mm(**arguments(**ROWS))


def test_row_scales_in_float16_are_silently_wrong_outside_cublas() -> None:
    result = FakeCuda((8, 9)).scaled_mm(**arguments(**ROWS, out_dtype=torch.float16))
    assert not result.eq(16).any()
    assert result.view(torch.bfloat16).eq(16).all()


def test_an_empty_contraction_drops_the_bias() -> None:
    result = FakeCuda().scaled_mm(
        **arguments(
            mat1=ones(32, 0),
            mat2=ones(48, 0).t(),
            bias=torch.ones(48).bfloat16(),
            out_dtype=torch.bfloat16,
        )
    )
    assert result.eq(0).all()


@pytest.mark.parametrize(
    ("left", "right", "out_dtype", "message"),
    [
        (torch.bfloat16, torch.float16, torch.float32, "input dtypes must be the same"),
        (torch.float32, torch.float32, torch.float64, "out_dtype must be the same"),
        (torch.bfloat16, torch.bfloat16, torch.float16, "out_dtype must be the same"),
    ],
)
def test_mm_refuses_what_cuda_refuses(
    left: torch.dtype, right: torch.dtype, out_dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        FakeCuda().mm(
            torch.ones(2, 3, dtype=left), torch.ones(3, 2, dtype=right), out_dtype=out_dtype
        )


def test_mm_keeps_float32_sums() -> None:
    a = torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16)
    b = torch.ones(2, 1, dtype=torch.bfloat16)
    assert FakeCuda().mm(a, b, out_dtype=torch.float32).item() == 257.0
