"""Whether a checkpoint belongs to a run: what of a configuration may change when it goes on."""

from collections.abc import Mapping
from typing import Any

# A resumed run may go on longer, elsewhere, or be recorded otherwise; all else shapes its numbers.
_MAY_CHANGE = {
    "train.epochs",
    "train.steps",
    "train.device",
    "train.compile",
    "convert.cache_weights",
    "train.log_every",
    "inspect.every",
    "inspect.tensorboard",
    "train.save_model",
    "train.on_nonfinite",
    "train.nonfinite_limit",
    "recipe_source",
    "data.path",
    "data.workers",
    "data.eval_batch_size",
    "checkpoint.every",
    "checkpoint.keep",
    "distributed.strategy",
    "distributed.gather",
    "distributed.timeout",
}


def require_same_run(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse to go on with a configuration that would not give the checkpoint's numbers.

    Raises: ValueError: A line a difference.
    """
    before, now = _flat(saved), _flat(asked)
    changed = [
        f"{key}: got {now.get(key)!r}; the checkpoint was made with {before.get(key)!r}; "
        "keep that, or start a new run"
        for key in sorted(before.keys() | now.keys())
        if key not in _MAY_CHANGE and before.get(key) != now.get(key)
    ]
    if changed:
        raise ValueError("\n".join(changed))


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        nested = isinstance(value, Mapping)
        flat |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat
