"""Operations that are worked out once, against torch working out each of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mixprec.planning import plan, stand_ins
from mixprec.planning.batches import META
from mixprec.planning.remembered import Remembering
from mixprec.train.config import from_dict

OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "transposed": lambda x: x.t() * 2,
    "one row over and over": lambda x: x[:1].expand(4, 3) + 1,
    "padded rows": lambda x: torch.empty_strided((2, 3), (8, 1), device=META).abs(),
    "other type": lambda x: x.to(torch.bfloat16) @ x.t().to(torch.bfloat16),
    "several results": lambda x: torch.sort(x, dim=1),
    "several results, one of them an argument": lambda x: torch.ops.aten.aminmax(x, dim=0),
    "in place": lambda x: x.clone().clamp_(0, 1),
    "in place, another size": lambda x: x.clone().resize_(5, 5),
    "into another": lambda x: torch.add(x, x, out=torch.empty(4, 3, device=META)),
    "into another size": lambda x: torch.add(x, x, out=torch.empty(0, device=META)),
    "a list": lambda x: torch.cat([x, x, x[:2]]),
    "views": lambda x: x.split(2),
    "no tensor among the arguments": lambda x: torch.zeros(2, 2, device=META),
}


def _seen(result: Any) -> list[object]:
    made = result if isinstance(result, tuple | list) else (result,)
    return [
        type(result),
        *((t.shape, t.stride(), t.dtype, t.device, t.untyped_storage().nbytes()) for t in made),
    ]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_torchs(name: str) -> None:
    operation = OPERATIONS[name]
    x = torch.empty(4, 3, device=META)
    expected = _seen(operation(x))
    with Remembering():
        for _ in range(3):
            assert _seen(operation(x)) == expected


class _Names(TorchDispatchMode):
    """The operations that come to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_equal_operations_are_worked_out_once() -> None:
    x = torch.empty(4, 3, device=META)
    with _Names() as torchs, Remembering():
        for _ in range(3):
            (x + 1).clamp_(0, 1)
            x.t() + 1
            x + 2
    known = torchs.names.count("aten.add.Tensor"), torchs.names.count("aten.clamp_.default")
    assert known == (3, 1)


@pytest.mark.parametrize("recipe", [pytest.param("nvfp4", marks=pytest.mark.slow), "bf16_pure"])
def test_plans_are_those_without_it(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    sizes = {"context": 16, "width": 32, "depth": 1, "heads": 2, "vocabulary": 16}
    config = from_dict({"model": "gpt", "recipe": recipe, "model_options": sizes})
    found = plan(config, "b200", batch=1)
    monkeypatch.setattr(stand_ins, "Remembering", nullcontext)
    assert plan(config, "b200", batch=1) == found


def test_numbers_of_other_types_are_others() -> None:
    x = torch.empty(3, dtype=torch.int32, device=META)
    with Remembering():
        assert [(x + one).dtype for one in (1, 1.0, True, 1.0)] == [
            torch.int32,
            torch.float32,
            torch.int32,
            torch.float32,
        ]


def test_results_have_bytes_of_their_own_and_arguments_stay_themselves() -> None:
    x = torch.empty(4, 3, device=META)
    with Remembering():
        first, second = x + 1, x + 1
        assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
        for one in (first, second):
            assert one.mul_(2) is one
            assert torch.add(x, x, out=one) is one
            assert one.view(12).untyped_storage()._cdata == one.untyped_storage()._cdata


def test_gradients_flow() -> None:
    with Remembering():
        for _ in range(2):
            weight = torch.empty(5, 3, device=META, requires_grad=True)
            (torch.empty(4, 3, device=META) @ weight.t()).relu().sum().backward()
            assert weight.grad is not None
            assert weight.grad.shape == (5, 3)


def test_tensors_with_numbers_are_torchs_matter() -> None:
    with Remembering():
        for value in (1.0, 2.0):
            x = torch.full((2,), value)
            assert (x + 1).tolist() == [value + 1] * 2
            assert x.to(META).device == META


def test_errors_are_torchs() -> None:
    x, y = torch.empty(4, 3, device=META), torch.empty(2, 3, device=META)
    with Remembering():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broadcast"):
                x + y
