"""What a run of steps consists of: its preset with what was asked for over it, and its cases."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mixprec.bench import flops
from mixprec.bench.contender import Case, Settings
from mixprec.bench.peers import PEERS, check_peers
from mixprec.bench.presets import AUTO, MODES, Preset, Workload, get_preset, workload_of
from mixprec.gemm.api import check_impl
from mixprec.memory import GIB
from mixprec.recipes import NARROW, Recipe, get_recipe, with_base
from mixprec.train.distributed import pick_device

DEVICES = ("auto", "cpu", "cuda", "mps")
LEAST_WARMUP = 2
_SHARE = 0.8
# weights and gradients, which every optimizer has
_LEAST_BYTES = 8
# and Adam's two averages
_USUAL_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A run, resolved.

    Attributes:
        preset: The preset with what was asked for in its place.
        workload: The model and its batches.
        settings: What all cases have alike.
        recipes: By label, the baseline first.
        peers: Names in `PEERS`.
        is_auto: Whether each case is run at the largest batch that fits.
        parameters: Of the model; None where they cannot be counted without making it.
    """

    preset: Preset
    workload: Workload
    settings: Settings
    recipes: dict[str, Recipe]
    peers: tuple[str, ...]
    is_auto: bool
    parameters: int | None

    @property
    def memory(self) -> int:
        """Bytes that the device has for the run."""
        device = self.settings.device
        if device.type == "cuda":
            return int(torch.cuda.mem_get_info(device)[1])
        return self.settings.limit or available_memory()


def plan_of(
    preset: str,
    *,
    workload: Workload | None,
    recipes: Sequence[str | Recipe] | None,
    base: Any,
    modes: Sequence[str] | None,
    batches: Sequence[int] | str | None,
    steps: int | None,
    warmup: int | None,
    peers: Sequence[str],
    device: torch.device,
    impl: str,
    memory_limit: int | None,
    seed: int,
) -> Plan:
    """A plan from the arguments of `run`.

    Raises: ValueError: One that cannot be used.
    """
    start = get_preset(preset)
    is_auto = batches == AUTO
    if isinstance(batches, str) and not is_auto:
        raise ValueError(f"batches: got {batches!r}; must be whole numbers, or auto")
    asked = {"base": base, "modes": modes, "steps": steps, "warmup": warmup}
    asked |= {"batches": None if is_auto else batches}
    chosen = replace(start, **{key: value for key, value in asked.items() if value is not None})
    _check(chosen)
    if memory_limit is not None and memory_limit < 1:
        raise ValueError(f"memory_limit: got {memory_limit}; bytes are at least 1; give more")
    model = workload or workload_of(chosen.model, chosen.options)
    limit = available_memory() if memory_limit is None else memory_limit
    return Plan(
        preset=chosen,
        workload=model,
        settings=Settings(
            device=device,
            optimizer=chosen.optimizer,
            impl=check_impl(impl),
            seed=seed,
            limit=limit if device.type == "cpu" else None,
        ),
        recipes=recipes_by_label(chosen.recipes if recipes is None else recipes, chosen.base),
        peers=check_peers(tuple(peers)),
        is_auto=is_auto,
        parameters=flops.parameter_count(model),
    )


def device_of(name: str) -> tuple[torch.device, str | None]:
    """The device of a name, and, where this machine has none such, the reason in a line.

    Raises: ValueError: No kind of device.
    """
    if name.partition(":")[0] not in DEVICES:
        raise ValueError(f"device: got {name!r}; must be one of {', '.join(DEVICES)}, or cuda:N")
    try:
        return pick_device(name), None
    except ValueError as error:
        return torch.device("cpu"), f"no device: {error}"


def required_device(name: str) -> torch.device:
    """The device of a name.

    Raises: ValueError: No kind of device, or this machine has none such.
    """
    device, reason = device_of(name)
    if reason is not None:
        raise ValueError(reason)
    return device


def available_memory() -> int:
    """Bytes that a run on the CPU may take: 0.8 of what is available, or of all there is."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        values = dict(line.split(":") for line in lines)
        available = int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(_SHARE * available)


def all_cases(plan: Plan) -> Iterator[Case]:
    """Every recipe and peer in every mode at every batch; auto: at one row, to be replaced."""
    for batch in (1,) if plan.is_auto else plan.preset.batches:
        for mode in plan.preset.modes:
            for label, recipe in plan.recipes.items():
                yield Case(label=label, recipe=recipe, mode=mode, batch=batch)
            for peer in plan.peers:
                for name in PEERS[peer].recipes:
                    yield Case(
                        label=f"{peer} {name}",
                        recipe=_around(next(iter(plan.recipes.values()))),
                        mode=mode,
                        batch=batch,
                        peer=peer,
                        peer_recipe=name,
                    )


def too_large(plan: Plan) -> str | None:
    """Why not even the weights and gradients fit, before the model is made; None where they do."""
    needed = (plan.parameters or 0) * _LEAST_BYTES
    if needed <= plan.memory:
        return None
    return (
        f"out of memory: {plan.parameters:,} weights and their gradients are {needed / GIB:.3g} "
        f"GiB; there are {plan.memory / GIB:.3g} GiB"
    )


def fits_in_turns(plan: Plan, cases: Sequence[Case]) -> bool:
    """Whether all contenders, with Adam's state, take less than half of the memory."""
    return len(cases) * (plan.parameters or 0) * _USUAL_BYTES <= plan.memory / 2


def _around(recipe: Recipe) -> Recipe:
    """What is around a peer's products: the first recipe's base, parameters in FP32."""
    base = recipe.base if recipe.base in NARROW else "fp32"
    return with_base(get_recipe("fp32"), base)


def recipes_by_label(recipes: Sequence[str | Recipe], base: Any) -> dict[str, Recipe]:
    """Recipes by a name for tables, all on a base if there is one.

    Raises: ValueError: None, an unknown one, or one that is named twice.
    """
    if isinstance(recipes, str | Recipe):
        recipes = [recipes]
    if not recipes:
        raise ValueError("recipes: got none; a run needs one at least; name some")
    chosen: dict[str, Recipe] = {}
    for entry in recipes:
        recipe = get_recipe(entry)
        # the base that all have alike is said once, above the table
        label = str(recipe) if base is None else recipe.name or "custom"
        if label in chosen:
            raise ValueError(f"recipes: got {label} twice; each is run once; leave one out")
        chosen[label] = recipe if base is None else with_base(recipe, base)
    return chosen


def _check(preset: Preset) -> None:
    for name, values in (("batches", preset.batches), ("modes", preset.modes)):
        if not values or len(set(values)) < len(values):
            raise ValueError(f"{name}: got {list(values)}; must be one or more, each once")
    for batch in preset.batches:
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise ValueError(
                f"batches: got {batch!r}; a batch has at least one row; give 1 or more"
            )
    for mode in preset.modes:
        if mode not in MODES:
            raise ValueError(f"modes: got {mode!r}; must be one of {', '.join(MODES)}")
    if preset.warmup < LEAST_WARMUP:
        raise ValueError(
            f"warmup: got {preset.warmup}; the first step compiles and the second counts memory; "
            f"give {LEAST_WARMUP} or more"
        )
    if preset.steps <= preset.warmup:
        raise ValueError(
            f"steps: got {preset.steps}, of which {preset.warmup} are the warm-up; none is left "
            "to time; give more"
        )
