"""Engines: what multiplies small integers exactly.

    dot(a, b)[..., m, n] = sum over k of a[..., m, k] * b[..., n, k]

An engine of width w takes integers from -2^(w - 1) to 2^(w - 1) - 1 and is exact while the sum of
absolute products stays within ``largest_sum``; ``capacity`` is the length k that always does.
Before its first use on a device it multiplies what would show a sum in fewer bits.

- ``float64``: integers in the CPU's or GPU's own DGEMM, 53 bits.
- ``float32``: SGEMM, 24 bits; refused where TF32 or BF16 may stand in for it.
- ``int8``: ``torch._int_mm``, 32-bit sums; on CPUs without AVX-512 VNNI a scalar loop, so that
  ``auto`` leaves it there.
- ``fp8``: integers up to 16 in e4m3, ``torch._scaled_mm``; exact on units that add in FP32, which
  Hopper's do not (numerics.md, section 4).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mixprec.cublas import DOUBLE

_TEST_ROWS = 2
_TEST_LENGTH = 1 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Exact products of small integers.

    Attributes:
        name: As in ``ENGINES``.
        width: Bits of an integer, its sign included.
        largest_sum: Bound on the sum of absolute products within which sums are exact.
        dtype: The type in which it takes integers.
        multiply: a[batch, m, k], b[batch, n, k] in that type to their products over k, in a type
            that holds them.
        why_not: Why it cannot run on a device, or None.
    """

    name: str
    width: int
    largest_sum: int
    dtype: torch.dtype
    multiply: Callable[[Tensor, Tensor], Tensor]
    why_not: Callable[[torch.device], str | None]

    @property
    def capacity(self) -> int:
        """The longest contraction of any integers of its width that is exact."""
        return self.largest_sum // 4 ** (self.width - 1)

    def dot(self, a: Tensor, b: Tensor) -> Tensor:
        """The exact product over the last axis, as float64 [batch, m, n].

        Args:
            a: [batch, m, k] integers in ``dtype``, k at most ``capacity``.
            b: [batch, n, k], the same.
        """
        if not (a.shape[-1] and a.shape[-2] and b.shape[-2] and a.shape[0]):
            shape = (*a.shape[:-1], b.shape[-2])
            return torch.zeros(shape, dtype=torch.float64, device=a.device)
        return self.multiply(a, b).to(torch.float64)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.shape[0] == 1:
        return torch.mm(a[0], b[0].mT).unsqueeze(0)
    return torch.bmm(a, b.mT)


def _padded(x: Tensor, rows: int, multiple: int) -> Tensor:
    """x[rows, k] contiguous, zeros added up to a least number of rows and a multiple along both."""
    row_padding = max(rows - x.shape[0], -x.shape[0] % multiple)
    return torch.nn.functional.pad(x, (0, -x.shape[1] % multiple, 0, row_padding)).contiguous()


def _by_matrix(
    product: Callable[[Tensor, Tensor], Tensor], rows: int, multiple: int
) -> Callable[[Tensor, Tensor], Tensor]:
    """A product of two padded matrices [m, k] and [n, k], for each of a batch."""

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        m, n = a.shape[1], b.shape[1]
        pairs = zip(a.unbind(), b.unbind(), strict=True)
        padded = ((_padded(x, rows, multiple), _padded(y, rows, multiple)) for x, y in pairs)
        return torch.stack([product(x, y)[:m, :n] for x, y in padded])

    return multiply


def _int_mm(a: Tensor, b: Tensor) -> Tensor:
    return torch._int_mm(a, b.mT)


def _scaled_mm(a: Tensor, b: Tensor) -> Tensor:
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.mT, scale_a=one, scale_b=one, out_dtype=torch.float32)


def _anywhere(device: torch.device) -> str | None:
    return None


def _float64(device: torch.device) -> str | None:
    if device.type == "cuda" and os.environ.get(DOUBLE) == "1":
        return f"{DOUBLE} is 1, so that cuBLAS emulates FP64 products itself; unset it"
    return None


def _float32(device: torch.device) -> str | None:
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        # torch refuses to answer where its backends are set apart
        precision = "mixed"
    if precision == "highest":
        return None
    return (
        f"torch's float32 matmul precision is {precision!r}, which lets FP32 products run in fewer "
        "bits; call torch.set_float32_matmul_precision('highest')"
    )


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            name="float64",
            width=21,
            largest_sum=1 << 53,
            dtype=torch.float64,
            multiply=_matmul,
            why_not=_float64,
        ),
        Engine(
            name="float32",
            width=8,
            largest_sum=1 << 24,
            dtype=torch.float32,
            multiply=_matmul,
            why_not=_float32,
        ),
        Engine(
            name="int8",
            width=8,
            largest_sum=(1 << 31) - 1,
            dtype=torch.int8,
            # the CUDA kernel wants more than 16 rows and sizes that are multiples of 8
            multiply=_by_matrix(_int_mm, rows=24, multiple=8),
            why_not=_anywhere,
        ),
        Engine(
            name="fp8",
            width=5,
            largest_sum=1 << 24,
            dtype=torch.float8_e4m3fn,
            multiply=_by_matrix(_scaled_mm, rows=16, multiple=16),
            why_not=_anywhere,
        ),
    )
}
"""The engines by name."""
_AUTO = "auto"


def check_engine(name: str) -> str:
    """The name itself, if it is ``auto`` or one of ``ENGINES``."""
    if name != _AUTO and name not in ENGINES:
        raise ValueError(f"engine: got {name!r}; must be one of auto, {', '.join(ENGINES)}")
    return name


def get_engine(name: str, device: torch.device) -> Engine:
    """The engine of that name, tested on the device.

    Args:
        name: In ``ENGINES``, or ``auto``: float64 on CPUs, int8 elsewhere.
        device: Where it will run.

    Raises:
        ValueError: An unknown name, or an engine that cannot run there or is not exact there.
    """
    check_engine(name)
    engine = ENGINES[name if name != _AUTO else "float64" if device.type == "cpu" else "int8"]
    reason = engine.why_not(device) or _fault(engine, device)
    if reason is not None:
        others = ", ".join(other for other in ENGINES if other != engine.name)
        raise ValueError(f"engine: got {engine.name!r}; {reason}; or use one of {others}")
    return engine


@functools.cache
def _fault(engine: Engine, device: torch.device) -> str | None:
    """What is wrong with an engine's sums on a device, found by multiplying; None if nothing."""
    try:
        exact = all(
            torch.equal(engine.dot(a, b).cpu(), expected)
            for a, b, expected in _cases(engine, device)
        )
    except torch.OutOfMemoryError:
        # no property of the engine
        raise
    except (RuntimeError, NotImplementedError) as error:
        return f"it does not run on {device}: {' '.join(str(error).split())[:200]}"
    return None if exact else f"its sums on {device} are not exact"


def _cases(engine: Engine, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Operands that a sum in fewer bits gets wrong, with their products."""
    low, high = -(1 << engine.width - 1), (1 << engine.width - 1) - 1
    lowest = torch.full((1, _TEST_ROWS, engine.capacity), low, dtype=torch.float64)
    # one less than the largest sum: its last bit is seen only where every one is kept
    last, small = lowest.clone(), lowest.clone()
    last[..., -1], small[..., -1] = 1, high
    # large terms that cancel, and ones among them
    alternating = torch.full_like(lowest, high)
    alternating[..., 1::2] = -high
    alternating[..., ::33] = 1
    generator = torch.Generator().manual_seed(0)
    shape = (1, _TEST_ROWS, min(engine.capacity, _TEST_LENGTH))
    random = torch.randint(low, high + 1, (2, *shape), generator=generator).to(torch.float64)
    pairs = [(lowest, lowest), (last, small), (alternating, last), (random[0], random[1])]
    return [
        (
            a.to(device=device, dtype=engine.dtype),
            b.to(device=device, dtype=engine.dtype),
            _integers(a, b),
        )
        for a, b in pairs
    ]


def _integers(a: Tensor, b: Tensor) -> Tensor:
    """The products in 64-bit integers, on the CPU."""
    a, b = a.to(torch.int64), b.to(torch.int64)
    return torch.stack([(row * b[0]).sum(-1) for row in a[0]]).unsqueeze(0).to(torch.float64)
