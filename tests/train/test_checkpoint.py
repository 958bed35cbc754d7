"""Checkpoints: what goes in comes out, and nothing that is damaged is taken for whole."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mixprec.train import checkpoint
from mixprec.train.checkpoint import CheckpointError

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


def same(a: Any, b: Any) -> bool:
    """Equal in structure, type and every bit."""
    if isinstance(a, Tensor):
        if not isinstance(b, Tensor) or (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        bits = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
        return torch.equal(*bits)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def small_tree() -> dict[str, Any]:
    return {"model": {"w": torch.randn(3, 2)}, "position": {"step": 4}}


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    tree = {
        "tensors": {str(dtype): torch.randn(4, 3).mul(3).to(dtype) for dtype in DTYPES},
        "odd": [torch.tensor(2.5), torch.zeros(0, 5), torch.arange(6.0).view(2, 3).t()],
        "plain": {0: (1, 2.5, None), "text": "ü", "nested": [[], {}, (), True], 1.5e-300: -0.0},
        "bits": torch.tensor([float("nan"), float("-inf"), -0.0, 5e-324], dtype=torch.float64),
    }
    found = checkpoint.load(checkpoint.save(tmp_path, 7, tree, keep=1))
    assert same(found, tree)


def test_nothing_is_pickled(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, small_tree(), keep=1)
    assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}


def test_a_tied_tensor_is_stored_once(tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(64, 64, bias=False), "b": nn.Linear(64, 64, bias=False)})
    model["b"].weight = model["a"].weight
    path = checkpoint.save(tmp_path, 1, {"model": model.state_dict()}, keep=1)
    assert (path / "model.safetensors").stat().st_size < 1.5 * 64 * 64 * 4
    found = checkpoint.load(path)["model"]
    assert torch.equal(found["b.weight"], model["a"].weight)


def test_views_of_one_storage_stay_apart(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    tree = {"parts": {"all": whole, "head": whole[:3], "tail": whole[3:]}}
    assert same(checkpoint.load(checkpoint.save(tmp_path, 1, tree, keep=1)), tree)


def test_what_cannot_be_held_is_refused_and_leaves_no_checkpoint(tmp_path: Path) -> None:
    kept = checkpoint.save(tmp_path, 1, small_tree(), keep=2)
    with pytest.raises(TypeError, match=r"model/f: got function; .* plain data and tensors"):
        checkpoint.save(tmp_path, 2, {"model": {"f": same}}, keep=2)
    assert checkpoint.listed(tmp_path) == [kept]


@pytest.mark.parametrize("name", ["model.safetensors", "tree.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_damage_is_found_and_named(tmp_path: Path, name: str, damage: str) -> None:
    path = checkpoint.save(tmp_path, 7, small_tree(), keep=1)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 0xFF
    if damage == "delete":
        (path / name).unlink()
    else:
        (path / name).write_bytes(content if damage == "flip" else content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=rf"step_00000007.*{name}"):
        checkpoint.load(path)


def test_newest_passes_by_what_is_damaged_and_says_so(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        path = checkpoint.save(tmp_path, step, {"position": {"step": step}}, keep=3)
    (path / "tree.json").write_text("{}")
    (tmp_path / ".writing_step_00000004").mkdir()
    said: list[str] = []
    found = checkpoint.newest(tmp_path, said.append)
    assert found == (tmp_path / "step_00000002", {"position": {"step": 2}})
    assert len(said) == 1
    assert "step_00000003; tree.json is truncated or changed" in said[0]


def test_newest_of_nothing_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "absent", print) is None


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for step in (5, 10, 15, 20):
        checkpoint.save(tmp_path, step, small_tree(), keep=keep)
    names = [path.name for path in checkpoint.listed(tmp_path)]
    assert names == [f"step_{step:08d}" for step in (5, 10, 15, 20)[-keep:]]


def test_later_steps_of_an_abandoned_run_are_dropped(tmp_path: Path) -> None:
    for step in (10, 20, 30, 15):
        checkpoint.save(tmp_path, step, small_tree(), keep=3)
    assert [path.name for path in checkpoint.listed(tmp_path)] == ["step_00000010", "step_00000015"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"position": {"step": 0}}, keep=1)
    path = checkpoint.save(tmp_path, 1, {"position": {"step": 1}}, keep=1)
    assert checkpoint.load(path) == {"position": {"step": 1}}


def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, small_tree(), keep=1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(CheckpointError, match="no known version"):
        checkpoint.load(path)


def test_generators_continue_where_they_were(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    # An odd number of normal draws leaves numpy and Python with a cached second one.
    np.random.standard_normal(3)
    random.gauss(0, 1)
    tree = {"generators": checkpoint.generators(cpu)}

    def draws() -> tuple[float, ...]:
        return (
            random.gauss(0, 1),
            random.random(),
            np.random.standard_normal(),
            np.random.rand(),
            torch.randn(()).item(),
        )

    expected = draws()
    path = checkpoint.save(tmp_path, 1, tree, keep=1)
    assert draws() != expected
    checkpoint.set_generators(checkpoint.load(path)["generators"], cpu)
    assert draws() == expected


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.AdamW(p, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), capturable=False, foreach=False),
        lambda p: torch.optim.RMSprop(p, centered=True),
        lambda p: torch.optim.LBFGS(p, max_iter=2),
    ],
    ids=["adadelta", "adamw", "sgd", "adam tensor lr", "rmsprop", "lbfgs"],
)
def test_state_of_any_optimizer_survives(tmp_path: Path, make: Any) -> None:
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    state = optimizer.state_dict()
    found = checkpoint.load(checkpoint.save(tmp_path, 3, {"optimizer": state}, keep=1))
    assert same(found["optimizer"], state)


@pytest.mark.parametrize("key", ["format", "files", "tree.json", "model.safetensors"])
def test_a_manifest_that_lacks_a_key_is_passed_by(tmp_path: Path, key: str) -> None:
    for step in (1, 2):
        path = checkpoint.save(tmp_path, step, small_tree() | {"position": step}, keep=2)
    manifest = json.loads((path / "manifest.json").read_text())
    (manifest if key in manifest else manifest["files"]).pop(key)
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError, match=r"step_00000002; its manifest\.json .* choose another"
    ):
        checkpoint.load(path)
    said: list[str] = []
    found = checkpoint.newest(tmp_path, said.append)
    assert found is not None
    assert found[1]["position"] == 1
    assert len(said) == 1


def test_tensors_that_cannot_be_written_are_an_error_of_the_system(tmp_path: Path) -> None:
    file = tmp_path / "absent" / "model.safetensors"
    with pytest.raises(OSError, match=r"model\.safetensors: .*No such file"):
        checkpoint._write_tensors(file, {"w": torch.ones(2)})
