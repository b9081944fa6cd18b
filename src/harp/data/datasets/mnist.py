"""MNIST and Fashion-MNIST: four idx files."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harp.data.dataset import DataSet
from harp.data.datasets.base import Part, Published, md5
from harp.data.formats.bounded import LARGEST, Bytes, File, inflate, read_file
from harp.errors import DataError

_TYPE = b"\0\0\x08"  # the first bytes of an idx file of unsigned bytes


def read_idx(file: File) -> Bytes:
    """Read an idx file of unsigned bytes, gzipped or not, as an array of the shape in its header."""
    name, data = read_file(file, "an idx file (the -ubyte or -ubyte.gz of MNIST)")
    gzipped = data[:2] == b"\x1f\x8b"
    shape = _shape(name, inflate(name, data, 4 + 4 * 255, wbits=31) if gzipped else data)
    start = 4 + 4 * len(shape)
    total = start + math.prod(shape)
    if total > LARGEST:
        raise DataError(f"{name}: the header claims {total:,} bytes, expected at most {LARGEST:,}")
    if gzipped:
        # One byte more than claimed, so that the end of the stream and its checksum are reached.
        data = inflate(name, data, total + 1, wbits=31)
    if len(data) != total:
        size = f"more than {total:,}" if gzipped and len(data) > total else f"{len(data):,}"
        claim = "x".join(map(str, shape))
        raise DataError(f"{name}: {size} bytes, expected {total:,} for the {claim} values of the header")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _shape(name: str, header: bytes) -> tuple[int, ...]:
    """The shape in an idx header: the type, the number of dimensions, big-endian sizes."""
    if len(header) < 4 or header[:3] != _TYPE or not 1 <= header[3] <= 4:
        raise DataError(f"{name}: starts with {header[:4].hex() or 'nothing'}, expected 000008 and 01 to 04 (idx)")
    rank = header[3]
    if len(header) < 4 + 4 * rank:
        raise DataError(f"{name}: {len(header)} bytes, expected a header of {4 + 4 * rank}")
    return struct.unpack_from(f">{rank}I", header, 4)


@dataclass(frozen=True, kw_only=True)
class Mnist(Published):
    """A data set in the four files of MNIST, gzipped or not; `digests` are the md5 of the files after gunzip."""

    digests: dict[str, str]

    def read(self, folder: Path) -> DataSet:
        """Read the four files from the first folder that has any of the images."""
        first = next(iter(self.digests))
        place = next((place for place in self.places(folder) if any(place.glob(f"{first}*"))), folder)
        train, test = (self._part(place, part) for part in ("train", "t10k"))
        return self.assemble([train], test, place)

    def _part(self, place: Path, part: str) -> Part:
        names = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
        (images, images_verified), (labels, labels_verified) = (self._file(place, name) for name in names)
        if images.ndim != 3 or labels.shape != images.shape[:1]:
            shapes = f"{images.shape} images with {labels.shape} labels"
            raise DataError(f"{place / names[0]}: {shapes}, expected (N, 28, 28) and (N,)")
        return Part(part, images[:, None], labels.astype(np.int64), images_verified and labels_verified)

    def _file(self, place: Path, file: str) -> tuple[Bytes, bool]:
        """The array in a file, and whether it is the published one."""
        path = next((path for path in (place / f"{file}.gz", place / file) if path.is_file()), None)
        if path is None:
            raise self.missing(f"{file}.gz", place)
        array = read_idx(path)
        header = _TYPE + struct.pack(f">B{array.ndim}I", array.ndim, *array.shape)
        return array, md5(header + array.tobytes()) == self.digests[file]


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
GARMENTS = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
