"""The region around functions, methods and generators, and not around coroutines."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mixprec.amp import autocast

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def product() -> torch.dtype:
    """The type in which a product runs here."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


def test_decorated_function_and_method() -> None:
    @autocast("bf16")
    def function(size: int, *, more: int = 0) -> tuple[int, torch.dtype]:
        """Doc."""
        return size + more, product()

    class Net(nn.Module):
        @autocast("fp16")
        def forward(self, x: Tensor) -> Tensor:
            return x @ x

    assert function(1, more=2) == (3, BF16)
    assert (function.__name__, function.__doc__) == ("function", "Doc.")
    assert Net()(torch.ones(2, 2)).dtype == FP16
    assert product() == FP32


def test_decorated_function_calls_itself() -> None:
    @autocast("bf16")
    def count(n: int) -> list[torch.dtype]:
        return [product(), *(count(n - 1) if n else [])]

    assert count(3) == [BF16] * 4


def test_decorated_generator_is_in_the_region_only_while_it_runs() -> None:
    seen: list[Any] = []

    @autocast("bf16")
    def generate() -> Generator[torch.dtype, str, str]:
        try:
            seen.append((yield product()))
            try:
                yield product()
            except KeyError:
                seen.append(("caught", product()))
            yield product()
        finally:
            seen.append(("closed", product()))
        return "end"

    generator = generate()
    assert (next(generator), product()) == (BF16, FP32)
    assert (generator.send("sent"), product()) == (BF16, FP32)
    assert (generator.throw(KeyError()), product()) == (BF16, FP32)
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert stop.value.value == "end"
    assert seen == ["sent", ("caught", BF16), ("closed", BF16)]

    seen.clear()
    generator = generate()
    next(generator)
    generator.close()
    assert (seen, product()) == ([("closed", BF16)], FP32)


def test_generator_suspended_inside_a_region_leaves_it_to_its_caller() -> None:
    def generate() -> Generator[None, None, None]:
        with autocast("bf16"):
            yield

    generator = generate()
    next(generator)
    assert product() == BF16
    generator.close()
    assert product() == FP32


def test_coroutines_are_refused_and_a_region_between_awaits_works() -> None:
    async def coroutine() -> torch.dtype:
        await asyncio.sleep(0)
        with autocast("bf16"):
            return product()

    async def asynchronous() -> Any:
        yield

    for function in (coroutine, asynchronous):
        message = f"function: got the coroutine function {re.escape(function.__qualname__)}; a reg"
        with pytest.raises(TypeError, match=message):
            autocast("bf16")(function)
    assert asyncio.run(coroutine()) == BF16
