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
from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]
MAGNITUDE = 0x7FFFFFFF
_LARGEST = float(np.finfo(np.float32).max)
_WITHOUT_MANTISSA = -(1 << 52)
_FLIPPED = (3, 5, 6, 7, 8, 9, 10, 12, 14, 15)


part_of_loop = njit(nogil=True, error_model="numpy")
"""For what loops call."""


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    try:
        return njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:
        # no folder can be written to: compiled anew in each process
        return part_of_loop(function)


@part_of_loop
def bits_of(value: Any) -> Any:
    return np.float32(value).view(np.int32)


@part_of_loop
def value_of(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


@compiled
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


@part_of_loop
def _amax_of_row(bits: Array, size: int, spare: Array, out: Array) -> None:
    length = len(bits)
    if size == 1:
        for j in range(length):
            out[j] = max(out[j], np.int32(bits[j] & MAGNITUDE))
        return
    has_halves = size % 2 == 0 and length % size == 0
    if has_halves:
        # as long as blocks have halves, these are compared many at once
        size //= 2
        length //= 2
        for j in range(length):
            spare[j] = max(np.int32(bits[2 * j] & MAGNITUDE), np.int32(bits[2 * j + 1] & MAGNITUDE))
    else:
        for j in range(length):
            spare[j] = np.int32(bits[j] & MAGNITUDE)
    while has_halves and size % 2 == 0:
        size //= 2
        length //= 2
        for j in range(length):
            spare[j] = max(spare[2 * j], spare[2 * j + 1])
    for b in range(len(out)):
        for j in range(b * size, min((b + 1) * size, length)):
            out[b] = max(out[b], spare[j])


@compiled
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


@part_of_loop
def _butterfly_of_rows(buffer: Array, first: int, stride: int, length: int) -> None:
    """Sums and differences over a stride, then over twice that."""
    for j in range(length):
        a, b = buffer[first, j], buffer[first + stride, j]
        c, d = buffer[first + 2 * stride, j], buffer[first + 3 * stride, j]
        e, f, g, h = a + b, a - b, c + d, c - d
        buffer[first, j], buffer[first + stride, j] = e + g, f + h
        buffer[first + 2 * stride, j], buffer[first + 3 * stride, j] = e - g, f - h


@compiled
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


@part_of_loop
def _butterfly(x: Array, first: int, stride: int) -> None:
    a, b = x[first], x[first + stride]
    c, d = x[first + 2 * stride], x[first + 3 * stride]
    e, f, g, h = a + b, a - b, c + d, c - d
    x[first], x[first + stride] = e + g, f + h
    x[first + 2 * stride], x[first + 3 * stride] = e - g, f - h


@compiled
def e8m0_scales(
    amax: Array,
    encode: Array,
    codes: Array,
    factor: float,
    addend: int,
    shift: int,
    lowest: int,
    at_once: int,
    part: int,
) -> None:
    """Encoding factors, and codes in uint8, of amaxes, all in a row; a part is so many of them."""
    for i in range(part * at_once, min((part + 1) * at_once, len(amax))):
        bits = bits_of(np.float32(amax[i] * np.float32(factor)))
        code = np.int32((np.int32(bits + addend) >> 23) - shift)
        code = np.int32(0 if bits <= lowest or code < 0 else code)
        code = np.int32(254 if code > 254 else code)
        code = np.int32(code if amax[i] < np.inf else 255)
        power = np.int32(np.int32(254 - code) << 23)
        power = np.int32(1 << 22 if code == 254 else power)
        codes[i] = code
        encode[i] = value_of(np.int32(0x7FC00000 if code == 255 else power))


@compiled
def real_scales(
    amax: Array,
    encode: Array,
    scale: Array,
    largest: float,
    is_power: bool,
    at_once: int,
    part: int,
) -> None:
    """Encoding factors and their reciprocals, float32; otherwise as ``e8m0_scales``."""
    for i in range(part * at_once, min((part + 1) * at_once, len(amax))):
        wide = np.float64(amax[i])
        # wide - wide is 0, or NaN where amax is not finite
        factor = ((wide - wide) + largest) / wide
        factor = np.float64(_LARGEST if factor > _LARGEST else factor)
        found = np.float32(factor)
        if is_power and found == found:
            found = np.float32(_power_below(found))
        found = np.float32(1.0 if wide == 0 else found)
        encode[i] = found
        scale[i] = np.float32(1.0 / np.float64(found))


@part_of_loop
def _power_below(value: Any) -> Any:
    bits = np.float64(value).view(np.int64)
    return np.int64(bits & _WITHOUT_MANTISSA).view(np.float64)


@compiled
def times_rows_and_columns(
    x: Array, rows: Array, columns: Array, rows_at_once: int, part: int
) -> None:
    """(x * rows) * columns in place, float32; a part is so many rows."""
    for i in range(part * rows_at_once, min((part + 1) * rows_at_once, len(x))):
        factor = rows[i]
        for j in range(x.shape[1]):
            x[i, j] = np.float32(x[i, j] * factor) * columns[j]
