"""The alarms of a run: what they look at in a trainer, and when."""

from mixprec.amp.autocast import region_dtype
from mixprec.inspection.alarms import (
    Alarm,
    AlarmWatch,
    nonfinite,
    nothing_converted,
    nothing_in_region,
    nothing_multiplied,
)
from mixprec.inspection.updates import UpdateWatch
from mixprec.nn.state import converted_layers
from mixprec.policy import Operation
from mixprec.train.faults import NonFiniteError
from mixprec.train.records import StepRecord
from mixprec.train.replay import replay
from mixprec.train.trainer import Trainer


class RunAlarms:
    """Watches one trainer; each method returns the alarms that are new.

    Statistics and updates are looked at in the steps that `inspect.every` samples, the loss scale
    in all of them, and the operations of the first step where no layer was converted.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        recipes = {layer.recipe for _, layer in converted_layers(trainer.model)}
        specs = [spec for recipe in recipes for spec in recipe.specs if spec is not None]
        self._quantises = bool(specs)
        self._watch = AlarmWatch(
            history=max((spec.amax_history_len for spec in specs), default=0),
            min_scale=trainer.config.scaler.min_scale,
        )
        self._updates = UpdateWatch(trainer.model, trainer.optimizer)
        self._region = region_dtype(trainer.recipe)
        self._operations: list[Operation] = []
        self._skipped = 0

    def close(self) -> None:
        """Look at no further step."""
        self._updates.close()

    def start(self) -> list[Alarm]:
        """Before the first step; a region's operations are counted in that."""
        trainer = self._trainer
        self._skipped = trainer.skipped
        if self._region is None:
            return self._watch.new([nothing_converted(trainer.report)])
        # a compiled graph has its operations built in
        if not trainer.report.converted and trainer.config.train.compile is False:
            trainer.record_operation = self._operations.append
        return []

    def before_step(self) -> None:
        """Ask for what the next step is looked at for."""
        every = self._trainer.config.inspect.every
        if every is not None and (self._trainer.done + 1) % every == 0:
            self._updates.ask()

    def after_step(self, record: StepRecord) -> list[Alarm]:
        """What a step gives reason for."""
        trainer = self._trainer
        # gradients that overflowed say nothing of the scales that fit those that do not
        is_skipped, self._skipped = trainer.skipped > self._skipped, trainer.skipped
        statistics = None if is_skipped else trainer.statistics
        found = self._of_region()
        if statistics is not None and not statistics.rows and self._quantises:
            found += self._watch.new([nothing_multiplied(trainer.report)])
        return found + self._watch.observe(
            record.step,
            rows=statistics.rows if statistics is not None else (),
            updates=self._updates.take(),
            loss_scale=record.loss_scale,
        )

    def failed(self, error: NonFiniteError) -> list[Alarm]:
        """What ended the run: the step of one process is taken again, every result looked at."""
        trainer, found = self._trainer, []
        if trainer.loss_scale is not None:
            found = self._watch.observe(error.step, loss_scale=trainer.loss_scale)
        # it ends at the first fault that it finds, where other ranks may have found none, and does
        # not look into shards
        fault = replay(trainer, error.step) if trainer.ranks.strategy == "none" else None
        return found + self._watch.new([None if fault is None else nonfinite(fault)])

    def _of_region(self) -> list[Alarm]:
        trainer = self._trainer
        if trainer.record_operation is None:
            return []
        trainer.record_operation = None
        narrow = sum(self._region in operation.compute for operation in self._operations)
        dtype = str(self._region).removeprefix("torch.")
        return self._watch.new([nothing_in_region(dtype, len(self._operations), narrow)])
