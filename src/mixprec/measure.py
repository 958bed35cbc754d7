"""What a low-bit run is measured by: error, lost elements, bytes kept for backward, time.

Nothing here knows a recipe: tensors and callables in, numbers out. Errors are computed in float64
(on the CPU for a device without it), so that a figure does not depend on the type of what it
describes. Tensors are read in pieces, which stay in a CPU's cache.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from mixprec.formats import FloatFormat

_INT_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FARTHEST = torch.iinfo(torch.int64).max
# of a format whose limits of rounding are float32 numbers
_EXACT_MANTISSA = 22
_PIECE, _PIECE_OF_ACCELERATOR = 1 << 17, 1 << 22


def as_float64(tensor: Tensor) -> Tensor:
    """In float64; on the CPU where the device has none."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def sqnr_db(reference: Tensor, approx: Tensor) -> float:
    """Signal to quantisation noise ratio, 10 log10(sum reference^2 / sum (approx - reference)^2).

    Args:
        reference: Any shape, any real type.
        approx: The same shape, any real type.

    Returns:
        Decibels. inf where both are equal (empty and all-zero tensors too), -inf where only the
        reference is zero, NaN where an element or a sum of squares is not finite.

    Raises:
        ValueError: The shapes differ.

    Exactness: the sums are float64.
    """
    return decibels(*squares(reference, approx))


def squares(reference: Tensor, approx: Tensor) -> tuple[float, float]:
    """sum reference^2 and sum (approx - reference)^2, in float64; else as ``sqnr_db``."""
    signal = noise = 0.0
    for exact, other in _pieces(reference, approx):
        exact = as_float64(exact)
        difference = as_float64(other) - exact
        signal += float(torch.dot(exact, exact))
        noise += float(torch.dot(difference, difference))
    return signal, noise


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise), with the edge cases of ``sqnr_db``."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """How many representable numbers apart two tensors are, element by element.

    Both are mapped to integers that rise with the value; -0 and +0 are one number, inf follows the
    largest finite one.

    Args:
        a: Any shape; float16, bfloat16, float32 or float64.
        b: The same shape and type.

    Returns:
        int64, the shape of ``a``. 0 between NaN and NaN; 2^63 - 1 between NaN and a number, and
        where two float64 values lie farther apart than that.

    Raises:
        ValueError: The shapes differ.
        TypeError: The types differ or are no floating-point type of 16 to 64 bits.
    """
    if a.dtype != b.dtype or not a.is_floating_point() or a.element_size() not in _INT_OF_SIZE:
        raise TypeError(
            f"a, b: got {a.dtype} and {b.dtype}; must be one floating-point type of 16 to 64 bits; "
            "cast both to it"
        )
    _check_shapes(a, b)
    p, q = _ordered(a), _ordered(b)
    distance = (p - q).abs()
    # Of opposite signs, a float64 difference can wrap.
    wrapped = ((p < 0) != (q < 0)) & (p.abs() > _FARTHEST - q.abs())
    distance = distance.masked_fill(wrapped, _FARTHEST)
    distance = distance.masked_fill(a.isnan() | b.isnan(), _FARTHEST)
    return distance.masked_fill(a.isnan() & b.isnan(), 0)


def underflow_share(reference: Tensor, approx: Tensor) -> float:
    """Share of the elements of ``reference`` that quantisation turned into zero.

    |{reference != 0, finite, approx == 0}| / number of elements.

    Args:
        reference: The tensor before quantisation, any shape, any real type.
        approx: The same tensor after it (values or dequantised), the same shape.

    Returns:
        0 to 1; 0 for an empty tensor.

    Raises:
        ValueError: The shapes differ.
    """
    return _share(num_underflowed(reference, approx), reference)


def num_underflowed(reference: Tensor, approx: Tensor) -> int:
    """How many elements ``underflow_share`` is a share of."""
    count = 0
    for exact, other in _pieces(reference, approx):
        gone = (other == 0) & (exact != 0)
        found = int(torch.count_nonzero(gone))
        # a sum looks at all elements in less time than picking those that are gone
        if found and not bool(exact.sum().isfinite()):
            found = int(torch.count_nonzero(exact[gone].isfinite()))
        count += found
    return count


def saturation_share(scaled: Tensor, fmt: FloatFormat) -> float:
    """Share of the elements that a saturating conversion to ``fmt`` clamps to its largest number.

    Counted are finite elements that nearest-even rounding would carry beyond ``fmt.max`` if the
    format went on: above 464 for e4m3, from 61440 on for e5m2. An element that merely rounds to
    ``fmt.max`` is not counted.

    Args:
        scaled: What is rounded (x / scale), any shape, any real type.
        fmt: The format it is rounded to.

    Returns:
        0 to 1; 0 for an empty tensor.
    """
    return _share(num_saturated(scaled, fmt), scaled)


def num_saturated(scaled: Tensor, fmt: FloatFormat) -> int:
    """How many elements ``saturation_share`` is a share of."""
    step = math.ldexp(1.0, fmt.max_exponent - fmt.mantissa)
    limit = fmt.max + step / 2
    max_is_odd = int(fmt.max / step) % 2 == 1
    # between two numbers of a short type there may be no such limit
    is_exact = scaled.dtype == torch.float32 and fmt.mantissa <= _EXACT_MANTISSA
    count = 0
    for piece, _ in _pieces(scaled, scaled):
        magnitude = (piece if is_exact else as_float64(piece)).abs()
        beyond = magnitude >= limit if max_is_odd else magnitude > limit
        if torch.count_nonzero(beyond):
            count += int(torch.count_nonzero(magnitude[beyond].isfinite()))
    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """One storage kept for backward: the first tensor saved from it, and all of its bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int
    is_parameter: bool


class saved_bytes:
    """Counts what autograd saves for backward in the forward passes run inside the block.

    Each storage counts once and whole, since a saved view keeps all of it alive. Storages of
    parameters, which exist anyway, are counted apart. The storages are held until the block ends,
    so that no address stands for two of them.

        with saved_bytes(model.parameters()) as saved:
            loss = model(x).sum()
        saved.activation_bytes, saved.parameter_bytes

    Args:
        parameters: Tensors whose storages, and views of them, count as parameters.

    What a function keeps outside ``save_for_backward`` is not seen.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        self.tensors: list[SavedTensor] = []
        self._parameters = {_address(parameter) for parameter in parameters}
        self._held: dict[int, torch.UntypedStorage] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved)

    @property
    def activation_bytes(self) -> int:
        """Bytes of the storages that are no parameter's."""
        return sum(saved.bytes for saved in self.tensors if not saved.is_parameter)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the parameters' storages among those saved."""
        return sum(saved.bytes for saved in self.tensors if saved.is_parameter)

    def __enter__(self) -> saved_bytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._held.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        address = _address(tensor)
        if address not in self._held:
            storage = tensor.untyped_storage()
            self._held[address] = storage
            self.tensors.append(
                SavedTensor(
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    bytes=storage.nbytes(),
                    is_parameter=address in self._parameters,
                )
            )
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Times of contenders measured in turns.

    Attributes:
        seconds: Median time of each contender.
        ratios: Median over the rounds of its time divided by the first contender's in that round.
    """

    seconds: Mapping[str, float]
    ratios: Mapping[str, float]


def interleaved(contenders: Mapping[str, Callable[[], object]], rounds: int) -> Timing:
    """Times several callables in turns, so that drift of the machine hits all of them alike.

    One round runs each contender once; the round that starts with another contender each time takes
    away what a fixed predecessor leaves in the caches. One round before the first warms up.

    Args:
        contenders: Name to a callable without arguments; ratios are to the first.
        rounds: Number of timed rounds, at least 1.

    Returns:
        Medians in seconds, and medians of the ratios within a round.

    Raises:
        ValueError: No contender, or fewer than one round.
    """
    if not contenders:
        raise ValueError("contenders: got none; there must be at least one; name what to time")
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}; must be at least 1; ask for an odd number")
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            elapsed = _timed(contenders[name])
            if turn >= 0:
                times[name].append(elapsed)
    first = times[names[0]]
    ratios = {
        name: statistics.median(mine / base for mine, base in zip(times[name], first, strict=True))
        for name in names
    }
    return Timing(
        seconds={name: statistics.median(times[name]) for name in names},
        ratios=ratios,
    )


def _timed(call: Callable[[], object]) -> float:
    """Seconds of one call, to the end of its work on a GPU already in use."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_initialized() else None
    if synchronize:
        synchronize()
    start = time.perf_counter()
    call()
    if synchronize:
        synchronize()
    return time.perf_counter() - start


def _pieces(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors of one shape, detached and in flat pieces whose elements belong together."""
    _check_shapes(a, b)
    a, b = a.detach(), b.detach().to(a.device)
    if a.dim() == 2 and a.stride(0) == b.stride(0) == 1:
        a, b = a.t(), b.t()
    size = _PIECE if a.device.type == "cpu" else _PIECE_OF_ACCELERATOR
    return zip(a.reshape(-1).split(size), b.reshape(-1).split(size), strict=True)


def _check_shapes(reference: Tensor, approx: Tensor) -> None:
    """Refuse two shapes that broadcasting would quietly join."""
    if reference.shape != approx.shape:
        raise ValueError(
            f"approx: got shape {tuple(approx.shape)}; must be the reference's "
            f"{tuple(reference.shape)}; compare tensors of one shape"
        )


def _ordered(tensor: Tensor) -> Tensor:
    """int64 that rise with the value, both zeros at 0."""
    bits = tensor.detach().contiguous().view(_INT_OF_SIZE[tensor.element_size()])
    magnitude = (bits & torch.iinfo(bits.dtype).max).to(torch.int64)
    return torch.where(bits < 0, -magnitude, magnitude)


def _share(count: int, tensor: Tensor) -> float:
    """A number of elements by the number of all."""
    return count / tensor.numel() if tensor.numel() else 0.0


def _address(tensor: Tensor) -> int:
    """Address of the storage behind a tensor; not of its memory, which there is none of on meta."""
    return tensor.untyped_storage()._cdata
