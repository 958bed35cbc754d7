"""Products on units of 16 bits: values that their type holds, float32 sums, then scales.

    result[m, n] = (sum_k a[m, k] * b[n, k]) * scale_a[m] * scale_b[n] + bias[n]

``BF16``, the fast path of CUDA GPUs without FP8 units (Ampere), takes every format whose values are
bfloat16 numbers: FP8, FP6, FP4 and bfloat16 itself. ``FP16`` takes those whose values are float16
numbers, on GPUs from Volta on. An operand in high precision joins in if it has the units' type.

``torch.mm(..., out_dtype=torch.float32)`` keeps the float32 sums; in torch 2.11 to 2.13 it exists
on CUDA and not on the CPU. Autocast does not touch it. The bound takes it that
``torch.backends.cuda.matmul.allow_fp16_accumulation`` is off, as it is by default.

Scales of blocks along the contraction are applied before the sum, where the units' type holds
every value times its scale; what is left, a scale a row or a tensor, follows the sum. BF16 has the
range of the scales, FP16 has not and takes none.

Exactness: operands bit for bit; sums within (K + 3) * 2^-24 * scale * sum|a||b|, plus half an ulp
of the result's type. At the lower end of the range bfloat16 differs from FP32: of values times
their block's scale, those below 2^-126 may be flushed to zero by the units, and those that are no
multiples of 2^-133 are rounded. That needs a scale below 2^-126 divided by the format's smallest
value (e4m3: 2^-117, so an amax below 2^-108; e2m1: 2^-125); nvfp4's block scales are never so
small. Looking for such blocks would stop the GPU. M, N, K as in ``native``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mixprec.formats import FloatFormat, get_format
from mixprec.gemm import native
from mixprec.hardware import generation
from mixprec.quantization import Operand, QuantizedTensor
from mixprec.rounding import holds
from mixprec.scale_rules import SCALE_RULES
from mixprec.scaling import times_blocks


@dataclass(frozen=True, slots=True)
class HalfUnits:
    """Products on the units of one type.

    Attributes:
        format: The type as a format.
        dtype: torch's name of it.
        title: Its name in messages.
        since: The first compute capability of NVIDIA with such units.
        has_range_of_scales: Whether values may be scaled before the sum: the type has the range of
            float32.
    """

    format: FloatFormat
    dtype: torch.dtype
    title: str
    since: str
    has_range_of_scales: bool

    def why_not(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> str | None:
        """Why these operands cannot be multiplied here, or None.

        Args:
            a: [M, K].
            b: [N, K].
            out_dtype: Type of the result.

        Returns:
            One line that names the argument and the rule.
        """
        # asked first and alone: on a CPU it spares every product the rest
        reason = self._why_not_device(native.stored(a))
        if reason is not None:
            return reason
        return native.first_reason(
            self._why_not_operand("a", a),
            self._why_not_operand("b", b),
            native.why_not_out_dtype(out_dtype),
        )

    def _why_not_operand(self, name: str, operand: Operand) -> str | None:
        if isinstance(operand, QuantizedTensor):
            if not holds(self.format, operand.spec.format):
                return f"{name}: got {operand.spec.format}; its values are no {self.title} numbers"
            return self._why_not_scales(name, operand)
        if operand.dtype != self.dtype:
            return (
                f"{name}: got {operand.dtype} in high precision; {self.title} units take "
                f"{self.dtype} alone"
            )
        return None

    def _why_not_scales(self, name: str, q: QuantizedTensor) -> str | None:
        if native.follows_sums(q):
            return None
        rule, bits = SCALE_RULES[q.spec.scale_rule], q.spec.format.mantissa
        # a product has one mantissa bit more than its factors together, unless one is a power of 2
        bits += rule.mantissa + 1 if rule.mantissa else 0
        if not self.has_range_of_scales or bits > self.format.mantissa:
            return (
                f"{name}: got blocks of {q.spec.block} scaled by {q.spec.scale_rule}; {self.title} "
                "does not hold the values times their scales"
            )
        return None

    def _why_not_device(self, x: Tensor) -> str | None:
        kind, capability = native.device_facts(x)
        if capability is None:
            return (
                f"device: got {kind}; torch.mm with float32 sums of 16 bits is there on cuda only"
            )
        unit = generation(capability)
        if unit.multiplies(self.format):
            return None
        major, minor = capability
        return (
            f"device: compute capability {major}.{minor} ({unit.name}) has no {self.title} units; "
            f"{self.since} has"
        )

    def why_slow(self, a: Operand, b: Operand) -> str | None:
        """None: where the units exist they are faster than the emulation."""
        return None

    def note(self, a: Operand, b: Operand) -> str | None:
        """None: the units add in FP32."""
        return None

    def prepare(self, x: Operand) -> Operand:
        """The operand itself: decoding costs little beside a product on a GPU."""
        return x

    def matmul(
        self, a: Operand, b: Operand, *, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """a @ b.T with scales, plus bias, in out_dtype.

        Args:
            a: [M, K], codes whose values the units' type holds, or a tensor of that type
                (``why_not`` gives None).
            b: [N, K] alike.
            bias: [N], any floating-point type; added in float32.
            out_dtype: float32, bfloat16 or float16.

        Returns:
            [M, N], contiguous.

        Edge cases: M, N or K may be 0 (K = 0 gives the bias); a NaN scale makes its block NaN, and
        so its row or column, or the whole result.
        """
        sums_MN = torch.mm(self._values(a), self._values(b).t(), out_dtype=torch.float32)
        return native.add_bias_and_round(native.apply_scales(sums_MN, a, b), bias, out_dtype)

    def _values(self, operand: Operand) -> Tensor:
        if isinstance(operand, Tensor):
            return operand
        values = operand.values
        if not native.follows_sums(operand):
            values = times_blocks(values, operand.block_scale, operand.spec.block, in_place=True)
        return values.to(self.dtype)


BF16 = HalfUnits(get_format("bf16"), torch.bfloat16, "BF16", "8.0", has_range_of_scales=True)
FP16 = HalfUnits(get_format("fp16"), torch.float16, "FP16", "7.0", has_range_of_scales=False)
