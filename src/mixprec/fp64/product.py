"""One product of real or complex matrices from small exact integer products.

    c[batch, m, n] = sum over k of a[batch, m, k] * b[batch, n, k]

Non-finite rows and columns are taken out, the plan chooses scheme and size, the scheme makes exact
terms, ``sums`` adds them up, ``nearest`` decides the last bit where that is asked for; rows and
columns beyond the limit, and the non-finite ones, are then put in.

Complex operands go to slices as real ones of twice the size, [[re, -im], [im, re]], and to residues
as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mixprec.fp64 import nearest, residues, schemes, slices
from mixprec.fp64.arithmetic import SMALLEST, UNIT
from mixprec.fp64.engines import Engine, get_engine
from mixprec.fp64.plan import NATIVE, Operand, Plan, make_plan
from mixprec.fp64.report import MatmulReport
from mixprec.fp64.request import DOUBLE_DOUBLE, FLOAT64, NEAREST, RESIDUES, Request
from mixprec.fp64.schemes import Raw
from mixprec.fp64.special_values import put_native, put_special, without_rows
from mixprec.fp64.sums import ADDED_UP, apply_exponents


@dataclass(frozen=True, slots=True)
class Product:
    """A finished product; ``low`` is empty but for ``double_double``."""

    high: Tensor
    low: Tensor
    report: MatmulReport


def multiply(
    a: Tensor, b: Tensor, request: Request, *, is_symmetric: bool = False, with_bound: bool = False
) -> Product:
    """The product of float64 or complex128 a[batch, m, k] and b[batch, n, k].

    Args:
        a, b: The operands, of either order in memory.
        request: Scheme, bits or accuracy, engine and output.
        is_symmetric: Whether b is a, so that half of the products are mirror images.
        with_bound: Whether the report holds a bound for each element.
    """
    engine = get_engine(request.engine, a.device)
    if 0 in (*a.shape, *b.shape):
        return _empty(a, b, request)
    if not a.is_complex():
        return _real(a, b, request, engine, is_symmetric, with_bound)
    real = _as_real(a), torch.cat([b.real, b.imag], -1)
    product = _real(*real, request, engine, False, with_bound, parts_of=(a, b))
    return _as_complex(product)


def _empty(a: Tensor, b: Tensor, request: Request) -> Product:
    zeros = a.new_zeros((*a.shape[:-1], b.shape[-2]))
    low = zeros.clone() if request.output == DOUBLE_DOUBLE else zeros.new_empty(0)
    report = MatmulReport(
        scheme=NATIVE,
        engine="",
        bits=53,
        parts=0,
        products=0,
        reason="nothing to multiply",
        error_bound=zeros.abs(),
    )
    return Product(zeros, low, report)


def _as_real(a: Tensor) -> Tensor:
    """[[re, -im], [im, re]], [batch, 2 m, 2 k]: times [re, im] the real part over the imaginary."""
    upper = torch.cat([a.real, -a.imag], -1)
    return torch.cat([upper, torch.cat([a.imag, a.real], -1)], -2)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    middle = x.shape[-2] // 2
    return x[..., :middle, :], x[..., middle:, :]


def _as_complex(product: Product) -> Product:
    high, low = (
        torch.complex(*_halves(x)) if x.numel() else x.to(torch.complex128)
        for x in (product.high, product.low)
    )
    report = product.report
    if report.error_bound is not None:
        # of the absolute value, from those of real and imaginary part
        bound = torch.hypot(*_halves(report.error_bound)) * (1 + 4 * UNIT)
        report = replace(report, error_bound=bound)
    return Product(high, low, report)


def _operand(x: Tensor, width: int) -> tuple[Operand, Tensor]:
    """The operand without its non-finite rows, and which those are."""
    amax = x.abs().amax(-1)
    is_special = ~torch.isfinite(amax)
    values = without_rows(x, is_special)
    amax = amax.masked_fill(is_special, 0.0)
    return Operand(values=values, exponent=slices.row_exponents(amax, width)), is_special


def _real(
    a: Tensor,
    b: Tensor,
    request: Request,
    engine: Engine,
    is_symmetric: bool,
    with_bound: bool,
    parts_of: tuple[Tensor, Tensor] | None = None,
) -> Product:
    left, special_rows = _operand(a, engine.width)
    right, special_columns = _operand(b, engine.width)
    is_complex = parts_of is not None
    plan = make_plan(left, right, request, engine, is_symmetric=is_symmetric, is_complex=is_complex)
    raw = _raw(left, right, plan, engine, is_symmetric, is_complex)
    error = schemes.error_of(raw, left, right) if with_bound else None
    high, low = _finish(left, right, raw, request, engine)
    _put_native(high, left, right, plan, engine)
    if plan.exact is not None:
        nearest.put_pairs(high, low, plan.exact, left, right)
    put_special(high, a, b, special_rows, special_columns)
    if low.numel():
        low.masked_fill_(~torch.isfinite(high), 0.0)
    report = MatmulReport(
        scheme=plan.scheme,
        engine=engine.name if plan.scheme != NATIVE else "",
        bits=_kept_bits(plan, engine),
        parts=plan.parts,
        products=plan.products,
        native_rows=_count_rows(plan.native_rows, is_complex),
        native_columns=int(plan.native_columns.sum()),
        special_rows=_count_rows(special_rows, is_complex),
        special_columns=int(special_columns.sum()),
        reason=plan.reason,
    )
    if error is not None:
        is_special = special_rows.unsqueeze(-1) | special_columns.unsqueeze(-2)
        bound = _bound(raw, error, high, request.output)
        bound = _beyond(bound, high, left, right, plan).masked_fill(is_special, 0.0)
        report = replace(report, error_bound=bound)
    return Product(high, low, report)


def _put_native(high: Tensor, a: Operand, b: Operand, plan: Plan, engine: Engine) -> None:
    """Rows and columns beyond the limit; correctly rounded where the native sums overflow."""
    is_native = plan.native_rows.unsqueeze(-1) | plan.native_columns.unsqueeze(-2)
    if not bool(is_native.any()):
        return
    put_native(high, a.values, b.values, plan.native_rows, plan.native_columns)
    nearest.settle_open(high, is_native & ~torch.isfinite(high), a, b, engine)


def _count_rows(rows: Tensor, is_complex: bool) -> int:
    """How many rows are marked; of a complex operand those with either part."""
    if is_complex:
        rows = rows.unflatten(-1, (2, -1)).any(-2)
    return int(rows.sum())


def _kept_bits(plan: Plan, engine: Engine) -> int:
    if plan.scheme == NATIVE:
        return 53
    if plan.scheme == RESIDUES:
        return int(residues.moduli(engine.width, plan.parts).norm_bits)
    return plan.parts * engine.width - 1


def _raw(
    a: Operand, b: Operand, plan: Plan, engine: Engine, is_symmetric: bool, is_complex: bool
) -> Raw:
    if plan.scheme == NATIVE:
        zeros = a.values.new_zeros((*a.values.shape[:-1], b.values.shape[-2]))
        return Raw(
            high=zeros,
            low=zeros.clone(),
            truncated=0.0,
            roundings=0.0,
            unit=1.0,
            rows=a.exponent,
            columns=b.exponent,
        )
    if plan.scheme == RESIDUES:
        by_residues = schemes.complex_by_residues if is_complex else schemes.by_residues
        return by_residues(a, b, plan.parts, engine)
    return schemes.by_slices(a, b, plan.parts, engine, is_symmetric=is_symmetric)


def _finish(
    a: Operand, b: Operand, raw: Raw, request: Request, engine: Engine
) -> tuple[Tensor, Tensor]:
    """The result, and its second part where that is asked for."""
    if request.output == NEAREST:
        return nearest.settle(a, b, raw, engine), raw.high.new_empty(0)
    high = apply_exponents(raw.high, raw.rows, raw.columns)
    if request.output == FLOAT64:
        return high, raw.high.new_empty(0)
    return high, apply_exponents(raw.low, raw.rows, raw.columns)


def _bound(raw: Raw, error: Tensor, high: Tensor, output: str) -> Tensor:
    """What each element may be off, [batch, m, n]."""
    if output == NEAREST:
        return _rounding(high)
    bound = apply_exponents(error, raw.rows, raw.columns) * (1 + 4 * UNIT) + 2 * SMALLEST
    return bound + _rounding(high) if output == FLOAT64 else bound


def _rounding(high: Tensor) -> Tensor:
    return high.abs() * (UNIT * (1 + 4 * UNIT)) + SMALLEST


def _beyond(bound: Tensor, high: Tensor, a: Operand, b: Operand, plan: Plan) -> Tensor:
    """The bound with that of exact pairs and of native products, k * 2^-53 |A||B|, put in."""
    if plan.exact is not None:
        bound = torch.where(plan.exact, high.abs() * ADDED_UP + 2 * SMALLEST, bound)
    is_native = plan.native_rows.unsqueeze(-1) | plan.native_columns.unsqueeze(-2)
    if not bool(is_native.any()):
        return bound
    length = a.values.shape[-1]
    native = a.values.abs() @ b.values.abs().mT
    native = native * ((length + 2) * UNIT * (1 + 2 * (length + 2) * UNIT)) + length * SMALLEST
    return torch.where(is_native, native, bound)
