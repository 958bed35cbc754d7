"""Scheme II: integers by their residues, one product a modulus, and Chinese remaindering.

    a' = RN(a * 2^mu[m]), b' = RN(b * 2^nu[n]),   sum over k |a' b'| < P / 2,   P = p_1 p_2 .. p_N
    c_t = (a' mod p_t)(b' mod p_t)^T mod p_t      exact small integers, N products
    c' = sum of c_t w_t - P Q,   w_t = (P / p_t) ((P / p_t)^-1 mod p_t)
    Q = RN(sum of c_t w_t / P)

The exponents mu and nu come from the norms of rows and columns: by Cauchy and Schwarz |a'||b'|
stays below P / 2. The moduli are pairwise coprime, from 2^width downward: 256, 255, 253, .. for 8
bits.

A complex product takes three real ones a modulus, or two where -1 has a square root j modulo it:
then a + i b goes to a + j b and a - j b, which multiply each by itself.

Exactness: c' is exact. What the integers leave out is at most (2^-mu |b|_1 + 2^-nu |a|_1) / 2 and
k 2^(-mu - nu) / 4 more.

Sources: Ozaki, Uchino and Imamura 2025 (the scheme); Kawakami and Takahashi 2026 (scaling by
norms); Garner 1959 (remaindering).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mixprec.fp64.arithmetic import scale
from mixprec.fp64.engines import Engine
from mixprec.fp64.slices import Term, fill, parts_for

Complex = tuple[Tensor, Tensor]
"""Residues of real and imaginary part, each [N, batch, rows, k]."""
# log2 of P / 2 is kept this far from what Cauchy and Schwarz allow, for the roundings of norms
_MARGIN_BITS = 2.0**-10
_LEAST_BITS = 20
_MOST_BITS = 1000
# sums up to this are reduced for certain by one quotient
_SURE = 1 << 45


@dataclass(frozen=True, slots=True)
class Moduli:
    """Pairwise coprime integers up to 2^width, and the constants of remaindering.

    Attributes:
        values: p_1 > p_2 > .. > p_N.
        limb_bits: Bits of one part of a weight, so that sums of residues times it are exact.
        weights: [parts][N] parts of w_t, the least significant first.
        product: [parts] parts of P.
    """

    values: tuple[int, ...]
    limb_bits: int
    weights: tuple[tuple[int, ...], ...]
    product: tuple[int, ...]

    @property
    def bits(self) -> float:
        """log2 of P."""
        return sum(map(math.log2, self.values))

    @property
    def norm_bits(self) -> float:
        """log2 of the largest norm of a row or column of integers."""
        return (self.bits - 1) / 2 - _MARGIN_BITS

    @property
    def roots(self) -> tuple[int | None, ...]:
        """A square root of -1 modulo each, or None."""
        return tuple(_root_of_minus_one(p) for p in self.values)


@functools.cache
def coprime(width: int) -> tuple[int, ...]:
    """All that ``moduli`` takes: greedily from 2^width down, their product below 2^1000."""
    found: list[int] = []
    bits = 0.0
    for candidate in range(1 << width, 2, -1):
        if all(math.gcd(candidate, p) == 1 for p in found):
            bits += math.log2(candidate)
            # a product of integers has to stay far from the end of float64
            if bits > _MOST_BITS:
                break
            found.append(candidate)
    return tuple(found)


@functools.cache
def moduli(width: int, count: int) -> Moduli:
    """The first ``count`` moduli of a width."""
    values = coprime(width)[:count]
    product = math.prod(values)
    room = math.ceil(math.log2(sum(p // 2 + 1 for p in values)))
    limb_bits = 51 - room
    parts = -(-product.bit_length() // limb_bits)
    weights = [product // p * pow(product // p, -1, p) for p in values]
    return Moduli(
        values,
        limb_bits,
        tuple(tuple(_limb(w, limb_bits, i) for w in weights) for i in range(parts)),
        tuple(_limb(product, limb_bits, i) for i in range(parts)),
    )


def _limb(value: int, bits: int, index: int) -> int:
    return value >> bits * index & (1 << bits) - 1


@functools.cache
def _root_of_minus_one(p: int) -> int | None:
    """j with j^2 = -1 modulo an odd p below 2^12, for larger ones a search takes too long."""
    if p % 2 == 0 or p >= 1 << 12:
        return None
    return next((j for j in range(2, p) if j * j % p == p - 1), None)


def moduli_for(norm_bits: float, width: int) -> int | None:
    """How many moduli give rows and columns so many bits of norm; None where too few exist."""
    total = 0.0
    for count, p in enumerate(coprime(width), start=1):
        total += math.log2(p)
        if (total - 1) / 2 - _MARGIN_BITS >= max(norm_bits, _LEAST_BITS):
            return count
    return None


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of the rows of an operand scaled by their exponents: |x|_1 and |x|_2, not below."""

    one: Tensor
    two: Tensor

    @staticmethod
    def of(x: Tensor, exponent: Tensor) -> Norms:
        """Norms of x[batch, rows, k] * 2^-exponent[batch, rows]."""
        scaled = scale(x, -exponent.unsqueeze(-1))
        inflated = 1 + 2.0**-52 * (x.shape[-1] + 8)
        one = scaled.abs().sum(-1) * inflated
        # squares of elements below 2^-511 underflow: k * 2^-1022 more than makes up for them
        two = torch.sqrt(scaled.square_().sum(-1) * inflated + x.shape[-1] * 2.0**-1000)
        return Norms(one, torch.where(one == 0, 1.0, two * inflated))


def exponents(norms: Norms, exponent: Tensor, used: Moduli, length: int) -> Tensor:
    """mu of each row: the largest with |a'|_2 at most 2^norm_bits, rounding included."""
    room = 2.0**used.norm_bits - 0.5 * math.sqrt(length)
    free = math.log2(room) - torch.log2(norms.two) - 2.0**-20
    return torch.floor(free.clamp(-2000, 2000)).to(torch.int64) - exponent


@functools.cache
def _powers(width: int, parts: int, values: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """2^(w (s - p)) mod p_t, symmetric, for the slices p = 1..s of each modulus t."""
    rows = ([pow(2, width * (parts - 1 - i), p) for i in range(parts)] for p in values)
    return tuple(
        tuple(r - p if r > p // 2 else r for r in row) for row, p in zip(rows, values, strict=True)
    )


def reduce(x: Tensor, p: Tensor) -> Tensor:
    """x mod p in [-p/2, p/2), in place, for float64 integers below 2^45.

    Up to 2^53 the quotient may round across a half, and what is left be 2 beyond p/2 at most.
    """
    half = torch.full((), 0.5, dtype=x.dtype, device=x.device)
    p = p.to(x)
    quotient = torch.addcmul(half, x, 1 / p).floor_()
    return x.addcmul_(quotient, p, value=-1)


def residues(
    x: Tensor, mu: Tensor, used: Moduli, width: int, dtype: torch.dtype = torch.float64
) -> Tensor:
    """RN(x * 2^mu) modulo each: integers [N, batch, rows, k] in a type that holds them."""
    parts = parts_for(math.ceil(used.norm_bits) + 1, width)
    # the last slice's unit is 2^-mu
    exponent = width * parts - 1 - mu
    digits = x.new_empty((parts, *x.shape))
    fill(list(digits.unbind()), x, exponent, width)
    out = torch.empty((len(used.values), *x.shape), dtype=dtype, device=x.device)
    powers = _powers(width, parts, used.values)
    # one modulus after the other: all of them in float64 would take eight times an int8 engine's
    for residue, row, p in zip(out, powers, used.values, strict=True):
        residue.copy_(reduce(_combined((row,), digits)[0], torch.tensor(float(p))))
    return out


def _combined(weights: tuple[tuple[int, ...], ...], x: Tensor) -> Tensor:
    """Sums of weights[i][j] * x[j], integers below 2^53, exactly."""
    if x.device.type == "cpu":
        return torch.mm(_tensor(weights, x), x.flatten(1)).reshape(-1, *x.shape[1:])
    # cuBLAS may emulate products in float64 too, in fewer bits
    out = x.new_zeros((len(weights), *x.shape[1:]))
    for sums, row in zip(out, weights, strict=True):
        for weight, part in zip(row, x, strict=True):
            sums.add_(part, alpha=weight)
    return out


def _tensor(values: tuple[tuple[int, ...], ...], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)


def _moduli_tensor(used: Moduli, like: Tensor, dim: int) -> Tensor:
    return _tensor((used.values,), like).reshape(-1, *[1] * (dim - 1))


def multiply(a: Tensor, b: Tensor, used: Moduli, engine: Engine) -> Tensor:
    """The products of residues [N, batch, m, k] and [N, batch, n, k], reduced."""
    shape = (*a.shape[:-1], b.shape[-2])
    out = torch.empty(shape, dtype=torch.float64, device=a.device)
    for product, left, right, p in zip(out, a, b, used.values, strict=True):
        product.copy_(_product(left.to(engine.dtype), right.to(engine.dtype), p, engine))
    return out


def _product(a: Tensor, b: Tensor, p: int, engine: Engine) -> Tensor:
    """The product of residues modulo p, in blocks that the engine takes."""
    modulus, total = torch.tensor(float(p)), None
    for start in range(0, a.shape[-1], engine.capacity):
        block = slice(start, start + engine.capacity)
        sums = reduce(engine.dot(a[..., block], b[..., block]), modulus)
        if engine.largest_sum > _SURE or total is not None:
            sums = reduce(sums if total is None else sums.add_(total), modulus)
        total = sums
    assert total is not None
    return total


def multiply_complex(a: Complex, b: Complex, used: Moduli, engine: Engine) -> tuple[Tensor, Tensor]:
    """Residues of the real and the imaginary part of the product of complex residues."""
    by_root = [t for t, root in enumerate(used.roots) if root is not None]
    others = [t for t, root in enumerate(used.roots) if root is None]
    shape = (len(used.values), a[0].shape[1], a[0].shape[2], b[0].shape[2])
    real, imaginary = a[0].new_empty(shape), a[0].new_empty(shape)
    for index, product in ((by_root, _two_products), (others, _three_products)):
        if index:
            part = Moduli(tuple(used.values[t] for t in index), used.limb_bits, (), ())
            left, right = (a[0][index], a[1][index]), (b[0][index], b[1][index])
            real[index], imaginary[index] = product(left, right, part, engine)
    return real, imaginary


def _two_products(a: Complex, b: Complex, used: Moduli, engine: Engine) -> Complex:
    p = _moduli_tensor(used, a[0], 4)
    roots = [root for root in used.roots if root is not None]
    over_j = [pow(2 * root, -1, value) for root, value in zip(roots, used.values, strict=True)]
    halves = [pow(2, -1, value) for value in used.values]
    j, over, half = (
        _tensor((tuple(values),), a[0]).reshape(-1, 1, 1, 1) for values in (roots, over_j, halves)
    )
    ja, jb = reduce(a[1] * j, p), reduce(b[1] * j, p)
    plus = multiply(reduce(a[0] + ja, p), reduce(b[0] + jb, p), used, engine)
    minus = multiply(reduce(a[0] - ja, p), reduce(b[0] - jb, p), used, engine)
    real = reduce(reduce(plus + minus, p) * half, p)
    return real, reduce(reduce(plus - minus, p) * over, p)


def _three_products(a: Complex, b: Complex, used: Moduli, engine: Engine) -> Complex:
    p = _moduli_tensor(used, a[0], 4)
    first, second = multiply(a[0], b[0], used, engine), multiply(a[1], b[1], used, engine)
    third = multiply(reduce(a[0] + a[1], p), reduce(b[0] + b[1], p), used, engine)
    return reduce(first - second, p), reduce(third - first - second, p)


def remaindered(c: Tensor, used: Moduli) -> list[Term]:
    """The integers with residues c [N, batch, m, n] as exact terms, least significant first."""
    parts = len(used.product)
    limbs = _combined(used.weights, c)
    base = 2.0**used.limb_bits
    # the value over P: an integer and less than a half, which float64 sees from the upper parts
    quotient = torch.zeros_like(limbs[0])
    total = 0
    for part, own in zip(range(parts), used.product, strict=True):
        quotient = quotient / base + limbs[part]
        total += own << used.limb_bits * part
    top = total / 2 ** (used.limb_bits * (parts - 1))
    quotient = torch.round(quotient / top)
    for part, own in enumerate(used.product):
        limbs[part].sub_(quotient * own)
    # each within half a base, so that no leading part cancels against the next
    for part in range(parts - 1):
        carry = torch.round(limbs[part] / base)
        limbs[part].sub_(carry * base)
        limbs[part + 1].add_(carry)
    return [Term(limbs[part], used.limb_bits * part) for part in range(parts)]
