"""One product of real or complex matrices from small exact integer products.

    c[batch, m, n] = sum over k of a[batch, m, k] * b[batch, n, k]

Non-finite rows and columns are taken out, the plan chooses scheme and size, the scheme makes exact
terms, ``sums`` adds them up, ``nearest`` decides the last bit where that is asked for; rows and
columns beyond the limit, and the non-finite ones, are then put in.

Complex operands go to slices as real ones of twice the size, [[re, -im], [im, re]], and to residues
as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mixprec.fp64 import nearest, residues, schemes, slices
from mixprec.fp64.arithmetic import UNIT
from mixprec.fp64.bounds import element_bounds
from mixprec.fp64.engines import Engine, get_engine
from mixprec.fp64.plan import NATIVE, Operand, Plan, Task, make_plan
from mixprec.fp64.report import MatmulReport
from mixprec.fp64.request import DOUBLE_DOUBLE, NEAREST, RESIDUES, Request
from mixprec.fp64.special_values import put_native, put_special, without_rows
from mixprec.fp64.sums import apply_exponents


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
        is_symmetric: Whether b is a, and real, so that half of the products are mirror images.
        with_bound: Whether the report holds a bound for each element.
    """
    engine = get_engine(request.engine, a.device)
    if 0 in (*a.shape, *b.shape):
        return _empty(a, b, request)
    is_complex = a.is_complex()
    if is_complex:
        a, b = _as_real(a), torch.cat([b.real, b.imag], -1)
    left, special_rows = _operand(a, engine.width)
    right, special_columns = _operand(b, engine.width)
    task = Task(
        a=left,
        b=right,
        request=request,
        engine=engine,
        is_symmetric=is_symmetric,
        is_complex=is_complex,
    )
    plan = make_plan(task)
    high, low, bound = _emulate(task, plan, with_bound)
    put_special(high, a, b, special_rows, special_columns)
    if low.numel():
        low.masked_fill_(~torch.isfinite(high), 0.0)
    if bound is not None:
        is_special = special_rows.unsqueeze(-1) | special_columns.unsqueeze(-2)
        bound = bound.masked_fill(is_special, 0.0)
    report = _report(task, plan, bound, special_rows, special_columns)
    product = Product(high, low, report)
    return _as_complex(product) if is_complex else product


def _emulate(task: Task, plan: Plan, with_bound: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """hi, lo and, if it is wanted, the bound of each element, for finite operands."""
    raw = schemes.run(task, plan)
    error = schemes.error_of(raw, task.a, task.b) if with_bound else None
    if task.request.output == NEAREST:
        high, low = nearest.settle(task.a, task.b, raw, task.engine), raw.high.new_empty(0)
    else:
        high, low = apply_exponents(raw.high, raw.rows, raw.columns), raw.high.new_empty(0)
        if task.request.output == DOUBLE_DOUBLE:
            low = apply_exponents(raw.low, raw.rows, raw.columns)
    _put_beyond(high, low, task, plan)
    if error is None:
        return high, low, None
    scaled = apply_exponents(error, raw.rows, raw.columns)
    return high, low, element_bounds(scaled, high, task, plan)


def _put_beyond(high: Tensor, low: Tensor, task: Task, plan: Plan) -> None:
    """Puts in what is beyond the slices: exact pairs, or native rows and columns.

    Where a native sum overflows on the way, the correctly rounded element takes its place.
    """
    if plan.exact is not None and task.request.output == DOUBLE_DOUBLE:
        nearest.put_pairs(high, low, plan.exact, task.a, task.b)
    elif plan.exact is not None:
        nearest.settle_open(high, plan.exact.clone(), task.a, task.b, task.engine)
    is_native = plan.is_native
    if bool(is_native.any()):
        put_native(high, task.a.values, task.b.values, plan.native_rows, plan.native_columns)
        is_open = is_native & ~torch.isfinite(high)
        nearest.settle_open(high, is_open, task.a, task.b, task.engine)


def _report(
    task: Task, plan: Plan, bound: Tensor | None, special_rows: Tensor, special_columns: Tensor
) -> MatmulReport:
    return MatmulReport(
        scheme=plan.scheme,
        engine=task.engine.name if plan.scheme != NATIVE else "",
        bits=_kept_bits(plan, task.engine),
        parts=plan.parts,
        products=plan.products,
        native_rows=_count_rows(plan.native_rows, task.is_complex),
        native_columns=int(plan.native_columns.sum()),
        special_rows=_count_rows(special_rows, task.is_complex),
        special_columns=int(special_columns.sum()),
        reason=plan.reason,
        error_bound=bound,
    )


def joined(products: Sequence[Product]) -> Product:
    """A batch of products that were done apart; the report has their largest sizes and sums."""
    reports = [product.report for product in products]
    bounds = [report.error_bound for report in reports if report.error_bound is not None]
    counts = ("products", "native_rows", "native_columns", "special_rows", "special_columns")
    widest = max(reports, key=lambda report: report.bits)
    report = replace(
        widest,
        error_bound=torch.cat(bounds) if bounds else None,
        **{name: sum(getattr(report, name) for report in reports) for name in counts},
    )
    high, low = (torch.cat([getattr(p, part) for p in products]) for part in ("high", "low"))
    return Product(high, low, report)


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
