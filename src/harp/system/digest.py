"""A digest at the end of a torch file, which detects damage before the file is loaded.

A torch file is a zip archive, and an archive may end with a comment. The comment holds the digest of everything that
torch wrote. So file and digest are always written together, and torch can still read the file.
"""

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

_MARK = b"harp sha256 "
_LENGTH = len(_MARK) + 64  # of the comment
_NO_COMMENT = b"\0\0"  # the last bytes of an archive from torch: a comment of length 0
_RECORD = 22  # bytes of the last record of an archive
_END = 1024  # bytes at the end of the file in which that record is searched
_BLOCK = 1 << 22


class Sealed:
    """A file that torch writes an archive to; `close` appends the digest.

    An error of the system is stored and raised by `close`, because torch's writer can't handle exceptions.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write bytes, like a file."""
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                self.file.write(view)
                self.digest.update(view)
            except OSError as error:
                self.error = error
        return len(view)

    def flush(self) -> None:
        """Do nothing: `close` flushes."""

    def close(self) -> None:
        """Append the digest to the archive, and flush it to the disk."""
        if self.error is not None:
            raise self.error
        self.file.seek(-len(_NO_COMMENT), os.SEEK_CUR)
        self.file.write(_LENGTH.to_bytes(2, "little") + _MARK + self.digest.hexdigest().encode())
        self.file.flush()
        os.fsync(self.file.fileno())


def intact(path: Path, *, from_disk: bool = False) -> bool | None:
    """Whether a file matches its digest; None if it has no digest.

    Arguments:
        from_disk: drop the file from the system's cache first, where the system supports it.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _END))
        end = file.read()
        start = end.rfind(b"PK\5\6")  # the last record of the archive ends with the length of the comment
        record, comment = end[start : start + _RECORD], end[start + _RECORD :]
        if start < 0 or (len(record) == _RECORD and not comment and record.endswith(_NO_COMMENT)):
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
