"""The first operation of a step whose result is not finite, forward or backward.

A mode below autograd looks at every result. A NaN or an infinity comes from somewhere: from an
operation whose inputs had none, from a tensor made before (a parameter, the batch), or on purpose
(masked_fill(-inf)). Each such result is followed to what comes of it, so that intermediate values
that vanish again, such as 1 / 0 of a scale that is not used, or a mask's -inf after its softmax,
are not taken for what made the loss or a gradient NaN.

Looking costs two passes over each result: it is meant for one step, run again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NAN, _INF = "nan", "inf"
_OVERWRITES = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "random_"})
"""In-place operations that do not read what they write to."""
_UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
)
"""Operations whose result is whatever the memory holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange:
    """What a tensor holds: the ends of its finite elements, and how many are not finite.

    name: A parameter's or buffer's, or the input batch; empty for others. smallest, largest: None
    where no element is finite.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    smallest: float | None
    largest: float | None
    nan: int
    inf: int

    def __str__(self) -> str:
        ends = "nothing finite"
        if self.smallest is not None:
            ends = f"{self.smallest:.4g} to {self.largest:.4g}"
        counts = [
            f"{count} {kind}" for kind, count in ((_NAN, self.nan), (_INF, self.inf)) if count
        ]
        text = f"{self.dtype} {list(self.shape)} {', '.join([ends, *counts])}"
        return f"{self.name} {text}" if self.name else text


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite:
    """Where the first NaN or infinity of a step came from.

    operation: torch's name of the operation, without the namespace; empty where `output` was not
        finite before the step: a parameter, a buffer, the batch.
    module: The module whose forward ran it, or whose forward made what backward went through;
        empty in the model itself or outside.
    phase: forward or backward; what checkpointing recomputes belongs to backward.
    node: In backward, the name of autograd's node.
    inputs: The ranges of its tensors, as they were before it ran.
    output: The range of the result.
    order: The operation's number in the step, from 0.
    """

    operation: str
    module: str
    phase: Literal["forward", "backward"]
    node: str
    inputs: tuple[TensorRange, ...]
    output: TensorRange
    order: int
    is_on_purpose: bool = field(default=False, repr=False)

    def __str__(self) -> str:
        if not self.operation:
            name = self.output.name or "a tensor made before the step"
            return f"{name} was not finite before the step: {replace(self.output, name='')}"
        node = f" ({self.node})" if self.node else ""
        inputs = "; ".join(map(str, self.inputs)) or "no tensor"
        where = self.module or "the model itself"
        return f"{self.operation} in {where}, {self.phase}{node}: {inputs} -> {self.output}"


Origins = dict[str, NonFinite]
"""By kind, nan or inf, what it came from."""


def first_nonfinite(
    model: nn.Module,
    step: Callable[[], Iterable[Tensor]],
    named: Mapping[str, Tensor] | None = None,
) -> NonFinite | None:
    """Run a step and name what its first non-finite result came from.

    Args:
        model: Its modules are named; compiled code is not looked into.
        step: Runs a forward pass, and a backward pass if that is asked about; returns the tensors
            that should be finite, such as the loss and the gradients.
        named: Tensors beside parameters and buffers to name, such as the batch.

    Returns:
        The earliest origin of the tensors that are not finite; None if all are finite.

    Edge cases: what is there on purpose is named only where nothing else explains the result: made
    by an operation with an infinite or NaN argument, an infinity of a buffer, or of a tensor that
    was there before and is none of parameters, buffers and ``named``. Changes nothing itself; what
    the step changes is the caller's.
    """
    trace = _Trace(model, named or {})
    with trace:
        results = list(step())
    return trace.origin_of(results)


class _Trace(TorchDispatchMode):
    """Follows NaN and infinities from operation to operation, by the memory that they lie in."""

    def __init__(self, model: nn.Module, named: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._places = _Places(model)
        self._masks = {_memory(buffer) for buffer in model.buffers()}
        tensors = {**named, **dict(model.named_buffers()), **dict(model.named_parameters())}
        self._names = {_memory(tensor): name for name, tensor in tensors.items()}
        self._origins: dict[int, Origins] = {}
        self._order = 0

    def __enter__(self) -> _Trace:
        self._places.enter()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._places.leave()

    def origin_of(self, tensors: Iterable[Tensor]) -> NonFinite | None:
        """The earliest origin of tensors that are not finite."""
        return _earliest(
            self._origin(_Input(tensor), kind) for tensor in tensors for kind in _kinds(tensor)
        )

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        leaves = tree_leaves((args, kwargs))
        written = _written(func, args, kwargs)
        inputs = []
        for each in _tensors(leaves):
            is_written = any(each is other for other in written)
            if is_written and (name in _OVERWRITES or func._schema.overload_name == "out"):
                continue
            # what is about to be overwritten is looked at first
            noted = (_kinds(each), self._range(each)) if is_written else None
            inputs.append(_Input(each, noted))
        result = func(*args, **kwargs)
        if name not in _UNWRITTEN:
            is_on_purpose = any(isinstance(x, float) and not math.isfinite(x) for x in leaves)
            call = _Call(name, inputs, is_on_purpose)
            for output in _tensors(tree_leaves(result)) or written:
                self._look(call, output, keeps=bool(written) or func.is_view)
        self._order += 1
        return result

    def _look(self, call: _Call, output: Tensor, keeps: bool) -> None:
        """Note where a result's NaN and infinities came from, or that it has none."""
        if _is_readable(output):
            origins = {kind: self._cause(call, output, kind) for kind in _kinds(output)}
        else:
            # codes, masks and indices may stand for what is not finite
            passed = [self._origins.get(_memory(each.tensor), {}) for each in call.inputs]
            origins = {
                kind: origin
                for kind in (_NAN, _INF)
                if (origin := _earliest(known.get(kind) for known in passed)) is not None
            }
        place = _memory(output)
        if origins:
            self._origins[place] = {**self._origins.get(place, {}), **origins} if keeps else origins
        elif not keeps:
            self._origins.pop(place, None)

    def _cause(self, call: _Call, output: Tensor, kind: str) -> NonFinite:
        """Inputs that have the kind; else those with the other, or codes of either; else it."""
        alike = _earliest(self._origin(each, kind) for each in call.inputs if kind in each.kinds)
        if alike is not None and not alike.is_on_purpose:
            return alike
        others = _earliest(
            origin
            for each in call.inputs
            for other in (_NAN, _INF)
            if (other in each.kinds or not _is_readable(each.tensor))
            and (origin := self._origin(each, other)) is not None
            and not origin.is_on_purpose
        )
        return others or alike or self._here(call, output)

    def _origin(self, entry: _Input, kind: str) -> NonFinite | None:
        """Where an input's came from; of a tensor that no operation made, the tensor itself."""
        place = _memory(entry.tensor)
        known = self._origins.get(place, {}).get(kind)
        if known is None and kind in entry.kinds:
            known = NonFinite(
                operation="",
                module="",
                phase=_phase(),
                node="",
                inputs=(),
                output=self._range(entry.tensor),
                order=self._order,
                # a constant, such as a table of a format's values, or a mask
                is_on_purpose=place not in self._names or (kind == _INF and place in self._masks),
            )
            self._origins.setdefault(place, {})[kind] = known
        return known

    def _here(self, call: _Call, output: Tensor) -> NonFinite:
        node = torch._C._current_autograd_node()
        return NonFinite(
            operation=call.name,
            module=self._places.of(node),
            phase=_phase(),
            node="" if node is None else node.name(),
            inputs=tuple(
                self._range(each.tensor) if each.noted is None else each.noted[1]
                for each in call.inputs
            ),
            output=self._range(output),
            order=self._order,
            is_on_purpose=call.is_on_purpose,
        )

    def _range(self, tensor: Tensor) -> TensorRange:
        name = self._names.get(_memory(tensor), "")
        ends: tuple[float | None, float | None] = (None, None)
        nan = inf = 0
        if _is_readable(tensor):
            finite = tensor[tensor.isfinite()]
            nan, inf = int(tensor.isnan().sum()), int(tensor.isinf().sum())
            if len(finite) and not finite.is_complex():
                ends = (finite.min().item(), finite.max().item())
        return TensorRange(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            smallest=ends[0],
            largest=ends[1],
            nan=nan,
            inf=inf,
        )


class _Input(NamedTuple):
    """A tensor of a call; where it is overwritten, what was not finite in it, and its range."""

    tensor: Tensor
    noted: tuple[tuple[str, ...], TensorRange] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return _kinds(self.tensor) if self.noted is None else self.noted[0]


class _Call(NamedTuple):
    """An operation; on purpose: one of its numbers is infinite or NaN."""

    name: str
    inputs: list[_Input]
    is_on_purpose: bool


class _Places:
    """Which module a forward operation, or a node of backward, belongs to.

    Autograd numbers its nodes in the order in which forward makes them, so that a module's are an
    interval.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._inside: list[tuple[str, int]] = []
        self._intervals: list[tuple[int, int, str]] = []
        self._parameters = {id(p): name for name, p in model.named_parameters()}
        self._handles: list[Any] = []

    def enter(self) -> None:
        for name, module in self._model.named_modules():
            into = partial(self._push, name)
            self._handles.append(module.register_forward_pre_hook(into, prepend=True))
            self._handles.append(module.register_forward_hook(self._pop, always_call=True))

    def leave(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _push(self, name: str, *_: Any) -> None:
        self._inside.append((name, torch._C._autograd._get_sequence_nr()))

    def _pop(self, *_: Any) -> None:
        name, start = self._inside.pop()
        self._intervals.append((start, torch._C._autograd._get_sequence_nr(), name))

    def of(self, node: Any) -> str:
        """The innermost module; of a node that adds to a gradient, its parameter."""
        if self._inside:
            return self._inside[-1][0]
        if node is None:
            return ""
        if hasattr(node, "variable"):
            return self._parameters.get(id(node.variable), "")
        number = node._sequence_nr()
        around = [
            (end - start, name) for start, end, name in self._intervals if start <= number < end
        ]
        return min(around, default=(0, ""))[1]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes to."""
    if not func._schema.is_mutable:
        return []
    given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    names = [
        each.name
        for each in func._schema.arguments
        if each.alias_info is not None and each.alias_info.is_write
    ]
    return _tensors(tree_leaves([given.get(name) for name in names]))


def _tensors(leaves: Iterable[Any]) -> list[Tensor]:
    return [each for each in leaves if isinstance(each, Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_readable(tensor: Tensor) -> bool:
    """Whether torch can say which elements are infinite or NaN: of codes of 8 bits it cannot."""
    is_wide = tensor.is_floating_point() and tensor.element_size() > 1
    return (is_wide or tensor.is_complex()) and not tensor.is_meta


def _kinds(tensor: Tensor) -> tuple[str, ...]:
    if not _is_readable(tensor) or bool(tensor.isfinite().all()):
        return ()
    found = ((_NAN, tensor.isnan()), (_INF, tensor.isinf()))
    return tuple(kind for kind, where in found if bool(where.any()))


def _earliest(origins: Iterable[NonFinite | None]) -> NonFinite | None:
    """The first in execution order; what was made on purpose only where there is nothing else."""
    known = (origin for origin in origins if origin is not None)
    return min(known, key=lambda origin: (origin.is_on_purpose, origin.order), default=None)


def _phase() -> Literal["forward", "backward"]:
    return "forward" if torch._C._current_graph_task_id() == -1 else "backward"
