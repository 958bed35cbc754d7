"""Explanations of backward: the gradient of every operation, and three products a layer."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_explanation import Net, X, mse
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mixprec
from mixprec.explanation import LOSS, OperationRow, explain
from mixprec.rounding import SOURCE_FORMATS

XS = torch.linspace(-1, 1, 48).reshape(2, 3, 8)
PRODUCTS = ["grad_input", "grad_weight", "grad_bias"]


def phases(rows: Iterable[OperationRow]) -> tuple[list[OperationRow], list[OperationRow]]:
    """What computes in forward, and in backward."""
    computing = [row for row in rows if not row.is_view]
    return tuple([row for row in computing if row.phase == p] for p in ("forward", "backward"))


def names(rows: Iterable[OperationRow]) -> list[tuple[str, str]]:
    return [(row.module, row.operation) for row in rows]


@pytest.mark.parametrize("policy", ["cuda", "torch_cpu"])
@pytest.mark.parametrize("base", ["fp32", "bf16", "fp16"])
def test_backward_of_a_chain_is_forward_from_its_end(base: str, policy: str) -> None:
    forward, backward = phases(explain(Net(), X, base, policy, loss=mse))
    made = [row for row in forward if row.operation != "zeros_like"]
    assert names(backward) == names(made)[::-1]
    # x, the statistics and the target have no gradient
    without = {"conv2d": 1, "batch_norm": 2, "mse_loss": 1}
    for row, of in zip(backward, made[::-1], strict=True):
        # a gradient has the type of its tensor
        assert row.inputs == of.outputs
        left = len(of.inputs) - without.get(of.operation, 0)
        assert (len(row.outputs), set(row.outputs)) == (left, set(of.inputs))
        assert (row.compute, row.rule) == (of.compute, of.rule)


class Dispatched(TorchDispatchMode):
    """The types of the gradients that torch's own kernels for backward take."""

    def __init__(self) -> None:
        super().__init__()
        self.types: dict[str, torch.dtype] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(args[0], Tensor):
            self.types[func._schema.name.removeprefix("aten::")] = args[0].dtype
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("policy", ["cuda", "torch_cpu"])
def test_gradients_compute_in_the_types_that_their_kernels_get(policy: str) -> None:
    kernels = {
        "layer_norm": "native_layer_norm_backward",
        "gelu": "gelu_backward",
        "softmax": "_softmax_backward_data",
    }
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
    model.append(nn.Softmax(-1))
    _, backward = phases(explain(model, XS, "bf16", policy))
    with mixprec.amp.autocast(dtype=torch.bfloat16, policy=policy):
        out = model(XS)
    with Dispatched() as seen:
        out.backward(torch.ones_like(out))
    rows = {row.operation: row for row in backward}
    for operation, kernel in kernels.items():
        # of the input and its gradient; parameters may have another
        assert rows[operation].compute[0] == str(SOURCE_FORMATS[seen.types[kernel]])


def test_converted_layers_show_their_products_with_operands() -> None:
    recipe = mixprec.resolve("fp8")
    rows = {(r.phase, r.module, r.operation): r for r in explain(Net(), X, recipe, loss=mse)}
    for phase, operation, gemm, types, out in (
        ("forward", "linear", recipe.output, ("fp32", "fp32"), "bf16"),
        ("backward", "grad_input", recipe.grad_input, ("bf16", "fp32"), "bf16"),
        ("backward", "grad_weight", recipe.grad_weight, ("bf16", "bf16"), "fp32"),
    ):
        row = rows[phase, "fc", operation]
        assert row.operands == (gemm.a, gemm.b)
        assert row.compute == (str(gemm.a.format), str(gemm.b.format))
        assert (row.inputs, row.outputs, row.impl) == (types, (out,), "emulated")
        assert row.rule == "recipe fp8_tensorwise on bf16"
    bias = rows["backward", "fc", "grad_bias"]
    assert (bias.inputs, bias.compute, bias.outputs) == (("bf16",), ("fp32",), ("fp32",))
    assert (bias.operands, bias.impl) == ((), "")


def test_products_are_in_the_order_of_execution_and_only_those_asked_for() -> None:
    net = Net()
    net.fc.weight.requires_grad_(False)
    _, backward = phases(explain(net, X, "mxfp8", loss=mse))
    expected = [
        (LOSS, "mse_loss"),
        ("", "softmax"),
        ("", "exp"),
        *(("fc", name) for name in ("grad_input", "grad_bias")),
        ("norms.layer", "layer_norm"),
        ("norms.batch", "batch_norm"),
        *(("conv", name) for name in ("grad_weight", "grad_bias")),
    ]
    assert names(backward) == expected


def test_product_in_high_precision_has_no_operands_and_nothing_to_choose() -> None:
    layer = nn.Linear(8, 8, bias=False)
    mixprec.convert(layer, "fp8_rowwise_hp_grad_weight", impl="emulated")
    (row,) = explain(nn.Sequential(nn.Identity(), layer), XS, "bf16")[1:]
    assert (row.operation, row.operands, row.compute) == (
        "grad_weight",
        (None, None),
        ("bf16", "bf16"),
    )
    assert row.impl == "emulated"


def test_exact_sums_compute_in_double_precision() -> None:
    rows = explain(nn.Linear(8, 8), XS.double(), "fp64_emulated")
    assert {(row.compute, row.impl) for row in rows if row.impl} == {(("fp64", "fp64"), "exact")}


class Block(nn.Module):
    """Attention by the function, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.norm(x).unflatten(-1, (2, 4)).transpose(1, 2)
        y = functional.scaled_dot_product_attention(q, q, q)
        return x + self.out(y.transpose(1, 2).flatten(2))


def test_attention_has_its_two_products_and_what_is_around_them() -> None:
    recipe = replace(mixprec.resolve("mxfp8"), attention=True)
    forward, backward = phases(explain(nn.Sequential(Block()), XS, recipe))
    # each of 2 x 2 entries is a product alike
    assert names(forward) == [
        ("0.norm", "layer_norm"),
        *(("0", name) for name in ("mul", "block", "stack", "softmax", "dropout")),
        *(("0", name) for name in ("block", "stack")),
        ("0.out", "linear"),
        ("0", "add"),
    ]
    found = names(backward)
    assert found.count(("0", "grad_input")) == found.count(("0", "grad_weight")) == 2
    assert found.index(("0", "softmax")) > found.index(("0", "grad_weight"))
    assert [row.operands for row in forward if row.operation == "block"] == [
        (recipe.output.a, recipe.output.b)
    ] * 2


@pytest.mark.parametrize(
    ("model", "x", "kind"),
    [
        (nn.LSTM(8, 4), XS, "lstm"),
        (nn.Conv1d(4, 4, 3, groups=2), torch.ones(2, 4, 8), "conv1d"),
        (nn.Bilinear(8, 8, 4), (XS, XS), "bilinear"),
        (nn.MultiheadAttention(8, 2), (XS, XS, XS), "multiheadattention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_layer_shows_its_products(model: nn.Module, x: Any, kind: str) -> None:
    forward, backward = phases(explain(model, x, "fp8_rowwise"))
    spec = mixprec.RECIPES["fp8_rowwise"].output.a
    assert {r.operands for r in forward if r.operation == kind} == {(spec, spec)}
    assert {r.operation for r in backward if r.operands} <= {"grad_input", "grad_weight"}
    assert any(row.operation == "grad_weight" for row in backward)


class Mixed(nn.Module):
    """Products and operations that belong to no layer of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = mixprec.linear(x, self.w, recipe="mxfp8")
        z = torch.zeros_like(y)
        z[0] = y[0]
        with mixprec.amp.autocast(dtype=torch.float16):
            return Square.apply(z) @ self.w


class Square(torch.autograd.Function):
    """A function of the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


def test_functions_assignments_and_regions_within_are_seen() -> None:
    forward, backward = phases(explain(Mixed(), XS, "fp32"))
    made = ["linear", "zeros_like", "setitem", "mul", "matmul"]
    assert [row.operation for row in forward] == made
    assert (forward[-1].compute, forward[-1].rule) == (("fp16",), "16-bit")
    done = ["matmul", "SquareBackward", "setitem", "grad_weight"]
    assert [row.operation for row in backward] == done
    assert {row.module for row in backward} == {""}


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_runs_each_operation_once_in_the_rows(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.net, x, use_reentrant=reentrant)

    net, x = nn.Sequential(nn.Linear(8, 8), nn.GELU()), XS.clone().requires_grad_()
    plain = explain(net, x, "fp8_rowwise")
    forward, backward = phases(explain(Checkpointed(net), x, "fp8_rowwise"))
    assert names(forward) == [(f"net.{row.module}", row.operation) for row in phases(plain)[0]]
    if reentrant:
        assert names(backward) == [("", "CheckpointFunctionBackward")]
    else:
        assert names(backward) == [(f"net.{r.module}", r.operation) for r in phases(plain)[1]]


def test_compiled_modules_run_as_they_are_written() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()))
    plain = explain(model, XS, "fp8_rowwise")
    model[1].compile(backend="eager")
    assert explain(model, XS, "fp8_rowwise") == plain
    rows = mixprec.recipe_errors(model, XS, recipes=["mxfp8"])
    assert list(dict.fromkeys(row.layer for row in rows)) == ["0", "1.0"]


def test_without_backward_or_gradients_there_are_no_such_rows() -> None:
    net = Net()
    whole = explain(net, X, "fp8")
    forward = [row for row in whole if row.phase == "forward"]
    assert explain(net, X, "fp8", backward=False) == forward
    with torch.no_grad():
        assert explain(net, X, "fp8") == forward
    assert explain(net.requires_grad_(False), X, "fp8") == forward


def test_model_and_its_gradients_stay_as_they_were() -> None:
    net = Net()
    net(X).sum().backward()
    before = copy.deepcopy({name: p.grad for name, p in net.named_parameters()})
    explain(net, X, "fp8", loss=mse)
    for name, parameter in net.named_parameters():
        assert parameter.grad.equal(before[name])
