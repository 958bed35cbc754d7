"""Any torch optimizer for parameters of 16 bits: float32 arithmetic, state and gradients.

    v = load(p);   v' = optimizer(v, gradient) in float32;   p = store(v')

for each narrow (float16 or bfloat16) parameter p; ``mixprec.optim.updates`` has load and store.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mixprec.gemm.widening import NARROW
from mixprec.noise import Noise
from mixprec.optim.updates import UPDATES, float32_at_least

_OWN = "mixed_precision"
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_STATE_HOOKS = (
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


def _of_inner(name: str) -> Any:
    """An attribute that the wrapper and the wrapped optimizer have in common."""
    return property(
        lambda self: getattr(self.inner, name), lambda self, value: setattr(self.inner, name, value)
    )


def _as_saved(saved: Any, loaded: Any, *, widen: bool) -> Any:
    """The saved state in its own type, or at least float32, where torch's loading put it."""
    if isinstance(saved, Tensor):
        dtype = float32_at_least(saved.dtype) if widen else saved.dtype
        return saved.detach().to(loaded.device, dtype, copy=True)
    if isinstance(saved, Mapping):
        return {key: _as_saved(saved[key], loaded[key], widen=widen) for key in saved}
    if isinstance(saved, list | tuple):
        pairs = zip(saved, loaded, strict=True)
        return type(saved)(_as_saved(mine, theirs, widen=widen) for mine, theirs in pairs)
    return loaded


class MixedPrecision(Optimizer):
    """A torch optimizer whose arithmetic and state are float32, for parameters of any type.

    The parameters may be narrowed before or after this is made (``parameter.data =
    parameter.data.to(dtype)``, ``model.half()``); made before, the masters are the float32 values
    themselves. Parameters of float32, float64 and complex types go to the optimizer as they are.
    It stands in the optimizer's place: groups, defaults, state and hooks are the same objects, so
    schedulers, ``add_param_group``, ``param_names`` and learning rates, numbers or tensors, work
    as before. While the optimizer steps, float32 stand-ins take the narrow parameters' places.

    Args:
        optimizer: A constructed optimizer; step it through this object only.
        update: masters, compensated, stochastic or plain, as ``mixprec.optim.updates`` has them.
        seed: Of the noise of stochastic updates, 0 to 2^64 - 1. The global generator is not used.
        float32_gradients: ``p.grad`` of a narrow parameter is float32, so that micro-batches are
            summed, unscaled and clipped there. False leaves it in the parameter's type, as
            DistributedDataParallel and FSDP2 need it, until ``widen_gradients`` or the step.

    Attributes:
        inner: The wrapped optimizer.
        update: As given.
        seed: As given, or as loaded.
        steps: Steps taken: a step that a loss scaler skips is none.

    Raises:
        TypeError: optimizer is no torch optimizer.
        ValueError: It is wrapped already or differentiable; unknown update; seed out of range.

    Edge cases: a parameter without a gradient is not touched. A narrow parameter that is changed
    from outside is noticed by its value: a master then becomes the parameter, element by element;
    a compensation too large for the parameter becomes 0, a smaller one is less than a rounding.
    A value beyond the type's range becomes inf; by stochastic updates the largest finite number.
    A closure sees the optimizer's points as stored. State that the optimizer kept in the
    parameter's type is widened when the parameter is first seen narrow.

    Memory for each narrow element: masters 4 bytes, compensated 2, between steps; the others 0, and
    4 during a step. To that comes the optimizer's own state in float32.

    Exactness: masters equal, bit for bit, the parameters of the wrapped optimizer on a float32
    model with the same gradients (tests/optim/test_mixed_precision.py).
    """

    inner: Optimizer
    update: str
    seed: int
    steps: int
    float32_gradients: bool
    _kept: dict[Tensor, Tensor | None]
    _exact: dict[Tensor, Tensor]
    state = _of_inner("state")
    param_groups = _of_inner("param_groups")
    defaults = _of_inner("defaults")

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        update: str = "masters",
        seed: int = 0,
        float32_gradients: bool = True,
    ) -> None:
        _check_arguments(optimizer, update)
        Noise(seed=seed)
        # torch's constructor would make groups and state of its own.
        self.__setstate__(
            {
                "inner": optimizer,
                "update": update,
                "seed": seed,
                "steps": 0,
                "float32_gradients": float32_gradients,
                "_kept": {},
                "_exact": {},
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        names = ("inner", "update", "seed", "steps", "float32_gradients", "_kept", "_exact")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for name in (*_STEP_HOOKS, *_STATE_HOOKS):
            setattr(self, name, getattr(self.inner, name))
        for name in _STEP_HOOKS:
            # They run once, after the parameters are stored, and their handles still remove them.
            setattr(self.inner, name, OrderedDict())
        self.refresh()

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @torch.no_grad()
    def refresh(self) -> None:
        """Take note of the parameters' types; every other method does it first.

        Call it after narrowing float64 parameters, where no other method comes before the next
        backward pass: their gradients would come in the narrow type and be summed there.
        """
        for parameter in self._parameters():
            if parameter.dtype not in NARROW:
                self._kept.pop(parameter, None)
                # No copy: the parameter's own memory, which narrowing leaves to this reference.
                self._exact[parameter] = parameter.data
            elif parameter not in self._kept:
                exact = self._exact.pop(parameter, parameter)
                self._kept[parameter] = UPDATES[self.update].start(parameter, exact)
                if parameter in self.state:
                    state = self.state[parameter]
                    self.state[parameter] = _as_saved(state, state, widen=True)
            elif (kept := self._kept[parameter]) is not None and kept.device != parameter.device:
                kept.data = kept.data.to(parameter.device)
            if self.float32_gradients:
                _set_gradient_type(parameter, float32_at_least(parameter.dtype))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        super().zero_grad(set_to_none)
        self.refresh()
        if not self.float32_gradients:
            for parameter in self._kept:
                _set_gradient_type(parameter, parameter.dtype)

    def widen_gradients(self) -> None:
        """Make the gradients that are there float32, to be unscaled and clipped there.

        For ``float32_gradients=False``, after the last backward pass before a step; ``zero_grad``
        ends it.
        """
        for parameter in self._kept:
            _set_gradient_type(parameter, torch.float32)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the group's parameters may be narrow."""
        self.inner.add_param_group(param_group)
        self.refresh()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the wrapped optimizer.

        Args:
            closure: Evaluates the model and returns the loss, for optimizers that take one. Before
                each evaluation the parameters are stored, so that it sees the optimizer's point.

        Returns:
            What the optimizer returns.
        """
        self.refresh()
        stand_ins = self._load(everything=closure is not None)
        back = {stand_in: parameter for parameter, stand_in in stand_ins.items()}

        def evaluate() -> Any:
            assert closure is not None
            self._exchange(back)
            self._store(stand_ins)
            loss = closure()
            _hand_gradients(stand_ins)
            self._exchange(stand_ins)
            return loss

        try:
            _hand_gradients(stand_ins)
            self._exchange(stand_ins)
            result = self.inner.step(*([] if closure is None else [evaluate]))
        finally:
            self._exchange(back)
        self._store(stand_ins)
        for stand_in in back:
            stand_in.grad = None
        self.steps += 1
        return result

    @torch.no_grad()
    def _load(self, *, everything: bool) -> dict[Tensor, Tensor]:
        """A float32 stand-in for each narrow parameter, or for those with a gradient."""
        return {
            parameter: UPDATES[self.update].load(parameter, kept).requires_grad_()
            for parameter, kept in self._kept.items()
            if everything or parameter.grad is not None
        }

    @torch.no_grad()
    def _store(self, stand_ins: Mapping[Tensor, Tensor]) -> None:
        for index, parameter in enumerate(self._parameters()):
            stand_in = stand_ins.get(parameter)
            if stand_in is not None and stand_in.grad is not None:
                noise = Noise(seed=self.seed, step=self.steps, stream=index)
                kept = self._kept[parameter]
                UPDATES[self.update].store(parameter, stand_in.detach(), kept, noise)

    def _exchange(self, replacement: Mapping[Tensor, Tensor]) -> None:
        """Put tensors into the places of others, in the groups' own lists and as keys of state."""
        for group in self.param_groups:
            # In place: LBFGS holds on to the list.
            group["params"][:] = [replacement.get(each, each) for each in group["params"]]
        entries = [(replacement.get(key, key), value) for key, value in self.state.items()]
        self.state.clear()
        self.state.update(entries)

    def masters(self) -> list[Tensor]:
        """The parameters as the next step would load them, at least float32, in their order.

        Each has the parameter's gradient, the same tensor where that is float32: clipping these
        clips the parameters. Read them only: values change by steps and through the parameters.
        """
        self.refresh()
        stand_ins = self._load(everything=True)
        _hand_gradients(stand_ins)
        return [stand_ins.get(parameter, parameter) for parameter in self._parameters()]

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state, and under ``mixed_precision`` what belongs to the wrapper.

        Returns:
            Plain data and tensors, which share their memory with the optimizer's, as torch's do.
        """
        self.refresh()
        parameters = self._parameters()
        kept = {i: self._kept[each] for i, each in enumerate(parameters) if each in self._kept}
        own = {
            "update": self.update,
            "seed": self.seed,
            "steps": self.steps,
            "shapes": [list(parameter.shape) for parameter in parameters],
            "kept": {i: None if each is None else each.detach() for i, each in kept.items()},
        }
        return {**self.inner.state_dict(), _OWN: own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state, each tensor in the type that it was saved in.

        Args:
            state_dict: Of this class, or of a plain optimizer of the wrapped one's class: its
                16-bit state is widened, masters and compensations then follow the parameters.

        Raises:
            ValueError: Another update, parameters of other shapes, or other parameters narrow than
                when the state was saved; nothing is loaded then.

        Edge cases: tensors are copied. Load the model as well: a master is taken where it rounds to
        the parameter.
        """
        self.refresh()
        own = state_dict.get(_OWN)
        if own is not None:
            self._check_state(own)
        # The last of the hooks sees what is loaded, after all others have changed it.
        seen = {key: value for key, value in state_dict.items() if key != _OWN}
        last = self.inner.register_load_state_dict_pre_hook(lambda _, state: seen.update(state))
        try:
            self.inner.load_state_dict(dict(seen))
        finally:
            last.remove()
        saved = chain.from_iterable(group["params"] for group in seen["param_groups"])
        for index, parameter in zip(saved, self._parameters(), strict=True):
            if index in seen["state"]:
                state = _as_saved(seen["state"][index], self.state[parameter], widen=own is None)
                self.state[parameter] = state
        if own is not None:
            self.seed, self.steps = own["seed"], own["steps"]
            for index, parameter in enumerate(self._parameters()):
                kept = own["kept"].get(index)
                if kept is not None:
                    self._kept[parameter] = kept.detach().to(parameter.device, copy=True)

    def _check_state(self, own: Mapping[str, Any]) -> None:
        if own["update"] != self.update:
            raise ValueError(
                f"state_dict: got update={own['update']!r}; this optimizer has "
                f"update={self.update!r}; wrap the optimizer with the state's"
            )
        shapes = [list(parameter.shape) for parameter in self._parameters()]
        if own["shapes"] != shapes:
            raise ValueError(
                f"state_dict: got parameters of shapes {own['shapes']}; this optimizer's are "
                f"{shapes}; give it the parameters that the state was saved for, in their order"
            )
        narrow = {i for i, parameter in enumerate(self._parameters()) if parameter in self._kept}
        if own["kept"].keys() != narrow:
            raise ValueError(
                f"state_dict: got narrow parameters {sorted(own['kept'])}; here they are "
                f"{sorted(narrow)}; narrow the model as it was when the state was saved"
            )


def _check_arguments(optimizer: object, update: str) -> None:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer: got {type(optimizer).__name__}; must be a torch.optim.Optimizer; "
            "construct one first"
        )
    if isinstance(optimizer, MixedPrecision):
        raise ValueError(
            "optimizer: got a MixedPrecision; it is wrapped already; use it as it is, or wrap "
            "its inner optimizer"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(
            "optimizer: got differentiable=True; rounding has no gradient; use differentiable=False"
        )
    if update not in UPDATES:
        raise ValueError(f"update: got {update!r}; must be one of {', '.join(UPDATES)}; choose one")


def _hand_gradients(stand_ins: Mapping[Tensor, Tensor]) -> None:
    """Give the stand-ins their parameters' gradients, the same tensors where those are float32."""
    for parameter, stand_in in stand_ins.items():
        stand_in.grad = None if parameter.grad is None else parameter.grad.float()


def _set_gradient_type(parameter: Tensor, dtype: torch.dtype) -> None:
    """Have the parameter's gradients come in a type, and convert the one that is there."""
    grad = parameter.grad
    if grad is not None and grad.dtype != dtype:
        # torch refuses a new type beside a gradient of another one.
        parameter.grad = None
    # Also where it reads so: unless it is set, it follows the parameter's type.
    parameter.grad_dtype = dtype
    if grad is not None and parameter.grad is None:
        parameter.grad = grad.to(dtype)
