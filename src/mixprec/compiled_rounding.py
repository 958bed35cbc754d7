"""Rounding in compiled loops: scaling, noise, rounding and codes of an operand's rows in one pass.

As ``compiled_loops``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from mixprec.compiled_loops import MAGNITUDE, Array, bits_of, compiled, part_of_loop, value_of

_EXPONENT, _SIGN = 0x7F800000, -(1 << 31)
_LAST_32 = (1 << 32) - 1
_FACTORS, _GOLDEN = (0x7FEB352D, 0x846CA68B), 0x9E3779B9


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


@compiled
def round_to_values(
    x: Array,
    encode: Array,
    scale: Array,
    block: tuple[int, int],
    grid: Grid,
    draws: Draws,
    is_stochastic: bool,
    out: Array,
    rows_at_once: int,
    part: int,
) -> None:
    """round(x * encode) * scale, float32; a part is so many rows.

    ``draws`` counts if stochastic, ``scale`` if it has the shape of ``encode``.
    """
    scaled = np.empty(x.shape[1], np.float32)
    factors = np.empty(x.shape[1], np.float32)
    multipliers = np.empty(x.shape[1], np.float32)
    noise = np.empty(x.shape[1], np.int32)
    is_scaled = scale.shape == encode.shape
    first = part * rows_at_once
    for i in range(first, min(first + rows_at_once, len(x))):
        if i == first or i % block[0] == 0:
            _repeat(encode[i // block[0]], block[1], factors)
            if is_scaled:
                _repeat(scale[i // block[0]], block[1], multipliers)
        _scale(x[i], factors, grid.largest, scaled)
        if is_stochastic:
            _draw(draws, i, noise)
            _values_by_draws(scaled, noise, grid, out[i])
        else:
            _nearest_values(scaled, grid, out[i])
        if is_scaled:
            for j in range(len(multipliers)):
                out[i, j] *= multipliers[j]


@compiled
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


@part_of_loop
def _repeat(per_block: Array, size: int, out: Array) -> None:
    length = len(out)
    if len(per_block) == 1:
        for j in range(length):
            out[j] = per_block[0]
    elif size == 1:
        for j in range(length):
            out[j] = per_block[j]
    elif size % 16 == 0 and length % 16 == 0:
        for start in range(0, length, 16):
            for k in range(16):
                out[start + k] = per_block[start // size]
    else:
        for j in range(length):
            out[j] = per_block[j // size]


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
        large = value_of(_power(bits_of(x[j]), grid)) * digits
        out[j] = np.float32(x[j] + large) - large


@part_of_loop
def _nearest_codes(x: Array, grid: Grid, out: Array) -> None:
    dropped = 23 - grid.mantissa
    digits = np.float32(1.5 * 2.0**dropped)
    exponent = (grid.first_power >> 23) + dropped
    first = np.int32((2 * exponent + 1) << (grid.mantissa - 1))
    for j in range(len(x)):
        bits = bits_of(x[j])
        large = value_of(_power(bits, grid)) * digits
        total = bits_of(np.float32(value_of(np.int32(bits & MAGNITUDE)) + large))
        code = np.int32(total - bits_of(large) + (bits_of(large) >> dropped) - first)
        out[j] = _with_sign(code, bits, x[j], grid)


@part_of_loop
def _negative_units(bits: Any, power: Any, grid: Grid) -> Any:
    """-|x| in whole units of 2^-24 steps."""
    per_unit = np.int32(((2 * 127 + grid.mantissa + 24) << 23) + _SIGN - power)
    return np.int32(np.floor(value_of(np.int32(bits & MAGNITUDE)) * value_of(per_unit)))


@part_of_loop
def _values_by_draws(x: Array, noise: Array, grid: Grid, out: Array) -> None:
    unit = np.float32(-(2.0 ** (-24 - grid.mantissa)))
    for j in range(len(x)):
        bits = bits_of(x[j])
        power = _power(bits, grid)
        units = np.int32(_negative_units(bits, power, grid) + noise[j])
        value = np.float32(np.int32(units & (-1 << 24))) * np.float32(value_of(power) * unit)
        out[j] = value_of(np.int32(bits_of(value) | np.int32(bits & _SIGN)))


@part_of_loop
def _codes_by_draws(x: Array, noise: Array, grid: Grid, out: Array) -> None:
    dropped = 23 - grid.mantissa
    first = np.int32(grid.first_power >> dropped)
    for j in range(len(x)):
        bits = bits_of(x[j])
        power = _power(bits, grid)
        whole = np.int32(np.int32(_negative_units(bits, power, grid) + noise[j]) >> 24)
        out[j] = _with_sign(np.int32((power >> dropped) - whole - first), bits, x[j], grid)


@part_of_loop
def _with_sign(code: Any, bits: Any, value: Any, grid: Grid) -> Any:
    # NaN has a sign where it has a code
    code = np.int32(code if value == value else grid.nan_code)
    is_signed = bits < 0 and (value == value or grid.nan_code > 0)
    return np.uint8(np.int32(code + (grid.sign_code if is_signed else 0)))
