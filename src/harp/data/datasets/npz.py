"""Your arrays, in an .npz file."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harp.data import formats
from harp.data.dataset import DataSet, check_range
from harp.data.datasets.base import UNKNOWN, Source, split_of
from harp.data.formats import Array, Integers
from harp.errors import DataError

KEYS = ("x_train", "y_train", "x_test", "y_test")
"""The arrays that the file must have."""


class Npz(Source):
    """The file itself, or data.npz in a folder."""

    def read(self, folder: Path, size: int | None) -> DataSet:
        """Read and check the four arrays."""
        path = folder / "data.npz" if folder.is_dir() else folder
        arrays = formats.read_npz(path, KEYS)
        train, test = (
            split_of(_images(f"{path}: x_{part} ", arrays[f"x_{part}"]), _labels(path, part, arrays))
            for part in ("train", "test")
        )
        return DataSet(
            name=self.name,
            train=train,
            test=test,
            classes=_classes(path, train.labels),
            balanced=False,
            flip=True,
            source=f"{path}; {UNKNOWN}",
            verified=False,
        )


def _classes(path: Path, labels: Tensor) -> tuple[str, ...]:
    """The labels are the names of the classes; a gap among them is refused."""
    present = torch.unique(labels)
    classes = len(present)
    if classes and int(present[-1]) != classes - 1:
        absent = int((present != torch.arange(classes)).nonzero()[0])
        raise DataError(f"{path}: y_train has no label {absent}, expected every one from 0 to {int(present[-1])}")
    return tuple(str(label) for label in range(classes))


def _images(where: str, images: Array) -> Array:
    """To uint8 or float32 [N, C, H, W]: channels are the axis of length 1 or 3, else the odd one."""
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
    # What rounding may have left outside is cut off: attacks count on pixels in [0, 1].
    return np.ascontiguousarray(images, np.float32).clip(0, 1)


def _labels(path: Path, part: str, arrays: dict[str, Array]) -> Integers:
    """To int64 [N]; a column [N, 1] will do."""
    labels, images = arrays[f"y_{part}"], arrays[f"x_{part}"]
    where = f"{path}: y_{part}"
    if labels.size != len(images) or labels.ndim not in (1, 2):
        raise DataError(f"{where} is {labels.shape}, expected one label for each of {len(images):,} images")
    flat = labels.reshape(-1)
    if flat.dtype.kind not in "iu":
        value, dtype = flat[0].item(), flat.dtype
        raise DataError(f"{where} holds {dtype}, {value} at position 0, expected integers from 0")
    wrong = np.flatnonzero((flat < 0) | (flat >= len(flat)) if part == "train" else flat < 0)
    if len(wrong):
        value, position = int(flat[wrong[0]]), int(wrong[0])
        raise DataError(f"{where} has {value} at position {position}, expected 0 to the number of classes - 1")
    return np.array(flat, np.int64)
