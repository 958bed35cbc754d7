"""How compiled loops are called: one record of numbers and addresses for all threads at work.

A loop is a C function of its record's address. Every thread of a team calls it and takes parts of
the work by counting in the record, so that neither the interpreter nor its lock is in the way: a
call on two threads costs 5 us, where arrays and parts that pass through Python cost 100.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, cfunc, from_dtype, njit, types
from numba.extending import intrinsic

Array = np.ndarray[Any, Any]
_TAKEN, _DONE = 0, 1
# kept machine code belongs to the type of its record: that of another version of this file must not
# be taken, since numba looks at the file of the loop itself only
_VERSION = f"calls_{zlib.crc32(Path(__file__).read_bytes()):08x}"
_COUNTS = ("taken", "done", "parts", _VERSION)

part_of_loop = njit(error_model="numpy")
"""For what loops call."""


def record_of(numbers: tuple[str, ...], reals: tuple[str, ...] = ()) -> np.dtype[Any]:
    """The type of a record: counts of parts, then whole numbers and addresses, then float64."""
    names = [(name, np.int64) for name in (*_COUNTS, *numbers)]
    return np.dtype([*names, *((name, np.float64) for name in reals)])


class Loop:
    """A compiled loop: compiled at its first use, its machine code kept for later processes.

    Args:
        function: Of the address of a record; takes its parts from ``parts_of``.
        record: The type of the record.
    """

    def __init__(self, function: Callable[[Any], None], record: np.dtype[Any]) -> None:
        self.record = record
        self._function = function

    @cached_property
    def address(self) -> int:
        """Where its machine code begins."""
        signature = types.void(types.CPointer(from_dtype(self.record)))
        try:
            compiled = cfunc(signature, cache=True, error_model="numpy")(self._function)
        except Exception as error:
            # numba lets through whatever a full disk or a damaged file leads to
            compiled = cfunc(signature, error_model="numpy")(self._function)
            warnings.warn(
                f"numba: compiled loops cannot be kept ({type(error).__name__}: {error}); each "
                "process compiles them anew, which takes seconds; set NUMBA_CACHE_DIR to a folder "
                "with room, and nothing else in it",
                RuntimeWarning,
                stacklevel=2,
            )
        assert compiled.address is not None
        return compiled.address


def loop(record: np.dtype[Any]) -> Callable[[Callable[[Any], None]], Loop]:
    """Make a function of a record's address a loop."""
    return lambda function: Loop(function, record)


@intrinsic
def _count(typing_context: Any, pointer: Any, place: Any) -> Any:
    """What one of a record's first numbers was, and one more there, for all threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = ir.IntType(64)
        first = builder.bitcast(arguments[0], number.as_pointer())
        address = builder.gep(first, [arguments[1]])
        return builder.atomic_rmw("add", address, ir.Constant(number, 1), "seq_cst")

    return types.int64(pointer, types.int64), generate


@intrinsic
def _pointer(typing_context: Any, address: Any, kind: Any) -> Any:
    """An address as a pointer to numbers of a type."""
    target = types.CPointer(kind.dtype)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(target))

    return target(types.int64, kind), generate


@part_of_loop
def parts_of(pointer: Any, count: int) -> Iterator[int]:
    """The parts of so many that fall to this thread, each counted once it is done."""
    part: int = _count(pointer, _TAKEN)  # type: ignore[call-arg]
    while part < count:
        yield part
        _count(pointer, _DONE)
        part = _count(pointer, _TAKEN)


@part_of_loop
def array_at(address: int, kind: Any, shape: Any) -> Any:
    """Contiguous memory of a type and shape."""
    return carray(_pointer(address, kind), shape)  # type: ignore[call-arg]
