"""Whole files and compressed data of bounded size."""

import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harp.errors import DataError

Array = NDArray[Any]
Bytes = NDArray[np.uint8]
Integers = NDArray[np.int64]

LARGEST = 1 << 30
"""The largest file, and the largest array inside a file, in bytes: four times the largest published one."""

DEFLATE_RATIO = 1032
"""The highest compression of deflate: an array that claims to be larger is not in the file."""


class Payload(NamedTuple):
    """A file in memory, such as a member of an archive; readers accept it in place of a path."""

    name: str
    data: bytes


File = str | Path | Payload


def read_file(file: File, expected: str) -> Payload:
    """Read a whole regular file of at most `LARGEST` bytes; an error says that it should be `expected`."""
    if isinstance(file, Payload):
        return file
    path = Path(file)
    try:
        if not path.exists():
            raise DataError(f"{path}: no such file, expected {expected}")
        if not path.is_file():
            raise DataError(f"{path}: not a regular file, expected {expected}")
        if (size := path.stat().st_size) > LARGEST:
            raise DataError(f"{path}: {size:,} bytes, expected {expected} of at most {LARGEST:,} bytes")
        return Payload(str(path), path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror}), expected {expected}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error of another library, or its type if it has no message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def inflate(name: str, data: bytes | memoryview, limit: int, wbits: int = zlib.MAX_WBITS) -> bytes:
    """At most `limit` decompressed bytes; the buffer grows with the data, whatever a header claims."""
    try:
        stream = zlib.decompressobj(wbits)
        inflated = stream.decompress(data, limit)
    except zlib.error as error:
        raise DataError(f"{name}: damaged compressed data ({first_line(error)}), expected a zlib stream") from error
    if len(inflated) < limit and not stream.eof:
        raise DataError(f"{name}: truncated compressed data, expected more than its {len(data):,} bytes")
    return inflated
