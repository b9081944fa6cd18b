"""idx: the format of MNIST and Fashion-MNIST."""

import math
import struct

import numpy as np

from harp.data.formats.bounded import LARGEST, Bytes, File, inflate, read_file
from harp.errors import DataError


def read_idx(path: File) -> Bytes:
    """Read an idx file of unsigned bytes, gzipped or not, as an array of the shape in its header."""
    name, data = read_file(path, "an idx file (the -ubyte or -ubyte.gz of MNIST)")
    gzipped = data[:2] == b"\x1f\x8b"
    header = inflate(name, data, 4 + 4 * 255, wbits=31) if gzipped else data
    shape = _shape(name, header)
    start = 4 + 4 * len(shape)
    total = start + math.prod(shape)
    if total > LARGEST:
        raise DataError(f"{name}: the header claims {total:,} bytes, expected at most {LARGEST:,}")
    if gzipped:
        # One byte more than claimed, so that the end of the stream and its checksum are reached.
        data = inflate(name, data, total + 1, wbits=31)
    if len(data) != total:
        seen = f"more than {total:,}" if gzipped and len(data) > total else f"{len(data):,}"
        claim = "x".join(map(str, shape))
        raise DataError(f"{name}: {seen} bytes, expected {total:,} for the {claim} values of the header")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _shape(name: str, header: bytes) -> tuple[int, ...]:
    """The shape in an idx header: two zero bytes, the type (8: unsigned byte), the rank, big-endian sizes."""
    if len(header) < 4 or header[:3] != b"\0\0\x08" or not 1 <= header[3] <= 4:
        raise DataError(f"{name}: starts with {header[:4].hex() or 'nothing'}, expected 000008 and 01 to 04 (idx)")
    rank = header[3]
    if len(header) < 4 + 4 * rank:
        raise DataError(f"{name}: {len(header)} bytes, expected a header of {4 + 4 * rank}")
    return struct.unpack_from(f">{rank}I", header, 4)
