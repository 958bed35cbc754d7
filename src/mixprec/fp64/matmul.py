"""``matmul``: the public product, from any shapes to the operator on batches of matrices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from mixprec.fp64.arithmetic import SMALLEST, UNIT
from mixprec.fp64.operator import fp64_matmul
from mixprec.fp64.report import MatmulReport, record
from mixprec.fp64.request import DOUBLE_DOUBLE, FLOAT64, Output, Request, Scheme

_DTYPES = (torch.float64, torch.complex128)


def matmul(
    a: Tensor,
    b: Tensor,
    *,
    scheme: Scheme = "auto",
    bits: int | Literal["auto"] = "auto",
    rtol: float | None = None,
    engine: str = "auto",
    output: Output = "float64",
    out: Tensor | None = None,
    alpha: complex = 1,
    beta: complex = 1,
    c: Tensor | None = None,
    report: bool = False,
) -> Any:
    """alpha * (a @ b) + beta * c in double precision, from exact products of small integers.

        c[m, n] = sum over k of a[m, k] * b[k, n]

    Args:
        a, b: float64 or complex128, both alike, with the shapes that ``torch.matmul`` takes: 1-D,
            2-D, batches with broadcasting, any strides, views that are conjugated or transposed.
        scheme: ``slices`` (Ozaki I), ``residues`` (Ozaki II), or ``auto``: the cheaper one.
        bits: Mantissa bits of the largest element of each row and column, as cuBLAS counts them:
            55 bits are 7 slices of 8 bits, 79 are 10. ``auto`` takes as many as the data need, so
            that the error of every element is at most 2^-53 |a @ b| + 2^-54 |a| @ |b|, where a
            native product, and what is left to native ones, is within k * 2^-53 |a| @ |b|.
        rtol: In place of bits: the largest error in units of |a| @ |b|; the library picks the
            scheme and size, or the native product where that is as good.
        engine: What multiplies integers, a name in ``ENGINES``: ``auto`` is ``float64`` on CPUs and
            ``int8`` elsewhere.
        output: ``float64``; ``double_double``, a pair (hi, lo) with hi = RN(hi + lo); or
            ``nearest``, the correctly rounded product.
        out: Where the result is written.
        alpha, beta: Factors; with alpha = 0 a and b are not read and get no gradient, with beta = 0
            c does not.
        c: Added to the product; broadcasts with it.
        report: Also return a ``MatmulReport``, with a bound on the error of each element; not under
            vmap and compilers.

    Returns:
        A tensor, or (hi, lo) for ``double_double``; with ``report`` a pair of that and the report.

    Raises:
        TypeError: Operands of another type than float64 and complex128, or of two types.
        ValueError: Shapes that do not match, an unknown scheme, engine or output, bits or rtol out
            of range, an engine that is not exact on the device, ``out`` with a gradient.

    Edge cases: inf and NaN as IEEE 754 has them, in their row of a or column of b alone. A product
    that overflows on the way but not in the end (1e200 * 1e200 - 1e200 * 1e200) is finite here
    and inf or NaN natively. Exact zeros are +0. k = 0 gives zeros. ``bits="auto"`` decides for the
    whole operands, of a pair for each matrix of a batch: a row alone may take fewer bits than among
    others, and differ in the last place.

    Exactness: integer products and sums are exact, so that for given bits the result does not
    depend on threads, blocks, the order of k or the batch; with ``nearest`` neither on scheme,
    engine or bits. With ``bits="auto"`` rows and columns that need more than the limit of 10 slices
    (79 bits of 8-bit ones) are done natively, with ``rtol`` and for a pair such elements exactly;
    the report says so. The gradients are products of the same kind.
    alpha and beta round once more each.

    Sources: Ozaki et al. 2012 and 2025; cuBLAS 13 (bits, dynamic precision).
    """
    request = Request(
        scheme=scheme,
        bits=None if bits == "auto" else bits,
        rtol=rtol,
        engine=engine,
        output=output,
    )
    _check(a, b, output, alpha, beta, c)
    if out is not None:
        _check_out(out, a, b, output, c)
    if not report:
        return _write(out, _affine(_product(a, b, request, alpha), alpha, beta, c))
    with record(with_bounds=True, of_this_thread=True) as found:
        product = _product(a, b, request, alpha)
    result = _affine(product, alpha, beta, c)
    return _write(out, result), _with_shape(found, product, result, alpha, beta, c)


def _check(
    a: Tensor, b: Tensor, output: str, alpha: complex, beta: complex, c: Tensor | None
) -> None:
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; must be a tensor; use torch.tensor")
        if x.dtype not in _DTYPES:
            raise TypeError(
                f"{name}: got {x.dtype}; only float64 and complex128 are emulated; convert it with "
                f"{name}.to(torch.float64)"
            )
    if a.dtype != b.dtype:
        raise TypeError(f"b: got {b.dtype} beside {a.dtype}; both must be alike; convert one")
    if a.device != b.device:
        raise ValueError(f"b: got {b.device} beside {a.device}; both must be on one; move one")
    if a.dim() == 0 or b.dim() == 0:
        raise ValueError(
            f"b: got shapes {tuple(a.shape)} and {tuple(b.shape)}; both need an axis to contract; "
            "use * for a number"
        )
    inner = b.shape[-2] if b.dim() > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise ValueError(
            f"b: got shapes {tuple(a.shape)} and {tuple(b.shape)}; a's last axis has "
            f"{a.shape[-1]} elements, b's first of a matrix {inner}; they must agree; transpose one"
        )
    if output != FLOAT64 and ((alpha, beta) != (1, 1) or c is not None):
        raise ValueError(
            f"output: got {output!r} with alpha, beta or c; more than float64 holds for the "
            "product alone; leave them out"
        )
    if c is not None:
        _check_c(c, a.dtype, _result_shape(a, b))
    for name, factor in (("alpha", alpha), ("beta", beta)):
        if isinstance(factor, complex) and not a.is_complex():
            raise TypeError(
                f"{name}: got {factor} for {a.dtype}; a complex factor needs complex operands; "
                "convert them to torch.complex128"
            )


def _check_out(out: Tensor, a: Tensor, b: Tensor, output: str, c: Tensor | None) -> None:
    if output == DOUBLE_DOUBLE:
        raise ValueError("out: got one for a pair; its two parts are returned; leave it out")
    tensors = [x for x in (out, a, b, c) if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise ValueError(
            "out: got a tensor where gradients are recorded; an operation with out has none; call "
            "it under torch.no_grad()"
        )
    shape = _result_shape(a, b)
    if tuple(out.shape) != shape or out.dtype != a.dtype:
        raise ValueError(
            f"out: got {out.dtype} {tuple(out.shape)}; the result is {a.dtype} {shape}; pass a "
            "tensor like it"
        )


def _check_c(c: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if c.dtype != dtype:
        raise TypeError(f"c: got {c.dtype} beside {dtype}; both must be alike; convert one")
    padded = (*[1] * (len(shape) - c.dim()), *c.shape)
    fits = len(padded) == len(shape) and all(
        given in (1, size) for given, size in zip(padded, shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"c: got shape {tuple(c.shape)}; must broadcast to the result's {shape}; reshape it"
        )


def _affine(product: Any, alpha: complex, beta: complex, c: Tensor | None) -> Any:
    result = product if alpha in (0, 1) else product * alpha
    if c is None or beta == 0:
        return result
    return result + (c if beta == 1 else c * beta)


def _result_shape(a: Tensor, b: Tensor) -> tuple[int, ...]:
    rows = a.shape[-2:-1]
    columns = b.shape[-1:] if b.dim() > 1 else ()
    return (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *rows, *columns)


_NOTHING = MatmulReport(scheme="none", engine="", bits=0, parts=0, products=0, reason="alpha is 0")


def _product(a: Tensor, b: Tensor, request: Request, alpha: complex) -> Any:
    """a @ b in any shapes that torch.matmul takes; zeros where alpha is 0."""
    shape = _result_shape(a, b)
    if alpha == 0:
        return a.new_zeros(shape)
    a = a if a.dim() > 1 else a.unsqueeze(0)
    b = b if b.dim() > 1 else b.unsqueeze(-1)
    if b.dim() == 2 and not (request.is_alone and a.dim() > 2):
        # one matrix for all of a's: their rows are those of one matrix
        left = a.reshape(1, math.prod(a.shape[:-1]), a.shape[-1]) if a.dim() > 2 else a.unsqueeze(0)
        right = b.unsqueeze(0)
    else:
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        left, right = (
            x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch), *x.shape[-2:]) for x in (a, b)
        )
    options = request.scheme, request.bits, request.rtol, request.engine, request.output
    high, low = fp64_matmul(left, right, *options)
    if request.output == DOUBLE_DOUBLE:
        return high.reshape(shape), low.reshape(shape)
    return high.reshape(shape)


def _write(out: Tensor | None, result: Any) -> Any:
    return result if out is None else out.copy_(result)


def _with_shape(
    found: list[MatmulReport],
    product: Any,
    result: Any,
    alpha: complex,
    beta: complex,
    c: Tensor | None,
) -> MatmulReport:
    """The report, its bound in the result's shape and with the roundings after the product."""
    high = product[0] if isinstance(product, tuple) else product
    done = found[0] if found else _NOTHING
    bound = high.abs() if done.error_bound is None else done.error_bound.reshape(high.shape)
    if isinstance(product, tuple):
        return replace(done, error_bound=bound)
    # a rounding of a complex product is within sqrt(5) units
    unit = 3 * UNIT
    if alpha != 1:
        bound = (bound + product.abs() * unit) * (abs(alpha) * (1 + 2 * unit)) + 2 * SMALLEST
    if c is not None and beta != 0:
        bound = bound + (result.abs() + c.abs() * abs(beta)) * (2 * unit) + 4 * SMALLEST
    return replace(done, error_bound=bound)
