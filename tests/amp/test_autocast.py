"""The region as people use it: spellings, nesting, threads, other modes, weights that change."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import mixprec
from mixprec.amp import GradScaler, autocast
from mixprec.policy import innermost_region
from mixprec.recipes import RECIPES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def product() -> torch.dtype:
    """The type in which a product runs here."""
    return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    ("region", "dtype"),
    [
        (lambda: autocast("bf16"), BF16),
        (lambda: autocast("fp16"), FP16),
        (lambda: autocast("bf16_pure"), BF16),
        (lambda: autocast(RECIPES["fp16"]), FP16),
        (lambda: autocast("bf16-mixed"), BF16),
        (lambda: autocast("16-mixed"), FP16),
        (lambda: autocast("fp8"), BF16),
        (lambda: autocast("fp32"), FP32),
        (lambda: autocast("fp64"), FP32),
        (lambda: autocast(BF16), BF16),
        (lambda: autocast(FP32), FP32),
        (lambda: autocast(), FP16),
        (lambda: autocast("cuda"), FP16),
        (lambda: autocast("cuda:0"), FP16),
        (lambda: autocast("cpu"), BF16),
        (lambda: autocast(device_type="cpu"), BF16),
        (lambda: autocast(device_type="cuda", dtype=FP16, enabled=True), FP16),
        (lambda: autocast("cuda", dtype=BF16, cache_enabled=False), BF16),
        (lambda: autocast(dtype="bf16"), BF16),
        (lambda: autocast("cuda", enabled=False), FP32),
        (lambda: autocast("bf16", policy="torch_cpu"), BF16),
    ],
)
def test_spelling(region: Callable[[], autocast], dtype: torch.dtype) -> None:
    with region():
        assert product() == dtype
    assert product() == FP32


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("bf17",), ValueError, "recipe: got 'bf17'"),
        ((3,), TypeError, "recipe: got int; must be a name or a Recipe"),
        ((torch.int8,), ValueError, "dtype: got torch.int8; a region is of bfloat16 or float16"),
        (
            (torch.float8_e4m3fn,),
            ValueError,
            "dtype: got torch.float8_e4m3fn; .*narrower products come from mixprec.convert",
        ),
        (
            ("fp8_rowwise",),
            ValueError,
            "recipe_or_dtype: got fp8_rowwise on base fp32; a region sets the base alone.*convert",
        ),
    ],
)
def test_refused_types(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        autocast(*arguments)


def test_refused_combinations() -> None:
    with pytest.raises(ValueError, match=r"dtype: got torch.float16 beside bf16; both say the typ"):
        autocast("bf16", dtype=FP16)
    with pytest.raises(ValueError, match=r"policy: got 'cpu'; must be one of cuda, torch_cpu"):
        autocast("bf16", policy="cpu")


def test_the_innermost_region_counts() -> None:
    with autocast("bf16"):
        with autocast(enabled=False):
            assert product() == FP32
            with autocast("fp16"):
                assert product() == FP16
            assert product() == FP32
        assert product() == BF16


def test_a_layer_serves_regions_of_two_types_in_turn() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with autocast(BF16):
        first = layer(x)
        with autocast(FP16):
            assert layer(x).dtype == FP16
        assert torch.equal(layer(x), first)


def test_one_object_is_entered_again_while_it_is_active() -> None:
    region = autocast("bf16")

    def depth(left: int) -> None:
        with region:
            assert product() == BF16
            if left:
                depth(left - 1)
            assert product() == BF16

    depth(3)
    assert product() == FP32


def test_torchs_region_and_this_one_inside_each_other() -> None:
    exp = torch.ones(2, dtype=FP16)
    with autocast("bf16"), torch.autocast("cpu", FP16):
        assert product() == FP16
        assert exp.exp().dtype == FP16  # torch's list for the CPU
    with torch.autocast("cpu", FP16), torch.autocast("cpu", enabled=False), autocast("bf16"):
        assert product() == BF16
        assert exp.exp().dtype == FP32


def test_an_error_inside_leaves_the_region() -> None:
    with pytest.raises(KeyError), autocast("bf16"):
        raise KeyError
    assert product() == FP32
    assert innermost_region() is None


def test_leaving_in_another_order_raises() -> None:
    outer, inner = autocast("bf16"), autocast("fp16")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match="got left in another order than entered"):
        outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert product() == FP32
    with pytest.raises(RuntimeError, match="got left in another order than entered"):
        outer.__exit__(None, None, None)


def in_thread(run: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join()
    return found[0]


def test_a_new_thread_is_in_no_region() -> None:
    with autocast("bf16"):
        assert in_thread(product) == FP32
        assert product() == BF16


def test_two_threads_use_one_object() -> None:
    region, both = autocast("bf16"), threading.Barrier(2, timeout=600)

    def run() -> list[torch.dtype]:
        seen = []
        for _ in range(5):
            with region:
                both.wait()
                seen.append(product())
            both.wait()
            seen.append(product())
        return seen

    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(run()))
    thread.start()
    assert run() == [BF16, FP32] * 5
    thread.join()
    assert found == [[BF16, FP32] * 5]


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "in place": lambda layer: layer.weight.detach().add_(1),
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": layer.weight + 1}),
    "data": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "replaced": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach() + 1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weight_takes_effect_at_its_next_use(change: str) -> None:
    layer, x = nn.Linear(3, 1, bias=False), torch.ones(1, 3)
    with torch.no_grad():
        layer.weight.zero_()
    with autocast("bf16"):
        assert layer(x).item() == 0
        CHANGES[change](layer)
        assert layer(x).item() == 3


def test_training_inside_one_region_moves_the_weight() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.ones_(layer.weight)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    outputs = []
    with autocast("bf16"):
        for _ in range(3):
            optimizer.zero_grad()
            out = layer(torch.ones(1, 1))
            outputs.append(out.item())
            out.sum().backward()
            optimizer.step()
    assert outputs == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_forward_without_gradients_first_does_not_cut_the_graph(first: Callable[[], Any]) -> None:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4)
    with autocast("bf16"):
        with first():
            layer(x)
        out = layer(x)
    out.sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def test_backward_inside_equals_backward_outside() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(4, 8)

    def gradients(inside: bool) -> list[Tensor]:
        layer.zero_grad()
        with autocast("bf16"):
            loss = nn.functional.mse_loss(layer(x), x)
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [parameter.grad.clone() for parameter in layer.parameters()]

    for inside, outside in zip(gradients(True), gradients(False), strict=True):
        assert inside.dtype == FP32
        assert torch.equal(inside, outside)


def test_backward_runs_in_the_type_of_the_forward() -> None:
    x = torch.full((1, 1), 1e5, requires_grad=True)
    with autocast("bf16"):
        out = x @ torch.ones(1, 1)
    with autocast("fp16"):
        out.sum().backward()
    assert out.item() == torch.tensor(1e5, dtype=BF16).item()
    assert x.grad.item() == 1.0


class Count(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_other_modes_work_outside_and_inside() -> None:
    with Count() as outside, autocast("bf16"):
        assert product() == BF16
    with autocast("bf16"), Count() as inside:
        assert product() == BF16
    assert outside.calls >= 1
    assert inside.calls >= 1


def test_default_device_works_outside_and_inside() -> None:
    with torch.device("meta"), autocast("bf16"):
        assert torch.ones(2).device.type == "meta"
    with autocast("bf16"):
        torch.set_default_device("meta")
        try:
            assert torch.ones(2).device.type == "meta"
        finally:
            torch.set_default_device(None)
        assert product() == BF16


def test_transforms_of_functions_over_a_region() -> None:
    weight, xs = torch.randn(4, 4), torch.randn(3, 2, 4)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        with autocast("bf16"):
            return (x @ w).float().square().sum()

    got = torch.vmap(torch.func.grad(loss), (None, 0))(weight, xs)
    for gradient, x in zip(got, xs, strict=True):
        leaf = weight.clone().requires_grad_()
        loss(leaf, x).backward()
        assert torch.equal(gradient, leaf.grad)


def test_custom_function_follows_the_policy_and_refuses_mixed_types_in_backward() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx, gradient):
            a, b = ctx.saved_tensors
            return gradient @ b.t(), a.t() @ gradient

    a, b = torch.randn(2, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    with autocast("bf16"):
        out = Product.apply(a, b)
    assert out.dtype == BF16
    with pytest.raises(RuntimeError, match=r"dtype|BFloat16"):
        out.sum().backward()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_step_of_tutorials_runs_on_a_cpu(device: str) -> None:
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = GradScaler(device)
    x, y = torch.randn(32, 8), torch.randn(32, 4)
    losses = []
    for _ in range(30):
        with autocast(device_type=device, dtype=torch.float16):
            output = net(x)
            assert output.dtype is torch.float16
            loss = nn.functional.mse_loss(output, y)
            assert loss.dtype is torch.float32
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


def test_imports_of_the_package_reach_the_region() -> None:
    assert mixprec.amp.autocast is autocast
