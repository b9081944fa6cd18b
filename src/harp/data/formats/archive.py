"""Files inside a .tar.gz archive."""

import gzip
import tarfile
import zlib
from collections.abc import Collection
from pathlib import Path

from harp.data.formats.bounded import LARGEST, Payload, first_line
from harp.errors import DataError


def read_archive(path: str | Path, members: Collection[str]) -> dict[str, Payload]:
    """Read the named members of a .tar.gz archive in one pass, without writing anything to the disk."""
    try:
        with gzip.open(path) as stream:
            found = _read_members(str(path), stream, members)
            # To the end, where gzip keeps the checksum of it all.
            while stream.tell() <= LARGEST and stream.read(1 << 20):
                pass
    except DataError:
        raise
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, MemoryError) as error:
        reason = first_line(error)
        raise DataError(f"{path}: damaged or truncated archive ({reason}), expected a .tar.gz") from error
    if missing := ", ".join(name for name in members if name not in found):
        raise DataError(f"{path}: no {missing} in the archive, expected the published archive, complete")
    return found


def _read_members(path: str, stream: gzip.GzipFile, members: Collection[str]) -> dict[str, Payload]:
    found: dict[str, Payload] = {}
    # "r|" reads strictly forward: a damaged offset can't send it back and forth.
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            if member.size > LARGEST or stream.tell() > LARGEST:
                raise DataError(f"{path}: member of {member.size:,} bytes, expected {LARGEST:,} in all")
            name = member.name.removeprefix("./")
            contents = archive.extractfile(member) if member.isreg() and name in members else None
            if contents is not None:
                found[name] = Payload(f"{path}/{name}", contents.read())
    return found
