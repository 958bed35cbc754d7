"""`plan`: memory, layers and roofline of a training run on hardware that need not be there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mixprec.amp.autocast import DTYPES
from mixprec.amp.setup import cast_parameters
from mixprec.nn.layer import QuantizedLayer
from mixprec.nn.report import Report
from mixprec.planning.batches import META, row_of
from mixprec.planning.memory import Memory
from mixprec.planning.qualification import LayerPlan, layer_plans, product_sizes
from mixprec.planning.records import MemoryPlan, Plan, RecipePlan
from mixprec.planning.rehearsal import Step
from mixprec.planning.repeats import FEWEST, find_repeats, shortened
from mixprec.planning.roofline import Cost, Roofline, baseline_of, cost, roofline
from mixprec.planning.stand_ins import CPU, stand_ins
from mixprec.planning.targets import Target, target_of
from mixprec.recipes import RECIPES, Base, Recipe
from mixprec.support import release
from mixprec.train.checkpoint import isolated_generators
from mixprec.train.compared import chosen_recipes
from mixprec.train.config import Config, from_dict, load, to_dict
from mixprec.train.conversion import converted
from mixprec.train.models import BuiltModel, build_model
from mixprec.train.recipe_choice import RecipeTable, recipe_label, step_recipe

_DRAWS = {torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.erfinv_}
_NOTES = (
    "not counted: the process itself, libraries' workspaces, fragmentation, the data set",
    "peak: temporaries as operations one by one make them, emulated products among them",
)
_SHARDED = (
    "sharded: parameters, gradients, masters and state divided by the GPUs, the batch is each "
    "GPU's; two blocks gathered at a time, all outside of blocks throughout; no communication"
)


def plan(
    config: Config | str | Path | None = None,
    target: str = "h100",
    memory: str | int | None = None,
    gpus: int = 1,
    *,
    recipes: RecipeTable | Recipe | Sequence[RecipeTable | Recipe] | None = None,
    batch: int | None = None,
    torch_version: str | None = None,
) -> Plan:
    """What a training run would take and how it would run, without the hardware and the data.

    The configuration's model is made, converted and takes one training step on shapes alone, whose
    bytes are counted as ``mixprec.memory`` counts real ones. Of blocks that repeat a few are run
    for all.

    Args:
        config: A Config or a TOML file; None is ``mnist_cnn``. Data are not read; its batch size is
            one GPU's.
        target: One of ``mixprec.planning.targets.TARGETS``.
        memory: Of one GPU: bytes, or text such as "80GB"; None is the target's own.
        gpus: Over how many the run is sharded, fully (``mixprec.planning.memory`` says how).
        recipes: Names, recipes or tables in place of the configuration's.
        batch: Rows of one GPU's batch, in place of the configuration's.
        torch_version: Of the release that would run it, such as "2.11"; this one by default.

    Returns: A ``Plan``; bytes are those of one GPU.

    Raises:
        ConfigError, ValueError: A configuration, name or number that cannot be used; a model that
            cannot be made or run on the meta device.
        TypeError: config or recipes is none of these.

    Exactness: for a CPU the figures are those of the counters of ``mixprec.measure`` and
    ``mixprec.memory``, parameters, gradients, masters and state exactly, activations within 0.1 %,
    the peak within 5 % (tests/planning/test_memory.py); for a GPU those of eager operations on
    whole tensors (docs/plan.md).
    """
    resolved = _resolved(config, batch)
    for name, value in (("gpus", gpus), ("batch", resolved.data.batch_size)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: got {value!r}; must be a whole number of at least 1; use 1")
    place = target_of(target, memory)
    version = str(torch.__version__) if torch_version is None else torch_version
    release(version)
    chosen = [resolved.recipe] if recipes is None else chosen_recipes(resolved, recipes).values()
    costs = _Costs(resolved)
    with isolated_generators(CPU):
        parts = [
            _Part(replace(resolved, recipe=recipe), place, gpus, version, costs)
            for recipe in chosen
        ]
        entries = tuple(part.plan() for part in parts)
    return Plan(
        model=resolved.model,
        parameters=parts[0].count,
        target=place.name,
        memory_bytes=place.memory,
        gpus=gpus,
        batch=resolved.data.batch_size,
        torch=version,
        recipes=entries,
        notes=_NOTES if gpus == 1 else (*_NOTES, _SHARDED),
    )


def _resolved(config: Config | str | Path | None, batch: int | None) -> Config:
    found = config if isinstance(config, Config) else load(config)
    if batch is None:
        return found
    table = to_dict(found)
    table["data"] |= {"batch_size": batch}
    return from_dict(table)


def _built(config: Config) -> BuiltModel:
    """The configuration's model on the meta device."""
    try:
        with META, _NoDraws():
            return build_model(config.model, config.model_options)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"model: got {config.model}, which cannot be made on torch's meta device: "
            f"{str(error).splitlines()[0]}; let it make its tensors where torch's default device is"
        ) from error


class _NoDraws(TorchFunctionMode):
    """Leaves out the random numbers of a model's weights, which on meta take time and are none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func in _DRAWS else func(*args, **(kwargs or {}))


class _Costs:
    """What the plain model costs in a step, by the type that it runs in; each counted once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._found: dict[Base, Cost] = {}

    def of(self, base: Base) -> Cost:
        if base not in self._found:
            model, loss = _built(self._config)
            model.to(DTYPES[base])
            step = Step(
                model=model,
                loss=loss,
                recipe=replace(RECIPES["fp32"], parameters=base, base=base),
                optimizer=self._config.optimizer,
                row=row_of(self._config),
            )
            self._found[base] = _whole_cost(step, self._config.data.batch_size)
        return self._found[base]


def _whole_cost(step: Step, rows: int) -> Cost:
    repeats = find_repeats(step.model)
    few = [FEWEST] * len(repeats)
    with shortened(repeats, few):
        base = cost(step, rows)
    whole = dict(base)
    for run, repeat in enumerate(repeats):
        with shortened(repeats, [n + (run == i) for i, n in enumerate(few)]):
            more = cost(step, rows)
        for key, value in base.items():
            whole[key] += (len(repeat.blocks) - FEWEST) * (more[key] - value)
    return whole


class _Part:
    """The plan of one recipe."""

    def __init__(
        self, config: Config, target: Target, gpus: int, version: str, costs: _Costs
    ) -> None:
        self._config, self._target, self._gpus = config, target, gpus
        self._version, self._costs = version, costs
        self._recipe = step_recipe(config.recipe, config.base)
        built = _built(config)
        self.count = sum(p.numel() for p in built[0].parameters())
        self._names = dict(built[0].named_modules(remove_duplicate=False))
        self._step, self._report = self._prepared(built)
        self._repeats = find_repeats(self._step.model)

    def plan(self) -> RecipePlan:
        with stand_ins(self._step.model, self._step.device):
            return self._planned()

    def _planned(self) -> RecipePlan:
        config, rows = self._config, self._config.data.batch_size
        memory = Memory(self._step, self._repeats, self._gpus)
        figures = memory.figures(rows)
        peak = round(memory.peak(rows))
        shares = {
            name: memory.share(figures["", name]) for name in ("gradients", "masters", "state")
        }
        layers = self._layers()
        return RecipePlan(
            recipe=recipe_label(config.recipe, config.base),
            base=self._recipe.base,
            memory=MemoryPlan(
                parameters=memory.share(memory.parameters),
                gradients=shares["gradients"],
                masters=shares["masters"],
                optimizer=shares["state"],
                activations=round(figures["", "saved"]),
                peak=peak,
            ),
            fits=peak <= self._target.memory,
            largest_batch=memory.largest_batch(self._target.memory, rows),
            layers=layers,
            roofline=self._roofline(
                layers,
                # all but the gradients are written again
                shares["gradients"]
                + 2 * (shares["masters"] + shares["state"] + memory.share(memory.parameters)),
            ),
        )

    def _prepared(self, built: BuiltModel) -> tuple[Step, Report]:
        model, loss = built
        # what an implementation cannot do on meta says nothing about the target
        here = replace(self._config, convert=replace(self._config.convert, impl="auto"))
        report = converted(model, here)
        cast_parameters(model, self._recipe)
        is_gpu = self._target.accelerator is not None
        step = Step(
            model=model,
            loss=loss,
            recipe=self._recipe,
            optimizer=self._config.optimizer,
            row=row_of(self._config),
            accumulates=self._config.train.accumulate > 1,
            device=META if is_gpu else CPU,
        )
        return step, report

    def _layers(self) -> tuple[LayerPlan, ...]:
        with shortened(self._repeats, [FEWEST] * len(self._repeats)):
            sizes = product_sizes(self._step, self._config.data.batch_size)
        for repeat in self._repeats:
            # not the first, whose input may need no gradient
            last = list(repeat.blocks[FEWEST - 1].modules())
            for block in repeat.blocks[FEWEST:]:
                pairs = zip(block.modules(), last, strict=True)
                sizes |= {id(own): sizes[id(one)] for own, one in pairs if id(one) in sizes}
        return layer_plans(
            self._report,
            self._names,
            sizes,
            self._target,
            torch_version=self._version,
            impl=self._config.convert.impl,
        )

    def _roofline(self, layers: Sequence[LayerPlan], update_bytes: float) -> Roofline | None:
        row = self._target.accelerator
        if row is None:
            return None
        bases = dict.fromkeys((self._recipe.base, baseline_of(self._recipe)))
        return roofline(
            self._recipe,
            layers,
            {
                name: module.recipe
                for name, module in self._names.items()
                if isinstance(module, QuantizedLayer)
            },
            row,
            {base: self._costs.of(base) for base in bases},
            update_bytes,
        )
