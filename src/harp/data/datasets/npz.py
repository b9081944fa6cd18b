"""Arrays in an .npz file: the user's, and the data sets that are shipped with the package."""

import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from harp.data.dataset import DataSet, Split, check_range, draw_test
from harp.data.datasets.base import UNKNOWN, InMemory, split_of
from harp.data.formats.bounded import Array, Integers, Payload, read_file
from harp.data.formats.npz import names_in_npz, read_npz
from harp.errors import DataError

_KEYS = {"train": ("x_train", "y_train"), "test": ("x_test", "y_test")}
_PARTS = {"train": ("train", "training"), "test": ("test", "testing", "val", "valid", "validation")}
_IMAGES = ("x", "images", "image", "imgs", "data")
_LABELS = ("y", "labels", "label", "targets", "target")


class Npz(InMemory):
    """The arrays of the user, by any of the usual names; without test images, these are drawn from all."""

    def read(self, folder: Path) -> DataSet:
        """Read the file itself, or data.npz in a folder."""
        path = folder / "data.npz" if folder.is_dir() else folder
        file = read_file(path, "an .npz file")
        keys = _keys(file)
        splits = {part: _split(file, part, *pair) for part, pair in keys.items()}
        train, drawn = splits["train"], "test" not in keys
        if drawn:
            held = draw_test(train.labels, str(path))
            splits["test"], train = train.select(held.nonzero().flatten()), train.select((~held).nonzero().flatten())
        test = splits["test"]
        present = torch.unique(train.labels)
        count = len(present)
        if int(present[-1]) != count - 1:
            absent = int((present != torch.arange(count)).nonzero()[0])
            raise DataError(f"{path}: y_train has no label {absent}, expected every one from 0 to {int(present[-1])}")
        classes = tuple(str(label) for label in range(count))
        source = f"{path}; test images drawn from all, {UNKNOWN}" if drawn else f"{path}; {UNKNOWN}"
        return DataSet(self.name, train, test, classes, source=source, drawn=drawn)


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
        train, test = (_split(Payload(f"{self.name}.npz", data), part, *keys) for part, keys in _KEYS.items())
        source = f"{self.origin}; checksum agrees"
        return DataSet(self.name, train, test, self.classes, flip=self.flip, source=source, verified=True)


def _keys(file: Payload) -> dict[str, tuple[str, str]]:
    """The names of the images and labels of each part; arrays of no part are training data."""
    names = names_in_npz(file)
    by_words = {frozenset(re.split(r"[_\-.]", name.lower())): name for name in names}

    def pair(part: str) -> tuple[str, str] | None:
        images, labels = (
            next((by_words[key] for word in words if (key := frozenset({word, part} - {""})) in by_words), None)
            for words in (_IMAGES, _LABELS)
        )
        return None if images is None or labels is None else (images, labels)

    found = {part: next(filter(None, map(pair, words)), None) for part, words in _PARTS.items()}
    train = found["train"] or (pair("") if found["test"] is None else None)
    if train is None:
        shown = ", ".join(names)[:200] or "none"
        expected = "x_train, y_train, x_test and y_test, or x and y"
        raise DataError(f"{file.name}: no images and labels to train on among {shown}, expected {expected}")
    return {"train": train} if found["test"] is None else {"train": train, "test": found["test"]}


def _split(file: Payload, part: str, images_key: str, labels_key: str) -> Split:
    """A split of the arrays of these names."""
    arrays = read_npz(file, (images_key, labels_key))
    images = _images(f"{file.name}: {images_key} ", arrays[images_key])
    return split_of(images, _labels(f"{file.name}: {labels_key}", part, arrays[labels_key], len(images)))


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


def _labels(where: str, part: str, labels: Array, count: int) -> Integers:
    """To int64 [N]; a column [N, 1] is accepted."""
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
