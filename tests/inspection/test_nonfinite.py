"""nonfinite.py: the operation that the first NaN or infinity of a step came from."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.inspection.nonfinite import NonFinite, TensorRange, first_nonfinite
from mixprec.recipes import RECIPES

Function = Callable[[Tensor], Tensor]


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def model_with(function: Function) -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), Apply(function), nn.Linear(32, 32))


def fault_of(model: nn.Module, x: Tensor) -> NonFinite | None:
    """What a forward and a backward pass of the summed output come upon."""

    def step() -> list[Tensor]:
        model.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    return first_nonfinite(model, step, {"batch": x})


def found(model: nn.Module, x: Tensor) -> NonFinite:
    fault = fault_of(model, x)
    assert fault is not None
    return fault


def range_of(x: Tensor, name: str = "") -> TensorRange:
    """The range, element by element."""
    values = x.flatten().tolist()
    finite = [value for value in values if math.isfinite(value)]
    return TensorRange(
        name=name,
        dtype=str(x.dtype).removeprefix("torch."),
        shape=tuple(x.shape),
        smallest=min(finite, default=None),
        largest=max(finite, default=None),
        nan=sum(math.isnan(value) for value in values),
        inf=sum(math.isinf(value) for value in values),
    )


def test_an_operation_in_forward_with_the_ranges_of_its_input() -> None:
    model, x = model_with(torch.log), torch.randn(8, 32)
    fault = found(model, x)
    inside = model[0](x).detach()
    assert (fault.operation, fault.module, fault.phase, fault.node) == ("log", "1", "forward", "")
    assert fault.inputs == (range_of(inside),)
    assert fault.output == range_of(inside.log())
    assert fault.output.nan > 0


def test_an_operation_in_backward_of_a_finite_loss() -> None:
    model = nn.Sequential(nn.Linear(32, 32), Apply(lambda x: x * 0), Apply(torch.sqrt))
    fault = found(model, torch.randn(8, 32))
    assert (fault.module, fault.phase, fault.node) == ("2", "backward", "SqrtBackward0")
    # the gradient over twice the root, which is 0
    assert fault.operation == "div"
    assert [each.largest for each in fault.inputs][1] == 0.0
    assert fault.output.inf == 8 * 32


def test_an_overflow_is_named_not_the_nan_that_comes_of_it() -> None:
    model = model_with(lambda x: F.layer_norm((x * 1e30) * 1e30, (32,)))
    fault = found(model, torch.randn(8, 32))
    assert (fault.operation, fault.module) == ("mul", "1")
    assert (fault.output.nan, fault.output.inf) == (0, 8 * 32)


def test_an_overflow_of_half_precision_shows_what_was_too_large() -> None:
    model = model_with(lambda x: (x * 1e5).half().float())
    fault = found(model, torch.randn(8, 32))
    assert (fault.operation, fault.module) == ("_to_copy", "1")
    assert fault.inputs[0].largest is not None
    assert fault.inputs[0].largest > 65504
    assert fault.output.dtype == "float16"


@pytest.mark.parametrize("place", ["batch", "0.weight", "2.bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_tensor_that_was_there_before(place: str, value: float) -> None:
    model, x = model_with(F.relu), torch.randn(8, 32)
    tensor = x if place == "batch" else model.get_parameter(place)
    with torch.no_grad():
        tensor.view(-1)[3] = value
    fault = found(model, x)
    assert (fault.operation, fault.output) == ("", range_of(tensor.detach(), place))
    assert str(fault).startswith(f"{place} was not finite before the step: float32 ")


class Masked(nn.Module):
    """Scores that must not be looked at are -inf, by an operation or by a buffer that is added."""

    def __init__(self, first: int, adds: bool) -> None:
        super().__init__()
        self.query = nn.Linear(32, 32)
        self.register_buffer("mask", torch.ones(8, 8, dtype=torch.bool).triu(first))
        self.register_buffer("bias", torch.zeros(8, 8).masked_fill(self.mask, -math.inf))
        self.adds = adds

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x)
        scores = query @ query.T
        scores = scores + self.bias if self.adds else scores.masked_fill(self.mask, -math.inf)
        return scores.softmax(-1) @ query


@pytest.mark.parametrize("adds", [False, True])
def test_masks_are_no_fault_but_a_row_that_is_all_mask_is(adds: bool) -> None:
    x = torch.randn(8, 32)
    assert fault_of(Masked(1, adds), x) is None
    fault = found(Masked(0, adds), x)
    assert fault.operation == "_softmax"
    assert (fault.inputs[0].inf, fault.output.nan) == (36, 8)
    # what goes wrong beside a mask is no mask
    beside = nn.Sequential(Apply(torch.log), Masked(1, adds))
    assert (found(beside, x).operation, found(beside, x).module) == ("log", "0")


def test_an_overflow_beside_an_infinity_on_purpose() -> None:
    def both(x: Tensor) -> Tensor:
        return x.masked_fill(x > 0, math.inf) + x * 1e38 * 1e38

    assert found(model_with(both), torch.randn(8, 32)).operation == "mul"


def test_what_is_overwritten_is_forgotten() -> None:
    def twice(x: Tensor) -> Tensor:
        y = (x.detach() - 100).sqrt()
        return y.copy_(x.log())

    assert found(model_with(twice), torch.randn(8, 32)).operation == "log"


def test_values_that_vanish_again_are_no_fault() -> None:
    model = model_with(lambda x: torch.where(x > 100, 1 / (x.detach() * 0), x))
    assert fault_of(model, torch.randn(8, 32)) is None


def test_memory_that_is_not_written_yet_is_no_fault() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        # as torch fills it then
        assert torch.empty(3).isnan().all()
        x = torch.randn(8, 32)
        copied = model_with(lambda x: torch.empty_like(x).copy_(x))
        assert fault_of(copied, x) is None
        copied[1].function = lambda x: torch.empty_like(x).copy_(x.log())
        assert found(copied, x).operation == "log"
        rows = torch.arange(0, 8, 2)

        def by_rows(x: Tensor) -> Tensor:
            y = torch.empty_like(x).index_copy_(0, rows, x.log()[::2])
            return y.index_copy_(0, rows + 1, x[1::2])

        copied[1].function = by_rows
        assert found(copied, x).operation == "log"
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_overwritten_input_is_shown_as_it_was() -> None:
    def overflow(x: Tensor) -> Tensor:
        y = x.detach().clone()
        y.mul_(1e38).mul_(1e38)
        return x + y

    model, x = model_with(overflow), torch.randn(8, 32)
    fault = found(model, x)
    assert fault.operation == "mul_"
    assert fault.inputs == (range_of(model[0](x).detach().mul(1e38)),)


def test_what_checkpointing_recomputes_is_told_from_forward() -> None:
    factors = iter([1.0, 1e39])
    model = model_with(
        lambda x: checkpoint(lambda y: (y * next(factors)).sin(), x, use_reentrant=False)
    )
    fault = found(model, torch.randn(8, 32))
    assert (fault.operation, fault.module, fault.phase) == ("mul", "1", "backward")


@pytest.mark.parametrize("name", RECIPES)
def test_through_the_products_of_every_recipe(name: str) -> None:
    def converted(function: Function) -> nn.Module:
        model = model_with(function)
        if RECIPES[name].parameters == "fp64":
            model.double()
        mixprec.convert(model, name)
        return model

    healthy = converted(F.relu)
    x = torch.randn(32, 32).to(healthy[0].weight.dtype)
    assert fault_of(healthy, x) is None
    fault = found(converted(torch.log), x)
    assert (fault.operation, fault.module, fault.phase) == ("log", "1", "forward")
    fault = found(converted(lambda x: (x * 0).sqrt()), x)
    assert (fault.operation, fault.node) == ("div", "SqrtBackward0")
    x[2, 5] = math.inf
    assert (found(healthy, x).operation, found(healthy, x).output.name) == ("", "batch")


def test_looking_changes_no_bit_and_leaves_no_hook() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 4))
    x, results = torch.randn(8, 32), []
    for look in (lambda step: step(), lambda step: first_nonfinite(model, step)):
        torch.manual_seed(3)
        model.zero_grad()

        def step() -> list[Tensor]:
            model(x).square().sum().backward()
            return []

        look(step)
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    modules = list(model.modules())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)


def test_an_error_of_the_step_passes_and_leaves_no_hook() -> None:
    model = model_with(F.relu)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fault_of(model, torch.randn(8, 31))
    assert not any(module._forward_hooks for module in model.modules())
