"""Explanations of forward: every operation with the types that it takes, computes in and gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from train.conftest import write_idx_folder

import mixprec
from mixprec.explanation import LOSS, OperationRow, explain_run
from mixprec.train.config import load

explain = partial(mixprec.explain, backward=False)
X = torch.linspace(-1, 1, 48).reshape(3, 1, 4, 4)


class Net(nn.Module):
    """A layer of each kind, and an operation of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.norms = nn.ModuleDict({"batch": nn.BatchNorm2d(2), "layer": nn.LayerNorm(8)})
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norms["batch"](self.conv(x)).flatten(1)
        return functional.softmax(self.fc(self.norms["layer"](x)).exp(), dim=-1)


def mse(output: Tensor) -> Tensor:
    return functional.mse_loss(output, torch.zeros_like(output))


def table(rows: list[OperationRow]) -> list[tuple[Any, ...]]:
    """Module, operation, compute, output and rule of what computes."""
    return [
        (row.module, row.operation, row.compute, row.outputs, row.rule)
        for row in rows
        if not row.is_view and row.phase == "forward"
    ]


# the types that torch documents for autocast on CUDA
BF16_ROWS = [
    ("conv", "conv2d", ("bf16",), ("bf16",), "16-bit"),
    ("norms.batch", "batch_norm", ("bf16", "fp32"), ("bf16",), "as statistics"),
    ("norms.layer", "layer_norm", ("fp32",), ("fp32",), "fp32"),
    ("fc", "linear", ("bf16",), ("bf16",), "16-bit"),
    ("", "exp", ("fp32",), ("fp32",), "fp32"),
    ("", "softmax", ("fp32",), ("fp32",), "fp32 result"),
    (LOSS, "zeros_like", ("fp32",), ("fp32",), "follows its inputs"),
    (LOSS, "mse_loss", ("fp32",), ("fp32",), "fp32"),
]


def test_operations_of_a_model_in_bf16() -> None:
    assert table(explain(Net(), X, "bf16", loss=mse)) == BF16_ROWS


def test_types_in_front_of_an_operation_are_those_of_its_inputs() -> None:
    inputs = {row.operation: row.inputs for row in explain(Net(), X, "bf16")}
    assert inputs["conv2d"] == ("fp32", "fp32", "fp32")
    assert inputs["flatten"] == ("bf16",)
    assert inputs["layer_norm"] == ("bf16", "fp32", "fp32")
    assert inputs["linear"] == ("fp32", "fp32", "fp32")
    assert inputs["exp"] == ("bf16",)


def test_views_are_marked() -> None:
    views = [(row.module, row.operation) for row in explain(Net(), X) if row.is_view]
    assert views == [("", "flatten")]


def test_torchs_list_for_the_cpu_keeps_norms_and_exponentials_narrow() -> None:
    rows = {row.operation: row for row in explain(Net(), X, "fp16", "torch_cpu")}
    for name in ("layer_norm", "exp", "softmax"):
        assert (rows[name].outputs, rows[name].rule) == (("fp16",), "follows its inputs")
    assert rows["linear"].rule == "16-bit"


@pytest.mark.parametrize("base", ["fp32", "fp64"])
def test_without_a_region_everything_follows_its_inputs(base: str) -> None:
    rows = table(explain(Net(), X, base, loss=mse))
    assert [row[:2] for row in rows] == [row[:2] for row in BF16_ROWS]
    assert {row[2:] for row in rows} == {((base,), (base,), "follows its inputs")}


def test_pure_recipe_has_narrow_parameters_and_inputs() -> None:
    rows = {row.operation: row for row in explain(Net(), X, "bf16_pure")}
    assert rows["conv2d"].inputs == ("bf16", "bf16", "bf16")
    assert rows["linear"].inputs[1:] == ("bf16", "bf16")


@pytest.mark.parametrize("asked", ["fp8", "fp8_tensorwise"])
def test_recipe_of_narrower_products_is_applied_to_a_copy(asked: str) -> None:
    net = Net()
    (row,) = (row for row in explain(net, X, asked) if row.operation == "linear")
    base = "bf16" if asked == "fp8" else "fp32"
    assert (row.module, row.compute) == ("fc", ("e4m3", "e4m3"))
    # layer norm gives FP32; in a region the layer takes it in the region's type
    assert (row.inputs, row.outputs) == (("fp32", "fp32"), (base,))
    assert row.rule == f"recipe {mixprec.resolve(asked)}"
    assert row.impl
    assert type(net.fc) is nn.Linear


def test_converted_layer_is_one_row_of_its_own_recipe() -> None:
    net = Net()
    mixprec.convert(net, "fp8_rowwise", impl="emulated")
    rows = table(explain(net, X, "bf16"))
    layers = {("conv", "conv2d"), ("fc", "linear")}
    expected = (("e4m3", "e4m3"), ("bf16",), "recipe fp8_rowwise")
    assert rows == [(*row[:2], *expected) if row[:2] in layers else row for row in BF16_ROWS[:-2]]
    (row,) = (row for row in explain(net, X, "bf16") if row.operation == "linear")
    assert row.impl == "emulated"


def test_high_precision_operand_has_the_type_of_the_layers_input() -> None:
    net = Net()
    spec = mixprec.RECIPES["fp8_rowwise"].output.a
    mixprec.convert(net, mixprec.Recipe(output=mixprec.GemmSpec(a=spec)))
    (row,) = (row for row in explain(net, X, "fp32") if row.operation == "linear")
    assert row.compute == ("e4m3", "fp32")


def test_model_state_and_generators_stay_as_they_were() -> None:
    net = nn.Sequential(Net(), nn.Dropout())
    mixprec.convert(net, "fp8_delayed")
    before = copy.deepcopy(net.state_dict()), copy.deepcopy(mixprec.state_dict(net))
    torch.manual_seed(3)
    explain(net, X, "bf16", loss=mse)
    drawn = torch.rand(4)
    torch.manual_seed(3)
    assert drawn.equal(torch.rand(4))
    after = net.state_dict(), mixprec.state_dict(net)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=0)
    assert not any(module._forward_hooks for module in net.modules())


class Two(nn.Module):
    """Takes two inputs, by place or by name."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


@pytest.mark.parametrize("pack", [lambda a, b: (a, b), lambda a, b: {"b": b, "a": a}])
def test_inputs_by_place_and_by_name(pack: Callable[..., Any]) -> None:
    rows = explain(Two(), pack(torch.ones(2, 3), torch.ones(3, 2).bfloat16()), "fp16")
    expected = ("", "matmul", ("fp32", "bf16"), ("fp16",), ("fp16",))
    assert [(r.module, r.operation, r.inputs, r.compute, r.outputs) for r in rows] == [expected]


def test_operator_has_a_plain_name_and_integers_no_row() -> None:
    class Add(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + (torch.arange(2) + 1)

    assert [row.operation for row in explain(Add(), torch.ones(2))] == ["add"]


def test_module_that_runs_twice_has_rows_for_each_turn() -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    names = [row.operation for row in explain(model, torch.ones(1, 2))]
    assert names == ["linear", "relu", "linear"]


def test_explain_refuses_names_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="policy: got 'tpu'; must be one of cuda, torch_cpu"):
        explain(Net(), X, "bf16", "tpu")
    with pytest.raises(ValueError, match="recipe: got 'bf17'"):
        explain(Net(), X, "bf17")


def test_model_in_bf16_stays_one() -> None:
    (row,) = explain(nn.Linear(2, 2).bfloat16(), torch.ones(1, 2).bfloat16(), "fp32")
    assert (row.inputs, row.outputs) == (("bf16",) * 3, ("bf16",))


def test_a_run_is_explained_by_its_configuration(tmp_path: Path) -> None:
    path = [f"data.path={write_idx_folder(tmp_path)}", "data.batch_size=4"]
    rows = table(explain_run(load(None, [*path, "recipe=fp8_rowwise", "base=bf16"])))
    by_module = {row[0]: row for row in rows}
    expected = (("e4m3", "e4m3"), ("bf16",), "recipe fp8_rowwise on bf16")
    assert by_module["conv1"] == ("conv1", "conv2d", *expected)
    assert by_module["fc2"][2:] == expected
    assert by_module[LOSS][2:] == (("fp32",), ("fp32",), "fp32")
