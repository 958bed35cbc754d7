"""The converted linear layer: parameters, buffers and routing; the arithmetic is in ``autograd``.

A layer is converted by giving it another class. The object, its parameters, hooks, names and
``state_dict`` keys stay what they were; numerics state sits in non-persistent buffers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mixprec.autograd import linear
from mixprec.gemm.api import Operand
from mixprec.hadamard import hadamard
from mixprec.linear_products import (
    G_GRAD_INPUT,
    G_GRAD_WEIGHT,
    W_GRAD_INPUT,
    W_OUTPUT,
    X_GRAD_WEIGHT,
    X_OUTPUT,
    LinearState,
    delayed_positions,
    quantize_operand,
    state_position,
)
from mixprec.noise import Noise
from mixprec.quant_spec import QuantSpec
from mixprec.recipes import OPERANDS, Recipe
from mixprec.scaling import DelayedState, split_state

_PREFIX = "mixprec_"
_NOISE_STEP = f"{_PREFIX}noise_step"
_HISTORY_NAMES = tuple(f"{_PREFIX}amax_{path.replace('.', '_')}" for path in OPERANDS)
_STREAMS_PER_LAYER = 8
NUMERICS_ATTRIBUTES = ("recipe", "impl", "noise_seed", "noise_stream", "_seen_weight")
"""What a converted layer has beside its buffers."""


def _is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, as activation checkpointing does."""
    # Dynamo cannot trace the question; a compiled graph recomputes nothing of its own accord
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class QuantizedLinear(nn.Linear):
    """``nn.Linear`` whose three products follow a recipe; made by ``mixprec.convert``.

    y = x @ weight.T + bias, x [..., in_features], in x's type (see ``mixprec.linear``).

    Attributes:
        recipe: The recipe; to change it, convert again.
        impl: The implementation asked for.
        noise_seed, noise_stream: Seed and first stream of its stochastic rounding.
    """

    recipe: Recipe
    impl: str
    noise_seed: int
    noise_stream: int
    _seen_weight: tuple[weakref.ref[Tensor], int] | None

    def start_numerics(self, recipe: Recipe, impl: str, seed: int, index: int) -> None:
        """Take a recipe with fresh state; ``index`` is the module's place in the model."""
        self.stop_numerics()
        self.recipe, self.impl = recipe, impl
        self.noise_seed, self.noise_stream = seed, _STREAMS_PER_LAYER * index
        self._seen_weight = None
        # state made inside inference mode could never be written outside it
        with torch.inference_mode(False):
            self._register_state(recipe, self.weight.device)

    def _register_state(self, recipe: Recipe, device: torch.device) -> None:
        for position in delayed_positions(recipe):
            spec = recipe.specs[position]
            assert spec is not None
            size = spec.amax_history_len + 2
            packed = torch.zeros(size, dtype=torch.float32, device=device)
            self.register_buffer(_HISTORY_NAMES[position], packed, persistent=False)
        if any(spec is not None and spec.is_stochastic for spec in recipe.specs):
            step = torch.zeros((), dtype=torch.int64, device=device)
            self.register_buffer(_NOISE_STEP, step, persistent=False)

    def stop_numerics(self) -> None:
        """Remove everything that ``start_numerics`` added."""
        for name in list(self.numerics_buffers()):
            delattr(self, name)
        for name in NUMERICS_ATTRIBUTES:
            self.__dict__.pop(name, None)

    def numerics_buffers(self) -> dict[str, Tensor]:
        """The state by buffer name: amax histories, and the count of noise steps."""
        return {
            name: buffer
            for name, buffer in self._buffers.items()
            if buffer is not None and name.startswith(_PREFIX)
        }

    def forget_weight(self) -> None:
        """Let the next training forward see any weight: scales are up to date now."""
        self._seen_weight = None

    def forward(self, x: Tensor) -> Tensor:
        """y = x @ weight.T + bias by the recipe; records amaxes in training mode."""
        delayed = self._delayed_states()
        records = self.training and not _is_recomputing()
        if records and any(state is not None for state in delayed):
            self._check_synced()
        state = LinearState(
            delayed=delayed, records_forward=records, records_backward=self.training
        )
        return linear(
            x,
            self.weight,
            self.bias,
            recipe=self.recipe,
            noise=self._noise(),
            impl=self.impl,
            state=state,
        )

    def quantized_operands(
        self, x: Tensor, grad_output: Tensor
    ) -> dict[str, tuple[Tensor, Operand]]:
        """The six operands as the layer would quantise them now, recording nothing.

        Args:
            x: [..., in_features].
            grad_output: [..., out_features].

        Returns:
            ``output.a`` to ``grad_weight.b`` -> the tensor, transformed where its product asks for
            it, and what is multiplied for it.
        """
        x = x.detach().reshape(-1, x.shape[-1])
        g = grad_output.detach().reshape(-1, grad_output.shape[-1])
        w = self.weight.detach()
        tensors = {
            X_OUTPUT: x,
            W_OUTPUT: w,
            G_GRAD_INPUT: g,
            W_GRAD_INPUT: w.t(),
            G_GRAD_WEIGHT: g.t(),
            X_GRAD_WEIGHT: x.t(),
        }
        delayed, noise = self._delayed_states(), self._noise()
        found = {}
        for position, path in enumerate(OPERANDS):
            state = delayed[state_position(self.recipe, position)]
            quantized = quantize_operand(
                tensors[position], self.recipe.specs[position], position, noise, state
            )
            found[path] = (_transformed(tensors[position], self.recipe.specs[position]), quantized)
        return found

    def _delayed_states(self) -> tuple[DelayedState | None, ...]:
        packed = [self._buffers.get(name) for name in _HISTORY_NAMES]
        return tuple(None if state is None else split_state(state) for state in packed)

    def _noise(self) -> Noise | None:
        step = self._buffers.get(_NOISE_STEP)
        if step is None:
            return None
        return Noise(seed=self.noise_seed, step=step, stream=self.noise_stream)

    def _check_synced(self) -> None:
        # a version changes every step, so compiled code would be compiled anew each time
        if torch.compiler.is_compiling() or self.weight.is_inference():
            return
        seen, version = self._seen_weight, self.weight._version
        if seen is not None and seen[0]() is self.weight and seen[1] != version:
            raise ValueError(
                f"weight: got a new value since the last training forward; recipe {self.recipe} "
                "rolls its amax history once a step; call mixprec.sync_scales(model) after each "
                "optimizer step, or mixprec.attach(model, optimizer) once"
            )
        self._seen_weight = (weakref.ref(self.weight), version)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        before = self.numerics_buffers()
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            assert new is not None
            if old.is_meta and not new.is_meta:
                # to_empty leaves memory as it finds it; a new layer's state is empty
                self._buffers[name] = torch.zeros_like(new, dtype=old.dtype)
            elif new.dtype != old.dtype:
                # .half() and .bfloat16() are about parameters: a history keeps its digits
                self._buffers[name] = old.to(new.device)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.forget_weight()

    def __getstate__(self) -> dict[str, Any]:
        # a copy has another weight, and a weak reference cannot be pickled
        return self.__dict__ | {"_seen_weight": None}

    def __reduce_ex__(self, protocol: Any) -> Any:
        if type(self) is QuantizedLinear or not is_converted_class(type(self)):
            return super().__reduce_ex__(protocol)
        return _rebuild, (plain_class(self),), self.__getstate__()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}, impl={self.impl}"


_CLASSES: dict[type[nn.Linear], type[QuantizedLinear]] = {nn.Linear: QuantizedLinear}


def quantized_class(original: type[nn.Linear]) -> type[QuantizedLinear]:
    """The class that a layer gets: for a subclass of Linear, one between it and ``nn.Linear``.

    A subclass whose forward calls ``super().forward`` then reaches the quantised product there.
    """
    if original not in _CLASSES:
        bases = (original, QuantizedLinear)
        _CLASSES[original] = type(f"Quantized{original.__name__}", bases, {})
    return _CLASSES[original]


def is_converted_class(kind: type[nn.Module]) -> bool:
    """Whether a class is one that conversion gives, not one that something else derived from it."""
    return kind in _CLASSES.values()


def plain_class(module: nn.Module) -> Any:
    """The class of a module; of a converted layer the one that it had before."""
    for original, quantized in _CLASSES.items():
        if type(module) is quantized:
            return original
    return type(module)


def _rebuild(original: type[nn.Linear]) -> QuantizedLinear:
    cls = quantized_class(original)
    return cls.__new__(cls)


def _transformed(x: Tensor, spec: QuantSpec | None) -> Tensor:
    return hadamard(x) if spec is not None and spec.hadamard else x
