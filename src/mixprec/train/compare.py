"""Several recipes on one model: the same weights, batches and dropout masks, one table.

The runs advance together, one optimizer step each in turn, so that drift of the machine hits all
alike; the ratio of step times is the median over the steps of the ratio within a step.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from mixprec.hardware import generation
from mixprec.measure import saved_bytes, sqnr_db
from mixprec.memory import peak_bytes, process_peak, state_bytes, tensors_in
from mixprec.nn import QuantizedLinear
from mixprec.quantization import QuantizedTensor
from mixprec.recipes import Recipe
from mixprec.train import checkpoint
from mixprec.train.compared import chosen_recipes, configuration, level_notes
from mixprec.train.config_fields import Config, InspectConfig
from mixprec.train.distributed import pick_device
from mixprec.train.faults import NonFiniteError
from mixprec.train.feed import dataset_of
from mixprec.train.log import (
    ProgressLines,
    create_folder,
    environment,
    finite,
    write_json,
    write_losses,
)
from mixprec.train.recipe_choice import RecipeTable
from mixprec.train.records import StepRecord
from mixprec.train.splits import Dataset
from mixprec.train.trainer import Trainer

EMULATED_NOTE = "emulated: timing is not hardware speed"
FP8_IMPL = "scaled_mm"
# The operand that each side of the three products is: activations, weights, output gradients.
OPERAND_KINDS: Mapping[str, str] = {
    "output.a": "x",
    "output.b": "w",
    "grad_input.a": "g",
    "grad_input.b": "w",
    "grad_weight.a": "g",
    "grad_weight.b": "x",
}
_OVER_SEEDS = ("train_loss", "loss", "accuracy", "accuracy_difference")


@dataclass(slots=True, kw_only=True)
class _Contender:
    """One recipe's run; a run that met a NaN or an infinity keeps its failure and stands still."""

    label: str
    trainer: Trainer
    records: list[StepRecord] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    failure: str | None = None

    def step(self) -> None:
        started = time.perf_counter()
        self._guarded(lambda: self.records.append(self.trainer.step()))
        if self.trainer.device.type != "cpu":
            torch.get_device_module(self.trainer.device).synchronize()
        self.step_ms.append(1e3 * (time.perf_counter() - started))

    @property
    def scale_curve(self) -> dict[str, list[Any]] | None:
        """The loss scale of each step, and the steps that were skipped; None without scaling."""
        if self.loss_scale is None:
            return None
        counts = pairwise([0, *(record.skipped for record in self.records)])
        return {
            "step": [record.step for record in self.records],
            "loss_scale": [record.loss_scale for record in self.records],
            "skipped": [step for step, (a, b) in enumerate(counts, start=1) if b > a],
        }

    @property
    def loss_scale(self) -> float | None:
        """The scale after the last step; None without loss scaling."""
        return self.trainer.loss_scale

    def record(self) -> dict[str, Any]:
        """What one seed says about the recipe; None where the run failed before it."""
        losses = [record.loss for record in self.records]
        tail = losses[-max(1, len(losses) // 10) :]
        record: dict[str, Any] = {
            "recipe": self.label,
            "impl": self.trainer.impl,
            "steps": self.trainer.total,
            "train_loss": None if self.failure else statistics.fmean(tail),
            "loss": None,
            "accuracy": None,
            "saved_bytes": None,
            "sqnr": dict.fromkeys(OPERAND_KINDS),
            **state_bytes(self.trainer.model, self.trainer.optimizer),
            "peak_bytes": None,
            # The first step allocates, and compiles.
            "step_ms": self.step_ms[1:] or self.step_ms,
            "curve": losses,
            "scale_curve": self.scale_curve,
            "loss_scale": self.loss_scale,
            "skipped": self.trainer.skipped,
        }
        self._guarded(lambda: record.update(_scores(self.trainer)))
        if self.failure is None:
            record["peak_bytes"] = _peak(self.trainer)
        return record | {"failure": self.failure}

    def _guarded(self, action: Callable[[], None]) -> None:
        if self.failure is None:
            try:
                action()
            except NonFiniteError as error:
                self.failure = str(error)


def run(
    config: Config | str | Path | None = None,
    *,
    recipes: RecipeTable | Recipe | Sequence[RecipeTable | Recipe] | None = None,
    steps: int | None = None,
    seeds: int = 1,
    out: str | Path | None = None,
    device: str | None = None,
    base: str | None = None,
    accumulate: str | Sequence[str] | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Train one model under several recipes and say what each costs and loses.

    Args:
        config: A Config or a TOML file; None is `mnist_cnn` on `mnist` for three epochs.
        recipes: Names, recipes or tables, or one alone; the others are compared with the first. A
            name may be that of the configuration's own recipe. None: fp32, the FP8 recipes, and the
            configuration's own.
        steps: Optimizer steps, before the epochs are over.
        seeds: Runs of each recipe, with the configuration's seed and those after it.
        out: A folder for `result.json` and `losses.csv`.
        device, base: In place of the configuration's; the base in place of each recipe's own.
        accumulate: How products of 8 bits and less are added, `fp32`, `hopper` or
            `hopper_promoted`, in every recipe; of several, each recipe runs with each.
        console: Where progress goes; standard error by default.

    Returns: `{"runs": [...], "by_seed": [...], ...}`; a run is one recipe, and `by_seed` has the
        same records for each seed alone, with SQNR by operand and every step's time. In a run:

        - `train_loss`: mean over the last tenth of the steps; `loss`, `accuracy` (0 to 1): of the
          evaluation rows; `accuracy_difference`: to the first recipe. All are means over the seeds;
          `spread` holds their sample standard deviations.
        - `sqnr`: decibels of x, w and g, mean over layers and products on one batch after training.
        - `step_ms`: median; `step_ratio`: median of the ratios to the first recipe's same step.
        - `saved_bytes`: kept for backward by one batch, parameters apart; `param_bytes`,
          `grad_bytes`, `optimizer_bytes`: of the tensors that exist after a step; `peak_bytes`: the
          most that is alive at once in a step, temporaries too and the data apart
          (`mixprec.memory.peak_bytes`), None for a model compiled for a CPU.
        - `loss_scale`: after the last step, None without loss scaling; `skipped`: steps that an
          overflow cost; `scale_curve`: the scale of each step and which were skipped; of the last
          seed.
        - `impl`: the resolved implementation; `curve`: the training loss of each step, mean over
          seeds; `failure`: why a run has no numbers, else None.

        `process_peak_bytes` is of the whole process, which holds all the runs, and never goes down.
        `notes` says what the figures do not: that emulated times are not the hardware's, or that
        the device's FP8 units add in fewer bits than FP32, with the bound.
    Raises:
        ConfigError, ValueError: As `mixprec.train.run`, and for a recipe that is named twice.
        TypeError: recipes or config is none of these.
    """
    if seeds < 1:
        raise ValueError(f"seeds: got {seeds}; at least one run is needed; give 1 or more")
    start = configuration(config, steps, device, base)
    chosen = chosen_recipes(start, recipes, accumulate)
    target = pick_device(start.train.device)
    data = dataset_of(start)
    folder = None if out is None else create_folder(out)
    with checkpoint.isolated_generators(target):
        by_seed = [_one_seed(start, chosen, data, offset, console) for offset in range(seeds)]
    impls = " ".join(record["impl"] for record in by_seed[0])
    result = {
        "model": start.model,
        "data": start.data.name,
        "steps": by_seed[0][0]["steps"],
        "seeds": [start.train.seed + offset for offset in range(seeds)],
        "notes": [*level_notes(start, list(chosen)), *_notes(impls, target)],
        "environment": environment(target),
        "process_peak_bytes": process_peak(),
        "runs": [_run(records, by_seed) for records in zip(*by_seed, strict=True)],
        "by_seed": by_seed,
    }
    if folder is not None:
        write_json(folder / "result.json", result)
        write_losses(folder / "losses.csv", result)
    return finite(result)


def _notes(impls: str, device: torch.device) -> list[str]:
    """What a reader of the figures has to know of the implementations behind them."""
    notes = [EMULATED_NOTE] if "emulated" in impls else []
    if FP8_IMPL in impls and device.type == "cuda":
        notes.append(generation(torch.cuda.get_device_capability(device)).fp8_sums)
    return list(filter(None, notes))


def _one_seed(
    base: Config,
    recipes: Mapping[str, RecipeTable],
    data: Dataset,
    offset: int,
    console: Console | None,
) -> list[dict[str, Any]]:
    train = replace(base.train, seed=base.train.seed + offset)
    base = replace(base, train=train, inspect=InspectConfig())
    contenders = [
        _Contender(label=label, trainer=Trainer(replace(base, recipe=recipe), data))
        for label, recipe in recipes.items()
    ]
    total = contenders[0].trainer.total
    log_every = max(base.train.log_every, total // 10)
    with ProgressLines(total, console) as lines:
        for done in range(1, total + 1):
            # Whoever goes first finds other caches than the rest, so each does in turn.
            first = done % len(contenders)
            for contender in contenders[first:] + contenders[:first]:
                contender.step()
            losses = ", ".join(
                f"{c.label} {c.records[-1].loss:.4f}" for c in contenders if c.records
            )
            show = lines.status if done % log_every == 0 or done == total else lines.advance
            show(done, f"seed {train.seed} step {done} of {total}: {losses}")
    return [contender.record() for contender in contenders]


def _scores(trainer: Trainer) -> dict[str, Any]:
    score = trainer.evaluate()
    saved, decibels = _probe(trainer)
    return {
        "loss": score.loss,
        "accuracy": score.accuracy,
        "saved_bytes": saved,
        "sqnr": decibels,
    }


def _probe(trainer: Trainer) -> tuple[int, dict[str, float | None]]:
    """Bytes kept for backward, and each operand's mean SQNR, from one batch; no update follows."""
    inputs, targets = trainer.batches(0)[0]
    met: list[tuple[QuantizedLinear, Tensor, list[Tensor]]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(module, QuantizedLinear)
        grads: list[Tensor] = []
        met.append((module, args[0].detach(), grads))
        output.register_hook(grads.append)

    quantized = [m for m in trainer.model.modules() if isinstance(m, QuantizedLinear)]
    handles = [module.register_forward_hook(note) for module in quantized]
    with saved_bytes(trainer.model.parameters()) as saved:
        loss = trainer.loss_of(inputs, targets)
    loss.backward()
    for handle in handles:
        handle.remove()
    decibels: dict[str, list[float]] = {operand: [] for operand in OPERAND_KINDS}
    for module, x, grads in met:
        for operand, (exact, used) in module.quantized_operands(x, grads[0]).items():
            if isinstance(used, QuantizedTensor):
                decibels[operand].append(sqnr_db(exact, used.dequantize()))
    return saved.activation_bytes, {name: _mean(values) for name, values in decibels.items()}


def _peak(trainer: Trainer) -> int | None:
    """The most bytes alive in one more step; None where they cannot be counted, or it failed."""
    if trainer.config.train.compile and trainer.device.type == "cpu":
        return None
    model = trainer.model
    existing = [*model.parameters(), *model.buffers()]
    existing += tensors_in(trainer.optimizer.state_dict())
    try:
        return peak_bytes(trainer.step, trainer.device, tensors=existing, apart=trainer.held_data)
    except NonFiniteError:
        return None


def _run(
    records: Sequence[dict[str, Any]], by_seed: Sequence[Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    """One recipe's entry from its record under each seed and those of the first recipe."""
    firsts = [contenders[0] for contenders in by_seed]
    for record, first in zip(records, firsts, strict=True):
        record["accuracy_difference"] = _difference(record["accuracy"], first["accuracy"])
    pairs = list(zip(records, firsts, strict=True))
    ratios = [a / b for r, f in pairs for a, b in zip(r["step_ms"], f["step_ms"], strict=True)]
    failure = next((r["failure"] for r in records if r["failure"]), None)
    ratio_known = not failure and not any(first["failure"] for first in firsts)
    last = records[-1]
    return {
        "recipe": last["recipe"],
        "impl": last["impl"],
        **{key: _mean([r[key] for r in records]) for key in _OVER_SEEDS},
        "loss_scale": last["loss_scale"],
        "skipped": last["skipped"],
        "sqnr": {kind: _mean(_of_kind(kind, records)) for kind in "xwg"},
        "step_ms": None if failure else statistics.median(t for r in records for t in r["step_ms"]),
        "step_ratio": statistics.median(ratios) if ratio_known else None,
        "saved_bytes": last["saved_bytes"],
        "param_bytes": last["param_bytes"],
        "grad_bytes": last["grad_bytes"],
        "optimizer_bytes": last["optimizer_bytes"],
        "peak_bytes": last["peak_bytes"],
        "failure": failure,
        "spread": {key: _deviation([r[key] for r in records]) for key in _OVER_SEEDS},
        "curve": _mean_curve([r["curve"] for r in records]),
        "scale_curve": last["scale_curve"],
    }


def _of_kind(kind: str, records: Sequence[Mapping[str, Any]]) -> list[float]:
    """The SQNR of x, w or g in each product that quantises it, under each seed."""
    operands = [name for name, its_kind in OPERAND_KINDS.items() if its_kind == kind]
    found = [record["sqnr"][name] for record in records for name in operands]
    return [decibels for decibels in found if decibels is not None]


def _mean_curve(curves: Sequence[Sequence[float]]) -> dict[str, list[Any]]:
    # As long as the shortest: a mean over fewer seeds would jump where a run failed.
    losses = [statistics.fmean(values) for values in zip(*curves, strict=False)]
    return {"step": list(range(1, len(losses) + 1)), "loss": losses}


def _difference(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known and len(known) == len(values) else None


def _deviation(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) == len(values) and len(known) > 1 else None
