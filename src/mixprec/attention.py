"""Scaled dot-product attention, its two products by a recipe.

scores = (q scale) k^T;   p = softmax(scores + mask);   output = dropout(p) v
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from mixprec.contraction import einsum
from mixprec.linear_products import LinearState
from mixprec.noise import Noise
from mixprec.recipes import Recipe

# the second product's draws, far above those of the first one's entries
_SECOND_PRODUCT = 2**40


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: str | Recipe,
    noise: Noise | None = None,
    impl: str = "auto",
    state: LinearState | None = None,
    values_state: LinearState | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention``, its products by a recipe.

    Both products are ``einsum``'s: each batch entry and head is a product of its own, with scales
    of its own. q is the x of the first one and k its weight; p the x of the second, v its weight.

    Args:
        query: [..., H, L, E], as torch takes it.
        key: [..., H, S, E].
        value: [..., H, S, V].
        attn_mask: Broadcasting to [..., H, L, S]: True takes part, or added to the scores.
        dropout_p: Share of p that is dropped.
        is_causal: Query i sees keys 0 to i; not beside attn_mask.
        scale: 1 / sqrt(E) by default; multiplies q before the product, whose results then fit
            into 16 bits where torch's do.
        enable_gqa: Heads of key and value serve several of query's.
        recipe, noise, impl: As in ``mixprec.linear``; no delayed scaling.
        state: Of the first entry's first product, whose backward counts the noise step.
        values_state: Of the first entry's second product.

    Returns:
        [..., H, L, V] in query's type. Scores are rounded to that type; softmax runs in float32.

    Raises:
        ValueError: attn_mask with is_causal; shapes that do not match; what ``einsum`` refuses.

    Edge cases: a query that sees no key gives zeros. Scores of all keys are held at once.
    """
    if attn_mask is not None and is_causal:
        raise ValueError("attn_mask: got one with is_causal=True; only one of them; leave one out")
    if query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise ValueError(
            f"key: got shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}; "
            "query and key have as many features, key and value as many rows; reshape them"
        )
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = einsum(
        "...le,...se->...ls", query * scale, key, recipe=recipe, noise=noise, impl=impl, state=state
    )
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if is_causal:
        attn_mask = torch.ones(wide.shape[-2:], dtype=torch.bool, device=wide.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        wide = wide.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        wide = wide + attn_mask
    if attn_mask is None:
        p = wide.softmax(-1)
    else:
        # filled before too: the gradient of a softmax of nothing is NaN, whatever covers it
        sees_nothing = (wide == -math.inf).all(-1, keepdim=True)
        p = wide.masked_fill(sees_nothing, 0.0).softmax(-1).masked_fill(sees_nothing, 0.0)
    p = torch.nn.functional.dropout(p, dropout_p).to(scores.dtype)
    second = None if noise is None else replace(noise, stream=noise.stream + _SECOND_PRODUCT)
    return einsum(
        "...ls,...sv->...lv",
        p,
        value,
        recipe=recipe,
        noise=second,
        impl=impl,
        state=values_state,
    )
