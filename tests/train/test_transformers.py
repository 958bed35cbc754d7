"""The transformers: sizes by arithmetic, shapes, causality, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mixprec.train.transformers import GPT, GPT_PRESETS, VIT_PRESETS, VisionTransformer

SMALL_VIT = dict(size=8, patch=4, width=12, depth=2, heads=3, classes=5, channels=1)
SMALL_GPT = dict(context=9, width=12, depth=2, heads=3, vocabulary=11)


def block_parameters(width: int) -> int:
    linears = 3 * width * width + width * width + 2 * 4 * width * width
    biases = 3 * width + width + 4 * width + width
    norms = 2 * 2 * width
    return linears + biases + norms


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_huge_preset_has_632_million_parameters() -> None:
    with torch.device("meta"):
        model = VisionTransformer(**VIT_PRESETS["huge"])
    patches = 3 * 16 * 16 * 1280 + 1280
    positions = (256 // 16) ** 2 * 1280
    norm_and_head = 2 * 1280 + 1280 * 1024 + 1024
    expected = patches + positions + 32 * block_parameters(1280) + norm_and_head
    assert count(model) == expected == 632_304_384


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("tiny", 5.7e6), ("small", 22.1e6), ("base", 86.6e6), ("large", 304.3e6)],
)
def test_vision_presets_have_their_published_sizes(preset: str, expected: float) -> None:
    with torch.device("meta"):
        model = VisionTransformer(**VIT_PRESETS[preset])
    # the published models have a class token and its position more: 2 * width
    assert count(model) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("preset", GPT_PRESETS)
def test_gpt_presets_by_arithmetic(preset: str) -> None:
    sizes = GPT_PRESETS[preset]
    width, depth, context = sizes["width"], sizes["depth"], sizes["context"]
    with torch.device("meta"):
        untied, tied = GPT(**sizes), GPT(**sizes, tied=True)
    blocks = depth * block_parameters(width)
    assert count(untied) == 256 * width + context * width + blocks + 2 * width + width * 256 + 256
    assert count(untied) - count(tied) == 256 * width
    assert tied.head.weight is tied.embedding.weight


def test_vision_transformer_gives_logits() -> None:
    torch.manual_seed(0)
    model = VisionTransformer(**SMALL_VIT)
    output = model(torch.randn(3, 1, 8, 8))
    assert output.shape == (3, 5)
    assert output.isfinite().all()


def test_vision_transformer_is_its_equations() -> None:
    torch.manual_seed(1)
    model = VisionTransformer(**SMALL_VIT).double()
    image = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    kernel = model.patches.weight.reshape(12, 16)
    corners = [(0, 0), (0, 4), (4, 0), (4, 4)]
    patches = [image[0, 0, r : r + 4, c : c + 4].reshape(16) for r, c in corners]
    x = torch.stack([kernel @ patch + model.patches.bias for patch in patches]) + model.positions
    for block in model.blocks:
        query, key, value = block.qkv(block.norm1(x)).split(12, dim=1)
        heads = []
        for head in range(3):
            part = slice(4 * head, 4 * head + 4)
            scores = query[:, part] @ key[:, part].T / 2
            heads.append(scores.softmax(dim=1) @ value[:, part])
        x = x + block.proj(torch.cat(heads, dim=1))
        hidden = block.fc1(block.norm2(x))
        x = x + block.fc2(hidden * (1 + torch.erf(hidden / 2**0.5)) / 2)
    expected = model.head(model.norm(x).mean(dim=0))
    torch.testing.assert_close(model(image)[0], expected, rtol=1e-12, atol=1e-12)


def test_a_token_changes_nothing_before_it() -> None:
    torch.manual_seed(0)
    model = GPT(**SMALL_GPT)
    tokens = torch.randint(0, 11, (2, 9))
    output = model(tokens)
    assert output.shape == (2, 9, 11)
    for place in range(9):
        changed = tokens.clone()
        changed[0, place] = (tokens[0, place] + 1) % 11
        again = model(changed)
        assert torch.equal(again[0, :place], output[0, :place])
        assert torch.equal(again[1], output[1])
        assert (again[0, place:] != output[0, place:]).any(dim=1).all()


def test_gpt_takes_fewer_tokens_than_its_context() -> None:
    torch.manual_seed(0)
    model = GPT(**SMALL_GPT)
    tokens = torch.randint(0, 11, (2, 9))
    torch.testing.assert_close(model(tokens[:, :4]), model(tokens)[:, :4])


def test_weights_start_small_and_biases_at_zero() -> None:
    torch.manual_seed(0)
    model = GPT(**GPT_PRESETS["tiny"])
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert not any(linear.bias.any() for linear in linears)
    for weight in (*(linear.weight for linear in linears), model.embedding.weight, model.positions):
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch": 3}, "patch: got 3 with size 8; patch must divide size; change either"),
        ({"heads": 5}, "heads: got 5 with width 12; heads must divide width; change either"),
        ({"depth": 0}, "depth: got 0; must be a whole number of at least 1"),
        ({"classes": 2.5}, "classes: got 2.5; must be a whole number"),
        ({"width": True}, "width: got True; must be a whole number"),
    ],
)
def test_vision_transformer_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VisionTransformer(**SMALL_VIT | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": 0}, "context: got 0; must be a whole number of at least 1"),
        ({"heads": 7}, "heads: got 7 with width 12; heads must divide width"),
        ({"tied": 1}, "tied: got 1; the head shares the embedding or not"),
    ],
)
def test_gpt_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPT(**SMALL_GPT | changes)


def test_inputs_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"images: got shape \[2, 3, 8, 8\]; .*\[N, 1, 8, 8\]"):
        VisionTransformer(**SMALL_VIT)(torch.zeros(2, 3, 8, 8))
    with pytest.raises(ValueError, match="tokens: got 10 a row; this model's context is 9"):
        GPT(**SMALL_GPT)(torch.zeros(1, 10, dtype=torch.long))
