"""A `Trainer`: one model in training, and the steps that it takes.

Step n of a run depends on the configuration and on the state after step n - 1, and on nothing else:
the order of the data comes from (seed, epoch), the generators that dropout draws from are seeded by
(seed, n), and a checkpoint holds the rest. A resumed run therefore equals the uninterrupted one bit
for bit (on a CPU; on a GPU as far as its kernels are deterministic).
"""

import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixprec import nn as layers
from mixprec.amp.inputs import cast_inputs
from mixprec.amp.setup import cast_parameters, region, scaler_for, with_update
from mixprec.inspection.statistics import StepStatistics
from mixprec.inspection.watch import Watcher
from mixprec.policy import Operation
from mixprec.recipes import DYNAMIC
from mixprec.train import checkpoint, optimizers, parallel
from mixprec.train.clipping import clip
from mixprec.train.config import Config, to_dict
from mixprec.train.conversion import converted
from mixprec.train.distributed import Ranks, pick_device
from mixprec.train.faults import FaultPolicy, NonFiniteError, first_fault
from mixprec.train.feed import Feed, dataset_of, in_order, num_workers
from mixprec.train.models import build_model
from mixprec.train.recipe_choice import step_recipe
from mixprec.train.records import Evaluation, StepRecord
from mixprec.train.same_run import require_same_run
from mixprec.train.sharded_checkpoint import assembled, placed
from mixprec.train.splits import Batch, Dataset, Items


class Trainer:
    """One model in training, with everything that a step reads or changes.

    Args:
        config: What to train and how.
        dataset: The data, where it is already loaded; else the configuration's.
        ranks: The ranks that train it; by default this process alone.

    Attributes:
        model: The converted model; `report` says what the conversion did.
        criterion: (output, targets) -> the mean loss that is minimised.
        done: Steps so far, of `total`, those that were skipped or passed by among them: the data
            goes on.
        skipped: How many of these were skipped.
        faults: What `train.on_nonfinite` does about values that are not finite, and did.
        loss: The training loss of the last one; NaN before the first.
        watcher: What samples steps; None without `inspect.every` or converted layers.
        statistics: Of the last step, if it was sampled.
        gathers: What the first step here sent to gather sharded weights.
        record_operation: Called with each operation in a region of 16 bits; None for nobody.
    """

    def __init__(
        self, config: Config, dataset: Dataset | None = None, ranks: Ranks | None = None
    ) -> None:
        self.config = config
        self.recipe = step_recipe(config.recipe, config.base)
        self.ranks = ranks or Ranks(device=pick_device(config.train.device))
        self.device = self.ranks.device
        data = dataset or dataset_of(config)
        self._feed = Feed(data, config, self.ranks)
        rows = data.evaluation
        self.evaluation_rows = rows if isinstance(rows, Items) else rows.to(self.device)
        checkpoint.seed_generators(config.train.seed)
        model, self.criterion = build_model(config.model, config.model_options)
        self.model = model.to(self.device)
        self.report = converted(self.model, config)
        parallel.spread(self.model, self.ranks, self.recipe)
        optimizers.rehearse(config.optimizer, self.device)
        optimizer = optimizers.make(config.optimizer, self.model.named_parameters())
        self.optimizer = with_update(
            optimizer,
            self.recipe,
            config.train.seed,
            float32_gradients=not parallel.reduces(self.ranks),
        )
        # after the wrapper, whose masters keep what this rounds away
        cast_parameters(self.model, self.recipe)
        self.faults = FaultPolicy(config.train.on_nonfinite, config.train.nonfinite_limit)
        self.scaler = scaler_for(
            self.recipe, checks=self.faults.checks_gradients, **asdict(config.scaler)
        )
        self._scheduler = torch.optim.lr_scheduler.StepLR(
            self.optimizer, step_size=1, gamma=config.optimizer.gamma
        )
        layers.attach(self.model, self.optimizer)
        self.gathers = parallel.GatherFigure(self.model, self.ranks, config)
        self.done = 0
        self.loss = math.nan
        every = config.inspect.every if self.report.converted else None
        self.watcher = None if every is None else Watcher(self.model, every)
        self.statistics: StepStatistics | None = None
        self.record_operation: Callable[[Operation], None] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps an epoch; the last one may have fewer rows."""
        return self._feed.steps_per_epoch

    @property
    def total(self) -> int:
        """Optimizer steps of the whole run."""
        if self.config.train.dry_run:
            return 1
        steps = self.config.train.epochs * self.steps_per_epoch
        return min(steps, self.config.train.steps or steps)

    @property
    def impl(self) -> str:
        """The resolved implementations of the converted layers; `native` where none is."""
        return ", ".join(sorted({row.impl for row in self.report.converted})) or "native"

    def batches(self, step: int) -> list[Batch]:
        """The (inputs, targets) whose gradients optimizer step `step` (from 0) adds up.

        Of several ranks each has its slices of them, which may be empty.
        """
        return self._feed.batches(step, self.total)

    @property
    def held_data(self) -> tuple[Tensor, ...]:
        """The data that lie on the device throughout."""
        return self._feed.held

    def close(self) -> None:
        """End the worker processes of the data, and what ranks share; a later step starts them."""
        self._feed.close()
        # torch's process group is to go last: what holds it must not outlive it
        vars(self).pop("_forward", None)

    @cached_property
    def _forward(self) -> Callable[[Tensor], Tensor]:
        """What makes the passes whose gradients ranks sum, compiled where that is asked for."""
        model = parallel.callable_of(self.model, self.ranks, self.config)
        mode = self.config.train.compile
        if mode is False:
            return model
        return torch.compile(model, mode=None if mode is True else str(mode))

    @property
    def skipped(self) -> int:
        return self.scaler.skipped_steps

    @property
    def loss_scale(self) -> float | None:
        """The scale of the next step's loss; None without loss scaling."""
        return None if self.recipe.loss_scale is None else self.scaler.get_scale()

    def loss_of(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of a batch, a scalar with gradients."""
        return self._output_and_loss(inputs, targets)[1]

    def _output_and_loss(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with region(self.recipe, self.record_operation):
            output = self._forward(self._cast(inputs))
            # the mean over no rows is NaN; this is 0, with gradients of 0
            loss = self.criterion(output, targets) if len(targets) else output.sum()
            return output, loss

    def _run(self, inputs: Tensor) -> object:
        with region(self.recipe):
            return self.model(self._cast(inputs))

    def _cast(self, inputs: Tensor) -> Tensor:
        return cast_inputs(inputs, self.recipe.parameters)

    def step(self) -> StepRecord:
        """Take one step; with loss scaling, one whose gradients overflow updates nothing but that.

        Raises: NonFiniteError: The loss, or the gradient where it is clipped without loss scaling
            or looked at by `train.on_nonfinite`, or where it overflows at the smallest loss scale;
            nothing was updated. Where such steps are skipped: as many in a row as may be.
        """
        epoch = self.done // self.steps_per_epoch
        lr = self.optimizer.param_groups[0]["lr"]
        loss_scale = self.loss_scale
        self.faults.before_step(self.model)
        with self.gathers.of_step():
            loss, inputs = self._gradients()
        clip = self.config.train.clip_norm
        norm = None if clip is None else self._clip(clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.faults.after_step(
            self.done + 1,
            self.scaler,
            is_dynamic=self.recipe.loss_scale == DYNAMIC,
            named=lambda: self._named_fault(inputs),
        )
        self.done += 1
        self.loss = loss
        self.statistics = self.watcher.step() if self.watcher else None
        if self.done % self.steps_per_epoch == 0:
            self._end_epoch()
        return StepRecord(
            step=self.done,
            epoch=epoch,
            loss=loss,
            lr=float(lr),
            grad_norm=norm,
            loss_scale=loss_scale,
            skipped=self.skipped,
        )

    def evaluation_batches(self) -> Iterator[tuple[Batch, bool]]:
        """The evaluation rows in their order, this rank's batches of them; in a dry run one.

        With each batch whether it counts: one that another rank counts is there so that all ranks
        make as many forward passes.
        """
        data, size = self.evaluation_rows, self.config.data.eval_batch_size
        rows = min(size, len(data)) if self.config.train.dry_run else len(data)
        turns = self.ranks.turns(math.ceil(rows / size))
        workers = num_workers(self.config, self.ranks)
        places = [place for place, _ in turns]
        batches = in_order(data, rows, size, self.device, workers, places)
        return zip(batches, (counts for _, counts in turns), strict=True)

    def evaluate(self) -> Evaluation:
        """Loss and accuracy on the evaluation rows (a dry run: on one batch of them).

        Raises: NonFiniteError: The loss of a batch is not finite.
        """
        loss, rows, right, asked = 0.0, 0.0, 0.0, 0.0
        fault = None
        self.model.eval()
        try:
            for (inputs, targets), counts in self.evaluation_batches():
                with torch.no_grad():
                    output, batch_loss = self._output_and_loss(inputs, targets)
                if not counts:
                    continue
                loss += batch_loss.item() * len(targets)
                rows += len(targets)
                if not math.isfinite(loss) and fault is None:
                    fault = inputs
                if output.shape[:-1] == targets.shape and not targets.is_floating_point():
                    right += int((output.argmax(dim=-1) == targets).sum())
                    asked += targets.numel()
            loss, rows, right, asked = self.ranks.sums(loss, rows, right, asked)
            # the last batch stands for one on a rank that has none at fault
            self._require_finite(
                loss, self.done, "the evaluation loss", inputs if fault is None else fault
            )
        finally:
            self.model.train()
        return Evaluation(loss=loss / rows, accuracy=right / asked if asked else None)

    def state(self, *, is_way_back: bool = False) -> dict[str, Any]:
        """Everything that the next step depends on, as a tree for `checkpoint.save`.

        is_way_back: Later faults lead back to this state.

        Raises: NonFiniteError: A parameter is not finite; such a state is not worth keeping.
        """
        # of a parameter in shards each rank sees its own
        bad = (name for name, p in self.model.named_parameters() if not p.isfinite().all())
        if (name := self.ranks.first_of(next(bad, None))) is not None:
            raise NonFiniteError(self.done, "a parameter", f"parameter {name}")
        if is_way_back:
            self.faults.way_back = self.done
        generators, *others = self.ranks.gathered(checkpoint.generators(self.device))
        return {
            "model": self.model.state_dict(),
            "numerics": layers.state_dict(self.model),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "generators": generators,
            "other_generators": others,
            # the order of the data follows from the step
            "position": {"step": self.done, "loss": self.loss},
            "faults": self.faults.state_dict(),
            "config": to_dict(self.config),
        }

    def save_model(self, path: Path) -> None:
        """The model's own state_dict, in a file for `torch.load(weights_only=True)`."""
        parallel.save(self.model.state_dict(), self.ranks, path)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned.

        Raises: ValueError: It is the state of another run; each difference has a line. Or this
            run would be over before it. CheckpointError: It is no state of a trainer.
        """
        with checkpoint.understood():
            config, done = dict(state["config"]), operator.index(state["position"]["step"])
        require_same_run(config, to_dict(self.config))
        self._require_steps(done)
        with checkpoint.understood():
            self._take_over(assembled(state, parallel.mesh_of(self.model)))
        self.done = done
        if self.watcher:
            self.watcher.restart(done)

    def _take_over(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(placed(state["model"], self.model.state_dict()))
        layers.load_state_dict(self.model, state["numerics"])
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.optimizer.load_state_dict(placed(state["optimizer"], dict(enumerate(parameters))))
        self._scheduler.load_state_dict(state["scheduler"])
        if self.scaler.is_enabled() and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        generators = [state["generators"], *state.get("other_generators", [])]
        # on more ranks than before the new ones have those that the step seeds
        own = generators[self.ranks.rank if self.ranks.rank < len(generators) else 0]
        checkpoint.set_generators(own, self.device)
        self.loss = float(state["position"]["loss"])
        # a checkpoint of before there were policies has no counts
        self.faults.load_state_dict(state.get("faults", {}))

    def roll_back(self, state: Mapping[str, Any], error: NonFiniteError) -> None:
        """Take over an earlier state, and pass by the data up to the step at fault.

        Raises: NonFiniteError: The given one, where this is not possible any more.
        """
        step = error.step
        if state["position"]["step"] >= step:
            raise error
        self.faults.roll_back(error)
        counts = self.faults.state_dict()
        self.load_state(state)
        self.faults.load_state_dict(counts)
        for done in range(self.done + 1, step + 1):
            if done % self.steps_per_epoch == 0:
                self._end_epoch()
        self.done = step
        if self.watcher:
            self.watcher.restart(step)

    def _require_steps(self, done: int) -> None:
        train = self.config.train
        if train.dry_run or done <= self.total:
            return
        key = "steps" if train.steps == self.total else "epochs"
        raise ValueError(
            f"train.{key}: got {getattr(train, key)}, {self.total} steps in all; the checkpoint "
            f"has {done} steps done; give more, or start a new run"
        )

    def _end_epoch(self) -> None:
        """Move the schedule, which counts epochs, whatever steps an overflow skipped in them."""
        with warnings.catch_warnings():
            # where all of them were, torch takes the order of the two calls to be wrong
            warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before")
            self._scheduler.step()

    def _gradients(self) -> tuple[float, Tensor]:
        """Gradients of the step's mean loss, whatever the batches it is made of.

        Returns: The loss; and the inputs of the first batch whose loss was not finite, or the last.
        """
        batches = self.batches(self.done)
        rows = self._feed.num_rows(self.done)
        seed = self.ranks.seed("step", self.config.train.seed, self.done)
        checkpoint.seed_step(seed, self.device)
        self.optimizer.zero_grad()
        total, suspect = 0.0, batches[0][0]
        for place, (inputs, targets) in enumerate(batches, start=1):
            with parallel.gradients(self._forward, summed=(is_last := place == len(batches))):
                loss = self.loss_of(inputs, targets) * (len(targets) / rows)
                suspect = inputs if math.isfinite(total) else suspect
                total += loss.item()
                self.scaler.scale(loss).backward()
            parallel.widen(self.optimizer, self.ranks, summed=is_last)
        parallel.share_statistics(self.model, self.ranks)
        (total,) = self.ranks.sums(total)
        if not self.faults.skips:
            self._require_finite(total, self.done + 1, "the loss", suspect)
        return total, suspect

    def _require_finite(self, value: float, step: int, what: str, inputs: Tensor) -> None:
        if not math.isfinite(value):
            raise NonFiniteError(step, what, self._named_fault(inputs) or "the loss itself")

    def _named_fault(self, inputs: Tensor) -> str | None:
        """The first tensor at fault of the lowest rank that has one; all ranks ask alike."""
        return self.ranks.first_of(first_fault(self.model, inputs, self._run))

    def _clip(self, largest: float) -> float:
        """Scale the gradients so that their L2 norm, in float32 or wider, is at most `largest`."""
        if self.scaler.is_enabled():
            return self.scaler.clip_grad_norm_(self.optimizer, largest).item()
        return clip(self.model.named_parameters(), largest, self.done + 1)
