"""Folders as `mixprec train` leaves them, written by hand, so that no test of a page trains."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CONFIG = """model = "mlp"
recipe = "{recipe}"
[train]
steps = 40
seed = 1
[optimizer]
name = "adamw"
lr = 0.00012345
[optimizer.options]
betas = [0.9, 0.95]
"""
LAYERS = ("blocks.0.mlp.0", "blocks.0.mlp.2", "head <b>")
FIELDS = ("amax", "range_use", "saturation", "underflow", "scale")
ALARM = {
    "kind": "saturation",
    "layer": "blocks.0.mlp.2",
    "operand": "output.a",
    "figures": {"share": 0.0123, "limit": 0.01},
    "text": "1.2 % of output.a are saturated, above 1 %",
    "suggestion": "use a dynamic scale <here>",
}


def row(layer: str, place: int, step: int) -> dict[str, Any]:
    """An operand's statistics, each a function of layer and step that a test can repeat."""
    return {
        "layer": layer,
        "product": "output",
        "operand": "a",
        "name": "q" if place == 1 else "",
        "format": "e4m3",
        "amax": 2.0 ** (place - step // 10),
        "range_use": 0.5 + place / 10,
        "saturation": place / 100,
        "underflow": step / 1000,
        "sqnr_db": None if place == 2 else 30.0 - place - step / 10,
        "scale": 2.0**-place,
        "elements": 64,
    }


def lines() -> list[dict[str, Any]]:
    """Records of 40 steps under a loss scale, steps 8 and 20 skipped, and two alarms alike."""
    records: list[dict[str, Any]] = []
    for step in range(4, 41, 4):
        record = {"step": step, "epoch": 0, "loss": 2.0 - step / 40, "lr": 0.1, "grad_norm": 1.0}
        skipped = (step >= 8) + (step >= 20)
        scaling = {"loss_scale": 65536.0 / 2 ** (step > 8), "skipped": skipped}
        records.append(record | scaling | {"step_ms": 10.0 + step})
        if step % 20 == 0:
            records.append({"step": step, "eval_loss": 1.5 - step / 80, "accuracy": step / 50})
            rows = [row(layer, place, step) for place, layer in enumerate(LAYERS)]
            product = {"layer": LAYERS[0], "product": "output", "operand": "", "name": ""}
            records.append({"step": step, "statistics": [*rows, product | {"sqnr_db": 25.5}]})
            records.append({"step": step, "alarm": ALARM})
    return records


def write_run(
    folder: Path,
    *,
    recipe: str = "fp16",
    records: Iterable[Mapping[str, Any]] | None = None,
    result: Mapping[str, Any] | None = None,
) -> Path:
    """A whole run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(CONFIG.format(recipe=recipe))
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "device": "cpu"}))
    text = "".join(
        f"{json.dumps(record)}\n" for record in (lines() if records is None else records)
    )
    (folder / "metrics.jsonl").write_text(text)
    own = {"model": "mlp", "recipe": recipe, "device": "cpu", "steps": 40, "skipped": 2}
    scores = {"train_loss": 1.0, "loss": 0.98765, "accuracy": 0.8, "step_ms": 34.0}
    (folder / "result.json").write_text(json.dumps({**own, **scores} if result is None else result))
    return folder
