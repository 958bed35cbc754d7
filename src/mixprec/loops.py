"""Passes over an operand on a CPU in compiled loops, on the threads that torch has.

What several passes of torch do, with the same bits, in one: numba compiles it at its first use and
keeps the machine code for later processes. Without numba, and for tensors that are no plain memory,
``serves`` is false and callers take torch's own passes.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixprec.formats import FloatFormat
from mixprec.modes import is_fake, is_watched
from mixprec.noise import Noise
from mixprec.scale_rules import Formula, PowerOfTwo

SMALLEST = 1 << 15
"""Elements of a tensor from which on a loop is worth its call, and its compiler's import."""
_WORTH_A_THREAD = 1 << 15
_PARTS_A_THREAD = 2


class Quantized(NamedTuple):
    """What ``quantized`` finds of each block, and of each element.

    codes: uint8; float32 values if these are asked for in their place.
    held: float32 values beside the codes, if asked for.
    """

    amax: Tensor
    encode: Tensor
    scale: Tensor
    codes: Tensor
    held: Tensor | None


def serves(x: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the loops here take x: a large matrix in plain memory, rows or columns whole.

    The first time that only numba is missing a warning says so.
    """
    # a size is not asked for while tracing: it may be unknown, and would become a condition
    if torch.compiler.is_compiling() or x.numel() < SMALLEST:
        return False
    return _is_plain(x, dtype) and _is_available()


def _is_plain(x: Tensor, dtype: torch.dtype) -> bool:
    if x.device.type != "cpu" or x.layout != torch.strided or not (type(x) is Tensor or is_fake(x)):
        return False
    if x.dtype != dtype or x.ndim != 2 or x.is_neg() or x._is_zerotensor():
        return False
    if not (x.is_contiguous() or x.t().is_contiguous()):
        return False
    return not is_watched() and not torch._C._are_functorch_transforms_active()


def reason() -> str | None:
    """Why there are no compiled loops here; None if there are."""
    try:
        import numba
    except Exception as error:
        return f"numba cannot be imported ({error})"
    return "NUMBA_DISABLE_JIT is set" if getattr(numba.config, "DISABLE_JIT", False) else None


@lru_cache(maxsize=1)
def _is_available() -> bool:
    why = reason()
    if why is not None:
        warnings.warn(
            f"numba: {why}; values are the same, but quantising on a CPU takes several times as "
            "long; pip install numba",
            RuntimeWarning,
            stacklevel=2,
        )
    return why is None


def block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """``scaling.block_amax`` of an x that ``serves``."""
    return _Blocks(x, block).amax()


def quantized(
    x: Tensor,
    block: tuple[int, int],
    formula: Formula,
    fmt: FloatFormat,
    noise: Noise | None,
    *,
    min_amax: float,
    decoded: bool,
    held: bool,
    is_scaled: bool,
) -> Quantized:
    """``rounded`` by scales that a formula makes of the blocks' amaxes, all in the same pass.

    Args:
        formula: As ``scale_rules`` has it of the format, with a floor ``min_amax`` under amax.
        decoded: float32 values in place of codes; ``held``: beside them.
        is_scaled: Whether values are times their scales.
    """
    blocks = _Blocks(x, block)
    finds_amax = not blocks.share_rows
    amax = blocks.one_each(torch.float32) if finds_amax else blocks.amax()
    encode = blocks.one_each(torch.float32)
    scale = blocks.one_each(torch.uint8 if isinstance(formula, PowerOfTwo) else torch.float32)
    out = torch.empty_like(x, dtype=torch.float32 if decoded else torch.uint8)
    beside = torch.empty_like(x) if held and not decoded else None
    blocks.run(
        finds_amax=finds_amax,
        amax=amax,
        encode=encode,
        scale=scale,
        is_scaled=is_scaled,
        min_amax=min_amax,
        codes=None if decoded else out,
        values=out if decoded else beside,
        **formula._asdict(),
        **_grid(fmt),
        **blocks.draws(noise),
    )
    return Quantized(amax, encode, scale, out, beside)


def rounded(
    x: Tensor,
    encode: Tensor,
    block: tuple[int, int],
    fmt: FloatFormat,
    noise: Noise | None,
    *,
    decoded: bool,
    scale: Tensor | None = None,
) -> Tensor:
    """Codes of round(x * encode) clamped to a format's range, or their values.

    Args:
        x: Of which ``serves`` is true.
        encode: float32, a factor for each block.
        block: Rows and columns that share a factor, -1 for all of them.
        fmt: Signed, of at most 8 bits, with mantissa bits.
        noise: Rounds stochastically; None to nearest, ties to even.
        decoded: float32 values, anything where the factor is NaN; else uint8 codes, there those of
            NaN or 0.
        scale: What values are times, float32, one a block; None is 1.

    Returns:
        Of x's shape and memory layout.
    """
    blocks = _Blocks(x, block)
    out = torch.empty_like(x, dtype=torch.float32 if decoded else torch.uint8)
    blocks.run(
        encode=blocks.in_order(encode),
        scale=None if scale is None else blocks.in_order(scale),
        is_scaled=scale is not None,
        codes=None if decoded else out,
        values=out if decoded else None,
        **_grid(fmt),
        **blocks.draws(noise),
    )
    return out


def times_rows_and_columns(x: Tensor, rows: Tensor, columns: Tensor) -> None:
    """x times factors [rows, 1], then times factors [1, columns], in place, for a contiguous x."""
    from mixprec.compiled_transforms import times_rows_and_columns as loop

    _run_over(loop, x, row_factors=rows.contiguous(), column_factors=columns.contiguous())


def hadamard(x: Tensor) -> Tensor:
    """``hadamard.hadamard`` of a length that is a multiple of 16."""
    from mixprec.compiled_transforms import hadamard_of_columns, hadamard_of_rows

    out = torch.empty_like(x)
    if x.is_contiguous():
        _run_over(hadamard_of_rows, x, out=out)
    else:
        _run_over(hadamard_of_columns, x, at_a_time=16, out=out)
    return out


def decoded(codes: Tensor, table: Tensor) -> Tensor:
    """The entries of a table, float32 [256], for uint8 codes that ``serves``; in their layout."""
    from mixprec.compiled_transforms import decode

    out = torch.empty_like(codes, dtype=torch.float32)
    _run_over(decode, codes, table=table, out=out)
    return out


class _Blocks:
    """A matrix and its blocks (rows, columns), -1 for all of them, as loops take them.

    Turned where columns lie in memory one after the other, so that all here but x has rows there.
    """

    def __init__(self, x: Tensor, block: tuple[int, int]) -> None:
        self.x, self.is_turned = x, not x.is_contiguous()
        (rows, columns), (height, width) = self._turned(x.shape), self._turned(block)
        self.rows, self.columns = rows, columns
        self.height = rows if height == -1 else height
        self.width = columns if width == -1 else width
        self.shape = -(-rows // self.height), -(-columns // self.width)

    def _turned(self, pair: Sequence[int]) -> tuple[int, int]:
        return (pair[1], pair[0]) if self.is_turned else (pair[0], pair[1])

    def one_each(self, dtype: torch.dtype) -> Tensor:
        """Room for one number a block."""
        room = self.x.new_empty(self.shape, dtype=dtype)
        return room.t() if self.is_turned else room

    def in_order(self, per_block: Tensor) -> Tensor:
        """Numbers of the blocks of x as loops take them."""
        found = (per_block.t() if self.is_turned else per_block).contiguous()
        assert (found.shape, found.dtype) == (self.shape, torch.float32)
        return found

    def draws(self, noise: Noise | None) -> dict[str, Any]:
        """What loops make the noise of x of."""
        if noise is None:
            return {}
        columns = int(noise.columns_of(self.x.shape[1]))
        row_step, column_step = self._turned((columns, 1))
        low_key, high_key = noise.keys(None)
        return {
            "is_stochastic": True,
            "first": int(noise.row) * columns + int(noise.column),
            "row_step": row_step,
            "column_step": column_step,
            "low_key": int(low_key),
            "high_key": int(high_key),
        }

    @property
    def share_rows(self) -> bool:
        """Whether each block has all rows, so that parts of it fall to several threads."""
        return self.height == self.rows > 1 and _num_parts(self.x) > 1

    def amax(self) -> Tensor:
        """The largest magnitude of each block."""
        if self.share_rows:
            # each part finds its own, by bits, which have the order of magnitudes, NaN above all
            at_once = -(-self.rows // _num_parts(self.x))
            found = _Blocks(self.x, self._turned((at_once, self.width))).amax().view(torch.int32)
            return found.amax(int(self.is_turned), keepdim=True).view(torch.float32)
        amax = self.one_each(torch.float32)
        self.run(finds_amax=True, amax=amax)
        return amax

    def run(self, *, finds_amax: bool = False, **numbers: Any) -> None:
        """The loop over them, divided by rows, to find amaxes by rows of whole blocks."""
        from mixprec.compiled_quantizing import quantize

        at_once = -(-self.rows // _num_parts(self.x))
        if finds_amax:
            at_once = -(-at_once // self.height) * self.height
        _run(
            quantize,
            -(-self.rows // at_once),
            x=self.x,
            rows=self.rows,
            columns=self.columns,
            block_rows=self.height,
            block_columns=self.width,
            rows_at_once=at_once,
            finds_amax=finds_amax,
            **numbers,
        )


@lru_cache(maxsize=64)
def _grid(fmt: FloatFormat) -> dict[str, Any]:
    return {
        "limit": fmt.max,
        "mantissa": fmt.mantissa,
        "first_power": fmt.min_exponent + 127 << 23,
        "sign_code": fmt.sign_mask,
        # of several the one that torch's casts give
        "nan_code": fmt.sign_mask - 1 if fmt.has_nan else 0,
    }


def _num_parts(x: Tensor) -> int:
    """Into how many parts work on x is divided; 1 is not divided."""
    threads = min(torch.get_num_threads(), x.numel() // _WORTH_A_THREAD)
    return threads * _PARTS_A_THREAD if threads > 1 else 1


def _run_over(loop: Any, x: Tensor, *, at_a_time: int = 1, **numbers: Any) -> None:
    """A loop over the rows of x in memory, so many at a time, divided into parts."""
    rows, columns = x.shape if x.is_contiguous() else x.shape[::-1]
    count = rows // at_a_time
    at_once = -(-count // _num_parts(x))
    parts = -(-count // at_once)
    _run(loop, parts, x=x, rows=rows, columns=columns, at_once=at_once, **numbers)


def _run(loop: Any, parts: int, **numbers: Any) -> None:
    """Every part of a loop of numbers and tensors, on the threads on which torch runs its own.

    Threads of our own would compete with torch's, which wait for work in a busy loop.
    """
    import numpy as np

    if any(isinstance(number, Tensor) and is_fake(number) for number in numbers.values()):
        return
    record = np.zeros(1, loop.record)
    record["parts"] = parts
    for name, number in numbers.items():
        if isinstance(number, Tensor):
            assert number.is_cpu
            assert number.is_contiguous() or number.t().is_contiguous()
            record[name] = number.data_ptr()
        else:
            record[name] = number or 0
    team = _team()
    threads = min(torch.get_num_threads(), parts)
    if threads == 1 or team is None:
        _call(loop.address)(record.ctypes.data)
    else:
        team(loop.address, record.ctypes.data, threads, 0)
    if record["done"] != parts:
        raise RuntimeError(
            f"compiled loops: {record['done'][0]} of {parts} parts were done; this should not "
            "happen; set NUMBA_DISABLE_JIT=1 to do without them"
        )


@lru_cache(maxsize=16)
def _call(address: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@lru_cache(maxsize=1)
def _team() -> Callable[..., None] | None:
    """GNU OpenMP's entry that runs a function on all threads of a team, if torch has loaded it."""
    try:
        team = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    team.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    team.restype = None
    return team
