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
from mixprec.fp64.slices import dropped, most_parts, parts_for

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
_RESIDUE_OVERHEAD = 400


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
class Task:
    """Two real operands and what is asked of their product.

    Attributes:
        a, b: Of a complex product [[re, -im], [im, re]] and [re, im].
        request: Scheme, bits or accuracy, output.
        engine: What multiplies integers.
        is_symmetric: Whether b is a, so that half of the products are mirror images.
        is_complex: Whether the operands stand for complex ones.
    """

    a: Operand
    b: Operand
    request: Request
    engine: Engine
    is_symmetric: bool = False
    is_complex: bool = False

    @property
    def length(self) -> int:
        """k, the contraction's length."""
        return self.a.values.shape[-1]


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
        exact: bool [batch, m, n], elements beyond the limit of a pair, or where an accuracy was
            asked for, which are computed from their exact values; or None.
    """

    scheme: str
    parts: int
    products: int
    native_rows: Tensor
    native_columns: Tensor
    reason: str
    exact: Tensor | None = None

    @property
    def is_native(self) -> Tensor:
        """bool [batch, m, n], the elements in a row or column beyond the limit."""
        return self.native_rows.unsqueeze(-1) | self.native_columns.unsqueeze(-2)


def make_plan(task: Task) -> Plan:
    """The plan of a product, from the request and, where bits are not given, from the data.

    Raises:
        ValueError: More moduli than the engine's width has.
    """
    request = task.request
    if request.bits is not None:
        return _by_bits(task, request.bits)
    if request.output == NEAREST:
        return _by_bits(task, NEAREST_BITS)
    if _native_suffices(task):
        rows, columns = _none_of(task)
        return Plan(
            scheme=NATIVE,
            parts=0,
            products=0,
            native_rows=~rows,
            native_columns=columns,
            reason=f"rtol {request.rtol:.3g} is within a native product's k * 2^-53",
        )
    return _by_share(task)


def _none_of(task: Task) -> tuple[Tensor, Tensor]:
    """No row and no column."""
    rows, columns = (torch.zeros_like(x.exponent, dtype=torch.bool) for x in (task.a, task.b))
    return rows, columns


def _native_suffices(task: Task) -> bool:
    request = task.request
    is_wanted = request.output == FLOAT64 and request.scheme == AUTO
    bound = (task.length + 3) * UNIT * (_COMPLEX if task.is_complex else 1)
    is_cheaper = task.a.values.device.type == "cpu"
    return is_wanted and is_cheaper and bound <= (request.rtol or 0)


def _by_bits(task: Task, bits: int) -> Plan:
    rows, columns = _none_of(task)
    is_residues = task.request.scheme == RESIDUES
    if is_residues:
        parts = _enough(residues.moduli_for(bits, task.engine.width), task)
        products = residue_products(task, parts)
    else:
        parts = parts_for(bits, task.engine.width)
        products = slice_products(task, parts)
    return Plan(
        scheme=RESIDUES if is_residues else SLICES,
        parts=parts,
        products=products,
        native_rows=rows,
        native_columns=columns,
        reason=f"{bits} bits",
    )


def _enough(count: int | None, task: Task) -> int:
    if count is None:
        raise ValueError(
            f"scheme: got 'residues'; the product needs more moduli of {task.engine.width} bits "
            "than there are; use 'slices' or a wider engine"
        )
    return count


def slice_products(task: Task, parts: int) -> int:
    """s (s + 1) / 2 pairs of slices; of a product x x^T those that are no mirror images."""
    if task.is_symmetric:
        return sum((q + 1) // 2 for q in range(1, parts + 1))
    return parts * (parts + 1) // 2 * (4 if task.is_complex else 1)


def residue_products(task: Task, count: int) -> int:
    """One product a modulus; of complex operands two where -1 has a root, or three."""
    if not task.is_complex:
        return count
    roots = residues.moduli(task.engine.width, count).roots
    return sum(2 if root is not None else 3 for root in roots)


def _by_share(task: Task) -> Plan:
    share = _share(task)
    need = _need(task, share)
    scheme, parts = SLICES, _fewest_parts(need.worst, share, task.engine.width)
    products = slice_products(task, parts)
    count = _moduli_instead(task, share, need, _cost(task, products, parts * _SLICE_OVERHEAD))
    if count is not None:
        scheme, parts, products = RESIDUES, count, residue_products(task, count)
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


def _share(task: Task) -> float:
    """The largest truncation, in units of |A||B|."""
    request = task.request
    if request.rtol is not None:
        share = request.rtol - (UNIT if request.output == FLOAT64 else LEAST_PAIR_RTOL / 2)
    elif request.output == FLOAT64:
        share = _AUTO_SHARE
    else:
        share = max(task.length, _LEAST_LENGTH) * _DOUBLE_DOUBLE_UNIT - LEAST_PAIR_RTOL / 2
    return share / (_COMPLEX if task.is_complex else 1)


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


def _need(task: Task, share: float) -> _Need:
    operands = task.a.values, task.b.values, task.a.exponent, task.b.exponent
    sums = least_sums(*operands)
    least = float(sums.amin())
    worst = math.log2(task.length) - math.log2(least) if least > 0 else math.inf
    lost: Callable[[], Tensor] = functools.partial(bits_lost, sums, *operands)
    rows, columns = _none_of(task)
    exact, beyond = None, ""
    # k is in worst already
    most = math.log2(share) - math.log2(dropped(task.engine.width, _limit(task)))
    if worst > most:
        found = lost()
        is_beyond = found > most
        if task.request.output == DOUBLE_DOUBLE or task.request.rtol is not None:
            exact = is_beyond
            beyond = f"; {int(exact.sum())} elements are beyond the limit"
        else:
            rows, columns = _cover(is_beyond)
            is_beyond = rows.unsqueeze(-1) | columns.unsqueeze(-2)
            beyond = f"; {int(rows.sum() + columns.sum())} rows or columns are beyond the limit"
        found.masked_fill_(is_beyond, -math.inf)
        worst, lost = float(found.amax()), lambda: found
    reason = f"the largest products stand {max(worst, 0):.1f} bits above |A||B|/k{beyond}"
    return _Need(worst=worst, lost=lost, rows=rows, columns=columns, exact=exact, reason=reason)


def _limit(task: Task) -> int:
    """Slices beyond which native products take over, or exact ones element by element."""
    if task.request.output == DOUBLE_DOUBLE:
        return most_parts(task.engine.width)
    return max(parts_for(_LIMIT_BITS, task.engine.width), _LIMIT_PARTS)


def _cover(is_beyond: Tensor) -> tuple[Tensor, Tensor]:
    """The rows, or the columns if they are fewer, that hold every element that is marked."""
    rows, columns = is_beyond.any(-1), is_beyond.any(-2)
    if int(rows.sum()) <= int(columns.sum()):
        return rows, torch.zeros_like(columns)
    return torch.zeros_like(rows), columns


def _fewest_parts(worst: float, share: float, width: int) -> int:
    """The fewest slices whose dropped bits are within a share; 1 where nothing can be lost."""
    most = most_parts(width)
    parts = range(1, most)
    enough = (s for s in parts if math.log2(dropped(width, s)) + worst <= math.log2(share))
    return next(enough, most)


def _moduli_instead(task: Task, share: float, need: _Need, cost: int) -> int | None:
    """How many moduli to take in place of slices of that cost, or None."""
    width = task.engine.width
    if task.request.scheme == RESIDUES:
        return _enough(_fewest_moduli(task, share, need.lost()), task)
    # |A||B| is at most |a|_2 |b|_1: the fewest for operands of the best scales
    fewest = residues.moduli_for(1 - math.log2(share), width)
    if task.request.scheme == SLICES or fewest is None or _residue_cost(task, fewest) >= cost:
        return None
    count = _fewest_moduli(task, share, need.lost())
    return count if count is not None and _residue_cost(task, count) < cost else None


def _fewest_moduli(task: Task, share: float, lost: Tensor) -> int | None:
    """The fewest moduli for which the truncation of every element is within a share."""
    a, b = (Norms.of(x.values, x.exponent) for x in (task.a, task.b))
    # 2^-mu is below 2 |a|_2 2^-norm_bits
    first = a.two.unsqueeze(-1) * b.one.unsqueeze(-2)
    second = a.one.unsqueeze(-1) * b.two.unsqueeze(-2)
    worst = float((torch.log2((first + second) / task.length) + lost).amax())
    if worst == math.inf:
        return None
    return residues.moduli_for(max(worst, 0.0) - math.log2(share) + 0.01, task.engine.width)


def _residue_cost(task: Task, count: int) -> int:
    return _cost(task, residue_products(task, count), count * _RESIDUE_OVERHEAD)


def _cost(task: Task, products: int, overhead: int) -> int:
    """Multiplications of products, and what overhead an element of a, b and the result takes."""
    batch, m, k = task.a.values.shape
    n = task.b.values.shape[-2]
    return batch * (products * m * n * k + overhead * (m * k + n * k + m * n))
