"""What a product takes: scheme, slices or moduli, and the rows or columns left to native products.

A share is an error in units of (|A||B|)[m, n]. ``bits="auto"`` asks for the truncation of at most

    float64         2^-54              so that with the last rounding a result is within
                                       2^-53 |C| + 2^-54 |A||B|, below a native DGEMM's k 2^-53
                                       |A||B|
    double_double   max(k, 512) 2^-104 as a product in double-double arithmetic
    nearest         a first try of 105 bits: the result decides whether it sufficed

and ``rtol`` for what is left of it after the last rounding.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mixprec.fp64 import residues
from mixprec.fp64.arithmetic import UNIT
from mixprec.fp64.certificate import bits_lost, least_sums
from mixprec.fp64.engines import Engine
from mixprec.fp64.request import (
    AUTO,
    DOUBLE_DOUBLE,
    FLOAT64,
    LEAST_PAIR_RTOL,
    NEAREST,
    RESIDUES,
    SLICES,
    Request,
)
from mixprec.fp64.residues import Norms
from mixprec.fp64.slices import MOST_PARTS_BITS, dropped, parts_for

NATIVE = "native"
_AUTO_SHARE = UNIT / 2
_LEAST_LENGTH = 512
_DOUBLE_DOUBLE_UNIT = 2.0**-104
NEAREST_BITS = 104
# errors of real and imaginary part make one of the absolute value: sqrt(2), and a little
_COMPLEX = 1.5
# cuBLAS leaves products that need more than 79 bits to native FP64: ten slices of eight bits
_LIMIT_BITS = 79
_LIMIT_PARTS = 10
# what a slice and a modulus cost an element besides the products, in multiplications of the engine:
# measured with DGEMM on two cores at 512 and 1024
_SLICE_OVERHEAD = 250
_RESIDUE_OVERHEAD = 650


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """A real operand with what every scheme needs of it.

    Attributes:
        values: float64 [batch, rows, k], finite.
        exponent: int64 [batch, rows], from ``row_exponents``.
    """

    values: Tensor
    exponent: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a product is done.

    Attributes:
        scheme: ``slices``, ``residues`` or ``native``.
        parts: Slices or moduli; 0 for native.
        products: Products of one pair of slices or one modulus.
        native_rows: bool [batch, m], rows beyond the limit.
        native_columns: bool [batch, n].
        reason: Why, in a line.
        exact: bool [batch, m, n], elements of a pair that no number of slices reaches; or None.
    """

    scheme: str
    parts: int
    products: int
    native_rows: Tensor
    native_columns: Tensor
    reason: str
    exact: Tensor | None = None


def slice_products(parts: int, *, is_symmetric: bool) -> int:
    """s (s + 1) / 2 pairs of slices; of a product x x^T those that are no mirror images."""
    if is_symmetric:
        return sum((q + 1) // 2 for q in range(1, parts + 1))
    return parts * (parts + 1) // 2


def make_plan(
    a: Operand,
    b: Operand,
    request: Request,
    engine: Engine,
    *,
    is_symmetric: bool = False,
    is_complex: bool = False,
) -> Plan:
    """The plan of a product, from the request and, where bits are not given, from the data."""
    if request.bits is not None:
        return _by_bits(a, b, request, request.bits, engine, is_symmetric, is_complex)
    if request.output == NEAREST:
        bits = NEAREST_BITS
        return _by_bits(a, b, request, bits, engine, is_symmetric, is_complex)
    length = a.values.shape[-1]
    if request.rtol is not None and _native_suffices(request, length, a.values.device, is_complex):
        every = torch.ones_like(a.exponent, dtype=torch.bool)
        none = torch.zeros_like(b.exponent, dtype=torch.bool)
        reason = f"rtol {request.rtol:.3g} is within a native product's k * 2^-53"
        return Plan(
            scheme=NATIVE,
            parts=0,
            products=0,
            native_rows=every,
            native_columns=none,
            reason=reason,
        )
    return _by_share(a, b, request, engine, is_symmetric, is_complex)


def _native_suffices(request: Request, length: int, device: torch.device, is_complex: bool) -> bool:
    is_wanted = request.output == FLOAT64 and request.scheme == AUTO
    bound = (length + 3) * UNIT * (_COMPLEX if is_complex else 1)
    return is_wanted and device.type == "cpu" and bound <= (request.rtol or 0)


def _by_bits(
    a: Operand,
    b: Operand,
    request: Request,
    bits: int,
    engine: Engine,
    is_symmetric: bool,
    is_complex: bool,
) -> Plan:
    rows, columns = _none_of(a, b)
    if request.scheme == RESIDUES:
        parts = _moduli_for(bits, engine)
        products = _residue_products(parts, engine, is_complex)
    else:
        parts = parts_for(bits, engine.width)
        products = slice_products(parts, is_symmetric=is_symmetric) * (4 if is_complex else 1)
    return Plan(
        scheme=RESIDUES if request.scheme == RESIDUES else SLICES,
        parts=parts,
        products=products,
        native_rows=rows,
        native_columns=columns,
        reason=f"{bits} bits",
    )


def _none_of(a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """No row and no column."""
    rows, columns = (torch.zeros_like(x.exponent, dtype=torch.bool) for x in (a, b))
    return rows, columns


def _moduli_for(norm_bits: float, engine: Engine) -> int:
    count = residues.moduli_for(norm_bits, engine.width)
    if count is None:
        raise ValueError(
            f"bits: got {norm_bits:.0f}; there are too few moduli of {engine.width} bits; use "
            "scheme='slices' or a wider engine"
        )
    return count


def _residue_products(count: int, engine: Engine, is_complex: bool) -> int:
    if not is_complex:
        return count
    roots = residues.moduli(engine.width, count).roots
    return sum(2 if root is not None else 3 for root in roots)


def _by_share(
    a: Operand,
    b: Operand,
    request: Request,
    engine: Engine,
    is_symmetric: bool,
    is_complex: bool,
) -> Plan:
    share = _share(request, a.values.shape[-1]) / (_COMPLEX if is_complex else 1)
    need = _need(a, b, share, request, engine)
    parts = _fewest_parts(need.worst, share, engine.width)
    sliced = slice_products(parts, is_symmetric=is_symmetric) * (4 if is_complex else 1)
    scheme, products = SLICES, sliced
    cost = _cost(a, b, sliced, parts * _SLICE_OVERHEAD)
    if request.scheme == RESIDUES or (
        request.scheme == AUTO and _may_save(a, b, share, engine, cost)
    ):
        count = _fewest_moduli(a, b, need.lost(), share, engine.width)
        if count is None and request.scheme == RESIDUES:
            raise ValueError(
                f"scheme: got 'residues'; the data need more moduli of {engine.width} bits than "
                "there are; use 'slices' or 'auto'"
            )
        if count is not None:
            remaindered = _residue_products(count, engine, is_complex)
            overhead = count * _RESIDUE_OVERHEAD
            if request.scheme == RESIDUES or _cost(a, b, remaindered, overhead) < cost:
                scheme, parts, products = RESIDUES, count, remaindered
    if bool(need.rows.all()) or bool(need.columns.all()):
        scheme, parts, products = NATIVE, 0, 0
    return Plan(
        scheme=scheme,
        parts=parts,
        products=products,
        native_rows=need.rows,
        native_columns=need.columns,
        reason=need.reason,
        exact=need.exact,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Need:
    """What the data ask for, but for what is beyond the limit.

    Attributes:
        worst: The largest of ``lost``.
        lost: ``bits_lost``, -inf where it is beyond; computed when it is called.
        rows, columns, exact: What is beyond, as in ``Plan``.
        reason: All that in a line.
    """

    worst: float
    lost: Callable[[], Tensor]
    rows: Tensor
    columns: Tensor
    exact: Tensor | None
    reason: str


def _need(a: Operand, b: Operand, share: float, request: Request, engine: Engine) -> _Need:
    operands = a.values, b.values, a.exponent, b.exponent
    length = a.values.shape[-1]
    sums = least_sums(*operands)
    least = float(sums.amin())
    worst = math.log2(length) - math.log2(least) if least > 0 else math.inf
    lost: Callable[[], Tensor] = functools.partial(bits_lost, sums, *operands)
    rows, columns = _none_of(a, b)
    exact, beyond = None, ""
    # k is in worst already
    most = math.log2(share) - math.log2(dropped(engine.width, _limit(request, engine)))
    if worst > most:
        found = lost()
        is_beyond = found > most
        if request.output == DOUBLE_DOUBLE:
            exact = is_beyond
            beyond = f"; {int(exact.sum())} elements need more than slices have"
        else:
            rows, columns = _cover(is_beyond)
            is_beyond = rows.unsqueeze(-1) | columns.unsqueeze(-2)
            beyond = f"; {int(rows.sum() + columns.sum())} rows or columns are beyond the limit"
        found.masked_fill_(is_beyond, -math.inf)
        worst, lost = float(found.amax()), lambda: found
    reason = f"the largest products stand {max(worst, 0):.1f} bits above |A||B|/k{beyond}"
    return _Need(worst=worst, lost=lost, rows=rows, columns=columns, exact=exact, reason=reason)


def _cover(is_beyond: Tensor) -> tuple[Tensor, Tensor]:
    """The rows, or the columns if they are fewer, that hold every element that is marked."""
    rows, columns = is_beyond.any(-1), is_beyond.any(-2)
    if int(rows.sum()) <= int(columns.sum()):
        return rows, torch.zeros_like(columns)
    return torch.zeros_like(rows), columns


def _cost(a: Operand, b: Operand, products: int, overhead: int) -> int:
    """Multiplications of products, and what overhead an element of a, b and the result takes."""
    batch, m, k = a.values.shape
    n = b.values.shape[-2]
    return batch * (products * m * n * k + overhead * (m * k + n * k + m * n))


def _may_save(a: Operand, b: Operand, share: float, engine: Engine, cost: int) -> bool:
    """Whether residues of the best-scaled operands would be cheaper."""
    # |A||B| is at most |a|_2 |b|_1
    least = residues.moduli_for(1 - math.log2(share), engine.width)
    return least is not None and _cost(a, b, least, least * _RESIDUE_OVERHEAD) < cost


def _share(request: Request, length: int) -> float:
    if request.rtol is not None:
        return request.rtol - (UNIT if request.output == FLOAT64 else LEAST_PAIR_RTOL / 2)
    if request.output == FLOAT64:
        return _AUTO_SHARE
    return max(length, _LEAST_LENGTH) * _DOUBLE_DOUBLE_UNIT


def _limit(request: Request, engine: Engine) -> int:
    """Slices beyond which a native product takes over; there is none for more than float64."""
    if request.output != FLOAT64:
        return MOST_PARTS_BITS // engine.width
    return max(parts_for(_LIMIT_BITS, engine.width), _LIMIT_PARTS)


def _fewest_parts(worst: float, share: float, width: int) -> int:
    """The fewest slices whose dropped bits are within a share; 1 where nothing can be lost."""
    most = MOST_PARTS_BITS // width
    for parts in range(1, most):
        if math.log2(dropped(width, parts)) + worst <= math.log2(share):
            return parts
    return most


def _fewest_moduli(a: Operand, b: Operand, lost: Tensor, share: float, width: int) -> int | None:
    """The fewest moduli for which the truncation of every element is within a share."""
    length = a.values.shape[-1]
    norms_a, norms_b = Norms.of(a.values, a.exponent), Norms.of(b.values, b.exponent)
    # 2^-mu is below 2 |a|_2 2^-norm_bits
    first = norms_a.two.unsqueeze(-1) * norms_b.one.unsqueeze(-2)
    second = norms_a.one.unsqueeze(-1) * norms_b.two.unsqueeze(-2)
    needed = torch.log2((first + second) / length) + lost
    worst = float(needed.amax()) if needed.numel() else -math.inf
    if math.isinf(worst) and worst > 0:
        return None
    return residues.moduli_for(max(worst, 0.0) - math.log2(share) + 0.01, width)
