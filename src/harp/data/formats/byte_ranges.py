"""Encoded images in their files: each one is a range of bytes, which is read only when it is needed."""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harp.data.formats.bounded import LARGEST, Bytes, Integers
from harp.errors import DataError


class Place(NamedTuple):
    """The place of one image: its name in messages, and a range of bytes in a file. Size -1 is the whole file."""

    name: str
    path: str
    offset: int = 0
    size: int = -1


@dataclass(frozen=True, eq=False)
class Names:
    """Many short texts in two arrays: a million Python strings would take much more memory."""

    letters: Bytes
    ends: Integers

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Names":
        """Pack texts; file names that are not UTF-8 are restored exactly."""
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> str:
        start = int(self.ends[row - 1]) if row else 0
        return self.letters[start : int(self.ends[row])].tobytes().decode("utf-8", "surrogateescape")


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """The places and labels of many encoded images below a folder: whole files, or members of archives."""

    root: str  # the folder that names and archives are relative to
    names: Names  # for whole files these are the paths
    sizes: Integers  # in bytes
    labels: Integers
    archives: tuple[str, ...] = ()
    archive_index: Integers | None = None  # for members: the number of the archive of each image
    offsets: Integers | None = None  # for members: the position of each image in its archive

    def __len__(self) -> int:
        return len(self.names)

    def place(self, row: int) -> Place:
        """The place of one image."""
        name = self.names[row]
        if self.archive_index is None or self.offsets is None:
            return Place(os.path.join(self.root, name), os.path.join(self.root, name))
        path = os.path.join(self.root, self.archives[int(self.archive_index[row])])
        return Place(f"{path}/{name}", path, int(self.offsets[row]), int(self.sizes[row]))

    def digest(self) -> str:
        """A digest of all names and sizes, without reading an image."""
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.names.letters, self.names.ends, self.sizes):
            digest.update(f"{array.dtype} {array.shape};".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def read_place(place: Place) -> bytes:
    """The encoded bytes of an image."""
    try:
        with open(place.path, "rb") as file:
            if place.size < 0 and os.fstat(file.fileno()).st_size > LARGEST:
                raise DataError(f"{place.name}: more than {LARGEST:,} bytes, expected an image")
            file.seek(place.offset)
            data = file.read(place.size)
    except OSError as error:
        raise DataError(f"{place.name}: can't be read ({error.strerror}), expected an image") from error
    if len(data) < place.size:
        raise DataError(f"{place.name}: {len(data):,} bytes, expected {place.size:,}: the archive is truncated")
    return data
