"""Sensitive layers in higher precision: the practice published for training in 4 bits."""

from __future__ import annotations

import glob
import math

from torch import nn

from mixprec.nn.kinds import kind_of
from mixprec.nn.selection import Recipes, recipe_patterns
from mixprec.recipes import Recipe, get_recipe, with_base


def keep_sensitive(
    model: nn.Module,
    recipe: Recipes,
    *,
    keep_first: int = 1,
    keep_last_share: float = 0.15,
    kept: str | Recipe = "bf16",
) -> dict[str, Recipe]:
    """The mapping for ``convert`` that keeps the first and last layers in higher precision.

        mixprec.convert(model, keep_sensitive(model, "nvfp4"))

    Products of 4 bits lose most in the last layers, the head among them, and runs in which every
    layer has 4 bits were seen to diverge; about 15 % of the linear layers, nearly all of them at
    the end, in bfloat16 were enough over 10^13 tokens. Embeddings and norms are not converted
    anyway.

    Args:
        model: Its layers of ``nn.KINDS`` count in the order of ``model.modules()``, each once.
        recipe: For the other layers; a mapping keeps its patterns, behind those of kept layers.
        keep_first: How many layers to keep at the start.
        keep_last_share: Share of these layers to keep at the end, rounded up to whole layers, so
            that the head is among them; 0 keeps none.
        kept: Recipe of the kept layers' products, on the base of ``recipe``.

    Returns:
        Name patterns to recipes, kept layers first.

    Raises:
        ValueError: An argument out of range, or no layer left for ``recipe``.

    Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, 2025. Its own
    12-billion model kept whole blocks (about 16 % of its linear layers), chosen by their place.
    """
    if not isinstance(keep_first, int) or isinstance(keep_first, bool) or keep_first < 0:
        raise ValueError(f"keep_first: got {keep_first!r}; must be at least 0; use 1")
    if not isinstance(keep_last_share, int | float) or not 0 <= keep_last_share < 1:
        raise ValueError(
            f"keep_last_share: got {keep_last_share!r}; must be a share below 1; use 0.15"
        )
    patterns = recipe_patterns(recipe)
    names = [name for name, module in model.named_modules() if kind_of(module) is not None]
    last = math.ceil(keep_last_share * len(names))
    if keep_first + last >= max(len(names), 1):
        raise ValueError(
            f"keep_first: got {keep_first} with keep_last_share {keep_last_share}; of "
            f"{len(names)} layers none is left for the recipe; keep fewer"
        )
    base = patterns[0][1].base
    precise = with_base(get_recipe(kept), base)
    chosen = names[:keep_first] + names[len(names) - last :]
    return {glob.escape(name): precise for name in chosen} | dict(patterns)
