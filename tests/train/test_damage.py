"""Disks and files on bad days: one clear line, nothing whole is lost, nothing damaged is taken."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from mixprec.train import checkpoint, run
from mixprec.train.checkpoint import CheckpointError
from mixprec.train.config import Config
from mixprec.train.trainer import Trainer
from train.small_models import SMALL_NET, use
from train.test_checkpoint import same, small_tree

Small = Callable[..., Config]
DAMAGED, REWRITTEN = 1000, 500


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A folder with a whole checkpoint of step 1."""
    checkpoint.save(tmp_path, 1, small_tree(), keep=3)
    return tmp_path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["_write", "_write_tensors", "_sync"])
def test_a_full_disk_is_one_line_and_keeps_what_was_whole(
    whole: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    before = checkpoint.load(whole / "step_00000001")
    monkeypatch.setattr(checkpoint, where, full_disk)
    line = r"checkpoint: got .*step_00000002; it cannot be written \(No space left on device\); "
    with pytest.raises(OSError, match=line) as stopped:
        checkpoint.save(whole, 2, small_tree(), keep=1)
    assert "\n" not in str(stopped.value)
    monkeypatch.undo()
    assert same(checkpoint.newest(whole, print)[1], before)
    assert not [name for name in names(whole) if name.startswith(".")]


def test_a_file_that_may_not_grow_is_one_line(whole: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with pytest.raises(OSError, match="step_00000002; it cannot be written"):
            checkpoint.save(whole, 2, {"model": {"w": torch.ones(20_000)}}, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(whole) == ["step_00000001"]


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    with pytest.raises(OSError, match=r"step_00000001; it cannot be written \("):
        checkpoint.save(tmp_path / "checkpoints", 1, small_tree(), keep=1)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("step", [1, 2])
def test_a_writer_killed_anywhere_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Killed before each call that changes the folder, in turn, until none is left."""
    old, new = {"position": {"step": "old"}}, {**small_tree(), "position": {"step": "new"}}
    calls = ["os.replace", "os.fsync", "shutil.rmtree", "json.dumps", "checkpoint.save_file"]
    reached = 0
    while True:
        folder = tmp_path / str(reached)
        checkpoint.save(folder, 1, old, keep=1)
        with monkeypatch.context() as patch:
            left = iter(range(reached, -1, -1))
            for call in calls:
                owner, name = call.split(".")
                holder = checkpoint if owner == "checkpoint" else getattr(checkpoint, owner)
                patch.setattr(holder, name, dying(getattr(holder, name), left))
            child = os.fork()
            if child == 0:
                checkpoint.save(folder, step, new, keep=1)
                os._exit(0)
            killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        found = checkpoint.newest(folder, pytest.fail)
        assert found is not None
        assert found[1]["position"]["step"] in ("old", "new")
        checkpoint.save(folder, 3, new, keep=1)
        assert names(folder) == ["step_00000003"]
        if not killed:
            break
        reached += 1
    assert reached > 8


def dying(call: Callable[..., Any], left: Iterator[int]) -> Callable[..., Any]:
    def die_or_call(*args: Any, **kwargs: Any) -> Any:
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **kwargs)

    return die_or_call


def test_a_folder_of_the_users_is_left_alone(whole: Path) -> None:
    (whole / "step_best").mkdir()
    (whole / "step_00000009").write_text("a file")
    checkpoint.save(whole, 2, small_tree(), keep=1)
    assert names(whole) == ["step_00000002", "step_00000009", "step_best"]


def test_a_run_whose_checkpoints_cannot_be_written_says_so_and_goes_on_later(
    small: Small, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use(monkeypatch, SMALL_NET)
    config = small("train.steps=4", "checkpoint.every=2")
    sync = checkpoint._sync
    monkeypatch.setattr(
        checkpoint, "_sync", lambda p: full_disk() if "00000004" in str(p) else sync(p)
    )
    with pytest.raises(OSError, match=r"step_00000004; it cannot be written"):
        run(config, out=tmp_path / "a", console=quiet())
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert (result["outcome"], result["exit_code"]) == ("error", 1)
    monkeypatch.setattr(checkpoint, "_sync", sync)
    assert run(config, out=tmp_path / "a", resume="auto", console=quiet())["steps"] == 4


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


@pytest.fixture(scope="module")
def trained(
    small: Small, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Trainer, Path]]:
    """A trainer, and its checkpoint."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch, SMALL_NET)
        config = small("recipe=fp8_delayed", "base=fp16", "optimizer.name=adamw")
        trainer = Trainer(config)
        trainer.step()
        yield trainer, checkpoint.save(tmp_path_factory.mktemp("c"), 1, trainer.state(), keep=1)


def damaged(content: bytes, draw: random.Random) -> bytes:
    found, place = bytearray(content), draw.randrange(len(content))
    kind = draw.randrange(4)
    if kind == 0:
        found[place] ^= 1 << draw.randrange(8)
    elif kind == 1:
        del found[place:]
    elif kind == 2:
        found[place:place] = draw.randbytes(draw.randrange(1, 9))
    else:
        del found[place : place + draw.randrange(1, 99)]
    return bytes(found)


def test_damaged_bytes_are_an_error_or_no_damage(tmp_path: Path) -> None:
    tree = small_tree() | {"plain": [1, (2.5, None)], "text": "ü"}
    path, draw = checkpoint.save(tmp_path, 1, tree, keep=1), random.Random(0)
    files = {file: file.read_bytes() for file in sorted(path.iterdir())}
    loaded = 0
    for _ in range(DAMAGED):
        file = draw.choice(list(files))
        file.write_bytes(damaged(files[file], draw))
        try:
            found = checkpoint.load(path)
        except CheckpointError as error:
            assert str(path) in str(error)  # noqa: PT017, either outcome is right
        else:
            assert same(found, tree)
            loaded += 1
        file.write_bytes(files[file])
    assert loaded < DAMAGED / 20


ODD = [None, True, -1, 3.5, 10**30, float("nan"), "x", "", [], {}, ["tensor", "x"], ["dict", 3]]
ODD += [["dict", [[[], 1]]], ["list", None], ["nothing", []], [1, 2, 3], "\ud800", ["tensor", []]]


def rewritten(node: Any, draw: random.Random) -> Any:
    """The same JSON with one node of it replaced by something else."""
    if not isinstance(node, list | dict) or not node or draw.random() < 0.15:
        return draw.choice(ODD)
    keys = list(node) if isinstance(node, dict) else range(len(node))
    key = draw.choice(keys)
    changed = dict(node) if isinstance(node, dict) else list(node)
    if isinstance(node, dict) and draw.random() < 0.1:
        del changed[key]
    else:
        changed[key] = rewritten(node[key], draw)
    return changed


def test_content_that_is_no_runs_is_one_line(trained: tuple[Trainer, Path], tmp_path: Path) -> None:
    trainer, path = trained
    copy, draw = tmp_path / "step_00000001", random.Random(0)
    shutil.copytree(path, copy)
    tree = json.loads((path / "tree.json").read_text())
    manifest = json.loads((path / "manifest.json").read_text())
    for _ in range(REWRITTEN):
        (copy / "tree.json").write_text(json.dumps(rewritten(tree, draw)))
        manifest["files"]["tree.json"] = checkpoint._fingerprint(copy / "tree.json")
        (copy / "manifest.json").write_text(json.dumps(manifest))
        try:
            trainer.load_state(checkpoint.load(copy))
        except ValueError as error:  # of which CheckpointError is one
            assert str(error)  # noqa: PT017, either outcome is right
    trainer.load_state(checkpoint.load(path))
