"""Products of 16-bit tensors computed in FP32: how exact, what is kept, what hooks see."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gemm.bound import HALF_SMALLEST, HALF_ULP
from mixprec.gemm.widening import mapped, widened
from mixprec.measure import saved_bytes

BF16, FP16 = torch.bfloat16, torch.float16
Product = Callable[..., Tensor]
# product, shapes of its operands, terms of a sum: forward, and in the gradient of each operand
PRODUCTS: dict[str, tuple[Product, tuple[tuple[int, ...], ...], tuple[int, ...]]] = {
    "linear": (F.linear, ((33, 64), (48, 64)), (64, 48, 33)),
    "matmul": (torch.matmul, ((3, 17, 40), (40, 24)), (40, 24, 51)),
    "bmm": (torch.bmm, ((4, 17, 40), (4, 40, 24)), (40, 24, 17)),
    "einsum": (
        lambda a, b: torch.einsum("bik,bjk->bij", a, b), ((4, 17, 40), (4, 24, 40)), (40, 24, 17),
    ),
    "conv1d": (F.conv1d, ((3, 8, 50), (16, 8, 5)), (40, 80, 3 * 46)),
    "conv2d": (F.conv2d, ((2, 4, 12, 12), (8, 4, 3, 3)), (36, 72, 200)),
    "conv2d, stride": (
        lambda a, b: F.conv2d(a, b, stride=2, padding=1), ((2, 4, 12, 12), (8, 4, 3, 3)),
        (36, 72, 72),
    ),
    "conv2d, dilation": (
        lambda a, b: F.conv2d(a, b, dilation=2), ((2, 4, 12, 12), (8, 4, 3, 3)), (36, 72, 128),
    ),
    "conv2d, groups": (
        lambda a, b: F.conv2d(a, b, groups=2), ((2, 4, 12, 12), (8, 2, 3, 3)), (18, 36, 200),
    ),
    "conv3d": (F.conv3d, ((2, 3, 6, 6, 6), (4, 3, 3, 3, 3)), (81, 108, 128)),
    "conv_transpose2d": (
        lambda a, b: F.conv_transpose2d(a, b, stride=2), ((2, 8, 6, 6), (8, 4, 3, 3)),
        (72, 36, 72),
    ),
}  # fmt: skip


def operands(name: str, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in PRODUCTS[name][1]]


def results(run: Product, tensors: list[Tensor], gradient: Tensor | None = None) -> list[Tensor]:
    """Output and the gradients of the operands."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = run(*leaves)
    gradient = torch.ones_like(out) if gradient is None else gradient.to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Float64 to 16 bits at once, by the spacing of the type at each number."""
    digits = {BF16: 8, FP16: 11}[dtype]
    exponent = torch.frexp(exact).exponent.clamp(min=1 + int(math.log2(torch.finfo(dtype).tiny)))
    return torch.ldexp(torch.round(torch.ldexp(exact, digits - exponent)), exponent - digits)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_output_and_gradients_are_within_the_bound(name: str, dtype: torch.dtype) -> None:
    product, _, lengths = PRODUCTS[name]
    tensors = operands(name, dtype)
    gradient = torch.randn_like(product(*(tensor.float() for tensor in tensors))).to(dtype)
    got = results(lambda *args: widened(product, args, {}, dtype), tensors, gradient)
    exact = results(product, [tensor.double() for tensor in tensors], gradient)
    magnitude = results(product, [t.double().abs() for t in tensors], gradient.abs())
    right: list[Tensor] = []
    for result, reference, size, terms in zip(got, exact, magnitude, lengths, strict=False):
        sums = terms * 2.0**-24 * size
        allowed = sums + HALF_ULP[dtype] * (reference.abs() + sums) + HALF_SMALLEST[dtype]
        assert result.dtype == dtype
        assert ((result.double() - reference).abs() <= allowed).all()
        right.append((result.double() == rounded(reference, dtype)).flatten())
    assert torch.cat(right).double().mean() >= 0.997


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_addition_is_rounded_together_with_the_product(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 9, 32).to(dtype), torch.randn(2, 32, 7).to(dtype)
    added = torch.randn(2, 9, 7).to(dtype)
    out = widened(torch.baddbmm, (added, a, b), {}, dtype)
    exact = torch.baddbmm(added.double(), a.double(), b.double())
    assert (out.double() == rounded(exact, dtype)).double().mean() >= 0.997


def test_exact_sums_are_exact() -> None:
    a, b = torch.randint(-4, 5, (8, 16)).bfloat16(), torch.randint(-3, 4, (16, 5)).bfloat16()
    assert torch.equal(widened(torch.mm, (a, b), {}, BF16).long(), a.long() @ b.long())


def test_float16_overflows_to_infinity() -> None:
    big = torch.tensor([[300.0, -300.0], [65504.0, 0.0]], dtype=FP16)
    out = widened(torch.mm, (big, torch.tensor([[300.0], [0.0]], dtype=FP16)), {}, FP16)
    assert out.tolist() == [[math.inf], [math.inf]]
    out = widened(torch.mm, (big, torch.tensor([[0.0], [300.0]], dtype=FP16)), {}, FP16)
    assert out.tolist() == [[-math.inf], [0.0]]
    assert widened(torch.mm, (big[1:].bfloat16(), big.bfloat16()), {}, BF16).isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    a = torch.ones(3, 4, dtype=BF16)
    a[1, 2] = bad
    out = widened(torch.mm, (a, torch.ones(4, 2, dtype=BF16)), {}, BF16)
    assert not out[1].isfinite().any()
    assert torch.equal(out[[0, 2]], torch.full((2, 2), 4.0, dtype=BF16))


def test_backward_keeps_16_bits() -> None:
    a = torch.randn(64, 32).bfloat16().requires_grad_()
    b = torch.randn(32, 16).bfloat16().requires_grad_()
    with saved_bytes() as narrow:
        widened(torch.mm, (a, b), {}, BF16)
    with saved_bytes() as wide:
        torch.mm(a.float(), b.float())
    assert wide.activation_bytes == 2 * narrow.activation_bytes == 4 * (64 * 32 + 32 * 16)


def test_graph_keeps_no_operand_that_backward_does_not_need() -> None:
    a = torch.randn(64, 32).bfloat16()
    b = torch.randn(32, 16).bfloat16().requires_grad_()
    with saved_bytes() as saved:
        out = widened(torch.mm, (a, b), {}, BF16)
    assert [tensor.shape for tensor in saved.tensors] == [(64, 32)]
    hooks = out.grad_fn.next_functions[0][0]
    assert hooks.name() == "MmBackward0"


def test_change_in_place_before_backward_raises() -> None:
    a = torch.randn(4, 4).bfloat16().requires_grad_()
    b = torch.randn(4, 4).bfloat16()
    out = widened(torch.mm, (a, b), {}, BF16)
    b.add_(1)
    message = r"backward: got a tensor of shape \(4, 4\) that was modified in place"
    with pytest.raises(RuntimeError, match=message):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_second_derivatives_are_those_without_hooks(dtype: torch.dtype) -> None:
    a, b = torch.randn(5, 6).to(dtype), torch.randn(6, 4).to(dtype)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return (x.float() @ w.float()).to(dtype)

    def penalty(run: Product) -> list[Tensor]:
        x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
        out = run(x, w).float().square().sum()
        gradients = torch.autograd.grad(out, (x, w), create_graph=True)
        return list(torch.autograd.grad(sum(g.float().square().sum() for g in gradients), (x, w)))

    for got, want in zip(
        penalty(lambda *args: widened(torch.mm, args, {}, dtype)), penalty(plain), strict=True
    ):
        assert want.abs().max() > 0
        assert torch.equal(got, want)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "every other", "offset"])
def test_any_strides_have_the_gradients_of_a_copy(layout: str) -> None:
    base = torch.randn(16, 16).bfloat16()
    view = {
        "transposed": base.t(),
        "expanded": base[:1].expand(16, 16),
        "every other": base[:, ::2],
        "offset": base[3:, 5:],
    }[layout]
    weight = torch.randn(view.shape[1], 6).bfloat16()

    def gradient(x: Tensor) -> Tensor:
        w = weight.clone().requires_grad_()
        widened(torch.mm, (x, w), {}, BF16).float().square().sum().backward()
        return w.grad

    assert torch.equal(gradient(view), gradient(view.contiguous()))


def test_hooks_around_see_the_16_bit_tensors_and_may_change_their_strides() -> None:
    seen: list[torch.dtype] = []
    a = torch.randn(6, 8).bfloat16().t()
    b = torch.randn(6, 4).bfloat16().requires_grad_()

    def away(saved: Tensor) -> Tensor:
        seen.append(saved.dtype)
        return saved.contiguous()

    widened(torch.mm, (a, b), {}, BF16).sum().backward()
    want, b.grad = b.grad, None
    with torch.autograd.graph.saved_tensors_hooks(away, lambda kept: kept):
        out = widened(torch.mm, (a, b), {}, BF16)
    out.sum().backward()
    assert seen == [BF16]
    assert torch.equal(b.grad, want)


def test_offloading_hooks_work_around_it() -> None:
    a = torch.randn(6, 8).bfloat16().requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        out = widened(torch.mm, (a, a.t()), {}, BF16)
    out.sum().backward()
    assert torch.equal(a.grad, (2 * a.double().sum(0)).bfloat16().expand(6, 8).contiguous())


def test_tensors_of_inference_mode_can_be_operands() -> None:
    with torch.inference_mode():
        a = torch.ones(3, 4, dtype=BF16)
    w = torch.ones(4, 2, dtype=BF16, requires_grad=True)
    widened(torch.mm, (a, w), {}, BF16).sum().backward()
    assert torch.equal(w.grad, torch.full((4, 2), 3.0, dtype=BF16))


def test_transforms_of_functions_work() -> None:
    a, w = torch.randn(3, 5, 4).bfloat16(), torch.randn(4, 2).bfloat16()

    def loss(x: Tensor, weight: Tensor) -> Tensor:
        return widened(torch.mm, (x, weight), {}, BF16).float().square().sum()

    got = torch.vmap(torch.func.grad(loss, argnums=1), (0, None))(a, w)
    for x, gradient in zip(a, got, strict=True):
        leaf = w.clone().requires_grad_()
        loss(x, leaf).backward()
        assert torch.equal(gradient, leaf.grad)


def test_nested_arguments_keep_their_containers() -> None:
    pair = torch.ones(2, dtype=BF16)
    nested: Any = ([pair, 1], {"a": (pair, "b")}, torch.ones(3).max(0))
    out = mapped(nested, lambda x: x.float(), (BF16,))
    assert out[0][0].dtype == out[1]["a"][0].dtype == torch.float32
    assert (out[0][1], out[1]["a"][1]) == (1, "b")
    assert type(out[2]) is type(nested[2])
    assert nested[0][0] is pair
