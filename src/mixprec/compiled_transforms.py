"""The Hadamard transform, factors of rows and columns, and decoding, in compiled loops.

As ``hadamard``, torch's products by factors and ``codes.decode`` have them, so that the bits are
theirs. Matrices are in the order of memory, float32 but for codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from mixprec.compiled_calls import Array, array_at, loop, part_of_loop, parts_of, record_of

_FLIPPED = (3, 5, 6, 7, 8, 9, 10, 12, 14, 15)
_MATRICES = record_of(("x", "out", "rows", "columns", "at_once"))
_CODES = record_of(("x", "table", "out", "rows", "columns", "at_once"))
_FACTORS = record_of(("x", "row_factors", "column_factors", "rows", "columns", "at_once"))


@part_of_loop
def _rows(call: Any, part: int, count: int) -> range:
    """Those of so many rows, or groups of them, that a part has."""
    return range(part * call.at_once, min((part + 1) * call.at_once, count))


@loop(_MATRICES)
def hadamard_of_columns(pointer: Any) -> None:
    """Each 16 rows transformed; a part is ``at_once`` groups of 16."""
    call = carray(pointer, 1)[0]
    x = array_at(call.x, np.float32, (call.rows, call.columns))
    out = array_at(call.out, np.float32, (call.rows, call.columns))
    for part in parts_of(pointer, call.parts):
        buffer = np.empty((16, 128), np.float32)
        for group in _rows(call, part, call.rows // 16):
            rows = slice(16 * group, 16 * group + 16)
            _hadamard_of_16_rows(x[rows], buffer, out[rows])


@part_of_loop
def _hadamard_of_16_rows(x: Array, buffer: Array, out: Array) -> None:
    width = buffer.shape[1]
    for start in range(0, x.shape[1], width):
        length = min(width, x.shape[1] - start)
        for k in range(16):
            sign = np.float32(-1.0 if k in _FLIPPED else 1.0)
            for j in range(length):
                buffer[k, j] = x[k, start + j] * sign
        for k in range(0, 16, 4):
            _butterfly_of_rows(buffer, k, 1, length)
        for k in range(4):
            _butterfly_of_rows(buffer, k, 4, length)
        for k in range(16):
            for j in range(length):
                out[k, start + j] = buffer[k, j] * np.float32(0.25)


@part_of_loop
def _butterfly_of_rows(buffer: Array, first: int, stride: int, length: int) -> None:
    """Sums and differences over a stride, then over twice that."""
    for j in range(length):
        a, b = buffer[first, j], buffer[first + stride, j]
        c, d = buffer[first + 2 * stride, j], buffer[first + 3 * stride, j]
        e, f, g, h = a + b, a - b, c + d, c - d
        buffer[first, j], buffer[first + stride, j] = e + g, f + h
        buffer[first + 2 * stride, j], buffer[first + 3 * stride, j] = e - g, f - h


@loop(_MATRICES)
def hadamard_of_rows(pointer: Any) -> None:
    """Each 16 elements of a row transformed; a part is ``at_once`` rows."""
    call = carray(pointer, 1)[0]
    x = array_at(call.x, np.float32, (call.rows, call.columns))
    out = array_at(call.out, np.float32, (call.rows, call.columns))
    signs = np.ones(16, np.float32)
    for k in _FLIPPED:
        signs[k] = -1.0
    for part in parts_of(pointer, call.parts):
        a = np.empty(16, np.float32)
        for i in _rows(call, part, call.rows):
            for start in range(0, call.columns, 16):
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


@loop(_FACTORS)
def times_rows_and_columns(pointer: Any) -> None:
    """(x * row_factors) * column_factors in place; a part is ``at_once`` rows."""
    call = carray(pointer, 1)[0]
    x = array_at(call.x, np.float32, (call.rows, call.columns))
    rows = array_at(call.row_factors, np.float32, (call.rows,))
    columns = array_at(call.column_factors, np.float32, (call.columns,))
    for part in parts_of(pointer, call.parts):
        for i in _rows(call, part, call.rows):
            factor = rows[i]
            for j in range(len(columns)):
                x[i, j] = np.float32(x[i, j] * factor) * columns[j]


@loop(_CODES)
def decode(pointer: Any) -> None:
    """The entry of a table, float32 [256], for each code, uint8; a part is ``at_once`` rows."""
    call = carray(pointer, 1)[0]
    codes = array_at(call.x, np.uint8, (call.rows, call.columns))
    out = array_at(call.out, np.float32, (call.rows, call.columns))
    table = array_at(call.table, np.float32, (256,))
    for part in parts_of(pointer, call.parts):
        for i in _rows(call, part, call.rows):
            for j in range(call.columns):
                out[i, j] = table[codes[i, j]]
