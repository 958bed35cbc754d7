"""Optimisation levels: what `initialize` makes of a model, its optimizer and its losses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from amp.leveled import LEVELS, backward, leveled, weighted
from mixprec.amp import initialize, master_params
from mixprec.optim import MixedPrecision
from mixprec.policy import innermost_region

HALF, SINGLE = torch.float16, torch.float32


class OwnNorm(nn.Module):
    """A user's normalisation with running statistics, of no class that torch knows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.register_buffer("running_mean", torch.zeros(size))
        self.register_buffer("running_var", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        y = (x.float() - self.running_mean) / self.running_var.sqrt() * self.weight.float()
        return y.to(x.dtype)


class Net(nn.Module):
    """Two linear layers, every kind of norm, a buffer of counts, keyword and nested inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.own = OwnNorm(8)
        self.layer_norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 1)
        self.register_buffer("seen", torch.tensor(2049.0))
        self.inputs: list[torch.dtype] = []

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
        self.inputs = [x.dtype]
        hidden = self.own(self.norm(self.first(x)).relu())
        return self.last(self.layer_norm(hidden))


# ---- what the model becomes


@pytest.mark.parametrize(
    ("level", "linear", "norm"),
    [("O0", SINGLE, SINGLE), ("O1", SINGLE, SINGLE), ("O2", HALF, SINGLE), ("O3", HALF, HALF)],
)
def test_types_of_parameters_and_buffers(level: str, linear: Any, norm: Any) -> None:
    model, _ = leveled(level, Net())
    for name, parameter in model.named_parameters():
        is_kept = name.startswith(("norm.", "own."))
        assert parameter.dtype == (norm if is_kept else linear), name
    floating = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    assert len(floating) == 5
    assert all(buffer.dtype == SINGLE for buffer in floating)
    assert model.norm.num_batches_tracked.dtype == torch.int64
    # 2049 is no number of fp16
    assert model.seen.item() == 2049


@pytest.mark.parametrize(("level", "keep"), [("O2", False), ("O3", True), ("O2", "False")])
def test_batch_norms_are_kept_or_cast_as_told(level: str, keep: bool | str) -> None:
    model, _ = leveled(level, Net(), keep_batchnorm_fp32=keep)
    want = SINGLE if keep is True else HALF
    assert {model.norm.weight.dtype, model.own.weight.dtype} == {want}
    assert model.layer_norm.weight.dtype == HALF


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nn.SyncBatchNorm(3), nn.BatchNorm1d(3)])
def test_norms_with_statistics_are_kept_of_whatever_class(norm: nn.Module) -> None:
    model, _ = leveled("O2", nn.Sequential(nn.Linear(3, 3), norm))
    assert (model[0].weight.dtype, norm.weight.dtype) == (HALF, SINGLE)


@pytest.mark.parametrize("level", LEVELS)
def test_keys_of_the_state_and_parameter_objects_stay(level: str) -> None:
    model = Net()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    leveled(level, model)
    assert list(model.state_dict()) == keys
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))


@pytest.mark.parametrize(
    ("level", "given", "inside"),
    [
        ("O1", HALF, SINGLE),
        ("O1", SINGLE, SINGLE),
        ("O2", SINGLE, HALF),
        ("O3", torch.bfloat16, HALF),
        ("O0", torch.float64, torch.float64),
    ],
)
def test_inputs_are_cast_to_the_type_of_the_parameters(level: str, given: Any, inside: Any) -> None:
    class Seen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, batch: dict[str, Any], *, mask: Tensor) -> Tensor:
            found.extend((batch["x"][0].dtype, batch["y"].dtype, mask.dtype, batch["name"]))
            return batch["x"][0]

    found: list[Any] = []
    model, _ = leveled(level, Seen())
    batch = {"x": [torch.ones(2, dtype=given)], "y": torch.ones(2).long(), "name": "row"}
    out = model(batch, mask=torch.ones(2, dtype=given))
    assert found == [inside, torch.int64, inside, "row"]
    assert out.dtype == (given if level == "O0" else SINGLE)
    assert batch["x"][0].dtype == given


@pytest.mark.parametrize("level", LEVELS)
def test_outputs_are_float32_in_any_nesting(level: str) -> None:
    class Many(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            inside.append(y.dtype)
            return {"y": y, "classes": (y.argmax(-1), [y])}

    inside: list[torch.dtype] = []
    model, _ = leveled(level, Many(2, 3))
    out = model(torch.randn(5, 2))
    assert inside == [SINGLE if level == "O0" else HALF]
    assert (out["y"].dtype, out["classes"][1][0].dtype) == (SINGLE, SINGLE)
    assert out["classes"][0].dtype == torch.int64
    assert innermost_region() is None


def test_type_of_outputs_as_told() -> None:
    model, _ = leveled("O2", cast_model_outputs=HALF)
    assert model(torch.ones(1, 2)).dtype == HALF


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("place", ["forward", "hook before", "hook after"])
def test_error_inside_forward_leaves_no_region_behind(place: str) -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if place == "forward":
                raise ArithmeticError("mine")
            return super().forward(x)

    def fails(*_: Any) -> None:
        raise ArithmeticError("mine")

    model, _ = leveled("O1", Failing(2, 1))
    if place == "hook before":
        model.register_forward_pre_hook(fails)
    if place == "hook after":
        model.register_forward_hook(fails)
    with pytest.raises(ArithmeticError, match="mine"):
        model(torch.ones(1, 2))
    assert innermost_region() is None
    assert (torch.ones(1, 2) @ torch.ones(2, 1)).dtype == SINGLE


def test_model_inside_another_one() -> None:
    inner, _ = leveled("O2", nn.Linear(2, 2))
    outer, _ = leveled("O1", nn.Linear(2, 2))

    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            found.append(innermost_region())
            return outer(inner(x))

    found: list[Any] = []
    both = initialize(Both(), opt_level="O1", verbosity=0)
    assert both(torch.ones(1, 2)).dtype == SINGLE
    assert found[0].dtype == HALF
    assert innermost_region() is None


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_copy_is_whole_and_independent(level: str, way: str) -> None:
    model, _ = leveled(level, Net())
    model.eval()
    twin = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    x = torch.randn(3, 4)
    want = model(x)
    assert torch.equal(twin(x), want)
    assert twin.inputs == [HALF if level == "O2" else SINGLE]
    with torch.no_grad():
        twin.last.weight.zero_()
        twin.last.bias.zero_()
    assert twin(x).count_nonzero() == 0
    assert torch.equal(model(x), want)
    assert innermost_region() is None
    with pytest.raises(ValueError, match="models: got one that has a level already"):
        leveled(level, twin)


def test_products_of_o1_are_of_16_bits() -> None:
    model, _ = leveled("O1", weighted(1.0, 1.0))
    # 2049 and 1/3 are rounded before they are multiplied
    assert model(torch.tensor([[2049.0, 0.0]])).item() == 2048
    assert model(torch.tensor([[1 / 3, 0.0]])).item() == torch.tensor(1 / 3).half().item()
    plain, _ = leveled("O0", weighted(1.0, 1.0))
    assert plain(torch.tensor([[2049.0, 0.0]])).item() == 2049


# ---- what the optimizer becomes


def test_masters_are_the_float32_values_from_before_the_cast() -> None:
    layer = nn.Linear(64, 64)
    before = [parameter.detach().clone() for parameter in layer.parameters()]
    model, optimizer = leveled("O2", layer)
    masters = list(master_params(optimizer))
    assert all(torch.equal(new, old) for new, old in zip(masters, before, strict=True))
    assert torch.equal(model.weight, before[0].half())
    assert not torch.equal(model.weight.float(), before[0])


@pytest.mark.parametrize(
    ("level", "given", "update"),
    [
        ("O2", None, "masters"),
        ("O2", False, "plain"),
        ("O3", None, "plain"),
        ("O3", "True", "masters"),
    ],
)
def test_master_weights_are_those_of_the_level_or_as_told(
    level: str, given: Any, update: str
) -> None:
    _, optimizer = leveled(level, master_weights=given)
    assert isinstance(optimizer, MixedPrecision)
    assert optimizer.update == update


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_optimizer_of_float32_parameters_stays(level: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    assert initialize(model, optimizer, opt_level=level, verbosity=0) == (model, optimizer)
    masters, own = list(master_params(optimizer)), list(model.parameters())
    assert all(master is parameter for master, parameter in zip(masters, own, strict=True))


def test_small_steps_are_kept_by_masters_and_lost_without() -> None:
    # 64 steps of 2^-14 from 1, where fp16's numbers are 2^-11 apart below and 2^-10 above
    ends = {}
    for level in ("O2", "O3"):
        model, optimizer = leveled(level, weighted(1.0), lr=2.0**-14)
        for _ in range(64):
            optimizer.zero_grad()
            backward(model, optimizer, -1.0)
            optimizer.step()
        ends[level] = model.weight.item()
    assert ends == {"O2": 1 + 2.0**-8, "O3": 1.0}


def test_models_without_an_optimizer_come_alone() -> None:
    model = nn.Linear(2, 1)
    assert initialize(model, opt_level="O2", verbosity=0) is model
    both = [nn.Linear(2, 1), nn.Linear(2, 1)]
    assert initialize(both, opt_level="O2", verbosity=0) is both
    assert {model.weight.dtype for model in (model, *both)} == {HALF}


@pytest.mark.parametrize("kind", [list, tuple])
def test_nesting_is_that_of_the_arguments(kind: type) -> None:
    models = kind([nn.Linear(2, 1), nn.Linear(2, 1)])
    optimizers = kind([SGD(model.parameters(), lr=1.0) for model in models])
    new_models, new_optimizers = initialize(models, optimizers, opt_level="O2", verbosity=0)
    assert new_models is models
    assert type(new_optimizers) is kind
    assert [optimizer.inner for optimizer in new_optimizers] == list(optimizers)
    single = nn.Linear(2, 1)
    _, alone = initialize([single], [SGD(single.parameters(), lr=1.0)], verbosity=0)
    assert isinstance(alone, list)
    last = nn.Linear(2, 1)
    assert initialize(last, [], opt_level="O2", verbosity=0) == (last, [])


@pytest.mark.parametrize("level", LEVELS)
def test_disabled_changes_nothing(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = weighted(3.0)
    own = SGD(model.parameters(), lr=0.5)
    assert initialize(model, own, enabled=False, opt_level=level) == (model, own)
    assert capsys.readouterr().err == ""
    backward(model, own, 2.0)
    assert model.weight.grad.item() == 2
    own.step()
    assert (model.weight.item(), model.weight.dtype) == (2.0, SINGLE)


def test_adam_of_fp16_parameters_makes_no_nan_of_a_zero_gradient() -> None:
    for level in ("O2", "O3"):
        model, optimizer = leveled(level, weighted(1.0, 1.0), Adam, lr=1e-3)
        backward(model, optimizer, 0.0, 0.0)
        optimizer.step()
        assert model.weight.tolist() == [[1.0, 1.0]]
