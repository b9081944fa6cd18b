"""Tar archives, read in place: where their members are, by one pass over the headers."""

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from harp.data.formats.bounded import LARGEST, first_line
from harp.errors import DataError


class Member(NamedTuple):
    """A file in an archive: its name, where its bytes begin, and how many they are."""

    name: str
    offset: int
    size: int


class TarIndex:
    """The members of an uncompressed archive, or of an archive that is itself a member."""

    def __init__(self, path: str | Path, inside: Member | None = None) -> None:
        self.path = Path(path)
        self.inside = inside
        self.name = str(path) if inside is None else f"{path}/{inside.name}"
        self._file: IO[bytes] | None = None

    def __iter__(self) -> Iterator[Member]:
        """Its regular files in their order; whatever is no whole archive ends in a `DataError`."""
        seen = 0
        try:
            with self.path.open("rb") as self._file:
                window = _Window(self._file, self.inside)
                with tarfile.open(fileobj=window, mode="r:", bufsize=tarfile.BLOCKSIZE) as archive:
                    for entry in archive:
                        if entry.isreg() and not entry.issparse():
                            yield self._member(entry, window)
                            seen += 1
                    window.seek(archive.offset)
                    if window.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                        raise EOFError("there is no mark of its end")  # tarfile takes half a header for the end
        except (tarfile.TarError, OSError, EOFError, ValueError) as error:
            message = f"{self.name}: damaged or truncated after {seen:,} files ({first_line(error)})"
            raise DataError(f"{message}, expected an uncompressed tar archive, complete") from error

    def _member(self, entry: tarfile.TarInfo, window: "_Window") -> Member:
        if entry.size > LARGEST and not entry.name.endswith(".tar"):
            raise DataError(f"{self.name}: {entry.name} has {entry.size:,} bytes, expected at most {LARGEST:,}")
        if entry.offset_data + entry.size > window.size:
            raise EOFError(f"{entry.name} goes beyond the end")
        return Member(entry.name.removeprefix("./"), window.start + entry.offset_data, entry.size)

    def read(self, member: Member) -> bytes:
        """The bytes of a small member, while going through them."""
        assert self._file is not None
        self._file.seek(member.offset)
        return self._file.read(member.size)


class _Window(io.RawIOBase):
    """A part of a file as if it were a file."""

    def __init__(self, file: IO[bytes], part: Member | None) -> None:
        self.file, self.position = file, 0
        self.start = 0 if part is None else part.offset
        self.size = os.fstat(file.fileno()).st_size if part is None else part.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence]
        self.position = max(0, base + offset)
        return self.position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self.size - self.position)
        self.file.seek(self.start + self.position)
        data = self.file.read(left if size < 0 else min(size, left))
        self.position += len(data)
        return data
