"""Every recipe: a run resumed after any of its steps equals the one that was not interrupted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mixprec.recipes import RECIPES
from mixprec.train import checkpoint
from mixprec.train.config import Config
from mixprec.train.trainer import Trainer
from train.small_models import SMALL_NET, use
from train.test_mixed_precision import RESUMED, leaves

STEPS = 5
EVALUATED = 3


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in RESUMED])
def test_a_run_resumed_after_any_step_equals_the_uninterrupted_one(
    small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recipe: str
) -> None:
    use(monkeypatch, SMALL_NET)
    adam = ["optimizer.name=adamw", "optimizer.lr=0.01", "train.clip_norm=5.0"]
    # two steps an epoch, so that the schedule and the order of the data change on the way
    config = small(f"recipe={recipe}", *adam, "data.batch_size=16", "train.accumulate=2")
    straight = Trainer(config)
    records, paths = [], []
    for step in range(STEPS):
        paths.append(checkpoint.save(tmp_path, step, straight.state(), keep=STEPS))
        records.append(straight.step())
        if step == EVALUATED:
            straight.evaluate()
    expected = dict(leaves(straight.state()))
    for done, path in enumerate(paths):
        torch.manual_seed(99)
        resumed = Trainer(config)
        resumed.load_state(checkpoint.load(path))
        assert [resumed.step() for _ in range(done, STEPS)] == records[done:]
        found = dict(leaves(resumed.state()))
        assert [key for key in found | expected if found.get(key) != expected.get(key)] == []
