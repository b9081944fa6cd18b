"""Arrays in an .npz file: the user's, and the data sets that are shipped with the package."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from harp.data.dataset import DataSet, Split, check_range
from harp.data.datasets.base import UNKNOWN, InMemory, split_of
from harp.data.formats.bounded import Array, File, Integers, Payload
from harp.data.formats.npz import read_npz
from harp.errors import DataError

_KEYS = ("x_train", "y_train", "x_test", "y_test")


class Npz(InMemory):
    """The arrays of the user."""

    def read(self, folder: Path) -> DataSet:
        """Read the file itself, or data.npz in a folder."""
        path = folder / "data.npz" if folder.is_dir() else folder
        train, test = _splits(path)
        present = torch.unique(train.labels)
        count = len(present)
        if int(present[-1]) != count - 1:
            absent = int((present != torch.arange(count)).nonzero()[0])
            raise DataError(f"{path}: y_train has no label {absent}, expected every one from 0 to {int(present[-1])}")
        classes = tuple(str(label) for label in range(count))
        return DataSet(self.name, train, test, classes, source=f"{path}; {UNKNOWN}")


@dataclass(frozen=True, kw_only=True)
class Embedded(InMemory):
    """An .npz file inside the package."""

    classes: tuple[str, ...]
    flip: bool
    origin: str
    sha256: str

    def read(self, folder: Path) -> DataSet:
        """Read it from the package; the folder is ignored."""
        data = (resources.files("harp.data") / "embedded" / f"{self.name}.npz").read_bytes()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise DataError(f"embedded {self.name}.npz: another sha256 than released, expected an intact installation")
        train, test = _splits(Payload(f"{self.name}.npz", data))
        source = f"{self.origin}; checksum agrees"
        return DataSet(self.name, train, test, self.classes, flip=self.flip, source=source, verified=True)


def _splits(file: File) -> Iterator[Split]:
    """The training and the test split in a file."""
    name = file.name if isinstance(file, Payload) else str(file)
    arrays = read_npz(file, _KEYS)
    for part in ("train", "test"):
        images = _images(f"{name}: x_{part} ", arrays[f"x_{part}"])
        yield split_of(images, _labels(name, part, arrays[f"y_{part}"], len(images)))


def _images(where: str, images: Array) -> Array:
    """To uint8 or float32 [N, C, H, W]: channels are the axis of length 1 or 3, else the one that differs."""
    if images.ndim not in (3, 4) or not images.size:
        raise DataError(f"{where}is {images.shape}, expected (N, H, W), (N, C, H, W) or (N, H, W, C)")
    if images.dtype != np.uint8:
        if images.dtype.kind != "f":
            raise DataError(f"{where}is {images.dtype}, expected uint8 or float in [0, 1]")
        check_range(float(images.min()), float(images.max()), where)
    if images.ndim == 3:
        images = images[:, None]
    _, first, second, third = images.shape
    if first not in (1, 3) and (third in (1, 3) or (first == second and second != third)):
        images = images.transpose(0, 3, 1, 2)
    elif first not in (1, 3) and second != third:
        raise DataError(f"{where}is {images.shape}, expected (N, C, H, W) or (N, H, W, C)")
    if images.dtype == np.uint8:
        return np.array(images, order="C")
    # Rounding may leave values outside of [0, 1]: attacks need pixels inside.
    return np.ascontiguousarray(images, np.float32).clip(0, 1)


def _labels(name: str, part: str, labels: Array, count: int) -> Integers:
    """To int64 [N]; a column [N, 1] is accepted."""
    where = f"{name}: y_{part}"
    if labels.size != count or labels.ndim not in (1, 2):
        raise DataError(f"{where} is {labels.shape}, expected one label for each of {count:,} images")
    flat = labels.reshape(-1)
    if flat.dtype.kind not in "iu":
        value, dtype = flat[0].item(), flat.dtype
        raise DataError(f"{where} holds {dtype}, {value} at position 0, expected integers from 0")
    wrong = np.flatnonzero((flat < 0) | (flat >= len(flat)) if part == "train" else flat < 0)
    if len(wrong):
        value, position = int(flat[wrong[0]]), int(wrong[0])
        raise DataError(f"{where} has {value} at position {position}, expected 0 to the number of classes - 1")
    return np.array(flat, np.int64)
