"""Quantising in one compiled loop: amaxes of blocks, their scales, rounding, codes or values.

Where torch takes a pass over an operand for each step of arithmetic, all of them are done to a few
rows at a time, each as ``scaling``, ``scale_rules``, ``noise``, ``rounding`` and ``codes`` have it,
so that the bits are theirs. A matrix is in the order of memory, rows contiguous, and so are blocks
(rows, columns) of it.

numba widens every sum of integers to 64 bits: each is made 32 bits again, which costs nothing and
lets eight of them be done at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray

from mixprec.compiled_calls import Array, array_at, loop, part_of_loop, parts_of, record_of

_MAGNITUDE, _EXPONENT, _SIGN = 0x7FFFFFFF, 0x7F800000, -(1 << 31)
_LARGEST = float(np.finfo(np.float32).max)
_WITHOUT_MANTISSA = -(1 << 52)
_LAST_32 = (1 << 32) - 1
_FACTORS, _GOLDEN = (0x7FEB352D, 0x846CA68B), 0x9E3779B9

_MATRIX = ("x", "rows", "columns", "block_rows", "block_columns", "rows_at_once")
_FOUND = ("finds_amax", "amax", "encode", "scale", "is_scaled", "values", "codes")
_FORMULA = ("is_power", "addend", "shift", "lowest")
_GRID = ("mantissa", "first_power", "sign_code", "nan_code")
_NOISE = ("is_stochastic", "first", "row_step", "column_step", "low_key", "high_key")
_REALS = ("largest", "factor", "min_amax", "limit")


class Grid(NamedTuple):
    """Where values are rounded to.

    limit: float32; beyond it values are clamped.
    mantissa: Mantissa bits.
    first_power: int32, the bits of 2^min_exponent.
    sign_code: The code of -0.
    nan_code: That of NaN without its sign, 0 where there is none.
    """

    limit: Any
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


class Spare(NamedTuple):
    """Room for a row of elements: draws, scaled elements, factors and scales of each."""

    draws: Array
    scaled: Array
    factors: Array
    scales: Array


@loop(record_of(_MATRIX + _FOUND + _FORMULA + _GRID + _NOISE, _REALS))
def quantize(pointer: Any) -> None:
    """What is asked for of a matrix: amaxes, their scales, and values or codes.

    x: float32 [rows, columns], in blocks of ``block_rows`` by ``block_columns``.
    rows_at_once: A part; in whole blocks if ``finds_amax``.
    amax: float32 of the blocks; made if ``finds_amax``, used by a formula.
    encode, scale: float32 factors of the blocks, and what values are times; of amax by a formula
        (``scale_rules.Reciprocal`` if there is ``largest``, ``PowerOfTwo`` if there is ``factor``,
        whose scale is uint8 codes), else given.
    values, codes: round(x * encode), times scale if ``is_scaled``, float32; its codes, uint8.
    """
    call = carray(pointer, 1)[0]
    for part in parts_of(pointer, call.parts):
        _quantize_part(call, part)


@part_of_loop
def _quantize_part(call: Any, part: int) -> None:
    blocks = -(-call.columns // call.block_columns)
    spare = Spare(
        np.empty(call.columns, np.int32),
        np.empty(call.columns, np.float32),
        np.empty(call.columns, np.float32),
        np.empty(call.columns, np.float32),
    )
    multipliers = np.empty(blocks, np.float32)
    top = part * call.rows_at_once
    end = min(top + call.rows_at_once, call.rows)
    while top < end:
        bottom = min((top // call.block_rows + 1) * call.block_rows, end)
        if call.finds_amax:
            _find_amax(call, top, bottom)
        if call.largest > 0 or call.factor > 0:
            # parts that share blocks all write the same numbers there
            _find_scales(call, top, multipliers)
        elif call.is_scaled:
            multipliers[:] = _of_blocks(call, call.scale, np.float32, top)
        if call.values or call.codes:
            _repeat(
                _of_blocks(call, call.encode, np.float32, top), call.block_columns, spare.factors
            )
            if call.is_scaled:
                _repeat(multipliers, call.block_columns, spare.scales)
            _round_rows(call, top, bottom, spare)
        top = bottom


@part_of_loop
def _of_blocks(call: Any, address: int, kind: Any, row: int) -> Array:
    """What there is one of a block, of the blocks of a row."""
    shape = -(-call.rows // call.block_rows), -(-call.columns // call.block_columns)
    return array_at(address, kind, shape)[row // call.block_rows]


@part_of_loop
def _find_amax(call: Any, top: int, bottom: int) -> None:
    amax = _of_blocks(call, call.amax, np.int32, top)
    bits = array_at(call.x, np.int32, (call.rows, call.columns))
    amax[:] = 0
    for i in range(top, bottom):
        _amax_of_row(bits[i], call.block_columns, amax)


@part_of_loop
def _amax_of_row(bits: Array, size: int, out: Array) -> None:
    """The larger of what there is and the largest magnitude of each block, by bits of float32."""
    if size == 1:
        for j in range(len(out)):
            out[j] = max(out[j], np.int32(bits[j] & _MAGNITUDE))
        return
    for b in range(len(out)):
        # of a slice, whose indices are known not to be negative, many are compared at once
        own = bits[b * size : min((b + 1) * size, len(bits))]
        largest = out[b]
        for j in range(len(own)):
            magnitude = np.int32(own[j] & _MAGNITUDE)
            largest = magnitude if magnitude > largest else largest
        out[b] = largest


@part_of_loop
def _find_scales(call: Any, row: int, multipliers: Array) -> None:
    """Encoding factors, scales, and the factors that scales stand for, of the blocks of a row."""
    amax = _of_blocks(call, call.amax, np.float32, row)
    encode = _of_blocks(call, call.encode, np.float32, row)
    if call.factor > 0:
        codes = _of_blocks(call, call.scale, np.uint8, row)
        _powers_of_two(call, amax, encode, codes, multipliers)
    else:
        scale = _of_blocks(call, call.scale, np.float32, row)
        _reciprocals(call, amax, encode, scale)
        multipliers[:] = scale


@part_of_loop
def _powers_of_two(call: Any, amax: Array, encode: Array, codes: Array, scale: Array) -> None:
    floor, factor, lowest = call.min_amax, call.factor, call.lowest
    addend, shift = call.addend, call.shift
    for i in range(len(amax)):
        wide = np.float64(amax[i])
        wide = floor if wide < floor else wide
        bits = _bits_of(np.float32(wide * factor))
        code = np.int32((np.int32(bits + addend) >> 23) - shift)
        code = np.int32(0 if bits <= lowest or code < 0 else code)
        code = np.int32(254 if code > 254 else code)
        code = np.int32(code if wide < np.inf else 255)
        codes[i] = code
        encode[i] = _power_of_code(np.int32(254 - code), code)
        scale[i] = _power_of_code(code, code)


@part_of_loop
def _power_of_code(exponent: Any, code: Any) -> Any:
    """2^(exponent - 127), NaN for the code of NaN."""
    bits = np.int32(1 << 22 if exponent == 0 else np.int32(exponent << 23))
    return _value_of(np.int32(0x7FC00000 if code == 255 else bits))


@part_of_loop
def _reciprocals(call: Any, amax: Array, encode: Array, scale: Array) -> None:
    floor, largest, is_power = call.min_amax, call.largest, call.is_power
    for i in range(len(amax)):
        wide = np.float64(amax[i])
        wide = floor if wide < floor else wide
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


@part_of_loop
def _repeat(per_block: Array, size: int, out: Array) -> None:
    if size == 1:
        out[:] = per_block
        return
    for b in range(len(per_block)):
        own = out[b * size : min((b + 1) * size, len(out))]
        for j in range(len(own)):
            own[j] = per_block[b]


@part_of_loop
def _round_rows(call: Any, top: int, bottom: int, spare: Spare) -> None:
    """Rows of one row of blocks."""
    shape = (call.rows, call.columns)
    x = array_at(call.x, np.float32, shape)
    values, codes = array_at(call.values, np.float32, shape), array_at(call.codes, np.uint8, shape)
    grid = Grid(
        np.float32(call.limit),
        call.mantissa,
        np.int32(call.first_power),
        call.sign_code,
        call.nan_code,
    )
    low, high = np.uint32(call.low_key), np.uint32(call.high_key)
    draws = Draws(call.first, call.row_step, call.column_step, low, high)
    for i in range(top, bottom):
        _scale(x[i], spare.factors, grid.limit, spare.scaled)
        if call.is_stochastic:
            _draw(draws, i, spare.draws)
            if call.values:
                _values_by_draws(spare.scaled, spare.draws, grid, values[i])
            if call.codes:
                _codes_by_draws(spare.scaled, spare.draws, grid, codes[i])
        else:
            if call.values:
                _nearest_values(spare.scaled, grid, values[i])
            if call.codes:
                _nearest_codes(spare.scaled, grid, codes[i])
        if call.values and call.is_scaled:
            _multiply(values[i], spare.scales)


@part_of_loop
def _multiply(x: Array, factors: Array) -> None:
    for j in range(len(x)):
        x[j] *= factors[j]


@part_of_loop
def _scale(x: Array, factors: Array, largest: Any, out: Array) -> None:
    # comparisons that are false for NaN leave it
    for j in range(len(x)):
        value = x[j] * factors[j]
        value = largest if value > largest else value
        out[j] = -largest if value < -largest else value


@part_of_loop
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


@part_of_loop
def _mixed(x: Any) -> Any:
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(_FACTORS[0]))
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(15))) * np.uint32(_FACTORS[1]))
    return np.uint32(x ^ (x >> np.uint32(16)))


@part_of_loop
def _power(bits: Any, grid: Grid) -> Any:
    """The bits of 2^max(exponent, min_exponent)."""
    return max(np.int32(bits & _EXPONENT), grid.first_power)


@part_of_loop
def _nearest_values(x: Array, grid: Grid, out: Array) -> None:
    digits = np.float32(1.5 * 2.0 ** (23 - grid.mantissa))
    for j in range(len(x)):
        large = _value_of(_power(_bits_of(x[j]), grid)) * digits
        out[j] = np.float32(x[j] + large) - large


@part_of_loop
def _nearest_codes(x: Array, grid: Grid, out: Array) -> None:
    dropped = 23 - grid.mantissa
    digits = np.float32(1.5 * 2.0**dropped)
    exponent = (grid.first_power >> 23) + dropped
    first = np.int32((2 * exponent + 1) << (grid.mantissa - 1))
    for j in range(len(x)):
        bits = _bits_of(x[j])
        large = _value_of(_power(bits, grid)) * digits
        total = _bits_of(np.float32(_value_of(np.int32(bits & _MAGNITUDE)) + large))
        code = np.int32(total - _bits_of(large) + (_bits_of(large) >> dropped) - first)
        out[j] = _with_sign(code, bits, x[j], grid)


@part_of_loop
def _negative_units(bits: Any, power: Any, grid: Grid) -> Any:
    """-|x| in whole units of 2^-24 steps."""
    per_unit = np.int32(((2 * 127 + grid.mantissa + 24) << 23) + _SIGN - power)
    return np.int32(np.floor(_value_of(np.int32(bits & _MAGNITUDE)) * _value_of(per_unit)))


@part_of_loop
def _values_by_draws(x: Array, noise: Array, grid: Grid, out: Array) -> None:
    unit = np.float32(-(2.0 ** (-24 - grid.mantissa)))
    for j in range(len(x)):
        bits = _bits_of(x[j])
        power = _power(bits, grid)
        units = np.int32(_negative_units(bits, power, grid) + noise[j])
        value = np.float32(np.int32(units & (-1 << 24))) * np.float32(_value_of(power) * unit)
        out[j] = _value_of(np.int32(_bits_of(value) | np.int32(bits & _SIGN)))


@part_of_loop
def _codes_by_draws(x: Array, noise: Array, grid: Grid, out: Array) -> None:
    dropped = 23 - grid.mantissa
    first = np.int32(grid.first_power >> dropped)
    for j in range(len(x)):
        bits = _bits_of(x[j])
        power = _power(bits, grid)
        whole = np.int32(np.int32(_negative_units(bits, power, grid) + noise[j]) >> 24)
        out[j] = _with_sign(np.int32((power >> dropped) - whole - first), bits, x[j], grid)


@part_of_loop
def _with_sign(code: Any, bits: Any, value: Any, grid: Grid) -> Any:
    # NaN has a sign where it has a code
    code = np.int32(code if value == value else grid.nan_code)
    is_signed = bits < 0 and (value == value or grid.nan_code > 0)
    return np.uint8(np.int32(code + (grid.sign_code if is_signed else 0)))


@part_of_loop
def _bits_of(value: Any) -> Any:
    return np.float32(value).view(np.int32)


@part_of_loop
def _value_of(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)
