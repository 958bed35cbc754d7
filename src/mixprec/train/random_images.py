"""Random images, for measuring steps of a vision model: as much data as ImageNet, none on disk."""

import torch

from mixprec.train.splits import Batch, Dataset, Items, stream_seed


class RandomImages(Items):
    """Items `start` to `start + count`: an image [channels, size, size], and its label.

    Item i is standard normal in float32, from a generator seeded by (seed, i) alone; its label is
    i modulo classes.
    """

    def __init__(
        self, *, start: int, count: int, size: int, channels: int, classes: int, seed: int
    ) -> None:
        self.start = start
        self.count = count
        self.shape = (channels, size, size)
        self.classes = classes
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < self.count:
            raise IndexError(f"index: got {index}; there are {self.count} images; use one of them")
        number = self.start + index
        generator = torch.Generator().manual_seed(stream_seed("image", self.seed, number))
        image = torch.randn(self.shape, generator=generator)
        return image, torch.tensor(number % self.classes)

    @property
    def item_bytes(self) -> int:
        channels, height, width = self.shape
        return 4 * channels * height * width + 8


def random_images(
    path: str | None = None,
    *,
    items: int = 1_000_000,
    evaluation_items: int = 256,
    size: int = 256,
    channels: int = 3,
    classes: int = 1024,
    seed: int = 0,
) -> Dataset:
    """Random images and labels; the evaluation's are the items after those of the training.

    Args:
        items, evaluation_items: How many of each.
        size, channels, classes: Of an image, and of the labels.
        seed: Of the data, whatever the seed of the run.

    Raises: ValueError: A path, or a count that is none.
    """
    if path is not None:
        raise ValueError(f"data.path: got {path!r}; random images are read from nowhere; leave out")
    counts = dict(
        items=items, evaluation_items=evaluation_items, size=size, channels=channels,
        classes=classes,
    )  # fmt: skip
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(
                f"data.options.{name}: got {value!r}; must be a whole number of at least 1; use one"
            )
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise ValueError(f"data.options.seed: got {seed!r}; must be a whole number; use one")
    spans = ((0, items), (items, evaluation_items))
    train, evaluation = (
        RandomImages(
            start=start, count=count, size=size, channels=channels, classes=classes, seed=seed
        )
        for start, count in spans
    )
    return Dataset(train=train, evaluation=evaluation)
