"""Transformers whose step time is worth measuring: a vision transformer and a causal byte model.

Both are stacks of the same pre-norm block, width W, heads H:

    x = x + proj(attention(qkv(norm1(x))))        qkv: W -> 3 W, H heads of W / H
    x = x + fc2(gelu(fc1(norm2(x))))              fc1: W -> 4 W

Weights of linear layers, embeddings and positions start normal with deviation 0.02, biases at zero.
Sources: Dosovitskiy et al., "An Image is Worth 16x16 Words", arXiv 2010.11929, 2020; Radford et
al., "Language Models are Unsupervised Multitask Learners" (GPT-2), 2019.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_DEVIATION = 0.02

VIT_PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        name: MappingProxyType(
            dict(size=size, patch=16, width=width, depth=depth, heads=heads, classes=classes)
        )
        for name, size, width, depth, heads, classes in (
            ("tiny", 224, 192, 12, 3, 1000),
            ("small", 224, 384, 12, 6, 1000),
            ("base", 224, 768, 12, 12, 1000),
            ("large", 224, 1024, 24, 16, 1000),
            ("huge", 256, 1280, 32, 16, 1024),
        )
    }
)
GPT_PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        name: MappingProxyType(dict(context=context, width=width, depth=depth, heads=heads))
        for name, context, width, depth, heads in (
            ("tiny", 256, 192, 6, 6),
            ("small", 512, 384, 8, 8),
            ("base", 1024, 768, 12, 12),
        )
    }
)


class Block(nn.Module):
    """Pre-norm attention and a two-layer perceptron, each added to x [N, T, W]."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self._attention(self.norm1(x)))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

    def _attention(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return mixed.transpose(1, 2).reshape(rows, length, width)


class VisionTransformer(nn.Module):
    """Images [N, channels, size, size] to logits [N, classes].

    Patches are a convolution with kernel and stride `patch`; positions are learned; there is no
    class token: the mean over the (size / patch)^2 patches goes to the head. Its loss is the
    cross-entropy.

    Args: `size`, `patch` in pixels; the rest are counts. `VIT_PRESETS` has usual ones.
    Raises: ValueError: A count below 1, a patch that does not divide the size, heads that do not
        divide the width; images of another shape than the model's.
    """

    def __init__(
        self,
        *,
        size: int,
        patch: int,
        width: int,
        depth: int,
        heads: int,
        classes: int,
        channels: int = 3,
    ) -> None:
        check_vision(size, patch, width, depth, heads, classes, channels)
        super().__init__()
        self.shape = (channels, size, size)
        self.patches = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)
        self.positions = nn.Parameter(torch.empty((size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=False) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1:] != self.shape:
            raise ValueError(
                f"images: got shape {list(images.shape)}; this model takes [N, "
                f"{', '.join(map(str, self.shape))}]; set model_options size and channels to the "
                "data's"
            )
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


class GPT(nn.Module):
    """Tokens [N, T], T <= context, to the logits [N, T, vocabulary] of what follows each.

    Causal: the logits at t depend on tokens 0 to t alone. Positions are learned. Its loss is the
    cross-entropy of the next token, by default a byte.

    Args: `context`, the most tokens at once, and the rest are counts; `tied`: the head's weight is
        the embedding's. `GPT_PRESETS` has usual ones.
    Raises: ValueError: A count below 1, heads that do not divide the width, or more tokens than
        the context.
    """

    def __init__(
        self,
        *,
        context: int,
        width: int,
        depth: int,
        heads: int,
        vocabulary: int = 256,
        tied: bool = False,
    ) -> None:
        check_gpt(context, width, depth, heads, vocabulary, tied)
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads, causal=True) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        if tied:
            self.head.weight = self.embedding.weight
        _initialise(self)

    def forward(self, tokens: Tensor) -> Tensor:
        length, context = tokens.shape[1], len(self.positions)
        if length > context:
            raise ValueError(
                f"tokens: got {length} a row; this model's context is {context}; pass fewer, or "
                "set model_options context"
            )
        x = self.embedding(tokens) + self.positions[:length]
        return self.head(self.norm(self.blocks(x)))


def check_vision(
    size: int, patch: int, width: int, depth: int, heads: int, classes: int, channels: int = 3
) -> None:
    """Raise ValueError for what a `VisionTransformer` cannot be made of."""
    _require_counts(
        size=size,
        patch=patch,
        width=width,
        depth=depth,
        heads=heads,
        classes=classes,
        channels=channels,
    )
    _require_divisor("patch", patch, "size", size)
    _require_divisor("heads", heads, "width", width)


def check_gpt(
    context: int, width: int, depth: int, heads: int, vocabulary: int = 256, tied: bool = False
) -> None:
    """Raise ValueError for what a `GPT` cannot be made of."""
    _require_counts(context=context, width=width, depth=depth, heads=heads, vocabulary=vocabulary)
    _require_divisor("heads", heads, "width", width)
    if not isinstance(tied, bool):
        raise ValueError(f"tied: got {tied!r}; the head shares the embedding or not; use a boolean")


def _require_counts(**counts: int) -> None:
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"{name}: got {value!r}; must be a whole number of at least 1; use one"
            )


def _require_divisor(name: str, value: int, whole_name: str, whole: int) -> None:
    if whole % value:
        raise ValueError(
            f"{name}: got {value} with {whole_name} {whole}; {name} must divide {whole_name}; "
            "change either"
        )


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_DEVIATION)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)
    nn.init.normal_(model.get_parameter("positions"), std=_DEVIATION)
