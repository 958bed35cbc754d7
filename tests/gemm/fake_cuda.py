"""A strict stand-in for torch's CUDA products, for machines without a GPU.

It replaces ``torch._scaled_mm``, ``torch.nn.functional.scaled_mm`` (with the rules of
``fake_block_scales``) and ``torch.mm(out_dtype=)``, checks what CUDA checks, in its order
and with its exception types, and then computes: sums in float64, one rounding to float32, scales,
bias, one rounding to the result's type.

The rules are those of torch 2.11 to 2.13, read from ATen/native/cuda/ScaledBlas.cpp,
RowwiseScaledMM.cu, Blas.cpp and the cuBLASLt guide. Where CUDA is silently wrong, so is the fake.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from gemm.fake_block_scales import check_product, decoded
from mixprec.gemm import native

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ALIGNMENT = 16


@dataclass
class Call:
    """The arguments of one product, as torch got them."""

    name: str
    a: Tensor
    b: Tensor
    out_dtype: torch.dtype | None
    scales: tuple[Tensor, ...] = ()


@dataclass
class FakeCuda:
    """A GPU of a compute capability, with or without the cuBLAS (12.9) that knows row scales."""

    capability: tuple[int, int] = (9, 0)
    has_row_scales_in_cublas: bool = True
    kind: str = "cuda"
    calls: list[Call] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
        capability = self.capability if self.kind == "cuda" else None
        monkeypatch.setattr(native, "device_facts", lambda x: (self.kind, capability))
        monkeypatch.setattr(torch, "_scaled_mm", self.scaled_mm)
        monkeypatch.setattr(torch, "mm", self.mm)
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", self.block_scaled_mm)
        return self

    def block_scaled_mm(
        self,
        mat_a: Tensor,
        mat_b: Tensor,
        scale_a: Tensor,
        scale_recipe_a: ScalingType,
        scale_b: Tensor,
        scale_recipe_b: ScalingType,
        swizzle_a: SwizzleType | None = None,
        swizzle_b: SwizzleType | None = None,
        bias: Tensor | None = None,
        output_dtype: torch.dtype | None = torch.bfloat16,
        contraction_dim: tuple[int, ...] = (),
        use_fast_accum: bool = False,
    ) -> Tensor:
        self.calls.append(Call("block_scaled_mm", mat_a, mat_b, output_dtype, (scale_a, scale_b)))
        check_shapes(mat_a, mat_b)
        check(bias is None, "Bias is not supported when out_dtype is set to Float32")
        check(not use_fast_accum, "use_fast_accum is not supported")
        check(output_dtype in (torch.float32, torch.bfloat16, torch.float16), "out_dtype")
        b, types = mat_b.t(), (scale_recipe_a, scale_recipe_b)
        swizzles = swizzle_a, swizzle_b
        check_product(self.capability, mat_a, b, (scale_a, scale_b), types, swizzles)
        a_values = decoded(mat_a, scale_a, scale_recipe_a)
        return (a_values @ decoded(b, scale_b, scale_recipe_b).t()).to(output_dtype)

    def scaled_mm(
        self,
        mat1: Tensor,
        mat2: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        scale_result: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        self.calls.append(Call("scaled_mm", mat1, mat2, out_dtype, (scale_a, scale_b)))
        out_dtype = mat1.dtype if out_dtype is None else out_dtype
        check(
            self.capability >= (9, 0) or self.capability == (8, 9),
            "_scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9",
        )
        check_shapes(mat1, mat2)
        is_row_scaled = check_scales(mat1, mat2, scale_a, scale_b)
        check(bias is None or bias.numel() == mat2.shape[1], "Bias must be size")
        check(mat1.shape[1] % 16 == 0, "trailing dimension of mat1 to be divisible by 16")
        check(mat2.shape[0] % 16 == 0 and mat2.shape[1] % 16 == 0, "must be divisible by 16")
        check(mat1.dtype in FLOAT8 and mat2.dtype in FLOAT8, "to be Float8")
        check(
            not mat1.dtype == mat2.dtype == torch.float8_e5m2,
            "Multiplication of two Float8_e5m2 matrices is not supported",
            ValueError,
        )
        check_bias(bias, out_dtype)
        if 0 in (*mat1.shape, mat2.shape[1]):
            return torch.zeros(mat1.shape[0], mat2.shape[1], dtype=out_dtype)
        check_layout(mat1, mat2)
        check_out_dtype(out_dtype, mat1, mat2)
        is_cutlass = is_row_scaled and not (
            self.capability[0] == 9 and self.has_row_scales_in_cublas
        )
        if is_cutlass:
            check_cutlass(mat2, out_dtype)
        sums = (mat1.double() @ mat2.double()).float() * scale_a * scale_b
        if bias is not None:
            sums = sums + bias.float()
        if is_cutlass and out_dtype == torch.float16 and bias is None:
            return sums.to(torch.bfloat16).view(torch.float16)
        return sums.to(out_dtype)

    def mm(self, mat1: Tensor, mat2: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        self.calls.append(Call("mm", mat1, mat2, out_dtype))
        check_shapes(mat1, mat2)
        check(mat1.dtype == mat2.dtype, "input dtypes must be the same")
        out_dtype = mat1.dtype if out_dtype is None else out_dtype
        is_widened = out_dtype == torch.float32 and mat1.dtype in (torch.float16, torch.bfloat16)
        check(
            out_dtype == mat1.dtype or is_widened,
            "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs",
        )
        return (mat1.double() @ mat2.double()).to(torch.float32).to(out_dtype)


def check(holds: bool, message: str, error: type[Exception] = RuntimeError) -> None:
    if not holds:
        raise error(message)


def check_shapes(mat1: Tensor, mat2: Tensor) -> None:
    check(mat1.dim() == 2, "mat1 must be a matrix")
    check(mat2.dim() == 2, "mat2 must be a matrix")
    check(mat1.shape[1] == mat2.shape[0], "shapes cannot be multiplied")


def check_scales(mat1: Tensor, mat2: Tensor, scale_a: Tensor, scale_b: Tensor) -> bool:
    """Whether the scales are one a row; raises when they are neither that nor one a tensor."""
    is_float = scale_a.dtype == scale_b.dtype == torch.float32
    if is_float and scale_a.numel() == scale_b.numel() == 1:
        return False
    is_row = (
        tuple(scale_a.shape) == (mat1.shape[0], 1)
        and tuple(scale_b.shape) == (1, mat2.shape[1])
        and scale_a.is_contiguous()
        and scale_b.t().is_contiguous()
    )
    check(is_float and is_row, "Invalid scaling configuration.")
    return True


def check_bias(bias: Tensor | None, out_dtype: torch.dtype) -> None:
    if bias is None:
        return
    check(out_dtype != torch.float32, "Bias is not supported when out_dtype is set to Float32")
    check(bias.dtype in (torch.bfloat16, torch.float16), "Bias must be BFloat16 or Half")
    if out_dtype == torch.bfloat16:
        check(bias.dtype == torch.bfloat16, "Bias must be BFloat16 to compute")
    if out_dtype == torch.float16:
        check(bias.dtype == torch.float16, "Bias must be Float16 to compute")


def check_layout(mat1: Tensor, mat2: Tensor) -> None:
    """Row-major times column-major, leading dimensions and addresses in 16 bytes.

    Blackwell takes other layouts as well, but torch's shape function for compiled code does not.
    """
    check(
        mat1.stride(1) == 1 and mat1.stride(0) > 1 and mat1.stride(0) >= mat1.shape[1],
        "Only multiplication of row-major and column-major matrices is supported by cuBLASLt",
    )
    check(
        mat2.stride(0) == 1 and mat2.stride(1) > 1 and mat2.stride(1) >= mat2.shape[0],
        "Only multiplication of row-major and column-major matrices is supported by cuBLASLt",
    )
    is_aligned = all(
        x.data_ptr() % ALIGNMENT == 0 and max(x.stride()) % ALIGNMENT == 0 for x in (mat1, mat2)
    )
    check(is_aligned, "CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic")


def check_out_dtype(out_dtype: torch.dtype, mat1: Tensor, mat2: Tensor) -> None:
    """cuBLASLt's table of results of FP8 products."""
    wide = (torch.float32, torch.bfloat16, torch.float16)
    check(
        out_dtype in (*wide, mat1.dtype, mat2.dtype),
        "CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmulAlgoGetHeuristic",
    )


def check_cutlass(mat2: Tensor, out_dtype: torch.dtype) -> None:
    check(
        out_dtype in (torch.bfloat16, torch.float16),
        "Only bf16 and fp16 high precision output types are supported for row-wise scaling.",
        ValueError,
    )
    check(mat2.dtype == torch.float8_e4m3fn, "Expected b.dtype() == at::kFloat8_e4m3fn")
