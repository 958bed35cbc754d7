"""Operators of torch with a gradient, a rule for vmap and shapes for compilers.

The products and the factorisations built on them are operators, so that autograd (twice and more),
``torch.compile`` and ``torch.func.vmap`` take them as they take torch's own.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import torch
from torch import Tensor

from mixprec import torch_operators
from mixprec.fp64.product import joined, multiply
from mixprec.fp64.report import add_record, wants_bounds
from mixprec.fp64.request import DOUBLE_DOUBLE, FLOAT64, Output, Request, Scheme
from mixprec.modes import plain_arithmetic

# the data decide the number of products: a CUDA graph cannot hold that
define = functools.partial(torch_operators.define, tags=(torch.Tag.cudagraph_unsafe,))
"""``torch_operators.define`` of what runs products by integers."""


def _matmul(
    a: Tensor,
    b: Tensor,
    scheme: str,
    bits: int | None,
    rtol: float | None,
    engine: str,
    output: str,
) -> tuple[Tensor, Tensor]:
    request = Request(
        scheme=cast(Scheme, scheme),
        bits=bits,
        rtol=rtol,
        engine=engine,
        output=cast(Output, output),
    )
    a, b = (x.resolve_conj().resolve_neg() for x in (a, b))
    run = functools.partial(
        multiply, request=request, is_symmetric=_is_transposed(a, b), with_bound=wants_bounds()
    )
    with plain_arithmetic(a), torch.no_grad():
        if not request.is_alone or a.shape[0] < 2:
            product = run(a, b.mT)
        else:
            product = joined([run(x[None], y.mT[None]) for x, y in zip(a, b, strict=True)])
    add_record(product.report)
    return product.high, product.low


def _is_transposed(a: Tensor, b: Tensor) -> bool:
    """Whether b is the same memory as a, with its axes swapped."""
    if a.is_complex() or a.data_ptr() != b.data_ptr() or a.shape != b.mT.shape:
        return False
    axes = range(a.dim()) if a.shape[0] > 1 else range(1, a.dim())
    return all(a.stride(axis) == b.mT.stride(axis) for axis in axes)


def _fake(
    a: Tensor,
    b: Tensor,
    scheme: str,
    bits: int | None,
    rtol: float | None,
    engine: str,
    output: str,
) -> tuple[Tensor, Tensor]:
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return a.new_empty(shape), a.new_empty(shape if output == DOUBLE_DOUBLE else (0,))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    a, b, scheme, bits, rtol, engine, kind = inputs
    ctx.save_for_backward(a, b)
    ctx.options = scheme, bits, rtol, engine, FLOAT64 if kind == DOUBLE_DOUBLE else kind


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    # hi carries the gradient: lo is what its rounding left
    a, b = ctx.saved_tensors
    grad_a = fp64_matmul(gradient, b.mH, *ctx.options)[0] if ctx.needs_input_grad[0] else None
    grad_b = fp64_matmul(a.mH, gradient, *ctx.options)[0] if ctx.needs_input_grad[1] else None
    return grad_a, grad_b, None, None, None, None, None


def _vmap(info: Any, in_dims: tuple[Any, ...], a: Tensor, b: Tensor, *options: Any) -> Any:
    """The mapped axis joins the batch."""
    size = info.batch_size
    a, b = (
        x.movedim(dim, 0) if dim is not None else x.expand(size, *x.shape)
        for x, dim in zip((a, b), in_dims, strict=False)
    )
    high, low = fp64_matmul(a.flatten(0, 1), b.flatten(0, 1), *options)
    shape = (size, a.shape[1], a.shape[2], b.shape[3])
    if low.numel() == 0:
        return (high.reshape(shape), low), (0, None)
    return (high.reshape(shape), low.reshape(shape)), (0, 0)


fp64_matmul = define(
    "fp64_matmul", _matmul, fake=_fake, backward=_backward, setup_context=_setup_context
)
"""(hi, lo) of float64 or complex128 a[batch, m, k] @ b[batch, k, n]; lo is empty but for
``double_double``. Arguments as ``matmul`` has them, None for automatic bits."""
torch.library.register_vmap(fp64_matmul, _vmap)
