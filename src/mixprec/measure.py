"""What a low-bit run is measured by: error, lost elements, bytes kept for backward, time.

Nothing here knows a recipe: tensors and callables in, numbers out. Errors are computed in float64
on the CPU, so that a figure does not depend on the device or type of what it describes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from mixprec.formats import FloatFormat

_INT_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FARTHEST = torch.iinfo(torch.int64).max


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
    exact, other = _same_shape(reference, approx)
    signal = float(exact.square().sum())
    noise = float((other - exact).square().sum())
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
    exact, other = _same_shape(reference, approx)
    return _share((exact != 0) & exact.isfinite() & (other == 0))


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
    magnitude = _exact(scaled).abs()
    step = math.ldexp(1.0, fmt.max_exponent - fmt.mantissa)
    limit = fmt.max + step / 2
    max_is_odd = int(fmt.max / step) % 2 == 1
    beyond = magnitude >= limit if max_is_odd else magnitude > limit
    return _share(beyond & magnitude.isfinite())


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


def _exact(tensor: Tensor) -> Tensor:
    """A detached float64 copy on the CPU, since not every device has float64."""
    return tensor.detach().cpu().double()


def _same_shape(reference: Tensor, approx: Tensor) -> tuple[Tensor, Tensor]:
    """Both as float64, after the check that broadcasting would hide a mistake."""
    _check_shapes(reference, approx)
    return _exact(reference), _exact(approx)


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


def _share(hit: Tensor) -> float:
    """Number of true elements by number of elements."""
    return int(hit.sum()) / hit.numel() if hit.numel() else 0.0


def _address(tensor: Tensor) -> int:
    """Address of the storage behind a tensor."""
    return tensor.untyped_storage().data_ptr()
