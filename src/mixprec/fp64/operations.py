"""torch's operations that multiply matrices, as products: the factors, the sizes, the rest.

Those of ``OPERATIONS`` are products of two factors, plus a third tensor for some, or convolutions.
The operations of ``MULTIPLY_INSIDE`` multiply somewhere inside torch's own kernel, out of reach.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from mixprec.fp64.convolution import (
    Geometry,
    convolve,
    convolve_transposed,
    input_gradient,
    transposed_input_gradient,
    weight_gradient,
)

Arguments = Mapping[str, Any]
"""The arguments of a call by the names of torch's schema, defaults included."""
Product = Callable[..., Tensor]
"""``fp64.matmul`` with its options chosen."""

_Factors = tuple[Tensor, Tensor, Tensor | None]


def _sum_over_batch(x: Arguments) -> _Factors:
    """One product whose contraction runs over the batch too."""
    left, right = x["batch1"], x["batch2"]
    return left.transpose(0, 1).flatten(1), right.flatten(0, 1), x["self"]


_FACTORS: Mapping[str, Callable[[Arguments], _Factors]] = {
    "mm": lambda x: (x["self"], x["mat2"], None),
    "addmm": lambda x: (x["mat1"], x["mat2"], x["self"]),
    "bmm": lambda x: (x["self"], x["mat2"], None),
    "baddbmm": lambda x: (x["batch1"], x["batch2"], x["self"]),
    "addbmm": _sum_over_batch,
    "mv": lambda x: (x["self"], x["vec"], None),
    "addmv": lambda x: (x["mat"], x["vec"], x["self"]),
    "dot": lambda x: (x["self"], x["tensor"], None),
    "vdot": lambda x: (x["self"].conj(), x["other"], None),
}
_CONVOLUTION, _CONVOLUTION_BACKWARD = "convolution", "convolution_backward"
OPERATIONS = (*_FACTORS, _CONVOLUTION, _CONVOLUTION_BACKWARD)
"""What can be emulated, by torch's names."""

BECOMES: Mapping[str, str] = MappingProxyType(
    {
        "linear": "mm, addmm",
        "matmul": "mm, bmm, mv, dot",
        "einsum": "bmm, mm",
        "tensordot": "mm",
        "inner": "mm, dot",
        "conv1d": _CONVOLUTION,
        "conv2d": _CONVOLUTION,
        "conv3d": _CONVOLUTION,
        "conv_transpose1d": _CONVOLUTION,
        "conv_transpose2d": _CONVOLUTION,
        "conv_transpose3d": _CONVOLUTION,
    }
)
"""Operations that torch turns into others before anything sees them."""

_SOLVES = "LAPACK and cuSOLVER multiply inside; mixprec.fp64 has solve, cholesky, lu, qr"
_ATTENTION = (
    "a fused kernel multiplies inside; sdpa_kernel(SDPBackend.MATH) of torch.nn.attention takes "
    "products that are seen"
)
_LAYER = (
    "a fused kernel multiplies inside; torch.backends.mha.set_fastpath_enabled(False) takes "
    "products that are seen"
)
_FUSED = "a fused kernel multiplies inside"
_SPARSE = "sparse; mixprec.fp64.spmm multiplies those"
_KERNEL = "torch's own kernel multiplies inside"
_NO_PRODUCTS = (
    "linalg_vector_norm|linalg_cross|linalg_diagonal|_linalg_check_errors|linalg_vander.*"
)
MULTIPLY_INSIDE: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), reason)
    for pattern, reason in (
        (rf"(?!(?:{_NO_PRODUCTS})$)_?linalg_.*", _SOLVES),
        ("geqrf|ormqr|orgqr|cholesky.*|triangular_solve|lu_solve|_lu_with_info|lobpcg", _SOLVES),
        (r"_scaled_dot_product_.*|_flash_attention.*|_efficient_attention.*", _ATTENTION),
        (r"_native_multi_head_attention|_transformer_encoder_layer_fwd", _LAYER),
        (r"_cudnn_rnn.*|miopen_rnn.*|mkldnn_rnn.*|_addmm_activation", _FUSED),
        (r"_?sparse_.*mm.*|_sparse_addmm|sparse_sampled_addmm|hspmm|sspaddmm", _SPARSE),
        (r"_trilinear|conv_tbc.*|_euclidean_dist|_cdist_.*", _KERNEL),
        (r"_?slow_conv.*|(?:cudnn|mkldnn|miopen)_convolution.*|_convolution", _KERNEL),
    )
)
"""Names of operations, and why their products stay native."""


def why_inside(name: str) -> str | None:
    """Why an operation's products are out of reach; None where it multiplies nothing."""
    return next((why for pattern, why in MULTIPLY_INSIDE if pattern.fullmatch(name)), None)


def sizes(name: str, x: Arguments) -> tuple[int, int, int]:
    """m, n and k of an operation's product; of a convolution those of its forward product."""
    if name in _FACTORS:
        a, b, _ = _FACTORS[name](x)
        return (a.shape[-2] if a.dim() > 1 else 1, b.shape[-1] if b.dim() > 1 else 1, a.shape[-1])
    weight, groups = x["weight"], x["groups"]
    window = math.prod(weight.shape[2:])
    batch = x["input"].shape[0]
    if x["transposed"]:
        inner, outputs = weight.shape[0] // groups, weight.shape[1]
    else:
        inner, outputs = weight.shape[1], weight.shape[0] // groups
    return batch * _positions(name, x), outputs, inner * window


def _positions(name: str, x: Arguments) -> int:
    """How many positions a convolution's output has."""
    if name == _CONVOLUTION_BACKWARD:
        return math.prod(x["grad_output"].shape[2:])
    weight = x["weight"]
    axes = weight.dim() - 2
    geometry = _geometry(x)
    beyond = x["output_padding"]
    beyond = beyond * axes if len(beyond) == 1 else beyond
    counts = []
    for axis, size in enumerate(x["input"].shape[2:]):
        span = geometry.dilation[axis] * (weight.shape[2 + axis] - 1)
        step, padding = geometry.stride[axis], 2 * geometry.padding[axis]
        if x["transposed"]:
            counts.append((size - 1) * step - padding + span + 1 + beyond[axis])
        else:
            counts.append((size + padding - span - 1) // step + 1)
    return math.prod(counts)


def is_batched(name: str, x: Arguments) -> bool:
    """Whether a convolution's input has a batch axis; other operations say by their name."""
    return name in _FACTORS or x["input"].dim() == x["weight"].dim()


def run(name: str, x: Arguments, product: Product) -> Any:
    """The operation's result, a tensor, or of convolution_backward three or None."""
    if name in _FACTORS:
        a, b, c = _FACTORS[name](x)
        if c is None:
            return product(a, b)
        return product(a, b, alpha=x["alpha"], beta=x["beta"], c=c)
    if name == _CONVOLUTION_BACKWARD:
        return _gradients(x, product)
    if x["transposed"]:
        beyond = x["output_padding"]
        beyond = beyond * (x["weight"].dim() - 2) if len(beyond) == 1 else beyond
        result = convolve_transposed(x["input"], x["weight"], _geometry(x), beyond, product)
    else:
        result = convolve(x["input"], x["weight"], _geometry(x), product)
    if x["bias"] is None:
        return result
    return result + x["bias"].reshape(-1, *([1] * (result.dim() - 2)))


def _geometry(x: Arguments) -> Geometry:
    axes = x["weight"].dim() - 2
    return Geometry.of(axes, x["stride"], x["padding"], x["dilation"], x["groups"])


def _gradients(x: Arguments, product: Product) -> tuple[Tensor | None, ...]:
    gradient, data, weight = x["grad_output"], x["input"], x["weight"]
    needs_input, needs_weight, needs_bias = x["output_mask"]
    geometry, window = _geometry(x), weight.shape[2:]
    grad_input = grad_weight = grad_bias = None
    if needs_input:
        by_input = transposed_input_gradient if x["transposed"] else input_gradient
        grad_input = by_input(gradient, weight, data.shape[2:], geometry, product)
    if needs_weight and x["transposed"]:
        grad_weight = weight_gradient(data.conj(), gradient, window, geometry, product)
    elif needs_weight:
        grad_weight = weight_gradient(gradient, data.conj(), window, geometry, product)
    if needs_bias:
        grad_bias = gradient.sum([axis for axis in range(gradient.dim()) if axis != 1])
    return grad_input, grad_weight, grad_bias
