"""Data sets of images and labels, their validation, and hold-out splits.

Each split has two tensors: images as uint8 or float32 in [0, 1], and labels. Images that don't fit into memory are a
`harp.data.streaming.images.Streamed`, which acts as a tensor of uint8 and leaves the images in their files.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from harp.data.streaming.images import Streamed
from harp.errors import DataError
from harp.system.seeds import derive

TEST_SHARE = 0.2
"""The share of all images that become the test set of data without one."""

TOLERANCE = 1e-6
"""How far a pixel may be outside of [0, 1] because of rounding."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images [N, C, H, W], uint8 or float32 in [0, 1], and their labels [N], int64."""

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.dtype not in (torch.uint8, torch.float32):
            actual = f"{self.images.dtype} {tuple(self.images.shape)}"
            raise DataError(f"images are {actual}, expected uint8 or float32 of shape (N, C, H, W)")
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            actual = f"{self.labels.dtype} {tuple(self.labels.shape)}"
            raise DataError(f"labels are {actual}, expected int64 of shape ({len(self.images)},)")

    def __repr__(self) -> str:
        size = "x".join(map(str, self.images.shape[1:]))
        return f"Split({len(self):,} images of {size}, {str(self.images.dtype).removeprefix('torch.')})"

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Tensor | Sequence[int]) -> "Split":
        """The images at `indices`, in that order; streamed images stay in their files."""
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.labels.device)
        images = self.images
        return Split(images.subset(chosen) if isinstance(images, Streamed) else images[chosen], self.labels[chosen])


@dataclass(frozen=True, eq=False)
class DataSet:
    """A training and a test split with the same classes.

    `balanced`: report the mean of the per-class accuracies. `flip`: the usual augmentation mirrors images. `source`:
    one line about the origin of the data. `verified`: the files match the published checksums. `drawn`: the data has no
    test images of its own, they were drawn from all images, see `draw_test`.
    """

    name: str
    train: Split
    test: Split
    classes: tuple[str, ...]
    balanced: bool = False
    flip: bool = True
    source: str = ""
    verified: bool = False
    drawn: bool = False

    def __post_init__(self) -> None:
        if not len(self.train) or not len(self.test):
            raise DataError(f"{self.name}: {len(self.train)} train and {len(self.test)} test images, expected both")
        if self.train.images.shape[1:] != self.test.images.shape[1:]:
            shapes = f"{tuple(self.train.images.shape[1:])} and {tuple(self.test.images.shape[1:])}"
            raise DataError(f"{self.name}: train and test images are {shapes}, expected one shape")
        for part, split in (("train", self.train), ("test", self.test)):
            _check_labels(split.labels, len(self.classes), f"{self.name}: {part} ")

    def __repr__(self) -> str:
        size, counts = (
            "x".join(map(str, self.shape)),
            f"{len(self.train):,} training and {len(self.test):,} test images",
        )
        return f"DataSet({self.name}: {counts} of {size}, {self.num_classes} classes)"

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    def fingerprint(self) -> str:
        """A digest of all images and labels: equal for equal data, independent of the file format.

        For streamed images it is a digest of the names and sizes of their files, because reading them takes hours.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for tensor in (self.train.images, self.train.labels, self.test.images, self.test.labels):
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
            if isinstance(tensor, Streamed):
                digest.update(tensor.digest().encode())
                continue
            digest.update(tensor.detach().cpu().contiguous().numpy().data)
        return digest.hexdigest()


def holdout(split: Split, size: int, seed: int) -> tuple[Split, Split]:
    """Split off `size` images: (the rest, those held out), both in the original order with the same class proportions.

    Arguments:
        split: the split to divide.
        size: the number of images to hold out.
        seed: the seed of the random choice.

    Example:
        train, held = harp.holdout(split, 8, seed=0)
    """
    held = _held(split.labels.cpu(), size, seed)
    return split.select((~held).nonzero().flatten()), split.select(held.nonzero().flatten())


def _held(labels: Tensor, size: int, seed: int) -> Tensor:
    """Which of the images are held out: `size` of them, with the same class proportions as all."""
    count = len(labels)
    if not 1 <= size < count:
        raise DataError(f"hold-out of {size} from {count} images, expected 1 to {count - 1}")
    classes, counts = torch.unique(labels, return_counts=True)
    # The largest remainder method in integers: the sizes add up exactly and are the same on every machine.
    sizes, remainders = counts * size // count, counts * size % count
    extra = torch.sort(remainders, descending=True, stable=True).indices[: size - int(sizes.sum())]
    sizes[extra] += 1
    generator = torch.Generator().manual_seed(derive(seed, "holdout"))
    held = torch.zeros(count, dtype=torch.bool)
    for label, quota in zip(classes.tolist(), sizes.tolist(), strict=True):
        members = (labels == label).nonzero().flatten()
        held[members[torch.randperm(len(members), generator=generator)[:quota]]] = True
    return held


def draw_test(labels: Tensor, where: str) -> Tensor:
    """Which images are the test set of data that has none: a fifth of each class, the same ones each time.

    Every run on the data so has the same test images, whatever its seed.
    """
    counts = torch.unique(labels, return_counts=True)[1]
    if not len(labels) or int(counts.min()) < 2:
        raise DataError(f"{where}: no test images, and a class with one image, expected 2 or more to draw test images")
    return _held(labels, max(1, round(TEST_SHARE * len(labels))), 0)


def draw(split: Split, size: int, seed: int) -> Split:
    """A random choice of `size` images, in the original order with the same class proportions."""
    if size > len(split):
        raise DataError(f"{size} images to train on, but {len(split)} are left after the hold-out")
    return split if size == len(split) else holdout(split, size, seed)[1]


def check_range(low: float, high: float, where: str) -> None:
    """Raise `DataError` unless the lowest and the highest pixel are in [0, 1].

    A NaN among the pixels makes both NaN, and then the comparison fails too.
    """
    if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):
        raise DataError(f"{where}images range from {low:g} to {high:g}, expected all of them in [0, 1]")


def _check_labels(labels: Tensor, num_classes: int, where: str) -> None:
    wrong = ((labels < 0) | (labels >= num_classes)).nonzero()
    if len(wrong):
        position = int(wrong[0])
        value = int(labels[position])
        raise DataError(f"{where}label {value} at position {position}, expected 0 to {num_classes - 1}")
