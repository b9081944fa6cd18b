"""What data sets have in common: a description of each, and the two kinds: arrays in memory, and image files."""

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
from harp.data.formats.bounded import Array, Bytes, Integers
from harp.data.formats.byte_ranges import EncodedImages, read_place
from harp.data.formats.images import Centre, decode_image, strict_warnings
from harp.data.streaming.images import Streamed
from harp.errors import DataError
from harp.system.memory import machine_memory
from harp.system.progress import Quiet

logger = logging.getLogger("harp")

_SHARE = 1 / 4  # of the machine's memory that decoded images may take
_SHOWN = 6  # files that an error lists
_CHUNK = 256  # images decoded at a time

UNKNOWN = "no published checksum to compare with"


@dataclass(frozen=True)
class Facts:
    """A data set as it was published: numbers of images, their shape (channels, height, width) and classes."""

    train: int
    test: int
    shape: tuple[int, int, int]
    classes: int
    hub: str | None = None  # its name on model hubs


@dataclass(frozen=True)
class Preset:
    """The usual threat, lengths and crops on a data set; the defaults are those of the paper."""

    epsilon: str = "8/255"
    step: str = "2/255"
    epochs: tuple[int, int, int] = (100, 20, 100)  # pre-train, prune, fine-tune
    pad: int = 4  # smaller for small images


@dataclass(frozen=True)
class Source(ABC):
    """A data set by name: a description, and the files that it needs."""

    name: str
    description: str
    files: str
    facts: Facts | None = field(default=None, kw_only=True)  # None: known only from its files
    preset: Preset = field(default=Preset(), kw_only=True)


class InMemory(Source):
    """A data set of arrays."""

    @abstractmethod
    def read(self, folder: Path) -> DataSet:
        """Read the files in `folder`."""


class Listing(NamedTuple):
    """The places of the images of a data set, the classes, and one line about the origin."""

    train: EncodedImages
    test: EncodedImages
    classes: tuple[str, ...]
    source: str
    drawn: bool = False  # the test images are drawn from all images


class Encoded(Source):
    """A data set of image files, which are decoded once and kept in memory, or streamed."""

    @abstractmethod
    def find(self, folder: Path, display: Quiet) -> Listing:
        """The places of the images, without opening one."""

    def first_size(self, folder: Path, display: Quiet) -> tuple[int, int]:
        """Width and height of the first image."""
        place = self.find(folder, display).train.place(0)
        with strict_warnings():
            size = decode_image(read_place(place), place.name).size
        return int(size[0]), int(size[1])

    def open(
        self,
        folder: Path,
        size: int | None,
        *,
        stream: bool | None = None,
        margin: float | None = None,
        display: Quiet | None = None,
    ) -> DataSet:
        """Find the images, and decode them unless they are streamed."""
        display = display or Quiet()
        side = self.facts.shape[1] if size is None and self.facts is not None else size
        if side is None:
            raise DataError(f"{self.name}: no image size for {folder}, expected --size 64, or data.size in a recipe")
        crop = Centre(side, 1.0 if margin is None else margin)
        listing = self.find(folder, display)
        images: list[Tensor] = [Streamed(listing.train, crop), Streamed(listing.test, crop)]
        count, needed = sum(map(len, images)), sum(part.numel() for part in images)
        if not is_streamed(needed, stream, margin):
            memory = machine_memory()
            if memory is not None and needed > memory:
                # An allocation beyond the memory often succeeds, and kills the process later.
                wanted = f"{count:,} images at size {side} need {needed / 1e9:.1f} GB"
                raise DataError(f"{folder}: {wanted}, expected less than {memory / 1e9:.1f} GB, or stream: true")
            with display.counting(f"decode {self.name}", count):
                images = [_decoded(images[0], 0, count, display), _decoded(images[1], len(images[0]), count, display)]
        train, test = images
        return DataSet(
            name=self.name,
            train=Split(train, torch.from_numpy(listing.train.labels)),
            test=Split(test, torch.from_numpy(listing.test.labels)),
            classes=listing.classes,
            source=listing.source,
            drawn=listing.drawn,
        )


def is_streamed(needed: int, stream: bool | None, margin: float | None) -> bool:
    """Whether images that take `needed` bytes when decoded stay in their files.

    They do if `stream` says so, with a `margin` (because stored images are cropped differently each time), or if they
    would take more than a quarter of the machine's memory.
    """
    memory = machine_memory()
    large = memory is not None and needed > memory * _SHARE
    return margin is not None or bool(stream) or (stream is None and large)


def _decoded(images: Tensor, before: int, total: int, display: Quiet) -> Tensor:
    """All images in memory; `before` of `total` images were decoded before."""
    decoded = torch.empty(images.shape, dtype=torch.uint8)
    for start in range(0, len(images), _CHUNK):
        decoded[start : start + _CHUNK] = images[start : start + _CHUNK]
        display.count(before + min(start + _CHUNK, len(images)), total)
    return decoded


class Part(NamedTuple):
    """The arrays of one file, and whether they are the published ones (None: no checksum is known)."""

    name: str
    images: Bytes
    labels: Integers
    verified: bool | None


@dataclass(frozen=True, kw_only=True)
class Published(InMemory):
    """A data set that was published as files, which the user has downloaded."""

    classes: tuple[str, ...]
    balanced: bool = False
    flip: bool = True

    def places(self, folder: Path) -> list[Path]:
        """Folders to look in: the one with the name of the data set, then the one given, then one level down and up.

        A folder with the name of the data set comes first: MNIST and Fashion-MNIST use the same file names.
        """
        if folder.is_file():  # an archive
            folder = folder.parent
        own = _plain(self.name)
        below = sorted(filter(Path.is_dir, folder.iterdir())) if folder.is_dir() else []
        below = [path for path in below if _plain(path.name) == own or not _is_near(own, _plain(path.name))]
        below.sort(key=lambda path: _plain(path.name) != own)
        inside = [path / "raw" for path in below]  # as torchvision keeps MNIST
        return [folder / self.name, folder, *below, *inside, *([folder.absolute().parent] if folder.is_dir() else [])]

    def missing(self, file: str, folder: Path) -> DataError:
        """The error for a missing file, which says what to download and what is there instead."""
        return DataError(f"{self.name}: no {file} in {folder}, expected {self.files}; {contents(folder)}")

    def assemble(self, train: Sequence[Part], test: Part, origin: Path) -> DataSet:
        """Join the files, and say whether they are the published ones."""
        different = [part.name for part in (*train, test) if part.verified is False]
        verified = all(part.verified for part in (*train, test))
        result = "checksums agree" if verified else UNKNOWN
        if different:
            result = f"not the published contents: {', '.join(different)}"
            logger.warning("%s from %s: %s", self.name, origin, result)
        images, labels = (np.concatenate(arrays) for arrays in zip(*(part[1:3] for part in train), strict=True))
        return DataSet(
            name=self.name,
            train=split_of(images, labels),
            test=split_of(np.array(test.images), np.array(test.labels)),
            classes=self.classes,
            balanced=self.balanced,
            flip=self.flip,
            source=f"{origin}; {result}",
            verified=verified,
        )


def _plain(name: str) -> str:
    """A name in small letters and digits only."""
    return "".join(filter(str.isalnum, name.lower()))


def _is_near(own: str, other: str) -> bool:
    """Whether a folder's name is that of another data set with similar files, such as mnist for fashionmnist."""
    return own in other or (bool(other) and other in own)


def contents(folder: Path) -> str:
    """What is in a folder, for an error about what is not."""
    if not folder.is_dir():
        return f"{folder} is a file, not a folder" if folder.exists() else "there is no such folder"
    names = sorted(f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir())
    names = [name for name in names if not name.startswith(".")]
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"there is {', '.join(names[:_SHOWN])}{more}" if names else "it is empty"


def split_of(images: Array, labels: Array) -> Split:
    """A split that shares the memory of two arrays."""
    return Split(torch.from_numpy(images), torch.from_numpy(labels))


def md5(data: bytes | memoryview) -> str:
    """The kind of checksum that data sets were published with."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()
