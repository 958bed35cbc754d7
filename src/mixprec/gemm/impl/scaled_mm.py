"""Products of FP8 and FP4 operands by torch's scaled matrix product: cuBLASLt, CUTLASS, the CPU.

    result[m, n] = (sum_k a[m, k] * b[n, k]) * scale_a[m] * scale_b[n] + bias[n]

The codes go to the units as they are, a view of the same bytes. Three ways lead through
``torch._scaled_mm``, all with float32 sums and ``use_fast_accum=False``:

- two scales a tensor: torch applies them;
- a scale a row, bfloat16 result without bias, on CUDA: torch applies them and rounds once;
- everything else: sums with scale 1 in float32; scales, bias and rounding follow here. torch's row
  scales cannot serve there: most GPUs refuse them with a float32 result, and up to torch 2.13 a
  float16 result comes back as the bits of bfloat16. Its bias must have the type of the result, so
  that a float32 bias would be rounded.

The contract (torch 2.11 to 2.13, CUDA): compute capability 8.9, or 9.0 and above; the first operand
row-major, the second column-major; K and N multiples of 16; e5m2 with e5m2 refused; row scales
contiguous [M, 1] and [1, N], with the second operand e4m3 outside cuBLAS. Sizes are filled up with
codes of zero, which add nothing, and the result is cut.

Scales of blocks go to ``torch.nn.functional.scaled_mm`` in the layouts of ``block_scales``, for
float32 results; the factors of whole tensors, bias and rounding follow here. MXFP4 is not among
them: torch's product of it gives bfloat16 alone and is not in every build.

Exactness: operands bit for bit; sums within (K + 3) * 2^-24 * scale * sum|a||b|, plus half an ulp
of the result's type, where the units add in float32. Hopper's units add the products of one
instruction in fewer bits; ``use_fast_accum=False`` has their partial sums collected in float32.

Sources: PyTorch, ATen/native/cuda/ScaledBlas.cpp and RowwiseScaledMM.cu; NVIDIA, cuBLAS library
guide (cublasLtMatmul, FP8). M, N, K as in ``native``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mixprec.codes import float8_dtype
from mixprec.gemm import block_scales, native
from mixprec.hardware import generation
from mixprec.quant_spec import QuantSpec
from mixprec.quantization import Operand, QuantizedTensor

_MULTIPLE = 16


def why_not(a: Operand, b: Operand, out_dtype: torch.dtype) -> str | None:
    """Why these operands cannot be multiplied here, or None.

    Args:
        a: [M, K].
        b: [N, K].
        out_dtype: Type of the result.

    Returns:
        One line that names the argument and the rule.
    """
    for name, operand in (("a", a), ("b", b)):
        if not isinstance(operand, QuantizedTensor):
            return f"{name}: got a high-precision tensor; both operands must be FP8"
    assert isinstance(a, QuantizedTensor)
    assert isinstance(b, QuantizedTensor)
    if block_scales.are_in_blocks(a, b):
        reason = _why_not_blocks(a, b)
        return native.first_reason(reason, native.why_not_out_dtype(out_dtype))
    for name, q in (("a", a), ("b", b)):
        if float8_dtype(q.spec.format) is None:
            return f"{name}: got {q.spec.format}; the units multiply e4m3 and e5m2"
    return native.first_reason(native.why_not_out_dtype(out_dtype), _why_not_device(a, b))


def _why_not_blocks(a: QuantizedTensor, b: QuantizedTensor) -> str | None:
    kind, capability = native.device_facts(a.codes)
    if capability is not None:
        return block_scales.why_not_specs(a.spec, b.spec, capability)
    name, q = ("b", b) if native.follows_sums(a) else ("a", a)
    return f"{name}: got blocks of {q.spec.block} on {kind}; torch's product of blocks is on cuda"


def _why_not_device(a: Operand, b: Operand) -> str | None:
    kind, capability = native.device_facts(native.stored(a))
    if kind == "cpu":
        return None
    if capability is None:
        return f"device: got {kind}; torch's scaled product is used on cuda and cpu"
    assert isinstance(a, QuantizedTensor)
    assert isinstance(b, QuantizedTensor)
    unit = generation(capability)
    if not unit.multiplies(a.spec.format):
        major, minor = capability
        return f"device: compute capability {major}.{minor} ({unit.name}) has no FP8 units; 8.9 has"
    if float8_dtype(a.spec.format) == float8_dtype(b.spec.format) == torch.float8_e5m2:
        return "a, b: got e5m2 twice; NVIDIA's units multiply e5m2 with e4m3 only"
    return None


def why_slow(a: Operand, b: Operand) -> str | None:
    """Why ``auto`` passes this by although it can run, or None."""
    if native.device_facts(native.stored(a))[0] != "cpu":
        return None
    # measured on one thread with torch 2.13, 1024x1024x1024: 59 s, float32 takes 0.03 s
    return "device: on a CPU torch's scaled product is a plain loop, 1000 times slower than float32"


def note(a: Operand, b: Operand) -> str | None:
    """What the units' sums do differently from FP32's, with their bound, or None."""
    _, capability = native.device_facts(native.stored(a))
    if capability is None:
        return None
    assert isinstance(a, QuantizedTensor)
    return (generation(capability).fp8_sums or None) if float8_dtype(a.spec.format) else None


def matmul(a: Operand, b: Operand, *, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """a @ b.T with scales, plus bias, in out_dtype.

    Args:
        a: [M, K], codes with the scales that ``why_not`` gives None for.
        b: [N, K] alike.
        bias: [N], any floating-point type; added in float32.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        [M, N], contiguous.

    Edge cases: M, N or K may be 0 (K = 0 gives the bias); a NaN scale makes its row or column, or
    the whole result, NaN.
    """
    assert isinstance(a, QuantizedTensor)
    assert isinstance(b, QuantizedTensor)
    if block_scales.are_in_blocks(a, b):
        sums = _sums_of_blocks(a, b)
        for factor in (a.tensor_scale, b.tensor_scale):
            sums = sums if factor is None else sums.mul_(factor)
        return native.add_bias_and_round(sums, bias, out_dtype)
    a_MK, b_NK = _operand(a, fill_rows=False), _operand(b, fill_rows=True)
    product_dtype = out_dtype if bias is None else torch.float32
    scales = _torch_scales(a, b, b_NK.shape[0], product_dtype)
    if scales is None:
        one = torch.ones((), device=a_MK.device)
        product = _scaled_mm(a_MK, b_NK, (one, one), torch.float32, b.codes.shape[0])
        product = native.apply_scales(product, a, b)
    else:
        product = _scaled_mm(a_MK, b_NK, scales, product_dtype, b.codes.shape[0])
    return native.add_bias_and_round(product, bias, out_dtype)


def _sums_of_blocks(a: QuantizedTensor, b: QuantizedTensor) -> Tensor:
    """float32 [M, N]: values times the scales of their blocks, without the factors of tensors."""
    rows, columns = a.codes.shape[0], b.codes.shape[0]
    if 0 in (rows, columns, a.codes.shape[1]):
        return torch.zeros(rows, columns, device=a.codes.device)
    types = [block_scales.scaling_of(q.spec) for q in (a, b)]
    assert types[0] is not None
    assert types[1] is not None
    sums = torch.nn.functional.scaled_mm(
        block_scales.elements(a, fill_rows=True),
        block_scales.elements(b, fill_rows=True).t(),
        block_scales.scales(a, fill_rows=True),
        types[0].scaling_type,
        block_scales.scales(b, fill_rows=True),
        types[1].scaling_type,
        swizzle_a=block_scales.swizzle(types[0]),
        swizzle_b=block_scales.swizzle(types[1]),
        output_dtype=torch.float32,
        use_fast_accum=False,
    )
    return sums[:rows, :columns].contiguous()


def _operand(q: QuantizedTensor, *, fill_rows: bool) -> Tensor:
    """Codes as torch's FP8 type, row-major, aligned, filled up with zeros; a view if possible."""
    codes = q.codes
    more_rows = _missing(codes.shape[0]) if fill_rows else 0
    more_columns = _missing(codes.shape[1])
    if more_rows or more_columns:
        codes = pad(codes, (0, more_columns, 0, more_rows))
    is_row_major = codes.stride() == (codes.shape[1], 1)
    # Dynamo cannot read an offset; compiled code is given tensors at their start
    is_aligned = torch.compiler.is_compiling() or codes.storage_offset() % _MULTIPLE == 0
    if not (is_row_major and is_aligned):
        codes = codes.clone(memory_format=torch.contiguous_format)
    dtype = float8_dtype(q.spec.format)
    assert dtype is not None
    return codes.view(dtype)


def filled(a: QuantSpec, b: QuantSpec, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """M, N and K as the units multiply them, filled up with zeros.

    Args:
        a, b: How the operands are quantised.
        sizes: M, N and K of the product.
    """
    m, n, k = sizes
    scaling = block_scales.scaling_of(a)
    if scaling is None or block_scales.scaling_of(b) is None:
        return m, n + _missing(n), k + _missing(k)
    return m + -m % _MULTIPLE, n + -n % _MULTIPLE, k + -k % scaling.fill


def _missing(size: int) -> int:
    """What a size lacks to a multiple; an empty axis is filled too, where torch skips the work."""
    return -size % _MULTIPLE if size else _MULTIPLE


def _torch_scales(
    a: QuantizedTensor, b: QuantizedTensor, rows: int, product_dtype: torch.dtype
) -> tuple[Tensor, Tensor] | None:
    """Scales as torch takes them, b's filled up to rows; None where they must follow the sums."""
    if a.scale is None or b.scale is None:
        return None
    if a.scale.numel() == b.scale.numel() == 1:
        return a.scale, b.scale
    is_e4m3 = float8_dtype(b.spec.format) == torch.float8_e4m3fn
    is_cuda = native.device_facts(a.codes)[0] == "cuda"
    if not (is_cuda and is_e4m3 and product_dtype == torch.bfloat16):
        return None
    scale_a = a.scale.expand(a.codes.shape[0], 1)
    scale_b = b.scale.expand(b.codes.shape[0], 1)
    scale_b = pad(scale_b, (0, 0, 0, rows - scale_b.shape[0]), value=1.0)
    return scale_a.contiguous(), scale_b.contiguous().t()


def _scaled_mm(
    a_MK: Tensor, b_NK: Tensor, scales: tuple[Tensor, Tensor], dtype: torch.dtype, columns: int
) -> Tensor:
    product = torch._scaled_mm(a_MK, b_NK.t(), *scales, out_dtype=dtype, use_fast_accum=False)
    return product[:, :columns].contiguous()


def prepare(x: Operand) -> Operand:
    """The operand itself: the units take codes, nothing is worth keeping."""
    return x
