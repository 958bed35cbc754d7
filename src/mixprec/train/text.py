"""Text as bytes, for causal models: windows of context + 1 bytes, with a tail held out."""

import os
import sysconfig
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mixprec.train.splits import Batch, Dataset

STANDARD_LIBRARY_BYTES = 4 * 2**20
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_HELD_OUT_SHARE = 20
_MOST_HELD_OUT = 2**16
_BYTE_VALUES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Row i is content[i * context : (i + 1) * context + 1], int64.

    Inputs [n, context] are all of it but the last byte, targets [n, context] all but the first.
    content: uint8 [bytes], more than context of them.
    """

    content: Tensor
    context: int

    def __len__(self) -> int:
        return (len(self.content) - 1) // self.context

    def batch(self, rows: Tensor | slice) -> Batch:
        windows = self.content.unfold(0, self.context + 1, self.context)[rows].long()
        return windows[:, :-1], windows[:, 1:]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.content,)

    def to(self, device: torch.device) -> "Windows":
        return Windows(content=self.content.to(device), context=self.context)


def text(
    path: str | None = None,
    *,
    context: int = 256,
    max_bytes: int | None = None,
    vocabulary: int = _BYTE_VALUES,
) -> Dataset:
    """Bytes of text: what is trained on, and a tail that is not.

    The tail is one twentieth of the bytes, at most 65,536 and one window, at least one window.

    Args:
        path: A file; or a folder, whose text files (UTF-8 without NUL; hidden files and folders
            left out) follow one another in the order of their paths. None: the source of Python's
            own standard library, without its tests, the first 4 MiB; it is the same text for each
            version of Python, not for all of them.
        context: Bytes that the model sees at once.
        max_bytes: Read this many at most; None for all, or 4 MiB of the standard library.
        vocabulary: The model's; it has to know every byte.

    Raises: ValueError: No such path, no text in it, less of it than two windows, or a wrong number.
    """
    for name, value in (("context", context), ("max_bytes", max_bytes)):
        is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_count and not (name == "max_bytes" and value is None):
            raise ValueError(
                f"data.options.{name}: got {value!r}; must be a whole number of at least 1; use one"
            )
    if vocabulary < _BYTE_VALUES:
        raise ValueError(
            f"model_options.vocabulary: got {vocabulary}; text is bytes, {_BYTE_VALUES} of them; "
            "leave it out"
        )
    if path is None:
        content, place = _standard_library(max_bytes or STANDARD_LIBRARY_BYTES)
    else:
        content, place = _read(Path(path), max_bytes), path
    window = context + 1
    if len(content) < 2 * window:
        raise ValueError(
            f"data.path: got {place}, {len(content)} bytes of text; context {context} needs "
            f"{2 * window}, a window to train on and one to evaluate; give more text or a "
            "shorter context"
        )
    tail = max(window, min(len(content) // _HELD_OUT_SHARE, _MOST_HELD_OUT + 1))
    array = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())
    return Dataset(
        train=Windows(content=array[:-tail], context=context),
        evaluation=Windows(content=array[-tail:], context=context),
    )


def _standard_library(max_bytes: int) -> tuple[bytes, str]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = (
        file
        for file in _sorted_files(folder, leave_out=_NOT_LIBRARY)
        if file.suffix == ".py" and file.is_file()
    )
    content = _joined((file.read_bytes() for file in files), max_bytes)
    if not content:
        raise ValueError(
            f"data.path: got none, and this Python has no source files in {folder}; set it to a "
            "file or a folder of text"
        )
    return content, str(folder)


def _read(path: Path, max_bytes: int | None) -> bytes:
    if path.is_dir():
        files = (file for file in _sorted_files(path) if file.is_file())
        content = _joined(filter(_is_text, (file.read_bytes() for file in files)), max_bytes)
        kind = "a folder without text (UTF-8) in it"
    elif path.is_file():
        content = path.read_bytes()[:max_bytes]
        kind = "an empty file"
    else:
        raise ValueError(
            f"data.path: got {str(path)!r}; there is no such file or folder; correct it, or leave "
            "it out for the source of Python's standard library"
        )
    if not content:
        raise ValueError(f"data.path: got {str(path)!r}, {kind}; give text")
    return content


def _sorted_files(folder: Path, leave_out: Collection[str] = ()) -> list[Path]:
    """Every file below a folder that is not hidden, by the parts of its path below the folder."""
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name[0] != "." and name not in leave_out]
        found += [Path(place, name) for name in names if name[0] != "."]
    return sorted(found, key=lambda file: file.relative_to(folder).parts)


def _joined(contents: Iterator[bytes], max_bytes: int | None) -> bytes:
    joined = bytearray()
    for content in contents:
        joined += content
        if max_bytes is not None and len(joined) >= max_bytes:
            return bytes(joined[:max_bytes])
    return bytes(joined)


def _is_text(content: bytes) -> bool:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return b"\0" not in content
