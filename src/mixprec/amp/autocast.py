"""`autocast`: a region of 16-bit mixed precision, the same on every device."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from typing import Any, Self, TypeVar

import torch

from mixprec.policy import POLICIES, Region, innermost_region, uncompiled
from mixprec.recipes import Recipe, get_recipe
from mixprec.rounding import SOURCE_FORMATS

F = TypeVar("F", bound=Callable[..., Any])
DTYPES = {fmt.name: dtype for dtype, fmt in SOURCE_FORMATS.items()}
_DEVICE_TYPES = frozenset(
    """cpu cuda hip hpu ipu maia meta mps mtia npu privateuseone vulkan xla xpu""".split()
)
# what torch.autocast takes where it is given no type
_DEVICE_DTYPES = {"cpu": torch.bfloat16}


def region_dtype(recipe: str | Recipe) -> torch.dtype | None:
    """The type of a recipe's base as a region has it; None where nothing is changed."""
    dtype = DTYPES[get_recipe(recipe).base]
    return dtype if dtype.itemsize == 2 else None


class autocast:
    """A region in which operations run in the types of the mixed 16-bit policy.

    Matrix products, convolutions, attention and recurrent cells take and give 16 bits;
    exponentials, norms, softmax and losses run in FP32; others follow their inputs (the table:
    ``mixprec recipes bf16 --operations``). Forward and loss go inside, backward outside.

    A context manager, or a decorator of functions and generators. Nestable, the innermost region
    counting; one object may be entered again while it is active, and by several threads, each for
    itself.

    Args:
        recipe_or_dtype: A recipe, whose ``base`` is taken, or its name; torch.bfloat16, float16 or
            float32; or as torch.autocast has it a device's type ("cuda"), which decides nothing but
            the default type: bfloat16 for "cpu", else float16.
        dtype: In its place, as torch.autocast spells it.
        policy: ``cuda``: the operations that torch lists for CUDA, on every device. ``torch_cpu``:
            those that torch lists for the CPU (normalisations, softmax, exponentials stay 16-bit).
        enabled: False changes nothing, inside another region either.
        device_type, cache_enabled: Taken as torch.autocast takes them, without effect: a region
            holds on every device, and no casts are cached, so that a weight that is updated,
            loaded or swapped inside takes effect at its next use.

    Raises:
        TypeError, ValueError: Another type or name; a recipe of quantised products on base fp32,
            which ``mixprec.convert`` applies, not a region.

    Edge cases: float64, complex and integer tensors are never cast; a type of 32 or 64 bits is a
    region without effect. Sparse products run in FP32. A generator that is suspended inside a
    ``with`` leaves the region active in its caller, as every context manager does.

    Exactness: on a CPU products are within half an ulp of the type plus K * 2^-24 * sum|a||b|, in
    forward and backward. A recurrent layer's steps and attention's scores stay in FP32 between its
    rounded inputs and its rounded result; a GPU's own kernels decide that for themselves.

    Source: torch.autocast (operations and types).
    """

    def __init__(
        self,
        recipe_or_dtype: str | Recipe | torch.dtype | None = None,
        *,
        dtype: str | Recipe | torch.dtype | None = None,
        policy: str = "cuda",
        enabled: bool = True,
        device_type: str | None = None,
        cache_enabled: bool | None = None,
    ) -> None:
        if torch.compiler.is_compiling():
            # Dynamo would enter the region itself, and lose results at the next break
            torch._dynamo.graph_break(msg="regions of 16 bits are entered by eager code")
        if isinstance(recipe_or_dtype, str) and _is_device_type(recipe_or_dtype):
            recipe_or_dtype, device_type = None, recipe_or_dtype
        if recipe_or_dtype is not None and dtype is not None:
            raise ValueError(
                f"dtype: got {dtype} beside {recipe_or_dtype}; both say the type; leave one out"
            )
        if policy not in POLICIES:
            raise ValueError(f"policy: got {policy!r}; must be one of {', '.join(POLICIES)}")
        chosen = recipe_or_dtype if dtype is None else dtype
        if chosen is None:
            chosen = _DEVICE_DTYPES.get(device_type or "", torch.float16)
        self.dtype = _checked(chosen) if enabled else None
        self._policy = policy
        self._entered: list[Region] = []

    @uncompiled
    def __enter__(self) -> Self:
        region = self._region()
        region.__enter__()
        self._entered.append(region)
        return self

    @uncompiled
    def __exit__(self, *error: Any) -> None:
        # of the regions that several threads may have entered by this object, this thread's last
        region = innermost_region()
        if region is None or region not in self._entered:
            raise RuntimeError(
                "autocast: got left in another order than entered, as by a generator suspended "
                "inside one; regions are left innermost first; leave the region before yield"
            )
        self._entered.remove(region)
        region.__exit__(*error)

    def __call__(self, function: F) -> F:
        """The function with the region around each of its calls; a generator's only while it runs.

        Raises:
            TypeError: A coroutine function: other tasks run while it waits.
        """
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"function: got the coroutine function {function.__qualname__}; a region would "
                "hold for other tasks while it waits; use `with autocast(...)` between its awaits"
            )
        call = self._resumed if inspect.isgeneratorfunction(function) else self._called

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return call(function, *args, **kwargs)

        return wrapper  # type: ignore[return-value]

    def _region(self) -> Region:
        return Region(self.dtype, self._policy)

    def _called(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._region():
            return function(*args, **kwargs)

    def _resumed(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Generator[Any, Any, Any]:
        """A generator whose every stretch between two yields runs in a region of its own."""
        generator = function(*args, **kwargs)
        resume, value = generator.send, None
        while True:
            try:
                with self._region():
                    item = resume(value)
            except StopIteration as stop:
                return stop.value
            try:
                value, resume = (yield item), generator.send
            except GeneratorExit:
                with self._region():
                    generator.close()
                raise
            except BaseException as error:
                value, resume = error, generator.throw


def _is_device_type(name: str) -> bool:
    # not by torch.device(name), whose error Dynamo does not survive
    return name.partition(":")[0] in _DEVICE_TYPES


def _checked(choice: str | Recipe | torch.dtype) -> torch.dtype | None:
    """The region's type, None where it has no effect."""
    if isinstance(choice, torch.dtype):
        if choice not in SOURCE_FORMATS:
            raise ValueError(
                f"dtype: got {choice}; a region is of bfloat16 or float16; narrower products come "
                "from mixprec.convert"
            )
        choice = SOURCE_FORMATS[choice].name
    recipe = get_recipe(choice)
    dtype = region_dtype(recipe)
    if dtype is None and any(spec is not None for spec in recipe.specs):
        raise ValueError(
            f"recipe_or_dtype: got {recipe} on base {recipe.base}; a region sets the base alone, "
            "and its quantised products come from mixprec.convert; convert the model, and give "
            "the region 'bf16' or 'fp16' if the rest is to run in it"
        )
    return dtype
