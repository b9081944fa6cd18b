"""MNIST and Fashion-MNIST: four idx files."""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harp.data import formats
from harp.data.dataset import DataSet
from harp.data.datasets.base import Checked, Published, md5
from harp.data.formats import Bytes
from harp.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Mnist(Published):
    """A data set in the four files of MNIST, gzipped or not; `digests` are the md5 of the files after gunzip."""

    digests: dict[str, str]

    def read(self, folder: Path, size: int | None) -> DataSet:
        """Read the four files from the first place that has any of the images."""
        first = next(iter(self.digests))
        place = next((place for place in self.places(folder) if any(place.glob(f"{first}*"))), folder)
        files = {file: self._file(place, file) for file in self.digests}
        train, test = (_pair(place, part, files) for part in ("train", "t10k"))
        return self.assemble([train], test, place)

    def _file(self, place: Path, file: str) -> tuple[Bytes, bool]:
        """The array in a file, and whether it is the published one."""
        paths = [path for path in (place / f"{file}.gz", place / file) if path.is_file()]
        if not paths:
            raise self.missing(f"{file}.gz", place)
        array = formats.read_idx(paths[0])
        header = b"\0\0\x08" + struct.pack(f">B{array.ndim}I", array.ndim, *array.shape)
        return array, md5(header, array.data) == self.digests[file]


def _pair(place: Path, part: str, files: dict[str, tuple[Bytes, bool]]) -> Checked:
    """The images and labels of one split, which are two files."""
    names = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    (images, images_agree), (labels, labels_agree) = (files[name] for name in names)
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        shapes = f"{images.shape} images with {labels.shape} labels"
        raise DataError(f"{place / names[0]}: {shapes}, expected (N, 28, 28) and (N,)")
    return Checked(part, images[:, None], labels.astype(np.int64), images_agree and labels_agree)


MNIST_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
FASHION_MD5 = {
    "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
}
DIGITS = tuple(str(digit) for digit in range(10))
# fmt: off
GARMENTS = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)
# fmt: on
