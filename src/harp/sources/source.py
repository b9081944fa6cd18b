"""What the sources of data sets have in common."""

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from harp.errors import DataError
from harp.readers import Array, Bytes, Integers
from harp.split import DataSet, Split

logger = logging.getLogger("harp")

UNKNOWN = "no published checksum to compare with"


@dataclass(frozen=True)
class Source(ABC):
    """A data set by name: what it is, which files have to be there, and how they are read from a folder."""

    name: str
    description: str
    files: str

    @abstractmethod
    def read(self, folder: Path, size: int | None) -> DataSet:
        """Read the files in `folder`; only sources that resize look at `size`."""


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
