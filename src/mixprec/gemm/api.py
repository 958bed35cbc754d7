"""The product of two operands, each quantised or not, and the choice of what runs it.

    out[..., M, N] = (sum over k of a_values[m, k] * b_values[n, k]) * scale_a * scale_b + bias[n]

The contraction axis is last for both operands, always.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from mixprec.formats import FloatFormat
from mixprec.gemm.accumulation import EXACT, FP32, MODELS, Accumulate, check_accumulate
from mixprec.gemm.impl import emulated, exact, half_mm, scaled_mm
from mixprec.gemm.native import first_reason
from mixprec.noise import Noise
from mixprec.quant_spec import UNSCALED
from mixprec.quantization import Operand, QuantizedTensor, QuantSpec, quantize
from mixprec.rounding import SOURCE_FORMATS, can_look_at, check_floating, round_float
from mixprec.scaling import delayed_state


class _Impl(Protocol):
    """What a module in ``impl``, or an object in one, offers."""

    def why_not(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> str | None:
        """Why these operands cannot be multiplied here, or None."""

    def why_slow(self, a: Operand, b: Operand) -> str | None:
        """Why ``auto`` passes this by although it can run, or None."""

    def note(self, a: Operand, b: Operand) -> str | None:
        """What its sums do differently from FP32's, with their bound, or None."""

    def prepare(self, x: Operand) -> Operand:
        """The operand, with what several products would do anew each time."""

    def matmul(
        self, a: Operand, b: Operand, *, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        """a[M, K] times b[N, K] over the contraction, plus bias, in out_dtype."""


_IMPLS: dict[str, _Impl] = {
    "scaled_mm": scaled_mm,
    "bf16_mm": half_mm.BF16,
    "fp16_mm": half_mm.FP16,
    "emulated": emulated,
    "exact": exact,
}
IMPLS = tuple(_IMPLS)
"""The implementations, in the order in which ``auto`` asks them; it never comes to the last one,
which exact sums alone ask for."""
EMULATED = "emulated"
_NARROW = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSpec:
    """The two operands of one product, and its result; None is high precision.

    Args:
        a: How a[M, K] is quantised.
        b: How b[N, K] is quantised.
        out: How the result is rounded before it is held in its type; without a scale.
        accumulate: How products are added: in ``fp32``, or by a model of units that add in fewer
            bits (``accumulation.MODELS``), for two operands of 8 bits or less; emulated only. Or
            ``exact``, for two operands of high precision, in float64 by integer products.
    """

    a: QuantSpec | None = None
    b: QuantSpec | None = None
    out: QuantSpec | None = None
    accumulate: Accumulate = FP32

    def __post_init__(self) -> None:
        for name, spec in (("a", self.a), ("b", self.b), ("out", self.out)):
            if spec is not None and not isinstance(spec, QuantSpec):
                raise TypeError(
                    f"{name}: got {type(spec).__name__}; must be a QuantSpec or None; pass "
                    "QuantSpec(format=...)"
                )
        if _is_transformed(self.a) != _is_transformed(self.b):
            raise ValueError(
                "hadamard: got it for one operand; only both together leave the product unchanged; "
                "set it for a and b"
            )
        if self.out is not None and (self.out.scale_rule != UNSCALED or self.out.is_stochastic):
            raise ValueError(
                f"out: got {self.out}; a result is rounded to nearest without a scale; use "
                "QuantSpec(format=..., scale_rule='none')"
            )
        rounded = [name for name in ("a", "b", "out") if getattr(self, name) is not None]
        if check_accumulate(self.accumulate) == EXACT and rounded:
            raise ValueError(
                f"accumulate: got {EXACT!r} with a spec for {', '.join(rounded)}; it is of two "
                "operands in high precision; leave them as they are, or use 'fp32'"
            )
        if self.accumulate in MODELS and not self.is_narrow:
            raise ValueError(
                f"accumulate: got {self.accumulate!r} with operands {self.a} and {self.b}; the "
                "models are of units for operands of 8 bits or less; use 'fp32'"
            )

    @property
    def is_narrow(self) -> bool:
        """Whether both operands are quantised to 8 bits or less."""
        return all(spec is not None and spec.format.bits <= _NARROW for spec in (self.a, self.b))

    @property
    def is_plain(self) -> bool:
        """Whether it is torch's own product: nothing quantised, added up as usual."""
        return self.a is None and self.b is None and self.out is None and self.accumulate == FP32

    @property
    def is_exact(self) -> bool:
        """Whether it multiplies in float64, with exact sums."""
        return self.accumulate == EXACT


def _is_transformed(spec: QuantSpec | None) -> bool:
    return spec is not None and spec.hadamard


def check_impl(impl: str) -> str:
    """The name itself, if it is ``auto`` or one of ``IMPLS``."""
    if impl != "auto" and impl not in _IMPLS:
        raise ValueError(f"impl: got {impl!r}; must be one of auto, {', '.join(IMPLS)}")
    return impl


def _choose(
    a: Operand, b: Operand, out_dtype: torch.dtype, impl: str, accumulate: Accumulate = FP32
) -> tuple[str, list[str]]:
    """The implementation, and why those before it in ``IMPLS`` were passed by."""
    if accumulate == EXACT:
        # of two operands in high precision every name means auto
        reason = exact.why_not(a, b, out_dtype)
        if reason is not None:
            raise ValueError(reason)
        return EXACT, ["exact sums, made of exact products of small integers"]
    if accumulate != FP32:
        why = f"accumulate: got {accumulate!r}; only the emulation adds like that"
        if impl not in ("auto", EMULATED):
            raise ValueError(f"impl: got {impl!r}; {why}; use impl='auto' or 'emulated'")
        return EMULATED, [why]
    if any(isinstance(x, QuantizedTensor) and x.is_decoded for x in (a, b)):
        return EMULATED, ["an operand is decoded already"]
    is_quantised = isinstance(a, QuantizedTensor) or isinstance(b, QuantizedTensor)
    if impl != "auto" and is_quantised:
        reason = _IMPLS[impl].why_not(a, b, out_dtype)
        if reason is not None:
            raise ValueError(f"impl: got {impl!r}; {reason}; use impl='auto' or 'emulated'")
        return impl, ["asked for"]
    refusals: list[str] = []
    for name, module in _IMPLS.items():
        reason = first_reason(module.why_not(a, b, out_dtype), module.why_slow(a, b))
        if reason is None:
            return name, refusals
        refusals.append(reason)
    raise AssertionError("the emulation takes every operand")


def resolve(
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    impl: str = "auto",
    accumulate: Accumulate = FP32,
) -> tuple[str, str]:
    """Which implementation runs a product, and why.

    Args:
        a, b: The operands as they will be multiplied.
        out_dtype: Type of the result.
        impl: ``auto``, or a name that is taken or refused, never replaced. A product of two
            high-precision operands has nothing to choose: every name means ``auto`` there.
        accumulate: As in ``GemmSpec``.

    Returns:
        Name and reason. ``auto`` takes the first that can run and is not known to be slower here.
        The reason ends with what a native path does differently: sums in fewer bits, and their
        bound.

    Raises:
        ValueError: An unknown name, or an explicit choice that cannot run; the message says why.
    """
    name, reasons = _choose(a, b, out_dtype, check_impl(impl), accumulate)
    note = _IMPLS[name].note(a, b)
    return name, "; ".join(dict.fromkeys([*(reasons or ["native"]), *([note] if note else [])]))


def resolve_spec(
    spec: GemmSpec, device: torch.device | str, dtype: torch.dtype, impl: str = "auto"
) -> tuple[str, str]:
    """``resolve`` for operands of a type on a device, before there are any.

    Args:
        spec: The product's quantisations.
        device: Where the operands will be.
        dtype: Their type before they are quantised, and the result's.
        impl: As for ``resolve``.

    Returns:
        Name and reason.
    """
    # more than one block of any recipe along both axes, and too small for loops to be compiled for
    sample = torch.zeros((160, 160), device=device, dtype=dtype)

    def operand(quant: QuantSpec | None) -> Operand:
        if quant is None:
            return sample
        noise = Noise(seed=0) if quant.is_stochastic else None
        state = delayed_state(quant.amax_history_len, device) if quant.is_delayed else None
        return quantize(sample, quant, noise=noise, state=state)

    return resolve(operand(spec.a), operand(spec.b), dtype, impl, spec.accumulate)


def decodes_at_once(x: Tensor, impl: str) -> bool:
    """Whether operands on x's device go to the emulation, which multiplies values, not codes."""
    return impl in ("auto", EMULATED) and can_look_at(x)


def prepare(
    a: Operand, b: Operand, out_dtype: torch.dtype, impl: str, accumulate: Accumulate = FP32
) -> Operand:
    """a, with what its product with b and others like it would do anew each time."""
    name, _ = _choose(a, b, out_dtype, impl, accumulate)
    return _IMPLS[name].prepare(a)


def multiply(
    a: Operand,
    b: Operand,
    *,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    impl: str,
    out: QuantSpec | None = None,
    accumulate: Accumulate = FP32,
) -> Tensor:
    """The product of 2-D operands that are quantised already, rounded by ``out`` if given."""
    sum_dtype = torch.float32 if _rounds(out, out_dtype) else out_dtype
    name, _ = _choose(a, b, sum_dtype, impl, accumulate)
    if accumulate not in MODELS:
        result = _IMPLS[name].matmul(a, b, bias=bias, out_dtype=sum_dtype)
    else:
        result = emulated.matmul(a, b, bias=bias, out_dtype=sum_dtype, accumulate=accumulate)
    return rounded(result, out, out_dtype)


def rounded(result: Tensor, out: QuantSpec | None, out_dtype: torch.dtype) -> Tensor:
    """A product's sums rounded by ``out``, if given, and held in a type."""
    if out is not None and _rounds(out, out_dtype):
        result = round_float(result, out.format, out.rounding, None, out.saturate)
    return result.to(out_dtype)


def _rounds(out: QuantSpec | None, out_dtype: torch.dtype) -> bool:
    """Whether holding a result in a type leaves rounding to be done."""
    return out is not None and SOURCE_FORMATS[out_dtype] != out.format


def _as_operand(
    x: Operand, spec: QuantSpec | None, noise: Noise | None, stream: int, name: str
) -> Operand:
    if isinstance(x, QuantizedTensor):
        if x.spec != spec:
            raise ValueError(
                f"{name}: got an operand quantised by {x.spec}; the product asks for {spec}; "
                "quantise it by that spec"
            )
        return x
    if spec is None:
        return x.detach()
    if spec.is_delayed:
        raise ValueError(
            f"{name}: got a tensor for delayed scaling; its state is needed to quantise it; pass "
            "quantize(x, spec, state=...)"
        )
    if noise is not None:
        noise = replace(noise, stream=noise.stream + stream)
    return quantize(x, spec, noise=noise)


def _flatten(x: Operand) -> Operand:
    """The operand as a matrix, rows being the product of its leading axes."""
    if isinstance(x, QuantizedTensor):
        matrix = torch.Size(x.matrix_shape)
        return replace(x, codes=x.codes.reshape(matrix[0], x.codes.shape[-1]), shape=matrix)
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _check(a: Operand, b: Operand, bias: Tensor | None) -> None:
    for name, operand in (("a", a), ("b", b), ("bias", bias)):
        if operand is not None and not isinstance(operand, QuantizedTensor):
            check_floating(name, operand)
    if len(a.shape) < 1 or len(b.shape) != 2:
        raise ValueError(
            f"b: got shapes {tuple(a.shape)} and {tuple(b.shape)}; a is [..., K] and b is [N, K]; "
            "reshape them"
        )
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(
            f"b: got {b.shape[-1]} elements along the contraction; a has {a.shape[-1]}; both have "
            "it last, transpose one"
        )
    if bias is not None and tuple(bias.shape) != (b.shape[0],):
        raise ValueError(
            f"bias: got shape {tuple(bias.shape)}; must be ({b.shape[0]},), one value a row of b; "
            "reshape it"
        )


def quantized_matmul(
    a: Operand,
    b: Operand,
    gemm_spec: GemmSpec,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_spec: QuantSpec | FloatFormat | str | None = None,
    return_amax: bool = False,
    noise: Noise | None = None,
    impl: str = "auto",
) -> Operand | tuple[Operand, Tensor]:
    """The product of two operands, quantised as the spec says; without gradients.

    out = (sum_k a_values * b_values) * scale_a * scale_b + bias, accumulated in FP32

    Args:
        a: [..., K]; a tensor, or quantised already by ``gemm_spec.a``.
        b: [N, K]; a tensor, or quantised already by ``gemm_spec.b``.
        gemm_spec: The two quantisations; None multiplies the operand as it is.
        bias: [N], added in FP32 before the result is rounded.
        out_dtype: Type of the result; by default a's, or float32 for a quantised a.
        out_spec: Quantise the FP32 result by this spec, with its own scale.
        return_amax: Also return max |out| of the FP32 result, before out_dtype or out_spec rounds,
            and after ``gemm_spec.out`` has.
        noise: For stochastic rounding; a draws from its stream, b from the next one, the result
            from the one after.
        impl: ``auto``, a name in ``IMPLS``; an explicit choice
            never falls back.

    Returns:
        [..., N] in out_dtype, or a QuantizedTensor; with return_amax a pair with a 0-d float32.

    Raises:
        ValueError: Shapes that do not match, an operand quantised by another spec, delayed scaling
            without state, stochastic rounding without noise, an impl that cannot run.

    Edge cases: K = 0 gives zeros plus bias; empty results keep their shape (amax 0). A block with
    NaN or inf makes exactly the outputs that use it NaN.

    Exactness: quantised operands are equal bit for bit in every impl; the sums are within
    (K + 3) * 2^-24 * scale * sum|a||b| plus half an ulp of the output type (but for
    ``accumulate``).
    """
    if not isinstance(gemm_spec, GemmSpec):
        raise TypeError(
            f"gemm_spec: got {type(gemm_spec).__name__}; must be a GemmSpec; pass "
            "GemmSpec(a=QuantSpec(format=...), b=...)"
        )
    _check(a, b, bias)
    if out_dtype is None:
        out_dtype = a.dtype if isinstance(a, Tensor) else torch.float32
    elif out_dtype not in SOURCE_FORMATS:
        raise ValueError(
            f"out_dtype: got {out_dtype}; must be float16, bfloat16, float32 or float64; for a "
            "narrow result pass out_spec"
        )
    a = _as_operand(a, gemm_spec.a, noise, 0, "a")
    b = _as_operand(b, gemm_spec.b, noise, 1, "b")
    result_dtype = out_dtype
    if (out_spec is not None or return_amax) and out_dtype != torch.float64:
        result_dtype = torch.float32
    matrix = multiply(
        _flatten(a),
        _flatten(b),
        bias=bias,
        out_dtype=result_dtype,
        impl=check_impl(impl),
        out=gemm_spec.out,
        accumulate=gemm_spec.accumulate,
    )
    out = matrix.reshape(*a.shape[:-1], b.shape[0])
    amax = out.abs().amax() if return_amax and out.numel() else out.new_zeros(())
    if out_spec is not None:
        result_noise = noise and replace(noise, stream=noise.stream + 2)
        result: Operand = quantize(out, out_spec, noise=result_noise)
    else:
        result = out.to(out_dtype)
    return (result, amax) if return_amax else result
