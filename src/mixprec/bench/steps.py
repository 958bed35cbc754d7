"""Training steps of one model: recipe x eager or compiled x batch, in turns or one at a time."""

import gc
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from rich.console import Console

from mixprec.bench import flops
from mixprec.bench.batches import largest
from mixprec.bench.contender import Case, Contender, Settings
from mixprec.bench.plan import (
    Plan,
    all_cases,
    device_of,
    fits_in_turns,
    plan_of,
    too_large,
)
from mixprec.bench.presets import COMPILED, EAGER, Workload, workload_of
from mixprec.memory import in_fresh_process, process_peak
from mixprec.recipes import Recipe
from mixprec.train import checkpoint
from mixprec.train.compare import EMULATED_NOTE
from mixprec.train.log import ProgressLines, environment, finite

IN_TURNS, ALONE = "in turns", "one at a time"
_MOST_COMPILED = 256
_FRESH_STEPS = 2
_NARROW_BITS = 8
_LONGEST_REASON = 200
OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)
# what a library, a device or a compiler raises where it cannot run something
CANNOT_RUN = (RuntimeError, ValueError, TypeError, ImportError, NotImplementedError, OSError)
Skip = Callable[[Case, str], None]
Show = Callable[[str], None]


def run(
    preset: str = "vit-tiny",
    *,
    workload: Workload | None = None,
    recipes: Sequence[str | Recipe] | None = None,
    base: str | None = None,
    modes: Sequence[str] | None = None,
    batches: Sequence[int] | str | None = None,
    steps: int | None = None,
    warmup: int | None = None,
    peers: Sequence[str] = (),
    device: str = "auto",
    impl: str = "auto",
    memory_limit: int | None = None,
    alone: bool | None = None,
    process_peaks: bool = False,
    seed: int = 0,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure training steps of a model under several recipes.

    Args:
        preset: A name in `PRESETS`; the other arguments replace its values.
        workload: A model and batches of one's own, in the place of the preset's.
        recipes: Names or recipes; the others are compared with the first.
        base: fp32, bf16 or fp16 for all, in place of each recipe's own.
        modes: `eager`, `compiled` (torch.compile, one graph) or both.
        batches: Rows of a batch; `auto`: of each recipe and mode the largest that fits.
        steps, warmup: Steps in all, and how many of the first are no part of the times.
        peers: `torchao`, `transformer_engine`: other libraries, as further rows.
        device: auto, cpu, mps, cuda or cuda:N.
        impl: Of the products; a recipe that it cannot run is skipped.
        memory_limit: Bytes of live tensors that one contender may have on a CPU; None is 0.8 of
            what is available now. A GPU's limit is its memory.
        alone: One contender after the other, each freed before the next; False: all in turns, step
            by step, so that drift of the machine hits all alike; None: in turns where all should
            fit into half of the memory.
        process_peaks: Run two steps of each row in a process of its own, for that process's peak.
        seed: Of the weights and the batches.
        console: Where progress goes; standard error by default.

    Returns: `{"rows": [...], "skipped": [...], ...}`, one row a recipe, mode and batch:

        - `step_ms`, `step_ms_mean`: median and mean of the steps after the warm-up; `throughput`:
          `unit` a second, by the median.
        - `speedup`: throughput over that of the first recipe in the same mode, at the same batch
          if it has that (in turns: the median over the steps of the ratio within a step).
        - `param_bytes`, `grad_bytes`, `optimizer_bytes`, `saved_bytes` (activations kept for
          backward), `peak_bytes`: of the second step; the peak of a compiled model on a CPU is
          None. `process_peak_bytes`: with `process_peaks`.
        - `seconds_to_loss`: steps until the loss was first at or below the baseline's last one, by
          the median step; None where it never was.
        - `mfu`: see `mixprec.bench.flops`; None where the device is not in the hardware table.
        - `loss`: of the last step; `impl`: what multiplies.

        `skipped` has a `reason` in a line for each case that could not run; `order` says whether
        the contenders took turns. `process_peak_bytes` is of this process, for all rows.

    Raises:
        ValueError: A name or number that cannot be used. What cannot run is skipped, not raised.
    """
    target, no_device = device_of(device)
    plan = plan_of(
        preset,
        workload=workload,
        recipes=recipes,
        base=base,
        modes=modes,
        batches=batches,
        steps=steps,
        warmup=warmup,
        peers=peers,
        device=target,
        impl=impl,
        memory_limit=memory_limit,
        seed=seed,
    )
    if process_peaks and workload is not None:
        raise ValueError(
            "process_peaks: got it with a workload of one's own; another process makes the model "
            "anew, from a preset; name one"
        )
    skipped: dict[Case, str] = {}
    with checkpoint.isolated_generators(target), _progress(plan, console) as show:
        cases = _runnable(plan, no_device, skipped.__setitem__)
        if plan.is_auto:
            cases = _with_largest(plan, cases, skipped.__setitem__, show)
        is_alone = plan.is_auto or not fits_in_turns(plan, cases) if alone is None else alone
        rows = (_one_at_a_time if is_alone else _in_turns)(plan, cases, skipped.__setitem__, show)
    _add_speedups(plan, rows, is_alone)
    if process_peaks:
        for case, row in rows.items():
            row["process_peak_bytes"] = in_fresh_process(
                take_steps, plan.preset.model, dict(plan.preset.options), case, plan.settings
            )[1]
    return finite(_result(plan, rows, skipped, is_alone))


def take_steps(model: str, options: Mapping[str, Any], case: Case, settings: Settings) -> None:
    """Two steps of a model, for what they leave in the process's peak."""
    contender = Contender(workload_of(model, options), case, settings)
    for _ in range(_FRESH_STEPS):
        contender.step()


def _runnable(plan: Plan, no_device: str | None, skip: Skip) -> list[Case]:
    """The cases, but for those that are known not to run."""
    cases = list(all_cases(plan))
    reason = no_device or too_large(plan)
    if reason is None:
        return cases
    for case in cases:
        skip(case, reason)
    return []


def _with_largest(plan: Plan, cases: Sequence[Case], skip: Skip, show: Show) -> list[Case]:
    """The cases at the largest batch at which two steps fit.

    A compiled model on a CPU, whose tensors cannot be counted, gets the batch of the eager one.
    """
    found: list[Case] = []
    for case in cases:
        tried = case
        if plan.settings.device.type == "cpu":
            tried = replace(case, mode=EAGER)
        reasons: list[str] = []

        def fits(rows: int, case: Case = tried, reasons: list[str] = reasons) -> bool:
            show(f"{case.label} {case.mode}: does a batch of {rows} fit?")
            made = _made(plan, replace(case, batch=rows), lambda _, reason: reasons.append(reason))
            fitted = made is not None
            del made
            _free(plan.settings.device)
            return fitted

        rows = largest(fits)
        if rows:
            found.append(replace(case, batch=rows))
        else:
            skip(case, reasons[-1])
    return found


def _made(plan: Plan, case: Case, skip: Skip) -> tuple[Contender, dict[str, Any]] | None:
    """A contender after its first two steps, and its memory; None where it cannot run."""
    with _guarded(case, skip):
        contender = Contender(plan.workload, case, plan.settings)
        contender.first_step()
        return contender, contender.memory()
    return None


@contextmanager
def _guarded(case: Case, skip: Skip) -> Iterator[None]:
    """Turns what a case cannot do into the reason why it is skipped, in a line."""
    expected = (Exception,) if case.mode == COMPILED else (*CANNOT_RUN, *OUT_OF_MEMORY)
    try:
        yield
    except expected as error:
        skip(case, reason_of(error, "compile refused" if case.mode == COMPILED else "cannot run"))


def reason_of(error: Exception, kind: str = "cannot run") -> str:
    """Why something is skipped, in a line: the kind of fault, and the first line of its message."""
    line = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
    if isinstance(error, ImportError):
        return line[:_LONGEST_REASON]
    if isinstance(error, OUT_OF_MEMORY):
        kind = "out of memory"
    return f"{kind}: {line}"[:_LONGEST_REASON]


def _in_turns(
    plan: Plan, cases: Sequence[Case], skip: Skip, show: Show
) -> dict[Case, dict[str, Any]]:
    """All contenders advance together, each a step in turn, whoever goes first changing."""
    memory: dict[Case, dict[str, Any]] = {}
    running: list[Contender] = []
    with _many_compiled(cases):
        for case in cases:
            show(f"{case.label} {case.mode}, batch {case.batch}: first steps")
            made = _made(plan, case, skip)
            if made is not None:
                running.append(made[0])
                memory[case] = made[1]
        for step in range(2, plan.preset.steps):
            first = step % max(1, len(running))
            show(f"step {step + 1} of {plan.preset.steps}: {len(running)} contenders in turn")
            for contender in running[first:] + running[:first]:
                with _guarded(contender.case, skip):
                    contender.timed_step()
                    continue
                running.remove(contender)
    return {c.case: _row(plan, c, memory[c.case]) for c in running}


def _one_at_a_time(
    plan: Plan, cases: Sequence[Case], skip: Skip, show: Show
) -> dict[Case, dict[str, Any]]:
    """Each contender is made, run to its end and freed before the next."""
    rows: dict[Case, dict[str, Any]] = {}
    for case in cases:
        show(f"{case.label} {case.mode}, batch {case.batch}: first steps")
        made = _made(plan, case, skip)
        if made is not None:
            contender, memory = made
            with _guarded(case, skip):
                for step in range(2, plan.preset.steps):
                    show(f"{case.label} {case.mode}, batch {case.batch}: step {step + 1}")
                    contender.timed_step()
                rows[case] = _row(plan, contender, memory)
            del contender, made
        _free(plan.settings.device)
        if case.mode == COMPILED:
            torch._dynamo.reset()
    return rows


def _many_compiled(cases: Sequence[Case]) -> Any:
    """Room for more compiled models of one class than torch allows before it gives up."""
    if not any(case.mode == COMPILED for case in cases):
        return nullcontext()
    import torch._dynamo

    return torch._dynamo.config.patch(
        recompile_limit=_MOST_COMPILED, accumulated_recompile_limit=_MOST_COMPILED
    )


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _row(plan: Plan, contender: Contender, memory: Mapping[str, Any]) -> dict[str, Any]:
    case = contender.case
    timed = contender.step_ms[plan.preset.warmup - 2 :]
    median = statistics.median(timed)
    units = case.batch * plan.workload.units_per_row
    operations = flops.model_flops(plan.workload, case.batch)
    peak = None
    if case.peer is None:
        peak = flops.peak_rate(case.recipe, flops.device_row(plan.settings.device))
    return {
        "recipe": case.label,
        "mode": case.mode,
        "batch": case.batch,
        "impl": contender.impl,
        "step_ms": median,
        "step_ms_mean": statistics.fmean(timed),
        "throughput": 1e3 * units / median,
        "speedup": None,
        "seconds_to_loss": None,
        **memory,
        "flops": operations,
        "mfu": flops.utilisation(operations, median / 1e3, peak),
        "loss": contender.losses[-1].item(),
        "losses": [loss.item() for loss in contender.losses],
        "times_ms": timed,
    }


def _add_speedups(plan: Plan, rows: Mapping[Case, dict[str, Any]], is_alone: bool) -> None:
    first = next(iter(plan.recipes))
    for case, row in rows.items():
        bases = [b for c, b in rows.items() if (c.label, c.mode) == (first, case.mode)]
        same = [base for base in bases if base["batch"] == case.batch]
        if same and not is_alone:
            pairs = zip(same[0]["times_ms"], row["times_ms"], strict=True)
            row["speedup"] = statistics.median(theirs / mine for theirs, mine in pairs)
        elif bases:
            row["speedup"] = row["throughput"] / (same or bases)[0]["throughput"]
        if same:
            row["seconds_to_loss"] = _seconds_to(same[0]["loss"], row)


def _seconds_to(loss: float, row: Mapping[str, Any]) -> float | None:
    steps = (n for n, value in enumerate(row["losses"], start=1) if value <= loss)
    first = next(steps, None)
    return None if first is None else first * row["step_ms"] / 1e3


def _notes(plan: Plan, rows: Mapping[Case, Mapping[str, Any]]) -> list[str]:
    """What the figures do not say."""
    notes = [EMULATED_NOTE] if any("emulated" in row["impl"] for row in rows.values()) else []
    narrow = any(
        spec is not None and spec.format.bits <= _NARROW_BITS
        for case in rows
        for spec in case.recipe.specs
    )
    small, total = flops.small_layers(plan.workload)
    if narrow and small:
        notes.append(
            f"{small} of {total} linear layers: <= {flops.SMALL} inputs or outputs, too few for 8 "
            "bits to pay"
        )
    return notes


@contextmanager
def _progress(plan: Plan, console: Console | None) -> Iterator[Show]:
    total = len(list(all_cases(plan))) * plan.preset.steps
    with ProgressLines(total, console) as lines:
        shown = 0

        def show(text: str) -> None:
            nonlocal shown
            shown += 1
            lines.status(shown, text)

        yield show


def _result(
    plan: Plan,
    rows: Mapping[Case, dict[str, Any]],
    skipped: Mapping[Case, str],
    is_alone: bool,
) -> dict[str, Any]:
    names = ("recipe", "mode", "batch")
    return {
        "model": plan.workload.name,
        "unit": plan.workload.unit,
        "parameters": plan.parameters,
        "base": plan.preset.base,
        "optimizer": plan.preset.optimizer.name,
        "steps": plan.preset.steps,
        "warmup": plan.preset.warmup,
        "order": ALONE if is_alone else IN_TURNS,
        "memory_limit_bytes": plan.settings.limit,
        "process_peak_bytes": process_peak(),
        "environment": environment(plan.settings.device),
        "notes": _notes(plan, rows),
        "rows": list(rows.values()),
        "skipped": [
            dict(zip(names, (case.label, case.mode, case.batch), strict=True)) | {"reason": reason}
            for case, reason in skipped.items()
        ],
    }
