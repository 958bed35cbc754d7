"""Checkpoints: folders that are whole or not there, verified when read, without pickle.

A checkpoint is a tree of dicts, lists, tuples, numbers, text and tensors, one entry of the tree a
section:

    step_00000120/
      SECTION.safetensors   the section's tensors
      tree.json             everything else, with the tensors' names in their places
      manifest.json         size and SHA-256 of each file

It is written beside its place and renamed into it, so a run that dies while writing leaves the
checkpoint before it untouched; what it left behind goes when the next one is written. What is not
wanted any more loses its name before its files. A tensor that two names share is stored once.
"""

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

_NAME = re.compile(r"step_\d{8,}")
_WRITING, _REPLACED, _REMOVING = ".writing_", ".replaced_", ".removing_"
_SHARDS = "shards"
_FORMAT = 1
_UNREADABLE = (
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    SafetensorError,
    TypeError,
    ValueError,
)


class CheckpointError(ValueError):
    """A checkpoint that is damaged, incomplete or absent; the text names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """A tensor in the files of a folder, in parts (`mixprec.train.sharded_checkpoint`)."""

    name: str
    folder: Path | None = None


def save(
    folder: Path,
    step: int,
    tree: Mapping[str, Any],
    *,
    keep: int,
    spare: int | None = None,
    shards: Path | None = None,
) -> Path:
    """Write one checkpoint, and drop all but the newest `keep` up to it.

    Checkpoints of later steps are dropped too: they are damaged, or of a run that went another way
    from an earlier step, and would be taken for this run's newest.

    Args:
        tree: Sections by name. Keys are text, whole numbers, true/false or None.
        spare: The step of one that is not dropped, however old it is.
        shards: A folder of the files that the tree's `Shards` are in, which becomes part of it.

    Returns: The folder of this checkpoint, `step_` and eight digits.
    Raises:
        TypeError: The tree holds something that is neither plain data nor a tensor.
        OSError: It cannot be written, on a full disk for one; those before it are kept.
    """
    target = folder / f"step_{step:08d}"
    beside, replaced = folder / f"{_WRITING}{target.name}", folder / f"{_REPLACED}{target.name}"
    clear(folder, _WRITING, _REMOVING)
    try:
        beside.mkdir(parents=True)
        if shards is not None:
            os.replace(shards, beside / _SHARDS)
        _write(beside, tree)
        if target.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            os.replace(target, replaced)
        os.replace(beside, target)
        _sync(folder)
    except OSError as error:
        raise OSError(
            f"checkpoint: got {target}; it cannot be written ({error.strerror or error}); those "
            "before it are kept; make room, or give another folder"
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    steps = listed(folder)
    place = steps.index(target) + 1
    spared = folder / f"step_{step if spare is None else spare:08d}"
    for stale in steps[: max(0, place - keep)] + steps[place:]:
        if stale != spared:
            os.replace(stale, folder / f"{_REMOVING}{stale.name}")
    clear(folder, _REPLACED, _REMOVING)
    return target


def clear(folder: Path, *prefixes: str) -> None:
    """Remove the folders in a folder whose names begin so; what cannot be removed stays."""
    for prefix in prefixes:
        for leftover in folder.glob(f"{prefix}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def load(path: Path, *, is_verified: bool = False) -> dict[str, Any]:
    """Read a checkpoint back after verifying every file; tensors are on the CPU.

    Args:
        is_verified: Its files were verified already; they are not hashed once more.

    Raises: CheckpointError: A file is missing, truncated or changed; it is named.
    """
    try:
        return _loaded(path, is_verified)
    except CheckpointError:
        raise
    except _UNREADABLE as error:
        raise CheckpointError(
            f"checkpoint: got {path}; it cannot be read ({type(error).__name__}: {error}); choose "
            "another"
        ) from error


def listed(folder: Path, at_most: int | None = None) -> list[Path]:
    """The checkpoints of a folder up to a step, oldest first; nothing of them is verified."""
    found = [p for p in folder.glob("step_*") if _NAME.fullmatch(p.name) and p.is_dir()]
    return sorted((p for p in found if at_most is None or _step(p) <= at_most), key=_step)


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def newest(
    folder: Path, report: Callable[[str], None], *, at_most: int | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole, its folder and content, or None.

    Each damaged one is reported and passed by.

    at_most: The last step that is asked for.
    """
    for old in folder.glob(f"{_REPLACED}step_*"):
        # what died between two renames left no whole one of that name
        if not (place := folder / old.name.removeprefix(_REPLACED)).exists():
            os.replace(old, place)
    for path in reversed(listed(folder, at_most)):
        try:
            return path, load(path)
        except CheckpointError as error:
            report(f"skipped a damaged checkpoint: {error}")
    return None


@contextmanager
def understood() -> Iterator[None]:
    """A stretch in which a checkpoint is taken over by those whose state it holds.

    Raises: CheckpointError: In place of what they say of one that is not theirs.
    """
    try:
        yield
    except (*_UNREADABLE, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"checkpoint: got one whose content is not a run's ({type(error).__name__}: {error}); "
            "choose another"
        ) from error


def generators(device: torch.device) -> dict[str, Any]:
    """The states of Python's, numpy's and torch's global generators, as a tree."""
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(*_which(device))
    return state


def seed_generators(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_step(seed: int, device: torch.device) -> None:
    """Seed torch's global generators that a step on a device draws from."""
    if device.type == "cpu":
        # torch.manual_seed notes for devices that are not there who asked, which takes 1 ms
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def set_generators(state: Mapping[str, Any], device: torch.device) -> None:
    """Put back what `generators` returned; a device that the state does not know stays as it is."""
    name, keys, *rest = state["numpy"]
    random.setstate(state["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], *_which(device))


@contextmanager
def isolated_generators(device: torch.device) -> Iterator[None]:
    """Training seeds the global generators; leave them to the caller as they were."""
    before = generators(device)
    try:
        yield
    finally:
        set_generators(before, device)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    # There are several CUDA devices to choose from; torch.mps takes no such argument.
    return (device,) if device.type == "cuda" else ()


def _loaded(path: Path, is_verified: bool) -> dict[str, Any]:
    manifest = _json(path, "manifest.json")
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise CheckpointError(
            f"checkpoint: got {path}; its manifest.json is of no known version; choose another"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or "tree.json" not in files:
        raise CheckpointError(
            f"checkpoint: got {path}; its manifest.json does not list the files; choose another"
        )
    if not is_verified:
        for name, expected in files.items():
            _verify(path / name, expected)
    tensors: dict[str, Tensor | Shards] = {}
    for name in files:
        if name.startswith(f"{_SHARDS}/"):
            with safe_open(path / name, framework="pt") as parts:
                tensors |= {key: Shards(name=key, folder=path / _SHARDS) for key in parts.keys()}
        elif name.endswith(".safetensors"):
            tensors |= load_file(path / name)
    try:
        return {name: _unpack(node, tensors) for name, node in _json(path, "tree.json").items()}
    except KeyError as error:
        raise CheckpointError(
            f"checkpoint: got {path}; its manifest.json lists no file with {error}; choose another"
        ) from error


def _write(folder: Path, tree: Mapping[str, Any]) -> None:
    names: dict[tuple[Any, ...], str] = {}
    nodes = {}
    for section, value in tree.items():
        tensors: dict[str, Tensor] = {}
        nodes[section] = _pack(value, section, tensors, names)
        if tensors:
            _write_tensors(folder / f"{section}.safetensors", tensors)
    (folder / "tree.json").write_text(json.dumps(nodes))
    written = sorted(file for file in folder.rglob("*") if file.is_file())
    files = {file.relative_to(folder).as_posix(): _fingerprint(file) for file in written}
    manifest = {"format": _FORMAT, "files": files}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    for file in folder.rglob("*"):
        _sync(file)
    _sync(folder)


def _write_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:
        # It is the system's fault, a full disk for one, as it is of the files beside it.
        raise OSError(f"{file.name}: {error}") from error


def _pack(
    value: Any, path: str, tensors: dict[str, Tensor], names: dict[tuple[Any, ...], str]
) -> Any:
    """JSON for a tree: text, numbers and None as they are, the rest as [kind, content]."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Tensor):
        name = names.setdefault(_identity(value, path), path)
        if name == path:
            tensors[path] = value.detach().cpu().contiguous().clone()
        return ["tensor", name]
    if isinstance(value, Shards):
        return ["tensor", value.name]
    if isinstance(value, Mapping):
        pairs = [(key, _pack(item, f"{path}/{key}", tensors, names)) for key, item in value.items()]
        return ["dict", pairs]
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_pack(v, f"{path}/{i}", tensors, names) for i, v in enumerate(value)]]
    raise TypeError(
        f"{path}: got {type(value).__name__}; a checkpoint holds plain data and tensors; convert it"
    )


def _unpack(node: Any, tensors: Mapping[str, Tensor | Shards]) -> Any:
    if not isinstance(node, list):
        return node
    kind, content = node
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(item, tensors) for key, item in content}
    items = [_unpack(item, tensors) for item in content]
    return {"list": list, "tuple": tuple}[kind](items)


def _identity(tensor: Tensor, path: str) -> tuple[Any, ...]:
    """Equal for two names of the same elements; an empty tensor is only itself."""
    if not tensor.numel():
        return (path,)
    shape, stride = tuple(tensor.shape), tensor.stride()
    return (tensor.device, tensor.data_ptr(), tensor.dtype, shape, stride)


def _json(folder: Path, name: str) -> Any:
    try:
        return json.loads((folder / name).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint: got {folder}; it has no {name}, so it is not a whole checkpoint; "
            "choose another"
        ) from error
    except ValueError as error:
        raise CheckpointError(
            f"checkpoint: got {folder}; its {name} is damaged; choose another"
        ) from error


def _verify(file: Path, expected: Mapping[str, Any]) -> None:
    if not file.is_file():
        raise CheckpointError(
            f"checkpoint: got {file.parent}; {file.name} is missing; choose another"
        )
    if _fingerprint(file) != expected:
        raise CheckpointError(
            f"checkpoint: got {file.parent}; {file.name} is truncated or changed (its size or "
            "SHA-256 is not the recorded one); choose another"
        )


def _fingerprint(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _sync(path: Path) -> None:
    """Wait until the system has put a file, or a folder's list of names, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
