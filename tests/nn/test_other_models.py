"""Models of Hugging Face transformers, tiny and randomly initialised, where it is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mixprec

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
TOKENS = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=TOKENS, **SIZES))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=TOKENS, num_key_value_heads=2, **SIZES)
    return transformers.LlamaForCausalLM(config)


def qwen() -> nn.Module:
    config = transformers.Qwen2Config(vocab_size=TOKENS, num_key_value_heads=2, **SIZES)
    return transformers.Qwen2ForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=TOKENS, n_embd=32, n_layer=2, n_head=4)
    return transformers.GPT2LMHeadModel(config)


def linears(model: nn.Module) -> int:
    return sum(type(module) is nn.Linear for module in model.modules())


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("make", [bert, llama, qwen, gpt2])
def test_a_language_model_converts_trains_and_reverts(
    make: Callable[[], nn.Module], recipe: str
) -> None:
    torch.manual_seed(0)
    model = make()
    keys, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    count = linears(model)
    report = mixprec.convert(model, recipe)
    assert len(report.converted) == count > 0
    assert all(row.reason for row in report.left)
    assert list(model.state_dict()) == keys
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    mixprec.attach(model, optimizer)
    tokens = torch.randint(TOKENS, (2, 16))
    losses = []
    for _ in range(4):
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    mixprec.revert(model)
    assert [type(module) for module in model.modules()] == classes


def test_attention_of_a_library_is_included_by_name() -> None:
    torch.manual_seed(0)
    model, tokens = llama().eval(), torch.randint(TOKENS, (1, 8))
    plain = model(input_ids=tokens).logits
    recipe = mixprec.Recipe.from_dict({"variant_of": "mxfp8", "attention": True})
    only = {"*.self_attn": recipe}
    report = mixprec.convert(model, only, include=("LlamaAttention",))
    assert "LlamaAttention" in {row.type for row in report.converted}
    assert not torch.equal(model(input_ids=tokens).logits, plain)


def test_a_vision_transformer_converts_and_trains() -> None:
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=4, **SIZES)
    model = transformers.ViTForImageClassification(config)
    report = mixprec.convert(model, "fp8_rowwise")
    assert {row.type for row in report.converted} == {"Linear", "Conv2d"}
    images, labels = torch.randn(4, 3, 16, 16), torch.arange(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        loss: Tensor = model(pixel_values=images, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
