"""A small stand-in for MNIST on disk, so that a training step takes milliseconds."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mixprec.train.config import Config, load

TRAIN_ROWS, EVALUATION_ROWS = 56, 24


def idx_bytes(array: np.ndarray) -> bytes:
    """An array of bytes in IDX, the format of the original files."""
    return (
        bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + bytes(array)
    )


def write_idx_folder(folder: Path) -> Path:
    """Four files whose images are a noisy pattern for each label."""
    random = np.random.RandomState(3)
    patterns = random.randint(0, 200, (10, 28, 28))
    for part, rows in (("train", TRAIN_ROWS), ("t10k", EVALUATION_ROWS)):
        labels = np.arange(rows, dtype=np.uint8) % 10
        images = (patterns[labels] + random.randint(0, 56, (rows, 28, 28))).astype(np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    return folder


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of IDX files: 56 rows to train on, 24 to evaluate."""
    return write_idx_folder(tmp_path_factory.mktemp("digits"))


@pytest.fixture(scope="session")
def small(digits: Path) -> Callable[..., Config]:
    """A configuration of seven steps an epoch, batch 8, with settings over it."""

    def config(*settings: str) -> Config:
        base = [f"data.path={digits}", "data.batch_size=8", "train.epochs=2"]
        return load(None, [*base, "optimizer.lr=0.1", *settings])

    return config
