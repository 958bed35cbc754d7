"""Text: windows and their targets, the tail held out, folders, and what is refused."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mixprec.train.splits import Dataset
from mixprec.train.text import STANDARD_LIBRARY_BYTES, text

LENGTH = 4000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(1 + index * index % 113 for index in range(LENGTH)))
    return path


def everything(rows: Any) -> tuple[Tensor, Tensor]:
    return rows.batch(slice(None))


def content(data: Dataset) -> bytes:
    """The bytes that a data set read, up to what is left over of the last window of each part."""
    return b"".join(
        bytes(inputs.flatten().tolist()) for inputs, _ in map(everything, (data.train,))
    )


def test_windows_follow_one_another_and_targets_are_the_next_bytes(file: Path) -> None:
    original = file.read_bytes()
    data = text(str(file), context=10)
    kept = LENGTH - LENGTH // 20
    assert len(data.train) == (kept - 1) // 10
    inputs, targets = everything(data.train)
    assert inputs.dtype == targets.dtype == torch.int64
    for row in range(len(data.train)):
        assert bytes(inputs[row].tolist()) == original[10 * row : 10 * row + 10]
        assert bytes(targets[row].tolist()) == original[10 * row + 1 : 10 * row + 11]


def test_the_tail_is_held_out(file: Path) -> None:
    original = file.read_bytes()
    data = text(str(file), context=10)
    inputs, targets = everything(data.evaluation)
    tail = original[-(LENGTH // 20) :]
    assert bytes(inputs.flatten().tolist()) == tail[: 10 * len(inputs)]
    assert bytes(targets.flatten().tolist()) == tail[1 : 10 * len(inputs) + 1]
    assert len(inputs) == (len(tail) - 1) // 10


def test_the_tail_has_a_window_at_least_and_a_cap(file: Path) -> None:
    assert len(text(str(file), context=1500).evaluation) == 1
    assert len(text(None, context=256).evaluation) == 2**16 // 256


def test_rows_by_index_are_those_in_order(file: Path) -> None:
    rows = text(str(file), context=10).train
    inputs, targets = everything(rows)
    chosen = torch.tensor([5, 0, 5, len(rows) - 1])
    found = rows.batch(chosen)
    assert torch.equal(found[0], inputs[chosen])
    assert torch.equal(found[1], targets[chosen])


def test_the_default_is_the_standard_library() -> None:
    data = text()
    read = content(data)
    folder = Path(sysconfig.get_path("stdlib"))
    assert read.startswith((folder / "__future__.py").read_bytes()[:5000])
    assert STANDARD_LIBRARY_BYTES - 2**16 - 2 * 257 <= len(read) < STANDARD_LIBRARY_BYTES
    ast.parse((folder / "abc.py").read_text())
    assert (folder / "abc.py").read_bytes() in read
    assert (folder / "test" / "regrtest.py").read_bytes() not in read
    assert content(text()) == read


def test_a_folder_is_its_text_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    parts = {"b/a.txt": b"1", "a.md": b"2", "b.txt": b"3", "b/c/d": b"4", "a/z": "é".encode()}
    for name, letter in parts.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(letter * 10)
    left_out = {".git/x": b"5" * 10, "image.png": b"\x89PNG\xff", "zeros": b"\0" * 10, ".x": b"6"}
    for name, letters in left_out.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(letters)
    expected = "é".encode() * 10 + b"2" * 10 + b"1" * 10 + b"4" * 10 + b"3" * 10
    data = text(str(tmp_path), context=1)
    read = content(data) + b"".join(
        bytes([int(inputs[0])]) for inputs in everything(data.evaluation)[0]
    )
    tail = max(2, len(expected) // 20)
    kept = expected[: len(expected) - tail]
    assert read == kept[:-1] + expected[-tail:-1]


def test_at_most_so_many_bytes_are_read(file: Path, tmp_path: Path) -> None:
    for path in (file, tmp_path):
        data = text(str(path), context=1, max_bytes=100)
        assert content(data) == file.read_bytes()[:94]
        assert len(data.evaluation) == 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("absent", {}, r"data.path: got '.*absent'; there is no such file or folder"),
        ("empty", {}, r"data.path: got '.*empty', an empty file; give text"),
        ("folder", {}, r"data.path: got '.*folder', a folder without text \(UTF-8\) in it"),
        ("short", {"context": 8}, "short, 17 bytes of text; context 8 needs 18, a window to"),
        ("short", {"context": 0}, "data.options.context: got 0; must be a whole number"),
        ("short", {"max_bytes": "1k"}, "data.options.max_bytes: got '1k'; must be a whole"),
        ("short", {"vocabulary": 128}, "model_options.vocabulary: got 128; text is bytes, 256"),
    ],
)
def test_what_cannot_be_read_is_said(
    tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short").write_bytes(b"x" * 17)
    with pytest.raises(ValueError, match=message):
        text(str(tmp_path / name), **options)


def test_two_windows_are_enough(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"x" * 18)
    data = text(str(tmp_path / "short"), context=8)
    assert (len(data.train), len(data.evaluation)) == (1, 1)
