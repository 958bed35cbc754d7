"""Parity runs: one model, one seed, every recipe; what 150 steps end at, beside FP32."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from mixprec.recipes import RECIPES
from mixprec.train.config import load
from mixprec.train.feed import dataset_of
from mixprec.train.trainer import Trainer

STEPS, TAIL = 150, 15
# by the bits of the narrowest operand; those of 4 keep the first and the last layers in bf16
MARGIN = {8: 0.02, 4: 0.08}
KEPT = ("convert.keep_first=1", "convert.keep_last_share=0.15")
COMPARED = [
    "fp8_tensorwise",
    "fp8_delayed",
    "fp8_rowwise",
    "fp8_rowwise_hp_grad_weight",
    "fp8_blockwise",
    "mxfp8",
    "mxfp4",
    "nvfp4",
]

VIT = (
    "model=vit",
    'model_options={preset="tiny", size=28, patch=14, channels=1, classes=10}',
    "data.name=mnist",
    "data.batch_size=16",
    "optimizer.lr=3e-5",
    "train.clip_norm=1.0",
)
GPT = (
    "model=gpt",
    'model_options={preset="tiny", context=64}',
    "data.name=text",
    "data.batch_size=4",
    "optimizer.lr=3e-4",
    # without it the first steps are as chaotic as 2 % of the loss, under FP32 too
    "train.clip_norm=1.0",
)


def bits(recipe: str) -> int:
    return min((s.format.bits for s in RECIPES[recipe].specs if s is not None), default=32)


def run(settings: Sequence[str], recipes: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Of each recipe the first loss and the mean of the last 15."""
    found = {}
    data = None
    for recipe in recipes:
        kept = KEPT if bits(recipe) == 4 else ()
        more = ["optimizer.name=adamw", "optimizer.options={fused=true}"]
        more += [f"train.steps={STEPS}", "train.epochs=100"]
        config = load(None, [*settings, *more, *kept, f"recipe={recipe}"])
        data = data or dataset_of(config)
        trainer = Trainer(config, data)
        losses = [trainer.step().loss for _ in range(STEPS)]
        found[recipe] = (losses[0], statistics.fmean(losses[-TAIL:]))
    return found


def assert_near_fp32(settings: Sequence[str], recipes: Sequence[str]) -> None:
    """FP32 learns, and each recipe ends within its margin of it, though not at the same digits."""
    torch.set_num_threads(1)
    found = run(settings, ["fp32", *recipes])
    first, end = found["fp32"]
    assert end < 0.7 * first
    assert all(found[recipe][1] != end for recipe in recipes)
    off = {recipe: found[recipe][1] / end - 1 for recipe in recipes}
    assert {name: far for name, far in off.items() if abs(far) > MARGIN[bits(name)]} == {}


def main() -> None:
    """Print the table of docs/results.md."""
    for name, settings in (("ViT-tiny, digits", VIT), ("GPT-tiny, text", GPT)):
        found = run(settings, ["fp32", "bf16", *COMPARED, "mxfp6_e3m2", "mxfp6_e2m3"])
        first, end = found["fp32"]
        print(f"{name}: fp32 {first:.3f} -> {end:.4f}")
        for recipe, (_, loss) in found.items():
            print(f"| `{recipe}` | {loss:.4f} | {100 * (loss / end - 1):+.2f} % |", flush=True)


if __name__ == "__main__":
    main()
