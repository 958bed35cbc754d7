"""Checkpoints of several ranks: what is in shards is written and read by all of them at once.

    step_00000120/
      ...                   as `mixprec.train.checkpoint` has it; of a tensor in shards the name
      shards/               its parts: safetensors files, one a rank

The shards are torch.distributed.checkpoint's, without pickle, and are read by any number of ranks:
each takes what its own shards overlap, one process all of it. The first rank writes all else, lists
the shards with their sizes and SHA-256 too, and gives the whole its name after every rank is done.
All ranks see the same folder. Which checkpoint is whole the first rank, which verifies it, decides
for all; each rank then reads it for itself, so that nothing but its name is sent.

Source: torch.distributed.checkpoint's HuggingFaceStorageWriter and HuggingFaceStorageReader.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixprec.train import checkpoint
from mixprec.train.checkpoint import CheckpointError, Shards
from mixprec.train.distributed import Ranks

_BESIDE = ".shards_of_"


def save(
    ranks: Ranks,
    folder: Path,
    step: int,
    tree: Mapping[str, Any],
    *,
    keep: int,
    spare: int | None = None,
) -> Path:
    """`checkpoint.save` by all ranks, each with its own shards in the tree.

    Raises: OSError: A rank cannot write, on every rank; the checkpoints before it are kept.
    """
    shards: dict[str, Tensor] = {}

    def named(path: str, leaf: Any) -> Any:
        if not hasattr(leaf, "device_mesh"):
            return leaf
        shards[path] = leaf.detach()
        return Shards(name=path)

    plain = {name: _mapped(value, named, name) for name, value in tree.items()}
    beside = folder / f"{_BESIDE}{step:08d}" if shards else None
    if beside is not None:
        ranks.at_first(lambda: checkpoint.clear(folder, _BESIDE))
        _write(beside, shards)
    return ranks.at_first(
        lambda: checkpoint.save(folder, step, plain, keep=keep, spare=spare, shards=beside)
    )


def load(ranks: Ranks, path: Path) -> dict[str, Any]:
    """`checkpoint.load` by all ranks.

    Raises: CheckpointError: It is damaged, or a rank cannot read it; on every rank.
    """
    found = _read(ranks, lambda: (path, checkpoint.load(path)))
    assert found is not None
    return found


def newest(
    ranks: Ranks, folder: Path, report: Callable[[str], None], *, at_most: int | None = None
) -> dict[str, Any] | None:
    """The content of `checkpoint.newest`, by all ranks; the first one reports.

    Raises: CheckpointError: A rank cannot read what the first one has verified; on every rank.
    """
    return _read(ranks, lambda: checkpoint.newest(folder, report, at_most=at_most))


def _read(
    ranks: Ranks, find: Callable[[], tuple[Path, dict[str, Any]] | None]
) -> dict[str, Any] | None:
    """What a function finds on the first rank, as each rank reads it; None where it finds none."""
    trees: list[dict[str, Any]] = []

    def path_of_found() -> Path | None:
        if (found := find()) is None:
            return None
        trees.append(found[1])
        return found[0]

    path, error = ranks.at_first(path_of_found), None
    if path is None:
        return None
    if not ranks.is_first:
        try:
            trees.append(checkpoint.load(path, is_verified=True))
        except (CheckpointError, RuntimeError, MemoryError) as caught:
            # whatever it is, the others wait for a word of it
            error = f"rank {ranks.rank} cannot read it ({caught})"
    # nobody goes on, and drops it, before all have read it
    if (error := ranks.first_of(error)) is not None:
        raise CheckpointError(
            f"checkpoint: got {path}; {error}, which the first rank can; give a folder that all "
            "ranks see"
        )
    return trees[0]


def assembled(tree: Mapping[str, Any], mesh: Any) -> dict[str, Any]:
    """What `checkpoint.load` gave, with the tensors that it left in their shards.

    Args:
        tree: Of the same checkpoint on all ranks.
        mesh: The device mesh whose ranks take a shard each, along the first axis; None for whole
            tensors, on the CPU.

    Raises: CheckpointError: A shard cannot be read.
    """
    found: dict[str, Shards] = {}

    def note(_: str, leaf: Any) -> None:
        if isinstance(leaf, Shards):
            found[leaf.name] = leaf

    _mapped(tree, note, "")
    if not found:
        return dict(tree)
    from torch.distributed import checkpoint as torch_checkpoint
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor import empty as sharded

    (folder,) = {leaf.folder for leaf in found.values()}
    assert folder is not None  # from a checkpoint
    with _quiet():
        reader = torch_checkpoint.HuggingFaceStorageReader(str(folder))
        known: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Any] = {}
    for name in found:
        size, dtype = known[name].size, known[name].properties.dtype
        if mesh is None:
            tensors[name] = torch.empty(size, dtype=dtype)
        else:
            tensors[name] = sharded(size, dtype=dtype, device_mesh=mesh, placements=[Shard(0)])
    try:
        with _quiet():
            torch_checkpoint.load(tensors, storage_reader=reader, no_dist=mesh is None)
    except torch_checkpoint.CheckpointException as error:
        raise CheckpointError(
            f"checkpoint: got {folder.parent}; its shards cannot be read ({_cause(error)}); choose "
            "another"
        ) from error

    def filled(_: str, leaf: Any) -> Any:
        return tensors[leaf.name] if isinstance(leaf, Shards) else leaf

    return {name: _mapped(value, filled, name) for name, value in tree.items()}


def placed(state: Mapping[Any, Any], held: Mapping[Any, Tensor]) -> dict[Any, Any]:
    """A state with each tensor as what it belongs to is held: whole, or this rank's shard of it.

    Args:
        state: Of a model by name; or of an optimizer, nested, by its parameters' numbers.
        held: The tensors of the same keys. What has another shape than its own is left alone, as
            are counts of steps.
    """
    return {
        key: _placed_like(value, held[key])
        if key in held
        else placed(value, held)
        if isinstance(value, Mapping)
        else value
        for key, value in state.items()
    }


def _placed_like(value: Any, held: Tensor) -> Any:
    if isinstance(value, Mapping):
        return {key: _placed_like(entry, held) for key, entry in value.items()}
    mesh = getattr(held, "device_mesh", None)
    if mesh is None or not isinstance(value, Tensor) or value.shape != held.shape:
        return value
    if hasattr(value, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    # every rank has all of it: nothing is sent
    placements = held.placements  # type: ignore[attr-defined]
    return distribute_tensor(value.to(held.device), mesh, placements, src_data_rank=None)


def _write(folder: Path, shards: dict[str, Tensor]) -> None:
    from torch.distributed import checkpoint as torch_checkpoint

    writer = torch_checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        with _quiet():
            torch_checkpoint.save(shards, storage_writer=writer)
    except torch_checkpoint.CheckpointException as error:
        raise OSError(
            f"checkpoint: got {folder.parent}; its shards cannot be written ({_cause(error)}); "
            "those before it are kept; make room, or give another folder"
        ) from error


def _cause(error: Any) -> str:
    """The first rank's failure, in a line."""
    failures = [failure for failure, _ in error.failures.values()]
    return (str(failures[0]).splitlines() or [type(failures[0]).__name__])[0]


def _mapped(value: Any, change: Callable[[str, Any], Any], path: str) -> Any:
    """A tree with each leaf as a function of its path and itself gives it."""
    if isinstance(value, Mapping):
        return {key: _mapped(entry, change, f"{path}/{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        items = (_mapped(entry, change, f"{path}/{i}") for i, entry in enumerate(value))
        return type(value)(items)
    return change(path, value)


@contextmanager
def _quiet() -> Iterator[None]:
    """torch tells of its own deprecations, and that one process alone reads or writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
