"""A whole training run: steps, evaluations, checkpoints, and the records in the run's folder."""

import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from mixprec.inspection.alarms import Alarm
from mixprec.inspection.statistics import StepStatistics
from mixprec.memory import state_bytes
from mixprec.nn import Report
from mixprec.train import checkpoint, sharded_checkpoint
from mixprec.train.alarms import RunAlarms
from mixprec.train.config import Config, load, recipe_line, to_toml
from mixprec.train.distributed import started
from mixprec.train.events import Events
from mixprec.train.faults import EXIT_CODES, WRONG_INPUT, NonFiniteError
from mixprec.train.log import (
    Metrics,
    ProgressLines,
    create_folder,
    environment,
    named_folder,
    write_json,
)
from mixprec.train.recipe_choice import recipe_label
from mixprec.train.trainer import Trainer

_CHECKPOINTS = "checkpoints"
_CONFIG = "config.toml"
_EVENTS = "events"
_METRICS = "metrics.jsonl"
_MODEL = "model.pt"
_RESULT = "result.json"


class Preempted(Exception):
    """The run was asked to stop; `path` is the checkpoint that it saved first."""

    def __init__(self, path: Path | None) -> None:
        saved = f"a checkpoint is in {path}" if path else "nothing was saved: the run has no folder"
        super().__init__(f"stopped on request; {saved}")
        self.path = path


def run(
    config: Config | str | Path,
    *,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    console: Console | None = None,
    show: Callable[[Report], None] | None = None,
) -> dict[str, Any]:
    """Train a model as a configuration says.

    Args:
        config: A Config, or the path of a TOML file.
        out: The run's folder; None (and a dry run) leaves nothing on disk.
        resume: A checkpoint's folder, or "auto" for the newest whole one in `out`.
        stop: Asked after each step; true saves a checkpoint and raises Preempted.
        console: Where progress goes; standard error by default.
        show: Shows what the conversion did; by default it is printed with the progress.

    Returns: The content of `result.json`: `loss` and `accuracy` of the last evaluation,
        `train_loss` of the last step, `step_ms` the median step of this process, bytes held after
        it by `mixprec.memory.state_bytes`, what ran, and, where weights are gathered from shards,
        what `gathers` sent in its first step (`mixprec.nn.Traffic.to_dict`). `outcome` is a key of
        `mixprec.train.faults.EXIT_CODES`, which the file has where the run did not finish too.
    Raises:
        ConfigError: The configuration cannot be used.
        ValueError: `out` holds another run, or a configuration of the user's, or cannot be written;
            or the checkpoint is damaged or of another run.
        NonFiniteError: A loss was not finite, and `train.on_nonfinite` is to stop then, or has come
            to its limit; checkpoints saved before it are kept.
        OSError: A checkpoint cannot be written; those saved before it are kept.
        Preempted: `stop` said so.
    """
    if not isinstance(config, Config):
        config = load(config)
    folder = None if out is None or config.train.dry_run else named_folder(out)
    shared = config.distributed
    with (
        started(shared.strategy, config.train.device, shared.timeout) as ranks,
        checkpoint.isolated_generators(ranks.device),
    ):
        ranks.at_first(lambda: _check_folder(folder, resume))
        trainer = Trainer(config, ranks=ranks)
        # what the other ranks would write and show is the same, or of their own rows
        own = folder if ranks.is_first else None
        shown = console if ranks.is_first else Console(quiet=True)
        events = Events(own and own / _EVENTS, is_asked=config.inspect.tensorboard)
        alarms = RunAlarms(trainer)
        with (
            closing(trainer),
            closing(events),
            closing(alarms),
            ProgressLines(trainer.total, shown) as lines,
        ):
            _resume(trainer, folder, resume, lines)
            metrics = _begin(trainer, folder)
            lines.line(f"{config.model}, {recipe_line(config)}, {ranks}")
            (show if show and ranks.is_first else lines.show)(trainer.report)
            if config.inspect.every and trainer.watcher is None:
                lines.line("inspect.every: no layer is converted, so that there are no statistics")
            return _Run(
                trainer=trainer,
                folder=folder,
                metrics=metrics,
                events=events,
                alarms=alarms,
                lines=lines,
            ).train(stop)


_OUTCOMES: dict[type[Exception], str] = {
    NonFiniteError: "nonfinite",
    Preempted: "preempted",
    **dict.fromkeys(WRONG_INPUT, "wrong input"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A trainer with what its run writes and shows."""

    trainer: Trainer
    folder: Path | None
    metrics: Metrics
    events: Events
    alarms: RunAlarms
    lines: ProgressLines

    def train(self, stop: Callable[[], bool]) -> dict[str, Any]:
        """Every step that is left, then the result; however it ends, result.json says how."""
        started = time.perf_counter()
        step_ms: list[float] = []
        self._tell(self.trainer.done, self.alarms.start())
        try:
            self._have_a_way_back()
            while self.trainer.done < self.trainer.total:
                self._advance(step_ms, stop)
            return self._result(step_ms, time.perf_counter() - started)
        except Exception as error:
            named = (name for kind, name in _OUTCOMES.items() if isinstance(error, kind))
            outcome = next(named, "error")
            # on a full disk the error says enough
            with suppress(OSError):
                self._write_result(outcome, {"steps": self.trainer.done, "error": str(error)})
            raise

    def _advance(self, step_ms: list[float], stop: Callable[[], bool]) -> None:
        """One step with its checkpoint, where one is due or asked for; or the way back."""
        is_asked = False
        try:
            step_ms.append(self._step())
            is_due = self._is_due()
            is_asked = self.trainer.ranks.any(stop()) and self.trainer.done < self.trainer.total
            saved = self._save(is_way_back=is_due) if is_asked or is_due else None
        except NonFiniteError as error:
            self._failed(error)
            saved = self._back(error)
        if is_asked:
            raise Preempted(saved)

    def _have_a_way_back(self) -> None:
        if self.folder is not None and self.trainer.faults.goes_back:
            folder, limit = self.folder / _CHECKPOINTS, self.trainer.faults.way_back
            if not self.trainer.ranks.at_first(lambda: checkpoint.listed(folder, limit)):
                self._save()

    def _back(self, error: NonFiniteError) -> Path | None:
        """Go on from the newest checkpoint, after the data of the fault; or raise."""
        state = None
        if self.trainer.faults.goes_back and self.folder is not None:
            folder, limit = self.folder / _CHECKPOINTS, self.trainer.faults.way_back
            ranks, report = self.trainer.ranks, self.lines.line
            state = sharded_checkpoint.newest(ranks, folder, report, at_most=limit)
        if state is None:
            raise error
        self.trainer.roll_back(state, error)
        step = state["position"]["step"]
        self.lines.line(f"{error}; back to step {step}, and on after the data of {error.step}")
        return self._save()

    def _failed(self, error: NonFiniteError) -> None:
        self._tell(error.step, self.alarms.failed(error))
        self.metrics.write(step=error.step, error=str(error))

    def _step(self) -> float:
        """One optimizer step with its records; milliseconds."""
        trainer = self.trainer
        self.alarms.before_step()
        started = time.perf_counter()
        record = trainer.step()
        milliseconds = 1e3 * (time.perf_counter() - started)
        text = f"epoch {record.epoch + 1} step {record.step} loss {record.loss:.4f}"
        if record.loss_scale is not None:
            text += f" loss scale {record.loss_scale:g}"
        if record.loss_scale is not None or record.skipped:
            text += f" skipped {record.skipped}"
        if record.step % trainer.config.train.log_every == 0 or record.step == trainer.total:
            self.metrics.write(**asdict(record), step_ms=milliseconds)
            self.lines.status(record.step, text)
        else:
            self.lines.advance(record.step, text)
        if trainer.faults.skipped_for is not None:
            self.lines.line(f"{trainer.faults.skipped_for}; skipped")
            self.metrics.write(step=record.step, error=str(trainer.faults.skipped_for))
        if trainer.statistics is not None:
            self._inspected(trainer.statistics)
        self._tell(record.step, self.alarms.after_step(record))
        if record.step % trainer.steps_per_epoch == 0 and record.step < trainer.total:
            self._evaluate()
        return milliseconds

    def _inspected(self, statistics: StepStatistics) -> None:
        self.metrics.write(**statistics.to_record())
        self.events.write(statistics)
        if statistics.worst is not None:
            self.lines.line(f"step {statistics.step}: lowest {statistics.worst}")

    def _tell(self, step: int, alarms: list[Alarm]) -> None:
        for alarm in alarms:
            self.metrics.write(**alarm.to_record(step))
            self.lines.line(f"ALARM at step {step}, {alarm}; {alarm.suggestion}")

    def _evaluate(self) -> dict[str, float | None]:
        trainer, score = self.trainer, self.trainer.evaluate()
        self.metrics.write(step=trainer.done, eval_loss=score.loss, accuracy=score.accuracy)
        right = "" if score.accuracy is None else f", accuracy {100 * score.accuracy:.2f} %"
        self.lines.line(f"step {trainer.done}: evaluation loss {score.loss:.4f}{right}")
        return {"loss": score.loss, "accuracy": score.accuracy}

    def _is_due(self) -> bool:
        trainer = self.trainer
        every = trainer.config.checkpoint.every or trainer.steps_per_epoch
        return trainer.done % every == 0 or trainer.done == trainer.total

    def _save(self, *, is_way_back: bool = True) -> Path | None:
        trainer = self.trainer
        # A dry run is whole only if the state can be saved, so it is collected there too.
        state, keep = trainer.state(is_way_back=is_way_back), trainer.config.checkpoint.keep
        if self.folder is None:
            return None
        folder = self.folder / _CHECKPOINTS
        spare = trainer.faults.way_back if trainer.faults.goes_back else None
        return sharded_checkpoint.save(
            trainer.ranks, folder, trainer.done, state, keep=keep, spare=spare
        )

    def _result(self, step_ms: list[float], seconds: float) -> dict[str, Any]:
        trainer, config = self.trainer, self.trainer.config
        try:
            score = self._evaluate()
        except NonFiniteError as error:
            self._failed(error)
            raise
        sent = {}
        if (traffic := trainer.gathers.traffic) is not None:
            sent = {"gathers": traffic.to_dict()}
            self.lines.line(str(traffic))
        held = state_bytes(trainer.model, trainer.optimizer)
        result = {
            "model": config.model,
            "recipe": recipe_label(config.recipe, config.base),
            "base": trainer.recipe.base,
            "impl": trainer.impl,
            "device": str(trainer.device),
            "ranks": trainer.ranks.size,
            "strategy": trainer.ranks.strategy,
            "seed": config.train.seed,
            "steps": trainer.done,
            "skipped": trainer.skipped,
            "rollbacks": trainer.faults.rollbacks,
            "train_loss": trainer.loss,
            **score,
            "step_ms": median(step_ms) if step_ms else None,
            "seconds": seconds,
            **sent,
            **held,
            # without a step in this process there are none yet
            "grad_bytes": held["grad_bytes"] or None,
        }
        if self.folder is not None and config.train.save_model:
            trainer.save_model(self.folder / _MODEL)
        return self._write_result("finished", result)

    def _write_result(self, outcome: str, result: dict[str, Any]) -> dict[str, Any]:
        result = {"outcome": outcome, "exit_code": EXIT_CODES[outcome], **result}
        if self.folder is not None and self.trainer.ranks.is_first:
            write_json(self.folder / _RESULT, result)
        return result


def _begin(trainer: Trainer, folder: Path | None) -> Metrics:
    """The run's folder with its configuration; the records of its steps."""
    if folder is None:
        return Metrics(None)
    trainer.ranks.at_first(lambda: str(create_folder(folder)))
    if not trainer.ranks.is_first:
        return Metrics(None)
    # Before the configuration: without metrics, a config.toml is known to be the user's.
    metrics = Metrics(folder / _METRICS, resumed_at=trainer.done)
    (folder / _RESULT).unlink(missing_ok=True)
    (folder / _CONFIG).write_text(to_toml(trainer.config), encoding="utf-8")
    write_json(folder / "environment.json", environment(trainer.device))
    return metrics


def _check_folder(folder: Path | None, resume: str | Path | None) -> None:
    if folder is None and resume == "auto":
        raise ValueError(
            "resume: got 'auto' without a run folder (a dry run has none); it looks there; give out"
        )
    if folder is None:
        return
    goes_on = resume == "auto" or (
        resume is not None and Path(resume).resolve().parent == (folder / _CHECKPOINTS).resolve()
    )
    if (folder / _METRICS).exists() and not goes_on:
        raise ValueError(
            f"out: got {folder}; it holds another run; pass --resume auto to go on with it, or "
            "another folder"
        )
    if (folder / _CONFIG).exists() and not (folder / _METRICS).exists():
        raise ValueError(
            f"out: got {folder}; its {_CONFIG} is not a run's and would be overwritten; name "
            "another folder"
        )


def _resume(
    trainer: Trainer, folder: Path | None, resume: str | Path | None, lines: ProgressLines
) -> None:
    if resume is None:
        return
    ranks = trainer.ranks
    if resume != "auto":
        state = sharded_checkpoint.load(ranks, Path(resume))
    else:
        assert folder is not None  # _check_folder
        found = sharded_checkpoint.newest(ranks, folder / _CHECKPOINTS, lines.line)
        if found is None:
            lines.line(f"no whole checkpoint in {folder}: starting from the beginning")
            return
        state = found
    trainer.load_state(state)
    lines.line(f"resumed after step {trainer.done} of {trainer.total}")
