"""The two schemes, from operands to an unevaluated sum and its bound, exponents left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mixprec.fp64 import residues, slices
from mixprec.fp64.arithmetic import UNIT, scale
from mixprec.fp64.engines import Engine
from mixprec.fp64.plan import NATIVE, Operand, Plan, Task
from mixprec.fp64.request import SLICES
from mixprec.fp64.residues import Norms
from mixprec.fp64.sums import ADDED_UP, add_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Raw:
    """A result before the exponents of rows and columns.

    Attributes:
        high, low: [batch, m, n], the product but for ``error_of``.
        truncated: What the scheme leaves out, in the same units: one bound, or one an element.
        roundings: What adding up loses, in units of the sum of absolute terms.
        unit: How many of the units a product of elements just below 1 has.
        rows, columns: The exponents of one unit.
    """

    high: Tensor
    low: Tensor
    truncated: Tensor | float
    roundings: float
    unit: float
    rows: Tensor
    columns: Tensor


def error_of(raw: Raw, a: Operand, b: Operand) -> Tensor:
    """Bound on |hi + lo - product| in the units of raw, [batch, m, n]."""
    error = raw.high.abs() * ADDED_UP + raw.truncated
    if raw.roundings:
        # slices with their signs are at most 3 |x| together, and so terms at most 10 |A||B|
        error += _magnitudes(a, b) * (10 * raw.roundings * raw.unit)
    return error


def _magnitudes(a: Operand, b: Operand) -> Tensor:
    """|A||B| with the exponents of rows and columns taken off, not below."""
    length = a.values.shape[-1]
    x, y = (scale(z.values, -z.exponent.unsqueeze(-1)).abs_() for z in (a, b))
    # what underflows is below the last term
    return (x @ y.mT).mul_(1 + 4 * (length + 2) * UNIT).add_(length * 2.0**-1000)


def run(task: Task, plan: Plan) -> Raw:
    """The product by the plan's scheme; zeros where every row or column is native."""
    if plan.scheme == NATIVE:
        zeros = task.a.values.new_zeros((*task.a.values.shape[:-1], task.b.values.shape[-2]))
        return Raw(
            high=zeros,
            low=zeros.clone(),
            truncated=0.0,
            roundings=0.0,
            unit=1.0,
            rows=task.a.exponent,
            columns=task.b.exponent,
        )
    if plan.scheme == SLICES:
        return by_slices(task.a, task.b, plan.parts, task.engine, is_symmetric=task.is_symmetric)
    return by_residues(task, plan.parts)


def by_slices(
    a: Operand, b: Operand, parts: int, engine: Engine, *, is_symmetric: bool = False
) -> Raw:
    """The product by so many slices."""
    width = engine.width
    left = slices.cut(a.values, a.exponent, width, parts, dtype=engine.dtype)
    right = slices.cut(b.values, b.exponent, width, parts, dtype=engine.dtype, is_reversed=True)
    multiply_slices = slices.multiply_by_own if is_symmetric else slices.multiply
    terms = multiply_slices(left, right, engine)
    high, low, lost = add_up(terms, plain=terms[0].exponent + slices.PLAIN_BITS - width)
    # in units of the leading slices: an element below 1 is 2^(w - 1) of them
    unit = 4.0 ** (width - 1)
    return Raw(
        high=high,
        low=low,
        truncated=a.values.shape[-1] * slices.dropped(width, parts) * unit,
        roundings=lost,
        unit=unit,
        rows=a.exponent - (width - 1),
        columns=b.exponent - (width - 1),
    )


def by_residues(task: Task, count: int) -> Raw:
    """The product by so many moduli."""
    a, b, engine = task.a, task.b, task.engine
    used = residues.moduli(engine.width, count)
    mu, nu, truncated = _residue_scaling(task, used)
    # parts of complex numbers are added before they are multiplied
    dtype = torch.float64 if task.is_complex else engine.dtype
    right = residues.residues(b.values, nu, used, engine.width, dtype)
    if not task.is_complex:
        left = residues.residues(a.values, mu, used, engine.width, dtype)
        product = residues.multiply(left, right, used, engine)
    else:
        rows, length = a.values.shape[-2] // 2, task.length // 2
        # the first half of the columns of [[re, -im], [im, re]]
        left = residues.residues(a.values[..., :length], mu, used, engine.width)
        parts = residues.multiply_complex(
            (left[..., :rows, :], left[..., rows:, :]),
            (right[..., :length], right[..., length:]),
            used,
            engine,
        )
        product = torch.cat(parts, -2)
    high, low, _ = add_up(residues.remaindered(product, used))
    # the leading term that is not 0 outweighs the others: ADDED_UP covers what adding them loses
    return Raw(
        high=high,
        low=low,
        truncated=truncated * (1 + 2.0**-40),
        roundings=0.0,
        unit=1.0,
        rows=-mu,
        columns=-nu,
    )


def _residue_scaling(task: Task, used: residues.Moduli) -> tuple[Tensor, Tensor, Tensor]:
    """The exponents of rows and columns, and the truncation in units of the integers."""
    a, b, length = task.a, task.b, task.length
    norms_a, norms_b = Norms.of(a.values, a.exponent), Norms.of(b.values, b.exponent)
    mu = residues.exponents(norms_a, a.exponent, used, length)
    nu = residues.exponents(norms_b, b.exponent, used, length)
    if task.is_complex:
        # [re, -im] and [im, re] have one norm, but for the order of its sum
        mu = mu.unflatten(-1, (2, -1)).amin(-2).repeat(1, 2)
    # |a' b' - a b 2^(mu + nu)| is below |b| 2^nu / 2 + |a| 2^mu / 2 + 1/4
    whole_a = norms_a.one * torch.exp2((mu + a.exponent).to(torch.float64))
    whole_b = norms_b.one * torch.exp2((nu + b.exponent).to(torch.float64))
    error = 0.5 * (whole_a.unsqueeze(-1) + whole_b.unsqueeze(-2)) + 0.25 * length
    return mu, nu, error
