"""What a user switches on around operations, and how our own arithmetic stays out of its reach."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)


class EagerMode(TorchDispatchMode):
    """A dispatch mode for code that is not compiled."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # else the first operation imports the compiler, which takes seconds
        return False


def is_autocast_on(x: Tensor) -> bool:
    """Whether an autocast region is active where x is; torch knows none for meta tensors."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_modes() -> contextlib.AbstractContextManager[None]:
    """A stretch in which torch's function modes see nothing: no policy changes our arithmetic."""
    is_any_active = torch._C._len_torch_function_stack() > 0
    return torch._C.DisableTorchFunction() if is_any_active else contextlib.nullcontext()


def on_numbers() -> contextlib.AbstractContextManager[object]:
    """A stretch in which no dispatch mode sees operations: tensors made there can be kept."""
    return _disable_current_modes()


@contextlib.contextmanager
def plain_arithmetic(x: Tensor) -> Iterator[None]:
    """A stretch in which neither a mode nor an autocast region reaches operations on x's device."""
    with without_modes():
        if not is_autocast_on(x):
            yield
            return
        with torch.autocast(x.device.type, enabled=False):
            yield


def is_called_by_compiled_code() -> bool:
    """Whether a graph that torch.compile made calls the function that asks.

    A graph has the modes that it was traced in worked into it, yet runs inside them: what it calls
    by its Python name reaches them a second time, with shapes and types that it relies on.
    """
    frame: FrameType | None = sys._getframe(2)
    assert frame is not None
    if "extern_kernels" in frame.f_globals:
        # what Inductor writes calls torch.convolution by name
        return True
    # a graph may be part of another, run by an operator; those of torch.fx alone are user code
    if not _is_of_graph(frame) and frame.f_code is not torch.fx.Interpreter.call_function.__code__:
        return False
    while frame is not None:
        graph = frame.f_locals.get("self") if _is_of_graph(frame) else None
        if "dynamo_compile_id" in getattr(graph, "meta", ()):
            return True
        frame = frame.f_back
    return False


def _is_of_graph(frame: FrameType) -> bool:
    # by its name: to look at the locals of other code would keep them alive
    return frame.f_code.co_filename.startswith("<eval_with_key>")


def is_watched() -> bool:
    """Whether a mode sees torch's operations, and more of them than the memory that they take.

    What goes past torch is hidden from such a one: a tracer would leave it out.
    """
    if torch._ops._len_torch_dispatch_stack_pre_dispatch():
        # a tracer's, which sees operations before autograd does
        return True
    if not torch._C._len_torch_dispatch_stack():
        return False
    modes = _get_current_dispatch_mode_stack()
    return not all(
        getattr(mode, "sees_memory_only", _is_of(mode, "FakeTensorMode")) for mode in modes
    )


def is_fake(x: Tensor) -> bool:
    """Whether x says that it is in memory and has no numbers there: a fake tensor of torch."""
    return _is_of(x, "FakeTensor")


def _is_of(x: object, name: str) -> bool:
    # who has made one has loaded this, which takes seconds
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    # another thread may be importing it
    return fakes is not None and isinstance(x, getattr(fakes, name, ()))
