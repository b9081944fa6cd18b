"""Tar archives: members of a .tar.gz, and where the members of an uncompressed archive are."""

import gzip
import os
import tarfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, NamedTuple

from harp.data.formats.bounded import LARGEST, Payload, first_line
from harp.errors import DataError


def read_archive(path: Path, members: Collection[str]) -> dict[str, Payload]:
    """Read the named members of a .tar.gz archive in one pass, without writing anything to the disk."""
    contents: dict[str, Payload] = {}
    try:
        # "r|" reads strictly forward: a damaged offset can't send it back and forth.
        with _Bounded(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if not 0 <= member.size <= LARGEST:
                    raise DataError(f"{path}: member of {member.size:,} bytes, expected {LARGEST:,} in all")
                name = member.name.removeprefix("./")
                content = archive.extractfile(member) if member.isreg() and name in members else None
                if content is not None:
                    contents[name] = Payload(f"{path}/{name}", content.read())
            # Read to the end, where gzip has the checksum of everything.
            while stream.read(1 << 20):
                pass
    except DataError:
        raise
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, MemoryError) as error:
        reason = first_line(error)
        raise DataError(f"{path}: damaged or truncated archive ({reason}), expected a .tar.gz") from error
    if missing := ", ".join(name for name in members if name not in contents):
        raise DataError(f"{path}: no {missing} in the archive, expected the published archive, complete")
    return contents


class _Bounded(gzip.GzipFile):
    """A stream that ends with an error after `LARGEST` bytes: a small archive can hold a name of many gigabytes."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > LARGEST:
            raise tarfile.ReadError(f"more than {LARGEST:,} bytes in all")
        return data


class Member(NamedTuple):
    """A file in an archive: its name, the position of its first byte, and its size."""

    name: str
    offset: int
    size: int


class TarIndex:
    """The members of an uncompressed archive, or of an archive that is itself a member (`inside`)."""

    def __init__(self, path: Path, inside: Member | None = None) -> None:
        self.path, self.inside = path, inside
        self.name = str(path) if inside is None else f"{path}/{inside.name}"
        self._file: IO[bytes] | None = None

    def __iter__(self) -> Iterator[Member]:
        """The regular files in their order; raises `DataError` if the archive is damaged or incomplete."""
        count = 0
        try:
            with self.path.open("rb") as self._file:
                end = os.fstat(self._file.fileno()).st_size
                if self.inside is not None:
                    end = self.inside.offset + self.inside.size
                    self._file.seek(self.inside.offset)  # tarfile starts at the current position
                with tarfile.open(fileobj=self._file, mode="r:") as archive:
                    start = -1
                    for entry in archive:
                        # A negative size would send the iteration back to where it was.
                        if entry.size < 0 or archive.offset <= start:
                            raise tarfile.ReadError(f"{entry.name[:100]!r} has a negative size")
                        start = archive.offset
                        if entry.isreg() and not entry.issparse():
                            yield self._member(entry, end)
                            count += 1
                    self._file.seek(archive.offset)
                    # tarfile also stops at half a header, so the block that marks the end is checked here.
                    if archive.offset >= end or self._file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                        raise EOFError("there is no mark of its end")
        except (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, MemoryError) as error:
            message = f"{self.name}: damaged or truncated after {count:,} files ({first_line(error)})"
            raise DataError(f"{message}, expected an uncompressed tar archive, complete") from error

    def _member(self, entry: tarfile.TarInfo, end: int) -> Member:
        if entry.size > LARGEST and not entry.name.endswith(".tar"):
            raise DataError(f"{self.name}: {entry.name} has {entry.size:,} bytes, expected at most {LARGEST:,}")
        if entry.offset_data + entry.size > end:
            raise EOFError(f"{entry.name} goes beyond the end")
        return Member(entry.name.removeprefix("./"), entry.offset_data, entry.size)

    def read(self, member: Member) -> bytes:
        """The bytes of a small member, during the iteration."""
        assert self._file is not None
        self._file.seek(member.offset)
        return self._file.read(member.size)
