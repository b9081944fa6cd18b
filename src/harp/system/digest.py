"""A digest at the end of a torch file: damage is found before anything is taken from it.

A torch file is a zip archive, and an archive may end with a comment. The digest of all that torch wrote is put
there, so that it is in place in the same moment as the file, and torch reads the file as before.
"""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from harp.errors import CheckpointError

_MARK = b"harp sha256 "
_LENGTH = len(_MARK) + 64  # of the comment
_NO_COMMENT = b"\0\0"  # how torch ends an archive: a comment of length 0
_RECORD = 22  # bytes of an archive's last record
_END = 1024  # bytes that it is looked for in
_BLOCK = 1 << 22


class Sealed:
    """A file that torch writes an archive to; `close` puts the digest behind it.

    What the system refuses is remembered and raised by `close`: torch's writer does not survive an exception.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Add bytes, as a file does."""
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                self.file.write(view)
                self.digest.update(view)
            except OSError as error:
                self.error = error
        return len(view)

    def flush(self) -> None:
        """Nothing: `close` does it."""

    def close(self) -> None:
        """End the archive with the digest of all that was written, on the disk itself."""
        if self.error is not None:
            raise self.error
        self.file.seek(-len(_NO_COMMENT), os.SEEK_CUR)
        self.file.write(_LENGTH.to_bytes(2, "little") + _MARK + self.digest.hexdigest().encode())
        self.file.flush()
        os.fsync(self.file.fileno())


def intact(path: Path, *, from_disk: bool = False) -> bool | None:
    """Whether a file is what was written, by its digest; None if it carries none.

    Arguments:
        from_disk: read it from the disk where the system allows that, not from what it remembers of the writing.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END))
        end = file.read()
        last = end.rfind(b"PK\5\6")  # the archive's last record, whose last two bytes are the comment's length
        record, comment = end[last : last + _RECORD], end[last + _RECORD :]
        if last < 0 or (len(record) == _RECORD and not comment and record.endswith(_NO_COMMENT)):
            return None
        if int.from_bytes(record[-2:], "little") != len(comment) or not comment.startswith(_MARK):
            return False
        if from_disk and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        digest, left = hashlib.sha256(), size - len(comment) - len(_NO_COMMENT)
        while left and (block := file.read(min(left, _BLOCK))):
            digest.update(block)
            left -= len(block)
        digest.update(_NO_COMMENT)
        return comment == _MARK + digest.hexdigest().encode()


def check(path: Path, *, from_disk: bool = False) -> None:
    """Refuse a file whose digest says that it is damaged."""
    if intact(path, from_disk=from_disk) is False:
        raise CheckpointError(f"{path} is damaged: it is not what was written, by the digest at its end")
