"""Encoded images where they lie: each is a range of bytes of some file, and nothing is read before it is asked for."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harp.data.formats.bounded import LARGEST, Bytes, Integers
from harp.errors import DataError


class Place(NamedTuple):
    """Where one image is: its name for people, and the bytes of a file. A size of -1 is all of the file."""

    name: str
    path: str
    offset: int = 0
    size: int = -1


@dataclass(frozen=True, eq=False)
class Names:
    """Many short texts in two arrays: a million Python strings would take ten times the memory."""

    letters: Bytes
    ends: Integers

    @classmethod
    def of(cls, texts: Iterable[str]) -> "Names":
        """Pack texts; what is no UTF-8 in a file's name comes back as it was."""
        encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
        ends = np.cumsum([len(each) for each in encoded], dtype=np.int64)
        return cls(np.frombuffer(b"".join(encoded), np.uint8), ends)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, row: int) -> str:
        start = int(self.ends[row - 1]) if row else 0
        return self.letters[start : int(self.ends[row])].tobytes().decode("utf-8", "surrogateescape")


@dataclass(frozen=True, eq=False)
class Extents:
    """So many encoded images below a folder: whole files, or members of archives by their offsets.

    Arguments:
        root: the folder that names and archives are relative to.
        names: of the images; of whole files they are the paths.
        sizes: in bytes.
        archives: the files that hold the images, if they are members; `held` is the archive of each image and
            `offsets` where in it the image begins.
    """

    root: str
    names: Names
    sizes: Integers
    archives: tuple[str, ...] = ()
    held: Integers | None = None
    offsets: Integers | None = None

    def __len__(self) -> int:
        return len(self.names)

    def place(self, row: int) -> Place:
        """Where an image is."""
        name = self.names[row]
        if self.held is None or self.offsets is None:
            return Place(os.path.join(self.root, name), os.path.join(self.root, name))
        archive = self.archives[int(self.held[row])]
        path = os.path.join(self.root, archive)
        return Place(f"{path}/{name}", path, int(self.offsets[row]), int(self.sizes[row]))

    def digest(self) -> str:
        """A digest of all names and sizes, without reading an image."""
        found = hashlib.blake2b(digest_size=16)
        for array in (self.names.letters, self.names.ends, self.sizes):
            found.update(f"{array.dtype} {array.shape};".encode())
            found.update(np.ascontiguousarray(array).data)
        return found.hexdigest()


def whole_files(root: str, names: Sequence[str], sizes: Sequence[int]) -> Extents:
    """Images that are files of their own, by paths relative to a folder."""
    return Extents(root, Names.of(names), np.array(sizes, np.int64))


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
