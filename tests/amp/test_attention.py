"""Attention in a region, against torch's own of 16 bits and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mixprec.amp import autocast

BF16, FP16 = torch.bfloat16, torch.float16
SHAPE = (2, 4, 24, 16)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.5},
    "bool mask": {"attn_mask": torch.ones(24, 24).tril(3).bool()},
    "float mask": {"attn_mask": torch.randn(24, 24)},
    "fewer heads": {"enable_gqa": True},
}


def tensors(case: str, dtype: torch.dtype) -> list[Tensor]:
    heads = 2 if case == "fewer heads" else 4
    shapes = [SHAPE, (2, heads, 24, 16), (2, heads, 24, 16), SHAPE]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def attention(case: str, inputs: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradients of q, k, v, in a type that the mask takes too."""
    *qkv, gradient = inputs
    leaves = [tensor.to(dtype).requires_grad_() for tensor in qkv]
    options = dict(CASES[case])
    mask = options.get("attn_mask")
    if mask is not None and mask.is_floating_point():
        options["attn_mask"] = mask.to(BF16).to(dtype)
    out = F.scaled_dot_product_attention(*leaves, **options)
    return [out, *torch.autograd.grad(out, leaves, gradient.to(out.dtype))]


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_error_is_at_most_twice_that_of_torchs_own(case: str, dtype: torch.dtype) -> None:
    inputs = tensors(case, dtype)
    exact = attention(case, inputs, torch.float64)
    own = attention(case, inputs, dtype)
    with autocast(dtype):
        ours = attention(case, inputs, dtype)
    for result, native, reference in zip(ours, own, exact, strict=True):
        assert result.dtype == dtype
        error, allowed = (result - reference).abs(), (native - reference).abs()
        assert error.max() <= 2 * allowed.max()
        assert error.mean() <= 2 * allowed.mean()


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_mask_of_another_type_is_taken(dtype: torch.dtype) -> None:
    q = torch.randn(SHAPE)
    with autocast(dtype):
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=torch.zeros(24, 24))
        want = F.scaled_dot_product_attention(q, q, q)
    assert out.dtype == dtype
    assert torch.allclose(out.float(), want.float(), atol=2 * torch.finfo(dtype).eps)


def test_lowest_number_as_mask_hides_a_position() -> None:
    q, v = torch.randn(1, 1, 2, 4), torch.tensor([[[[1.0], [2.0]]]])
    mask = torch.tensor([[0.0, torch.finfo(FP16).min], [torch.finfo(FP16).min, 0.0]])
    with autocast(FP16):
        out = F.scaled_dot_product_attention(q, q, v, attn_mask=mask)
    assert out.flatten().tolist() == [1.0, 2.0]
