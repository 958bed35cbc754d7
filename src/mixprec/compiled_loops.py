"""Loops over the elements of an operand, compiled when they are first called: arrays in and out.

Several steps of arithmetic in one pass, where torch takes one pass a step; each step as
``scaling``, ``hadamard``, ``noise``, ``rounding`` and ``codes`` have it, so that the bits are
theirs. Matrices are in the order of memory, rows contiguous, and blocks (rows, columns) of it. A
call does one part of the work: parts write to different places, and hold no lock of the
interpreter.

numba widens every sum of integers to 64 bits: each is made 32 bits again, which costs nothing and
lets eight of them be done at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]
_MAGNITUDE, _EXPONENT, _SIGN = 0x7FFFFFFF, 0x7F800000, -(1 << 31)
_LAST_32 = (1 << 32) - 1
_FACTORS, _GOLDEN = (0x7FEB352D, 0x846CA68B), 0x9E3779B9
_FLIPPED = (3, 5, 6, 7, 8, 9, 10, 12, 14, 15)


class Grid(NamedTuple):
    """Where values are rounded to.

    largest: float32; beyond it values are clamped.
    mantissa: Mantissa bits.
    first_power: int32, the bits of 2^min_exponent.
    sign_code: The code of -0.
    nan_code: That of NaN without its sign, 0 where there is none.
    """

    largest: Any
    mantissa: int
    first_power: Any
    sign_code: int
    nan_code: int


class Draws(NamedTuple):
    """What the noise of a matrix is made of.

    first: The index of its first element.
    row_step, column_step: How it grows from row to row, and within one.
    low_key, high_key: uint32 halves of the key.
    """

    first: int
    row_step: int
    column_step: int
    low_key: Any
    high_key: Any


_inner = njit(nogil=True, error_model="numpy")
"""Part of the loops that call it."""


def _compiled(function: Callable[..., None]) -> Callable[..., None]:
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:
        # no folder can be written to: compiled anew in each process
        return _inner(function)


@_inner
def _bits(value: Any) -> Any:
    return np.float32(value).view(np.int32)


@_inner
def _value(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@_inner
def _larger(a: Any, b: Any) -> Any:
    return a if a > b else b


@_compiled
def block_amax(
    bits: Array,
    block: tuple[int, int],
    out: Array,
    rows_at_once: int,
    columns_at_once: int,
    part: int,
) -> None:
    """The largest magnitude of each block, by the bits of float32: int32 [rows, columns].

    ``out`` begins as zeros; a part is so many of its rows and columns.
    """
    parts_a_row = -(-out.shape[1] // columns_at_once)
    first = part % parts_a_row * columns_at_once
    last = min(first + columns_at_once, out.shape[1])
    start, end = first * block[1], min(last * block[1], bits.shape[1])
    row = part // parts_a_row * rows_at_once * block[0]
    stop = min(row + rows_at_once * block[0], bits.shape[0])
    spare = np.empty(end - start, np.int32)
    for i in range(row, stop):
        _amax_of_row(bits[i, start:end], block[1], spare, out[i // block[0], first:last])


@_inner
def _amax_of_row(bits: Array, size: int, spare: Array, out: Array) -> None:
    length = len(bits)
    for j in range(length):
        spare[j] = np.int32(bits[j] & _MAGNITUDE)
    if size == 1:
        for j in range(length):
            out[j] = _larger(out[j], spare[j])
        return
    # halves, as long as blocks have them, are compared many at once
    while size % 2 == 0 and length % size == 0:
        size //= 2
        length //= 2
        for j in range(length):
            spare[j] = _larger(spare[2 * j], spare[2 * j + 1])
    for b in range(len(out)):
        for j in range(b * size, min((b + 1) * size, length)):
            out[b] = _larger(out[b], spare[j])


@_compiled
def hadamard_of_columns(x: Array, out: Array, groups_at_once: int, part: int) -> None:
    """Each 16 rows transformed, float32; a part is so many groups of 16."""
    width = 128
    buffer = np.empty((16, width), np.float32)
    groups = len(x) // 16
    for group in range(part * groups_at_once, min((part + 1) * groups_at_once, groups)):
        rows, results = x[16 * group : 16 * group + 16], out[16 * group : 16 * group + 16]
        for start in range(0, x.shape[1], width):
            length = min(width, x.shape[1] - start)
            for k in range(16):
                sign = np.float32(-1.0 if k in _FLIPPED else 1.0)
                for j in range(length):
                    buffer[k, j] = rows[k, start + j] * sign
            for k in range(0, 16, 4):
                _butterfly_of_rows(buffer, k, 1, length)
            for k in range(4):
                _butterfly_of_rows(buffer, k, 4, length)
            for k in range(16):
                for j in range(length):
                    results[k, start + j] = buffer[k, j] * np.float32(0.25)


@_inner
def _butterfly_of_rows(buffer: Array, first: int, stride: int, length: int) -> None:
    """Sums and differences over a stride, then over twice that."""
    for j in range(length):
        a, b = buffer[first, j], buffer[first + stride, j]
        c, d = buffer[first + 2 * stride, j], buffer[first + 3 * stride, j]
        e, f, g, h = a + b, a - b, c + d, c - d
        buffer[first, j], buffer[first + stride, j] = e + g, f + h
        buffer[first + 2 * stride, j], buffer[first + 3 * stride, j] = e - g, f - h


@_compiled
def hadamard_of_rows(x: Array, out: Array, rows_at_once: int, part: int) -> None:
    """Each 16 elements of a row transformed, float32; a part is so many rows."""
    a = np.empty(16, np.float32)
    signs = np.ones(16, np.float32)
    for k in _FLIPPED:
        signs[k] = -1.0
    for i in range(part * rows_at_once, min((part + 1) * rows_at_once, len(x))):
        for start in range(0, x.shape[1], 16):
            for k in range(16):
                a[k] = x[i, start + k] * signs[k]
            for k in range(0, 16, 4):
                _butterfly(a, k, 1)
            for k in range(4):
                _butterfly(a, k, 4)
            for k in range(16):
                out[i, start + k] = a[k] * np.float32(0.25)


@_inner
def _butterfly(x: Array, first: int, stride: int) -> None:
    a, b = x[first], x[first + stride]
    c, d = x[first + 2 * stride], x[first + 3 * stride]
    e, f, g, h = a + b, a - b, c + d, c - d
    x[first], x[first + stride] = e + g, f + h
    x[first + 2 * stride], x[first + 3 * stride] = e - g, f - h


@_compiled
def round_to_values(
    x: Array,
    encode: Array,
    block: tuple[int, int],
    grid: Grid,
    draws: Draws,
    is_stochastic: bool,
    out: Array,
    rows_at_once: int,
    part: int,
) -> None:
    """round(x * encode), float32; a part is so many rows. ``draws`` counts if stochastic."""
    scaled = np.empty(x.shape[1], np.float32)
    factors = np.empty(x.shape[1], np.float32)
    noise = np.empty(x.shape[1], np.int32)
    first = part * rows_at_once
    for i in range(first, min(first + rows_at_once, len(x))):
        if i == first or i % block[0] == 0:
            _repeat(encode[i // block[0]], block[1], factors)
        _scale(x[i], factors, grid.largest, scaled)
        if is_stochastic:
            _draw(draws, i, noise)
            _values_by_draws(scaled, noise, grid, out[i])
        else:
            _nearest_values(scaled, grid, out[i])


@_compiled
def round_to_codes(
    x: Array,
    encode: Array,
    block: tuple[int, int],
    grid: Grid,
    draws: Draws,
    is_stochastic: bool,
    out: Array,
    rows_at_once: int,
    part: int,
) -> None:
    """The codes of round(x * encode), uint8; otherwise as ``round_to_values``."""
    scaled = np.empty(x.shape[1], np.float32)
    factors = np.empty(x.shape[1], np.float32)
    noise = np.empty(x.shape[1], np.int32)
    first = part * rows_at_once
    for i in range(first, min(first + rows_at_once, len(x))):
        if i == first or i % block[0] == 0:
            _repeat(encode[i // block[0]], block[1], factors)
        _scale(x[i], factors, grid.largest, scaled)
        if is_stochastic:
            _draw(draws, i, noise)
            _codes_by_draws(scaled, noise, grid, out[i])
        else:
            _nearest_codes(scaled, grid, out[i])


@_inner
def _repeat(per_block: Array, size: int, out: Array) -> None:
    length = len(out)
    if len(per_block) == 1:
        out[:] = per_block[0]
    elif size == 1:
        out[:] = per_block
    elif size % 16 == 0 and length % 16 == 0:
        for start in range(0, length, 16):
            for k in range(16):
                out[start + k] = per_block[start // size]
    else:
        for j in range(length):
            out[j] = per_block[j // size]


@_inner
def _scale(x: Array, factors: Array, largest: Any, out: Array) -> None:
    # comparisons that are false for NaN leave it
    for j in range(len(x)):
        value = x[j] * factors[j]
        value = largest if value > largest else value
        out[j] = -largest if value < -largest else value


@_inner
def _draw(draws: Draws, row: int, out: Array) -> None:
    step = draws.column_step
    start = 0
    while start < len(out):
        index = draws.first + row * draws.row_step + start * step
        # as far as the high half of the index stays what it is
        end = min(len(out), start + ((index | _LAST_32) - index) // step + 1)
        high = np.uint32(np.uint32(np.uint32(index >> 32) * np.uint32(_GOLDEN)) + draws.high_key)
        low, by = np.uint32(index & _LAST_32), np.uint32(step & _LAST_32)
        part = out[start:end]
        for j in range(len(part)):
            counter = np.uint32(low + np.uint32(np.uint32(j) * by))
            mixed = _mixed(np.uint32(counter ^ draws.low_key))
            part[j] = np.int32(_mixed(np.uint32(mixed + high)) >> np.uint32(8))
        start = end


@_inner
def _mixed(x: Any) -> Any:
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(_FACTORS[0]))
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(15))) * np.uint32(_FACTORS[1]))
    return np.uint32(x ^ (x >> np.uint32(16)))


@_inner
def _power(bits: Any, grid: Grid) -> Any:
    """The bits of 2^max(exponent, min_exponent)."""
    return _larger(np.int32(bits & _EXPONENT), grid.first_power)


@_inner
def _nearest_values(x: Array, grid: Grid, out: Array) -> None:
    digits = np.float32(1.5 * 2.0 ** (23 - grid.mantissa))
    for j in range(len(x)):
        large = _value(_power(_bits(x[j]), grid)) * digits
        out[j] = np.float32(x[j] + large) - large


@_inner
def _nearest_codes(x: Array, grid: Grid, out: Array) -> None:
    dropped = 23 - grid.mantissa
    digits = np.float32(1.5 * 2.0**dropped)
    exponent = (grid.first_power >> 23) + dropped
    first = np.int32((2 * exponent + 1) << (grid.mantissa - 1))
    for j in range(len(x)):
        bits = _bits(x[j])
        large = _value(_power(bits, grid)) * digits
        total = _bits(np.float32(_value(np.int32(bits & _MAGNITUDE)) + large))
        code = np.int32(total - _bits(large) + (_bits(large) >> dropped) - first)
        out[j] = _with_sign(code, bits, x[j], grid)


@_inner
def _negative_units(bits: Any, power: Any, grid: Grid) -> Any:
    """-|x| in whole units of 2^-24 steps."""
    per_unit = np.int32(((2 * 127 + grid.mantissa + 24) << 23) + _SIGN - power)
    return np.int32(np.floor(_value(np.int32(bits & _MAGNITUDE)) * _value(per_unit)))


@_inner
def _values_by_draws(x: Array, noise: Array, grid: Grid, out: Array) -> None:
    unit = np.float32(-(2.0 ** (-24 - grid.mantissa)))
    for j in range(len(x)):
        bits = _bits(x[j])
        power = _power(bits, grid)
        units = np.int32(_negative_units(bits, power, grid) + noise[j])
        value = np.float32(np.int32(units & (-1 << 24))) * np.float32(_value(power) * unit)
        out[j] = _value(np.int32(_bits(value) | np.int32(bits & _SIGN)))


@_inner
def _codes_by_draws(x: Array, noise: Array, grid: Grid, out: Array) -> None:
    dropped = 23 - grid.mantissa
    first = np.int32(grid.first_power >> dropped)
    for j in range(len(x)):
        bits = _bits(x[j])
        power = _power(bits, grid)
        whole = np.int32(np.int32(_negative_units(bits, power, grid) + noise[j]) >> 24)
        out[j] = _with_sign(np.int32((power >> dropped) - whole - first), bits, x[j], grid)


@_inner
def _with_sign(code: Any, bits: Any, value: Any, grid: Grid) -> Any:
    # NaN has a sign where it has a code
    code = np.int32(code if value == value else grid.nan_code)
    is_signed = bits < 0 and (value == value or grid.nan_code > 0)
    return np.uint8(np.int32(code + (grid.sign_code if is_signed else 0)))
