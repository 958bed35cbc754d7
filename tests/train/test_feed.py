"""Batches: their order, and that worker processes change when they are made and nothing else."""

from __future__ import annotations

import io
import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from mixprec.train import feed, run
from mixprec.train.config import Config, ConfigError, load
from mixprec.train.distributed import Ranks
from mixprec.train.feed import Feed, dataset_of, in_order, num_workers
from mixprec.train.loop import Preempted
from mixprec.train.random_images import random_images
from mixprec.train.splits import epoch_order, stream_seed
from mixprec.train.trainer import Trainer

CPU = torch.device("cpu")
ALONE = Ranks(device=CPU)
IMAGES = ["model=vit", "data.options.items=22", "data.options.evaluation_items=5"]
SMALL = [f"model_options.{k}={v}" for k, v in dict(size=8, patch=4, width=12, depth=1).items()]
STEPS = ["data.batch_size=4", "data.eval_batch_size=2", "train.accumulate=2", "train.steps=7"]
WORKERS = [0, 1, 2]


def images(workers: int, *settings: str) -> Config:
    """Random images of 8 by 8: three steps an epoch, the last with 6 rows of 8."""
    settings = ("model_options.classes=7", f"data.workers={workers}", *settings)
    return load(
        None, [*IMAGES, *SMALL, *STEPS, "optimizer.name=adamw", "optimizer.lr=0.01", *settings]
    )


def same(one: list[tuple[Tensor, Tensor]], other: list[tuple[Tensor, Tensor]]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b)
        for pair in zip(one, other, strict=True)
        for a, b in zip(*pair, strict=True)
    )


def test_an_image_is_a_function_of_seed_and_index_alone() -> None:
    data = random_images()
    assert (len(data.train), len(data.evaluation)) == (1_000_000, 256)
    image, label = data.train[999_999]
    assert (image.shape, image.dtype, label.item()) == ((3, 256, 256), torch.float32, 575)
    assert image.mean().item() == pytest.approx(0, abs=0.01)
    assert image.std().item() == pytest.approx(1, abs=0.01)
    torch.manual_seed(3)
    assert torch.equal(random_images().train[999_999][0], image)
    assert not torch.equal(random_images(seed=1).train[999_999][0], image)
    assert not torch.equal(data.train[0][0], image)
    # the evaluation's come after those of the training
    assert torch.equal(random_images(items=999_999).evaluation[0][0], image)


def test_images_follow_the_options_of_the_model() -> None:
    data = dataset_of(images(0))
    image, label = data.train[9]
    assert (len(data.train), image.shape, label.item()) == (22, (3, 8, 8), 2)
    image, label = dataset_of(
        images(0, "model_options.channels=1", "data.options.classes=5")
    ).train[9]
    assert (image.shape, label.item()) == ((1, 8, 8), 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "folder"}, "data.path: got 'folder'; random images are read from nowhere"),
        ({"items": 0}, "data.options.items: got 0; must be a whole number of at least 1"),
        ({"classes": 2.5}, "data.options.classes: got 2.5; must be a whole number"),
        ({"seed": "x"}, "data.options.seed: got 'x'; must be a whole number"),
    ],
)
def test_images_refuse(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        random_images(**options)


def test_an_index_past_the_end_is_refused() -> None:
    with pytest.raises(IndexError, match="index: got 22; there are 22 images"):
        dataset_of(images(0)).train[22]


@pytest.mark.parametrize("workers", WORKERS)
def test_batches_are_the_items_of_the_epochs_order(workers: int) -> None:
    config = images(workers)
    data = dataset_of(config)
    source = Feed(data, config, ALONE)
    assert source.steps_per_epoch == 3
    for step in range(7):
        epoch, place = divmod(step, 3)
        rows = epoch_order(22, config.train.seed, epoch)[8 * place : 8 * place + 8].tolist()
        expected = [rows[:4], rows[4:]]
        stacked = [
            tuple(torch.stack([data.train[row][side] for row in part]) for side in (0, 1))
            for part in expected
            if part
        ]
        assert same(source.batches(step, 7), stacked)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_step_out_of_turn_is_the_same_step(workers: int) -> None:
    config = images(workers)
    straight = Feed(dataset_of(config), config, ALONE)
    expected = [straight.batches(step, 7) for step in range(7)]
    other = Feed(dataset_of(config), config, ALONE)
    for step in (5, 0, 0, 1, 2, 6, 3, 4, 5, 6):
        assert same(other.batches(step, 7), expected[step]), step


def test_what_one_trainer_does_to_a_batch_does_not_reach_another() -> None:
    config = images(0)
    data = dataset_of(config)
    first, second = Feed(data, config, ALONE), Feed(data, config, ALONE)
    kept = [(inputs.clone(), targets.clone()) for inputs, targets in first.batches(0, 7)]
    first.batches(0, 7)[0][0].zero_()
    assert same(second.batches(0, 7), kept)


def test_trainers_of_the_same_batches_make_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    collated = feed._collated
    monkeypatch.setattr(
        feed, "_collated", lambda items, part: made.append(part) or collated(items, part)
    )
    config = images(0)
    data = dataset_of(config)
    feeds = [Feed(data, config, ALONE) for _ in range(3)]
    for step in range(2):
        for one in feeds:
            one.batches(step, 7)
    assert len(made) == 4
    other = images(0, "train.seed=2")
    Feed(data, other, ALONE).batches(1, 7)
    assert len(made) == 6


def test_workers_leave_the_global_generator_alone() -> None:
    config = images(2)
    source = Feed(dataset_of(config), config, ALONE)
    torch.manual_seed(5)
    for step in range(4):
        source.batches(step, 7)
    torch.testing.assert_close(
        torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5))
    )


@pytest.mark.parametrize("workers", WORKERS)
def test_rows_in_order(workers: int) -> None:
    data = dataset_of(images(0)).evaluation
    batches = list(in_order(data, 5, 2, CPU, workers))
    assert [len(targets) for _, targets in batches] == [2, 2, 1]
    assert torch.equal(
        torch.cat([a for a, _ in batches]), torch.stack([data[i][0] for i in range(5)])
    )
    assert [int(label) for _, labels in batches for label in labels] == [
        (22 + i) % 7 for i in range(5)
    ]


def test_one_worker_a_core_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed.os, "sched_getaffinity", lambda _: {0, 1, 5}, raising=False)
    assert num_workers(load()) == 3
    monkeypatch.delattr(feed.os, "sched_getaffinity")
    monkeypatch.setattr(feed.os, "cpu_count", lambda: 7)
    assert num_workers(load()) == 7
    assert num_workers(images(2)) == 2


def test_too_little_shared_memory_is_said_before_the_bus_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])
    monkeypatch.setattr(feed, "_SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(64 << 20, 0, 64 << 20))
    config = load(None, ["model=vit", "model_options.preset=huge", "data.batch_size=32"])
    data = dataset_of(config)
    with pytest.raises(
        ValueError, match=r"data.workers: got 2; .* of 32 take 96 MiB of .* 64 free"
    ):
        Feed(data, load_with(config, workers=2), ALONE)
    Feed(data, load_with(config, workers=1), ALONE)


def load_with(config: Config, workers: int) -> Config:
    return replace(config, data=replace(config.data, workers=workers))


def stopping_after(steps: int) -> Callable[[], bool]:
    calls = iter(range(1, 100))
    return lambda: next(calls) >= steps


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def outcome(folder: Path) -> tuple[Any, Any, Any]:
    varying = {"step_ms", "seconds"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records = [{k: v for k, v in line.items() if k not in varying} for line in lines]
    result = json.loads((folder / "result.json").read_text())
    weights = torch.load(folder / "model.pt", weights_only=True)
    digests = {name: tensor.numpy().tobytes() for name, tensor in weights.items()}
    return records, {k: v for k, v in result.items() if k not in varying}, digests


TEXT = ["model=gpt", "model_options.context=16", "data.options.max_bytes=2000"]
TEXT += [f"model_options.{k}={v}" for k, v in dict(width=12, depth=1, heads=3).items()]


@pytest.mark.parametrize("kind", ["images", "text"])
def test_a_resumed_run_is_the_uninterrupted_one_whatever_the_workers(
    tmp_path: Path, kind: str
) -> None:
    def config(workers: int) -> Config:
        settings = ["train.log_every=1", "train.save_model=true", "recipe=fp8_delayed"]
        if kind == "images":
            return images(workers, *settings)
        return load(None, [*TEXT, *STEPS, f"data.workers={workers}", *settings])

    run(config(0), out=tmp_path / "straight", console=quiet())
    expected = outcome(tmp_path / "straight")
    assert len({record["loss"] for record in expected[0] if "loss" in record}) == 7
    for before, after, stop in ((2, 1, 4), (0, 2, 5)):
        folder = tmp_path / f"stopped_{stop}"
        with pytest.raises(Preempted):
            run(config(before), out=folder, stop=stopping_after(stop), console=quiet())
        run(config(after), out=folder, resume="auto", console=quiet())
        assert outcome(folder) == expected


def test_accuracy_of_text_is_over_its_bytes() -> None:
    trainer = Trainer(load(None, [*TEXT, *STEPS]))
    rows = trainer.evaluation_rows
    inputs, targets = rows.batch(slice(None))
    output = trainer.model(inputs)
    score = trainer.evaluate()
    assert targets.shape == (len(rows), 16)
    assert score.accuracy == (output.argmax(dim=2) == targets).double().mean().item()
    nats = -output.log_softmax(dim=2).gather(2, targets.unsqueeze(2)).mean()
    assert score.loss == pytest.approx(nats.item(), rel=1e-5)


def test_unknown_options_of_data_name_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, ["model=gpt", "data.options.contxt=3", "model_options.heds=3"])
    assert str(caught.value).splitlines() == [
        "data.options.contxt: got an unknown key; did you mean context?",
        "model_options.heds: got an unknown key; did you mean heads?",
    ]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], "mnist"),
        (["model=vit"], "random_images"),
        (["model=GPT"], "text"),
        (["model=vit", "data.batch_size=3"], "random_images"),
        (["model=vit", "data.name=mnist"], "mnist"),
        (["model=own.models:network"], "mnist"),
    ],
)
def test_a_model_has_its_data_by_default(settings: list[str], expected: str) -> None:
    assert load(None, settings).data.name == expected


def test_order_is_a_permutation_of_its_own_for_each_seed_and_epoch() -> None:
    orders = [epoch_order(100, seed, epoch) for seed in (1, 2) for epoch in (0, 1, 2)]
    for order in orders:
        assert sorted(order.tolist()) == list(range(100))
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)


def test_order_needs_no_global_generator() -> None:
    before = torch.get_rng_state()
    first = epoch_order(100, 1, 5)
    torch.rand(3)
    assert torch.equal(first, epoch_order(100, 1, 5))
    torch.manual_seed(0)
    assert torch.equal(before, torch.get_rng_state())


def test_stream_seeds_differ_by_every_part_and_fit_a_generator() -> None:
    parts = [(use, a, b) for use in ("order", "step") for a in (0, 1, 11) for b in (0, 1, 11)]
    seeds = {stream_seed(*part) for part in parts}
    assert len(seeds) == len(parts)
    assert all(0 <= seed < 2**63 for seed in seeds)
