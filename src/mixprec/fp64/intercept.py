"""``emulate``: a context in which torch's products in double precision are emulated.

The context is a mode of torch's dispatcher: below autograd, it sees the operations that forward and
backward passes come down to, and hands those of double precision to ``matmul``.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from mixprec.fp64.engines import check_engine
from mixprec.fp64.matmul import matmul
from mixprec.fp64.operations import (
    BECOMES,
    OPERATIONS,
    Arguments,
    is_batched,
    run,
    sizes,
    why_inside,
)
from mixprec.fp64.report import record
from mixprec.fp64.request import Request, Scheme
from mixprec.fp64.settings import Settings
from mixprec.fp64.speed import why_not_faster
from mixprec.fp64.tally import Tally

Strategy = Literal["eager", "performant"]
_EAGER, _PERFORMANT = get_args(Strategy)
_DTYPES = (torch.float64, torch.complex128)
_FUNCTIONAL, _OUT = "default", "out"


def emulate(
    bits: int | Literal["auto"] = "auto",
    *,
    ops: Iterable[str] | None = None,
    min_size: int = 1,
    strategy: Strategy = "eager",
    engine: str = "auto",
    scheme: Scheme = "auto",
    settings: Settings | None = None,
) -> contextlib.AbstractContextManager[Tally]:
    """A context in which products in double precision of unchanged code are emulated.

        with fp64.emulate() as done:
            loss = model(x).square().mean()
            loss.backward()
        print(done)

    mm, addmm, bmm, baddbmm, addbmm, mv, addmv, dot, vdot, convolution (1 to 3 axes, transposed too)
    and its gradient, of float64 and complex128, with what torch turns into them: linear, matmul,
    einsum, tensordot, LSTMs; in place and with ``out`` too. Everything else passes through, other
    types to the bit.

    Args:
        bits, engine, scheme: As ``matmul`` takes them.
        ops: The operations to emulate, of ``fp64.OPERATIONS``; None for all.
        min_size: A product stays native where m, n or k is below it.
        strategy: ``eager`` emulates everything; ``performant`` what the hardware table lets expect
            to be faster (``speed``), on CPUs nothing.
        settings: What the environment asks (``settings_from_environment``), in place of bits and
            strategy. If it is not enabled the context does nothing, and its table says so.

    Returns:
        A context that yields a ``Tally``: a table of what was emulated, what was not, and why.

    Raises:
        TypeError: ops that are one string, bits that are no number.
        ValueError: An unknown operation, strategy, engine or scheme, min_size below 1, bits out of
            range, settings beside bits or strategy; inside, an engine that is not exact there.

    Edge cases: beta = 0 does not read the tensor that is added, alpha = 0 not the factors. Of
    nested contexts the inner one decides. The context is of its thread; another thread's products
    are native and not counted. backward() called inside is emulated whatever ran the forward pass,
    outside it is native whatever ran the forward pass. ``torch.compile`` steps aside inside: its
    functions run uncompiled, and are emulated; a function that opens the context is not compiled
    either. Shapes without data (meta, fake tensors) are not counted. Factorisations, fused
    attention and sparse products multiply inside torch's kernels: native, and in the table with
    that reason.

    Exactness: that of ``matmul``; a convolution's elements, and those of its gradients, are one
    product each. What is added (bias, beta c) is rounded after.
    """
    if torch.compiler.is_compiling():
        # Dynamo runs a function that raises once more, uncompiled
        raise RuntimeError(
            "emulate: called inside a compiled function; a graph has no room for a mode; open it "
            "around the call"
        )
    if settings is not None:
        _check_alone(settings, bits, strategy)
        bits, strategy = settings.bits, settings.strategy
    chosen = _Choice(
        request=Request(scheme=scheme, bits=None if bits == "auto" else bits, engine=engine),
        operations=frozenset(_check_operations(ops)),
        min_size=_check_size(min_size),
        is_performant=_check_strategy(strategy) == _PERFORMANT,
    )
    check_engine(engine)
    if settings is not None and not settings.enabled:
        note = "nothing is emulated: CUBLAS_EMULATE_DOUBLE_PRECISION is not 1"
        return contextlib.nullcontext(Tally(strategy=strategy, bits=bits, note=note))
    return _open(chosen, Tally(strategy=strategy, bits=bits))


@contextlib.contextmanager
def _open(chosen: _Choice, done: Tally) -> Iterator[Tally]:
    with _Mode(chosen, done):
        yield done


def _check_alone(settings: Settings, bits: int | str, strategy: str) -> None:
    for name, value, default in (("bits", bits, "auto"), ("strategy", strategy, _EAGER)):
        if value != default:
            raise ValueError(
                f"settings: got them beside {name}={value!r}; they decide it; leave {name} out"
            )
    if not isinstance(settings, Settings):
        raise TypeError(
            f"settings: got {type(settings).__name__}; must be a Settings; pass "
            "settings_from_environment()"
        )


def _check_operations(ops: Iterable[str] | None) -> tuple[str, ...]:
    if ops is None:
        return OPERATIONS
    if isinstance(ops, str):
        raise TypeError(f"ops: got {ops!r}; must be several names; pass ({ops!r},)")
    names = tuple(ops)
    for name in names:
        if name in BECOMES:
            raise ValueError(
                f"ops: got {name!r}; torch turns it into other operations; name those: "
                f"{BECOMES[name]}"
            )
        if name not in OPERATIONS:
            near = difflib.get_close_matches(str(name), OPERATIONS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(OPERATIONS)}"
            raise ValueError(f"ops: got {name!r}; no operation that is emulated; {hint}")
    return names


def _check_size(min_size: int) -> int:
    if not isinstance(min_size, int) or isinstance(min_size, bool) or min_size < 1:
        raise ValueError(f"min_size: got {min_size!r}; must be a whole number from 1 on; use 1")
    return min_size


def _check_strategy(strategy: str) -> str:
    if strategy not in get_args(Strategy):
        known = " or ".join(get_args(Strategy))
        raise ValueError(f"strategy: got {strategy!r}; must be {known}; choose one")
    return strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """What is emulated, and how."""

    request: Request
    operations: frozenset[str]
    min_size: int
    is_performant: bool


@dataclass(frozen=True, slots=True)
class _Target:
    """An operation of torch as this context sees it.

    Attributes:
        name: Without the underscore of the variant in place.
        why_native: Why it never is emulated, or None.
        is_in_place: Whether it writes to ``self``.
    """

    name: str
    why_native: str | None
    is_in_place: bool


@functools.cache
def _target(func: OpOverload) -> _Target | None:
    """None for an operation that multiplies no matrices."""
    if func.namespace != "aten":
        return None
    name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
    base = name.removesuffix("_")
    if base not in OPERATIONS:
        why = why_inside(name)
        return None if why is None else _Target(name, why, False)
    has_one_out = overload == _OUT and len(func._schema.returns) == 1
    why = None if overload == _FUNCTIONAL or has_one_out else f"the variant {overload}"
    return _Target(base, why, base != name)


@functools.cache
def _is_composite(func: OpOverload) -> bool:
    """Whether torch makes it of other operations; under inference mode it gets here whole."""
    return func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)


_is_decided: ContextVar[bool] = ContextVar("is_decided", default=False)
"""Whether an inner context has decided on the operation that runs."""


class _Mode(TorchDispatchMode):
    def __init__(self, chosen: _Choice, done: Tally) -> None:
        super().__init__()
        self._chosen, self._done = chosen, done

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_decided.get() or any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            # a subclass takes itself apart, and this mode sees its parts
            return NotImplemented
        if _is_composite(func):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        target = _target(func)
        if target is None:
            return func(*args, **kwargs)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if any(x.is_meta for x in tensors):
            return func(*args, **kwargs)
        x = _arguments(func, args, kwargs)
        token = _is_decided.set(True)
        try:
            # where torch does not accept them it raises its own error
            is_accepted = target.why_native is not None or _is_accepted(func, args, kwargs)
            why = self._why_native(target, tensors, x) if is_accepted else ""
            if why is None:
                return self._emulate(target, x, kwargs)
            result = func(*args, **kwargs)
        finally:
            _is_decided.reset(token)
        if why:
            self._done.add_native(target.name, why)
        return result

    def _why_native(self, target: _Target, tensors: list[Tensor], x: Arguments) -> str | None:
        """Why a call is left to torch; empty for one that is none of this context's concern."""
        chosen = self._chosen
        dtypes = {tensor.dtype for tensor in tensors}
        if target.why_native is not None:
            return target.why_native if dtypes & {*_DTYPES} else ""
        if len(dtypes) > 1 or not dtypes & {*_DTYPES}:
            return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        if any(tensor.layout != torch.strided for tensor in tensors):
            return "sparse; mixprec.fp64.spmm multiplies those"
        if target.name not in chosen.operations:
            return "not in ops"
        if len({tensor.device for tensor in tensors}) > 1:
            return "on several devices"
        if not is_batched(target.name, x):
            return "an input without a batch axis"
        size = min(sizes(target.name, x))
        if size <= 0:
            return "nothing to multiply"
        if size < chosen.min_size:
            return f"smaller than {chosen.min_size}"
        if chosen.is_performant:
            request = chosen.request
            return why_not_faster(tensors[0].device, size, request.bits, request.engine)
        return None

    def _emulate(self, target: _Target, x: Arguments, kwargs: Mapping[str, Any]) -> Any:
        request = self._chosen.request
        product = functools.partial(
            matmul,
            scheme=request.scheme,
            bits="auto" if request.bits is None else request.bits,
            engine=request.engine,
        )
        with torch.no_grad(), record(of_this_thread=True) as reports:
            result = run(target.name, x, product)
            result = tree_map_only(Tensor, Tensor.contiguous, result)
            if target.is_in_place:
                result = x["self"].copy_(result)
            elif "out" in kwargs:
                out = kwargs["out"]
                result = out.resize_(result.shape).copy_(result)
        self._done.add_emulated(target.name, reports)
        return result


def _arguments(func: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    schema = func._schema.arguments
    given = {argument.name: value for argument, value in zip(schema, args, strict=False)}
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    return {**defaults, **given, **kwargs}


def _is_accepted(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether torch takes arguments of these shapes; warns where torch resizes ``out``."""
    args, kwargs = tree_map_only(Tensor, _shape_of, (args, kwargs))
    try:
        func(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError):
        return False
    return True


def _shape_of(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
