"""The operands of a linear layer's three products: quantised, recorded, kept for backward.

Kept for backward: codes and scales of the operands that backward multiplies; high-precision copies
only for high-precision products; of the weight the parameter itself, quantised again by the same
scale or along its other axis.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from mixprec.gathered_weight import GatheredWeight
from mixprec.gemm.api import GemmSpec, Operand, decodes_at_once, multiply, rounded
from mixprec.hadamard import padded_length
from mixprec.noise import Noise
from mixprec.quantization import QuantizedTensor, QuantSpec, quantize, requantize
from mixprec.recipes import Recipe
from mixprec.scaling import DelayedState, record_amax
from mixprec.sharding import WHOLE, Shard, Sharding
from mixprec.windows import Windows

# position of each operand in Recipe.specs, and the offset of its noise stream
X_OUTPUT, W_OUTPUT, G_GRAD_INPUT, W_GRAD_INPUT, G_GRAD_WEIGHT, X_GRAD_WEIGHT = range(6)
OUTPUT, GRAD_INPUT, GRAD_WEIGHT = range(3)
Tensors = tuple[Tensor | None, ...]
NOTHING: Tensors = (None,) * 4
# free and contraction axis of each operand, and what each product is summed over
_AXES = (
    ("rows", "inputs"),
    ("outputs", "inputs"),
    ("rows", "outputs"),
    ("inputs", "outputs"),
    ("outputs", "rows"),
    ("inputs", "rows"),
)
# parts of grad_weight are brought together by whoever holds the parameter: DDP, FSDP
_SUMMED = ("inputs", "outputs", None)
_FIRST_USE = {W_GRAD_INPUT: W_OUTPUT, G_GRAD_WEIGHT: G_GRAD_INPUT, X_GRAD_WEIGHT: X_OUTPUT}


@dataclass(slots=True)
class HeldWeight:
    """A weight's operands, kept from call to call until the weight changes."""

    _key: tuple[weakref.ref[Tensor], int] | None = None
    _operands: dict[int, Operand] = field(default_factory=dict)

    def check(self, weight: Tensor) -> None:
        """Forget everything made of another weight, or of this one before it was changed."""
        key = self._key
        if key is None or key[0]() is not weight or key[1] != weight._version:
            self._key = (weakref.ref(weight), weight._version)
            self._operands = {}

    def get(self, position: int, make: Callable[[], Operand]) -> Operand:
        """The operand at a position, made at its first use."""
        if position not in self._operands:
            self._operands[position] = make()
        return self._operands[position]


class Observer(Protocol):
    """Is told of a product once its output is there, and changes nothing."""

    def __call__(self, plan: Plan, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """x as the plan takes it, weight [N, K] and out [M, N], whose gradient a hook gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearState:
    """Numerics state of one product of a layer: read in forward and backward, updated in place.

    Args:
        delayed: A state for each operand with delayed scaling, by its position; else None.
        records_forward: Whether forward records amaxes (not in evaluation or recomputation).
        records_backward: Whether backward records amaxes.
        counts_noise: Whether a recording backward counts the noise step.
        held: Where the weight's operands are kept for later calls; None makes them anew.
        observers: Who is told of the product.
        sharding: Over whom the product's axes are spread.
    """

    delayed: tuple[DelayedState | None, ...] = (None,) * 6
    records_forward: bool = False
    records_backward: bool = False
    counts_noise: bool = True
    held: HeldWeight | None = None
    observers: tuple[Observer, ...] = ()
    sharding: Sharding = WHOLE

    def later(self) -> LinearState:
        """Of a further product of the same call, which records and counts nothing itself."""
        return LinearState(
            records_forward=self.records_forward, observers=self.observers, sharding=self.sharding
        )


# not made where it is used: Dynamo does not take a default that is an object
NO_STATE = LinearState()


def shared_positions(recipe: Recipe) -> frozenset[int]:
    """Operands of later products that are the transpose of their first use, value for value."""
    specs = recipe.specs
    shared = []
    for position, first in _FIRST_USE.items():
        spec = specs[position]
        if spec is not None and spec.is_symmetric and spec == specs[first]:
            shared.append(position)
    return frozenset(shared)


def delayed_positions(recipe: Recipe) -> tuple[int, ...]:
    """The operands that keep a history of their own."""
    shared = shared_positions(recipe)
    return tuple(
        position
        for position, spec in enumerate(recipe.specs)
        if spec is not None and spec.is_delayed and position not in shared
    )


def state_position(recipe: Recipe, position: int) -> int:
    """Where the history of an operand is kept: with the operand whose values it shares."""
    return _FIRST_USE[position] if position in shared_positions(recipe) else position


def quantize_operand(
    x: Tensor,
    spec: QuantSpec | None,
    position: int,
    noise: Noise | None,
    delayed: DelayedState | None,
    *,
    sharding: Sharding = WHOLE,
    decoded: bool = False,
    held: bool = False,
) -> Operand:
    """One of the six operands, drawing from its own stream of noise; x itself in high precision."""
    if spec is None:
        return x
    shard = Shard(*(getattr(sharding, axis) for axis in _AXES[position]))
    if noise is not None and spec.is_stochastic:
        # a padded contraction is data: parts lie one after the other as they are padded
        width = padded_length(x.shape[1]) if spec.hadamard else x.shape[1]
        noise = replace(noise, stream=noise.stream + position)
        noise = shard.noise(noise, (x.shape[0], width), x.device)
    return quantize(
        x,
        spec,
        noise=noise,
        state=delayed if spec.is_delayed else None,
        reduce=None if shard == Shard() else shard.largest,
        packed=False,
        decoded=decoded,
        held=held,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything about a call that is no tensor with a gradient.

    needs: Whether anybody may ask for the gradients of x and of the weight.
    windows: How x, if it is no matrix, becomes one.
    """

    specs: tuple[QuantSpec | None, ...]
    gemms: tuple[GemmSpec, ...]
    shared: frozenset[int]
    impl: str
    noise: Noise | None
    state: LinearState
    dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    needs: tuple[bool, bool]
    windows: Windows | None = None

    @property
    def keeps_codes(self) -> bool:
        """Whether x is kept for backward in codes; else it is kept itself and quantised again."""
        spec = self.specs[X_GRAD_WEIGHT]
        if not self.needs[1] or spec is None or self.windows is None:
            return self.needs[1] and spec is not None
        # the codes of windows that overlap can take more memory than x does
        overlap = math.prod(self.windows.kernel) / math.prod(self.windows.stride)
        return overlap * spec.format.bits <= 8 * self.dtype.itemsize

    @property
    def quantises_weight_again(self) -> bool:
        """Whether grad_input's weight has the values and scales of output's."""
        return W_GRAD_INPUT in self.shared and self.specs[W_OUTPUT] is not None

    def matrix(self, x: Tensor) -> Tensor:
        """x as [M, K]."""
        return x if self.windows is None else self.windows.matrix(x)

    def quantize(
        self,
        x: Tensor,
        position: int,
        records: bool,
        *,
        is_kept: bool = False,
        held: bool = False,
    ) -> Operand:
        """The operand at a position, its amax recorded; in codes where it outlives its product.

        held: Whether it is multiplied now too, so that values are of use beside the codes.
        """
        spec, takes_values = self.specs[position], decodes_at_once(x, self.impl)
        operand = quantize_operand(
            x.to(self.dtype) if spec is None else x,
            spec,
            position,
            self.noise,
            self.state.delayed[position],
            sharding=self.state.sharding,
            decoded=takes_values and not is_kept,
            held=takes_values and held,
        )
        if records:
            self._record(operand, position)
        return operand

    def _record(self, operand: Operand, position: int) -> None:
        delayed = self.state.delayed[position]
        if delayed is None or not isinstance(operand, QuantizedTensor):
            return
        assert operand.amax is not None
        for old, new in zip(delayed, record_amax(delayed, operand.amax), strict=True):
            if new is not old:
                old.copy_(new)

    def weight(self, w_NK: Tensor) -> Operand:
        """The weight of output."""
        if isinstance(w_NK, GatheredWeight):
            return self._gathered(w_NK, W_OUTPUT, self.state.records_forward)
        return self._held(
            W_OUTPUT,
            lambda is_kept: self.quantize(
                w_NK, W_OUTPUT, self.state.records_forward, is_kept=is_kept
            ),
        )

    def weight_again(self, w_NK: Tensor, made: Tensors) -> Operand:
        """w.T for grad_input: the parameter is kept anyway, so codes are made anew."""
        if isinstance(w_NK, GatheredWeight):
            return self._gathered(w_NK, W_GRAD_INPUT, self.state.records_backward)
        return self._held(
            W_GRAD_INPUT, lambda is_kept: self._weight_again(w_NK, made, is_kept=is_kept)
        )

    def _gathered(self, weight: GatheredWeight, position: int, records: bool) -> Operand:
        operand = weight.source.operand(position)
        if records:
            self._record(operand, position)
        return operand

    def _weight_again(self, w_NK: Tensor, made: Tensors, *, is_kept: bool) -> Operand:
        scale, encode, amax, tensor_amax = made
        spec = self.specs[W_GRAD_INPUT]
        if self.quantises_weight_again and spec is not None and encode is not None:
            assert scale is not None
            # transposed first: packed codes would have to be packed anew
            return requantize(
                w_NK.t(),
                spec,
                scale=scale.t(),
                encode=encode.t(),
                amax=amax,
                tensor_amax=tensor_amax,
                decoded=not is_kept and decodes_at_once(w_NK, self.impl),
            )
        return self.quantize(w_NK.t(), W_GRAD_INPUT, self.state.records_backward, is_kept=is_kept)

    def _held(self, position: int, make: Callable[[bool], Operand]) -> Operand:
        held, spec = self.state.held, self.specs[position]
        if held is None or spec is None or spec.is_stochastic:
            return make(False)
        return held.get(position, lambda: make(True))

    def x_again(self, x: Tensor, records: bool) -> Operand:
        """x.T for grad_weight, of x kept itself: with the values that forward gave it."""
        if X_GRAD_WEIGHT not in self.shared or self.specs[X_OUTPUT] is None:
            return self.quantize(self.matrix(x).t(), X_GRAD_WEIGHT, records)
        first = self.quantize(self.matrix(x), X_OUTPUT, records=False)
        assert isinstance(first, QuantizedTensor)
        return first.t()

    def transposed(
        self,
        x: Tensor,
        first: Operand | None,
        position: int,
        records: bool,
        *,
        is_kept: bool = False,
    ) -> Operand:
        """The operand of a later product: the first one's values, or x.T quantised anew."""
        if position in self.shared and isinstance(first, QuantizedTensor):
            return first.t()
        return self.quantize(x.t(), position, records, is_kept=is_kept)

    def multiply(
        self, product: int, a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """One of the three products, its result rounded as the recipe says."""
        gemm, axis = self.gemms[product], _SUMMED[product]
        spread = None if axis is None else getattr(self.state.sharding, axis)
        if spread is None:
            return multiply(
                a,
                b,
                bias=bias,
                out_dtype=dtype,
                impl=self.impl,
                out=gemm.out,
                accumulate=gemm.accumulate,
            )
        wide = torch.float64 if gemm.is_exact else sum_dtype(dtype)
        part = multiply(a, b, bias=None, out_dtype=wide, impl=self.impl, accumulate=gemm.accumulate)
        whole = spread.total(part)
        return rounded(whole if bias is None else whole + bias, gemm.out, dtype)

    def input_gradient(self, g: Operand, w: Operand, shape: torch.Size) -> Tensor:
        """grad_input, of x's shape; what several windows share is summed before it is rounded."""
        if self.windows is None:
            return self.multiply(GRAD_INPUT, g, w, None, self.dtype)
        rows = self.multiply(GRAD_INPUT, g, w, None, sum_dtype(self.dtype))
        return self.windows.adjoint(rows, shape).to(self.dtype)


def kept_of(operand: Operand) -> Tensors:
    """What backward needs of an operand that it multiplies: codes, scale, amax, tensor's amax."""
    if not isinstance(operand, QuantizedTensor):
        return NOTHING
    return operand.packed().codes, operand.scale, kept_amax(operand), operand.tensor_amax


def kept_amax(operand: QuantizedTensor) -> Tensor | None:
    """Of many blocks' amaxes their sum: only whether they are finite is asked again."""
    return operand.amax if operand.amax is None else operand.amax.sum().reshape(1, 1)


def restored(kept: Tensors, spec: QuantSpec, contraction: int) -> QuantizedTensor:
    """The operand of which ``kept_of`` kept this, with so many elements along the contraction."""
    codes, scale, amax, tensor_amax = kept
    assert codes is not None
    return QuantizedTensor(
        codes=codes,
        scale=scale,
        amax=amax,
        tensor_amax=tensor_amax,
        spec=spec,
        shape=torch.Size(
            (len(codes), padded_length(contraction) if spec.hadamard else contraction)
        ),
    )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which results are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32
