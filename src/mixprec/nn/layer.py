"""What every converted layer has: a recipe, numerics state, and products that follow them.

A layer is converted by giving it another class. The object, its parameters, hooks, names and
``state_dict`` keys stay what they were; numerics state sits in non-persistent buffers. A layer
with one product a forward pass names it ""; the others name theirs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mixprec.autograd import product
from mixprec.linear_products import (
    HeldWeight,
    LinearState,
    Observer,
    Plan,
    delayed_positions,
)
from mixprec.noise import Noise
from mixprec.recipes import OPERANDS, Recipe
from mixprec.scaling import DelayedState, split_state
from mixprec.sharding import WHOLE, Sharding, is_distributed, local_part
from mixprec.windows import Windows

_PREFIX = "mixprec_"
_NO_HISTORIES = ("",) * len(OPERANDS)
_STREAMS_PER_LAYER = 8
# far above the streams of any layer
_STREAMS_PER_ENTRY = 2**32
_STREAMS_PER_PRODUCT = 2**48
NUMERICS_ATTRIBUTES = (
    "recipe",
    "impl",
    "noise_seed",
    "noise_stream",
    "cache_weights",
    "_histories",
    "_seen",
    "_held",
    "observers",
    "sharding",
)
"""What a converted layer has beside its buffers."""


def _is_recomputing() -> bool:
    """Whether this forward runs inside a backward pass, as activation checkpointing does."""
    # Dynamo cannot trace the question; a compiled graph recomputes nothing of its own accord
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _is_traced() -> bool:
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def is_numerics_buffer(name: str) -> bool:
    """Whether a buffer's name, with its module's or without, is one that conversion gives."""
    return name.rpartition(".")[2].startswith(_PREFIX)


def _step_name(name: str) -> str:
    return _PREFIX + "_".join(filter(None, (name, "noise_step")))


def _history_names(name: str, recipe: Recipe) -> tuple[str, ...]:
    """The buffers of a product's histories by the operand's position; "" where there is none."""
    delayed = delayed_positions(recipe)
    paths = (path.replace(".", "_") for path in OPERANDS)
    names = [_PREFIX + "_".join(filter(None, (name, "amax", path))) for path in paths]
    return tuple(buffer if i in delayed else "" for i, buffer in enumerate(names))


class QuantizedLayer(nn.Module):
    """A layer whose products follow a recipe; made by ``mixprec.convert``.

    Attributes:
        recipe: The recipe; to change it, convert again.
        impl: The implementation asked for.
        noise_seed, noise_stream: Seed and first stream of its stochastic rounding.
        cache_weights: Whether quantised weights are kept until the weight changes.
        observers: Told of each product, with its name before ``Observer``'s arguments; in training
            its state records backward.
        sharding: Over whom the axes of its products are spread, by ``mixprec.distribute``.
    """

    reuses_weights: ClassVar[bool] = False
    """Whether a pass multiplies by one weight several times; it lets go of them by itself then."""
    recipe: Recipe
    impl: str
    noise_seed: int
    noise_stream: int
    cache_weights: bool
    observers: tuple[Callable[[str, Plan, Tensor, Tensor, Tensor], None], ...] = ()
    sharding: Sharding = WHOLE
    _histories: dict[str, tuple[str, ...]]
    _seen: dict[str, tuple[weakref.ref[Tensor], int]]
    _held: dict[tuple[str, int], HeldWeight]

    @staticmethod
    def sizes(layer: Any) -> tuple[int, ...]:
        """Contracted and free sizes of the products' weights, which hardware wants in multiples."""
        raise NotImplementedError

    @staticmethod
    def why_not(layer: Any, recipe: Recipe) -> str | None:
        """Why this layer cannot take this recipe, or None."""
        return None

    def product_names(self) -> tuple[str, ...]:
        """The names of the products, each with histories and a noise step of its own."""
        return ("",)

    def start_numerics(
        self, recipe: Recipe, impl: str, seed: int, cache_weights: bool, index: int
    ) -> None:
        """Take a recipe with fresh state; ``index`` is the module's place in the model."""
        self.stop_numerics()
        self.recipe, self.impl, self.cache_weights = recipe, impl, cache_weights
        self.noise_seed, self.noise_stream = seed, _STREAMS_PER_LAYER * index
        self._histories = {name: _history_names(name, recipe) for name in self.product_names()}
        self._seen, self._held = {}, {}
        # state made inside inference mode could never be written outside it
        with torch.inference_mode(False):
            self._register_state(recipe, device_of(self))

    def _register_state(self, recipe: Recipe, device: torch.device | None) -> None:
        for buffers in self._histories.values():
            for buffer, spec in zip(buffers, recipe.specs, strict=True):
                if buffer:
                    assert spec is not None
                    size = spec.amax_history_len + 2
                    packed = torch.zeros(size, dtype=torch.float32, device=device)
                    self.register_buffer(buffer, packed, persistent=False)
        if any(spec is not None and spec.is_stochastic for spec in recipe.specs):
            for name in self.product_names():
                step = torch.zeros((), dtype=torch.int64, device=device)
                self.register_buffer(_step_name(name), step, persistent=False)

    def stop_numerics(self) -> None:
        """Remove everything that ``start_numerics`` added."""
        for name in list(self.numerics_buffers()):
            delattr(self, name)
        for name in NUMERICS_ATTRIBUTES:
            self.__dict__.pop(name, None)

    def numerics_buffers(self) -> dict[str, Tensor]:
        """The state by buffer name: amax histories, and counts of noise steps."""
        return {
            name: local_part(buffer)
            for name, buffer in self._buffers.items()
            if buffer is not None and is_numerics_buffer(name)
        }

    def forget_weight(self) -> None:
        """Let the next training forward see any weight: scales are up to date now."""
        self._seen, self._held = {}, {}

    def multiply(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        name: str = "",
        owner: Tensor | None = None,
        entry: int = 0,
        windows: Windows | None = None,
        sharding: Sharding | None = None,
    ) -> Tensor:
        """A product of the layer by its recipe; records amaxes in training mode.

        Args:
            x: [..., K], or what ``windows`` makes a matrix of.
            weight: [N, K]: a parameter, or part of it.
            bias: [N].
            name: Which of ``product_names``.
            owner: The parameter that weight is made of; weight itself by default.
            entry: Which of several products of this name in a pass; the first counts the pass.
            windows: How x, if it is no matrix, becomes one.
            sharding: Over whom the product's axes are spread; the layer's own by default.
        """
        _check_whole(x, weight)
        owner = weight if owner is None else owner
        delayed = self.delayed_states(name)
        records = self._is_recording()
        if records and any(state is not None for state in delayed):
            self._check_synced(name, owner)
        state = LinearState(
            delayed=delayed,
            records_forward=records,
            records_backward=self.training,
            counts_noise=entry == 0,
            # the whole parameter is the same in every product
            held=self._held_weight(name, 0 if weight is owner else entry, owner),
            observers=self._told(name),
            sharding=self.active_sharding() if sharding is None else sharding,
        )
        return product(
            x,
            weight,
            bias,
            recipe=self.recipe,
            noise=self.noise(name, entry),
            impl=self.impl,
            state=state,
            windows=windows,
        )

    def _is_recording(self) -> bool:
        return self.training and not _is_recomputing()

    def active_sharding(self) -> Sharding:
        """Over whom axes are spread now: each rank evaluates rows of its own."""
        return self.sharding if self.training else replace(self.sharding, rows=None)

    def noise(self, name: str = "", entry: int = 0) -> Noise | None:
        """The noise of a product's next pass; None where nothing is rounded stochastically."""
        buffer = self._buffers.get(_step_name(name))
        if buffer is None:
            return None
        step = local_part(buffer)
        place = _STREAMS_PER_PRODUCT * self.product_names().index(name) + _STREAMS_PER_ENTRY * entry
        return Noise(seed=self.noise_seed, step=step, stream=self.noise_stream + place)

    def delayed_states(self, name: str = "") -> tuple[DelayedState | None, ...]:
        """A product's histories, by the operand's position."""
        packed = (self._buffers.get(buffer) for buffer in self._histories.get(name, _NO_HISTORIES))
        return tuple(None if state is None else split_state(local_part(state)) for state in packed)

    def _told(self, name: str) -> tuple[Observer, ...]:
        if not self.observers or _is_traced():
            return ()
        return tuple(functools.partial(observer, name) for observer in self.observers)

    def _held_weight(self, name: str, entry: int, owner: Tensor) -> HeldWeight | None:
        # a compiled graph quantises the weight as one of its operations; a mapped one has many
        if _is_traced() or not (self.cache_weights or self.reuses_weights):
            return None
        # what inference mode makes could not be kept for a backward pass
        if torch.is_inference_mode_enabled() or owner.is_inference():
            return None
        held = self._held.setdefault((name, entry), HeldWeight())
        held.check(owner)
        return held

    def _check_synced(self, name: str, owner: Tensor) -> None:
        # a version changes every step, so compiled code would be compiled anew each time
        if torch.compiler.is_compiling() or owner.is_inference():
            return
        seen, version = self._seen.get(name), owner._version
        if seen is not None and seen[0]() is owner and seen[1] != version:
            raise ValueError(
                f"weight: got a new value since the last training forward; recipe {self.recipe} "
                "rolls its amax history once a step; call mixprec.sync_scales(model) after each "
                "optimizer step, or mixprec.attach(model, optimizer) once"
            )
        self._seen[name] = (weakref.ref(owner), version)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # weak references would keep torch from swapping parameters
        self.forget_weight()
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
        # a copy has another weight and is nobody's to watch; a weak reference cannot be pickled
        return self.__dict__ | {"_seen": {}, "_held": {}, "observers": ()}

    def extra_repr(self) -> str:
        """The layer's own, and what it multiplies by."""
        own = super().extra_repr()
        return ", ".join(filter(None, (own, f"recipe={self.recipe}", f"impl={self.impl}")))


def _check_whole(x: Tensor, weight: Tensor) -> None:
    for name, tensor in (("x", x), ("weight", weight)):
        if is_distributed(tensor):
            raise TypeError(
                f"{name}: got a DTensor; only linear layers multiply by one, with both x and "
                "weight spread by parallelize_module; pass tensors, or leave the layer out (skip=)"
            )


def device_of(module: nn.Module) -> torch.device | None:
    """Where a module's first parameter is; None without one."""
    return next((parameter.device for parameter in module.parameters()), None)
