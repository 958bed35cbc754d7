"""Passes over an operand on a CPU in compiled loops, on the threads that torch has.

What several passes of torch do, with the same bits, in one: numba compiles it at its first use and
keeps the machine code for later processes. Without numba, and for tensors that are no plain memory,
``serves`` is false and callers take torch's own passes.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from mixprec.formats import FloatFormat
from mixprec.noise import Noise

SMALLEST = 1 << 16
"""Elements of a tensor from which on a loop is worth its call, and its compiler's import."""
_WORTH_A_THREAD = 1 << 16
_PARTS_A_THREAD = 2


def serves(x: Tensor) -> bool:
    """Whether the loops here take x: a large float32 matrix in plain memory, rows or columns whole.

    The first time that only numba is missing a warning says so.
    """
    return _is_plain(x) and x.numel() >= SMALLEST and _is_available()


def serves_blocks(per_block: Tensor) -> bool:
    """Whether they take a matrix of a number a block: of any size, once they are in use."""
    return "mixprec.compiled_loops" in sys.modules and _is_plain(per_block)


def _is_plain(x: Tensor) -> bool:
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.device.type != "cpu":
        return False
    is_matrix = x.dtype == torch.float32 and x.ndim == 2 and x.numel() > 0 and not x.is_neg()
    if not is_matrix or not (x.is_contiguous() or x.t().is_contiguous()):
        return False
    # what looks on, or stands for other tensors, sees operations of torch only
    is_watched = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()
    return not is_watched


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
    """``scaling.block_amax`` of blocks of so many rows and columns."""
    memory, is_turned = _in_order_of_memory(x)
    sizes = _turned(block, is_turned)
    shape = [-(-length // size) for length, size in zip(memory.shape, sizes, strict=True)]
    out = torch.zeros(shape, dtype=torch.int32)
    parts = _num_parts(x)
    at_once = [-(-shape[0] // parts), shape[1]]
    if shape[0] < parts:
        # blocks as long as the matrix leave the other axis to divide, by whole lines of the cache
        at_once = [shape[0], max(1, -(-shape[1] * _PARTS_A_THREAD // parts // 16) * 16)]
    arrays = _array(memory.view(torch.int32)), sizes, _array(out), *at_once
    counts = [-(-count // step) for count, step in zip(shape, at_once, strict=True)]
    _run(_loop("block_amax"), arrays, counts[0] * counts[1])
    found = out.view(torch.float32)
    return found.t() if is_turned else found


def e8m0_scales(amax: Tensor, rule: tuple[float, int, int, int]) -> tuple[Tensor, Tensor]:
    """Encoding factors of amaxes, and their codes, by ``scale_rules.PowerOfTwo``."""
    return _scales("e8m0_scales", amax, rule, torch.uint8)


def real_scales(amax: Tensor, largest: float, is_power: bool) -> tuple[Tensor, Tensor]:
    """Encoding factors of amaxes, and their reciprocals, as ``scale_rules`` has them."""
    return _scales("real_scales", amax, (float(largest), is_power), torch.float32)


def _scales(
    name: str, amax: Tensor, rule: tuple[Any, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    memory, is_turned = _in_order_of_memory(amax)
    encode, scale = torch.empty_like(memory), torch.empty_like(memory, dtype=dtype)
    arrays = [_array(x.view(-1)) for x in (memory, encode, scale)]
    _run_over(_loop(name), (*arrays, *rule), amax.numel(), _num_parts(amax))
    return (encode.t(), scale.t()) if is_turned else (encode, scale)


def times_rows_and_columns(x: Tensor, rows: Tensor, columns: Tensor) -> None:
    """x times factors [rows, 1], then times factors [1, columns], in place, for a contiguous x."""
    arrays = _array(x), _array(rows.reshape(-1)), _array(columns.reshape(-1))
    _run_over(_loop("times_rows_and_columns"), arrays, len(x), _num_parts(x))


def hadamard(x: Tensor) -> Tensor:
    """``hadamard.hadamard`` of a length that is a multiple of 16."""
    memory, is_turned = _in_order_of_memory(x)
    out = torch.empty_like(memory)
    name, count = ("columns", len(memory) // 16) if is_turned else ("rows", len(memory))
    _run_over(_loop(f"hadamard_of_{name}"), (_array(memory), _array(out)), count, _num_parts(x))
    return out.t() if is_turned else out


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
    memory, is_turned = _in_order_of_memory(x)
    sizes = _turned(block, is_turned)
    rows, columns = (
        length if size == -1 else size for length, size in zip(memory.shape, sizes, strict=True)
    )
    factors, multipliers = (
        _array((y.t() if is_turned else y).contiguous())
        for y in (encode, encode.new_empty((0, 0)) if scale is None else scale)
    )
    out = torch.empty_like(memory, dtype=torch.float32 if decoded else torch.uint8)
    arguments = (
        _array(memory),
        factors,
        *([multipliers] if decoded else []),
        (rows, columns),
        _grid(fmt),
        _draws(noise or Noise(seed=0), x, is_turned),
        noise is not None,
        _array(out),
    )
    loop = _rounding("round_to_values" if decoded else "round_to_codes")
    _run_over(loop, arguments, len(memory), _num_parts(x))
    return out.t() if is_turned else out


def _loop(name: str) -> Callable[..., None]:
    from mixprec import compiled_loops

    return getattr(compiled_loops, name)


def _rounding(name: str) -> Callable[..., None]:
    from mixprec import compiled_rounding

    return getattr(compiled_rounding, name)


def _array(x: Tensor) -> Any:
    """The memory of x for a loop to read and write."""
    import numpy as np

    # x.numpy() would fix the size of its memory for good, which FSDP2 sets to 0 between passes
    return np.from_dlpack(x)


def _in_order_of_memory(x: Tensor) -> tuple[Tensor, bool]:
    """x or its transpose, whichever has its rows in memory one after the other."""
    return (x, False) if x.is_contiguous() else (x.t(), True)


def _turned(pair: tuple[int, int], is_turned: bool) -> tuple[int, int]:
    return (pair[1], pair[0]) if is_turned else pair


@lru_cache(maxsize=64)
def _grid(fmt: FloatFormat) -> Any:
    import numpy as np

    from mixprec.compiled_rounding import Grid

    first_power = np.int32(fmt.min_exponent + 127 << 23)
    # of several the one that torch's casts give
    nan_code = fmt.sign_mask - 1 if fmt.has_nan else 0
    return Grid(np.float32(fmt.max), fmt.mantissa, first_power, fmt.sign_mask, nan_code)


def _draws(noise: Noise, x: Tensor, is_turned: bool) -> Any:
    import numpy as np

    from mixprec.compiled_rounding import Draws

    columns = int(noise.columns_of(x.shape[1]))
    first = int(noise.row) * columns + int(noise.column)
    low, high = (np.uint32(key & 0xFFFFFFFF) for key in noise.keys(None))
    return Draws(first, *_turned((columns, 1), is_turned), low, high)


def _num_parts(x: Tensor) -> int:
    """Into how many parts work on x is divided; 1 is not divided."""
    threads = min(torch.get_num_threads(), x.numel() // _WORTH_A_THREAD)
    return threads * _PARTS_A_THREAD if threads > 1 and _team() is not None else 1


def _run_over(
    loop: Callable[..., None], arguments: tuple[Any, ...], count: int, parts: int
) -> None:
    """A loop over so many rows, divided into parts."""
    at_once = -(-count // parts)
    _run(loop, (*arguments, at_once), -(-count // at_once))


def _run(loop: Callable[..., None], arguments: tuple[Any, ...], parts: int) -> None:
    """Every part of a loop, on the threads on which torch runs its own.

    Threads of our own would compete with torch's, which wait for work in a busy loop.
    """
    call = partial(loop, *arguments)
    team = _team()
    if parts == 1 or team is None:
        for part in range(parts):
            call(part)
        return
    done: deque[None] = deque()
    todo = iter(range(parts))
    if not loop.signatures:  # type: ignore[attr-defined]
        # compiled before, since an error would be lost there
        done.append(call(next(todo)))
    # without a line of Python in it, so that no signal's handler runs and raises in there
    work = ctypes.CFUNCTYPE(None)(partial(done.extend, map(call, todo)))
    team(work, None, torch.get_num_threads(), 0)
    if len(done) != parts:
        raise RuntimeError(
            f"compiled loops: {len(done)} of {parts} parts were done; this should not happen; set "
            "NUMBA_DISABLE_JIT=1 to do without them"
        )


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
