"""What was done: a record of each product, on request or for all inside a context."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulReport:
    """How a product was done.

    Attributes:
        scheme: ``slices``, ``residues`` or ``native``.
        engine: What multiplied the integers; empty for a native product.
        bits: Bits kept of the largest element of each row and column.
        parts: How many slices or moduli.
        products: Integer products of m n k each: pairs of slices, or moduli; of a complex product
            the real ones.
        native_rows, native_columns: How many needed more than the limit and went natively.
        special_rows, special_columns: How many hold inf or NaN.
        reason: Why this scheme and size, in a line.
        error_bound: float64 [..., m, n] with |C - A B| <= error_bound, 0 where inf or NaN
            decide; None unless it was asked for.
    """

    scheme: str
    engine: str
    bits: int
    parts: int
    products: int
    native_rows: int = 0
    native_columns: int = 0
    special_rows: int = 0
    special_columns: int = 0
    reason: str = ""
    error_bound: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Recorder:
    found: list[MatmulReport]
    with_bounds: bool
    thread: int | None

    @property
    def listens(self) -> bool:
        """Whether it is one of all threads, or of this one."""
        return self.thread in (None, threading.get_ident())


_recorders: list[_Recorder] = []
_lock = threading.Lock()


@contextlib.contextmanager
def record(
    *, with_bounds: bool = False, of_this_thread: bool = False
) -> Iterator[list[MatmulReport]]:
    """Collects the report of every emulated product while it is open, in order.

    Args:
        with_bounds: Whether reports hold ``error_bound``, a tensor as large as the product's
            result.
        of_this_thread: Leave out products of other threads; backward passes on GPUs run in some.

    Yields:
        A list that grows with each product; contexts may be nested, and each sees all products.
    """
    thread = threading.get_ident() if of_this_thread else None
    recorder = _Recorder([], with_bounds, thread)
    with _lock:
        _recorders.append(recorder)
    try:
        yield recorder.found
    finally:
        with _lock:
            _recorders.remove(recorder)


def wants_bounds() -> bool:
    """Whether an open ``record`` asks for bounds."""
    with _lock:
        return any(recorder.with_bounds and recorder.listens for recorder in _recorders)


def add_record(report: MatmulReport) -> None:
    """Adds a report to every open ``record``."""
    with _lock:
        for recorder in _recorders:
            if recorder.listens:
                recorder.found.append(report)
