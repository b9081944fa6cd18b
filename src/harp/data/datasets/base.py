"""What the sources of data sets have in common."""

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from harp.data.dataset import DataSet, Split
from harp.data.formats import Array, Bytes, Centre, Extents, Integers, memory_size
from harp.data.streaming.images import Streamed
from harp.errors import DataError
from harp.system.progress import Quiet

logger = logging.getLogger("harp")

_SHARE = 1 / 4  # of the machine's memory that decoded images may take
_CHUNK = 256

UNKNOWN = "no published checksum to compare with"


@dataclass(frozen=True)
class Facts:
    """A data set as it was published: how many images, of which shape (channels, height, width) and classes."""

    train: int
    test: int
    shape: tuple[int, int, int]
    classes: int
    hub: str | None = None  # what hubs of models call it


@dataclass(frozen=True)
class Preset:
    """The usual threat, lengths and crops on a data set; by default those of the paper."""

    epsilon: str = "8/255"
    step: str = "2/255"
    epochs: tuple[int, int, int] = (100, 20, 100)  # pre-train, prune, fine-tune
    pad: int = 4  # small images would lose what they show


@dataclass(frozen=True)
class Source(ABC):
    """A data set by name: what it is, which files have to be there, and how they are read from a folder."""

    name: str
    description: str
    files: str
    facts: Facts | None = field(default=None, kw_only=True)  # None: only its files tell
    preset: Preset = field(default=Preset(), kw_only=True)

    @abstractmethod
    def read(self, folder: Path, size: int | None) -> DataSet:
        """Read the files in `folder`; only sources that resize look at `size`."""


class Found(NamedTuple):
    """Where the images of a data set are, their labels, and one line on where that is."""

    train: Extents
    train_labels: Integers
    test: Extents
    test_labels: Integers
    classes: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Encoded(Source):
    """A data set of image files: they may be decoded once and held in memory, or stay where they are."""

    @abstractmethod
    def find(self, folder: Path, display: Quiet) -> Found:
        """Where the images are, without opening one."""

    def read(self, folder: Path, size: int | None) -> DataSet:
        """In memory, or streamed where that would take too much of it."""
        return self.open(folder, size)

    def open(
        self,
        folder: Path,
        size: int | None,
        *,
        stream: bool | None = None,
        margin: float | None = None,
        display: Quiet | None = None,
    ) -> DataSet:
        """Find the images and decode them, unless they are to be streamed."""
        display = display or Quiet()
        side = self.facts.shape[1] if size is None and self.facts is not None else size
        if side is None:
            raise DataError(f"{self.name}: no image size for {folder}, expected size= in pixels, such as 64")
        look = Centre(side, 1.0 if margin is None else margin)
        found = self.find(folder, display)
        train, test = Streamed(found.train, look), Streamed(found.test, look)
        needed, memory = train.numel() + test.numel(), memory_size()
        if is_streamed(needed, stream, margin):
            return self._made(found, train, test)
        if memory is not None and needed > memory:
            # Refused here: an allocation beyond the memory often succeeds, and kills the process later.
            count, have = f"{len(train) + len(test):,} images at size {side}", f"less than {memory / 1e9:.1f} GB"
            raise DataError(f"{folder}: {count} need {needed / 1e9:.1f} GB, expected {have}, or stream: true")
        with display.counting(f"decode {self.name}", len(train) + len(test)):
            tensors = _decoded(train, 0, len(test), display), _decoded(test, len(train), 0, display)
        return self._made(found, *tensors)

    def _made(self, found: Found, train: Tensor, test: Tensor) -> DataSet:
        return DataSet(
            name=self.name,
            train=Split(train, torch.from_numpy(found.train_labels)),
            test=Split(test, torch.from_numpy(found.test_labels)),
            classes=found.classes,
            balanced=False,
            flip=True,
            source=found.source,
            verified=False,
        )


def is_streamed(needed: int, stream: bool | None, margin: float | None) -> bool:
    """Whether image files that take so many bytes when they are decoded stay where they are.

    They do by `stream`, by a `margin` (stored pictures are needed, to crop them anew each time), or if they would take
    more than a quarter of the machine's memory.
    """
    memory = memory_size()
    large = memory is not None and needed > memory * _SHARE
    return margin is not None or bool(stream) or (stream is None and large)


def _decoded(images: Streamed, before: int, after: int, display: Quiet) -> Tensor:
    """All images in memory."""
    whole = torch.empty(images.shape, dtype=torch.uint8)
    for start in range(0, len(images), _CHUNK):
        whole[start : start + _CHUNK] = images[start : start + _CHUNK]
        display.count(before + min(start + _CHUNK, len(images)), before + len(images) + after)
    return whole


@dataclass(frozen=True)
class Checked:
    """The arrays of one file, and whether they are the published ones (None: no checksum is known)."""

    name: str
    images: Bytes
    labels: Integers
    agrees: bool | None


@dataclass(frozen=True, kw_only=True)
class Published(Source):
    """A data set that was published as files, which the user has downloaded."""

    classes: tuple[str, ...]
    balanced: bool = False
    flip: bool = True

    def places(self, folder: Path) -> tuple[Path, Path]:
        """A folder of the data set's own name comes first: MNIST and Fashion-MNIST use the same file names."""
        return folder / self.name, folder

    def missing(self, file: str, folder: Path) -> DataError:
        """The error for a file that is not there: it says what to download."""
        return DataError(f"{self.name}: no {file} in {folder}, expected {self.files}")

    def assemble(self, train: Sequence[Checked], test: Checked, origin: Path) -> DataSet:
        """Join the files, and say whether they are what was published."""
        unlike = [file.name for file in (*train, test) if file.agrees is False]
        verified = all(file.agrees for file in (*train, test))
        if verified:
            verdict = "checksums agree"
        elif unlike:
            verdict = f"not the published contents: {', '.join(unlike)}"
            logger.warning("%s from %s: %s", self.name, origin, verdict)
        else:
            verdict = UNKNOWN
        return DataSet(
            name=self.name,
            train=split_of(np.concatenate([f.images for f in train]), np.concatenate([f.labels for f in train])),
            test=split_of(np.array(test.images), np.array(test.labels)),
            classes=self.classes,
            balanced=self.balanced,
            flip=self.flip,
            source=f"{origin}; {verdict}",
            verified=verified,
        )


def split_of(images: Array, labels: Integers) -> Split:
    """A split that shares the memory of two arrays."""
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def md5(*parts: bytes | memoryview) -> str:
    """The checksum by which data sets were published."""
    digest = hashlib.md5(usedforsecurity=False)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
