"""MATLAB v5: the format of SVHN."""

import math
import struct
from collections.abc import Iterator

import numpy as np

from harp.data.formats.bounded import DEFLATE_RATIO, LARGEST, Array, File, Payload, inflate, read_file
from harp.errors import DataError

_MATRIX, _COMPRESSED = 14, 15
STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_CLASSES = dict(zip(range(6, 16), ("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"), strict=True))
_COMPLEX = 0x0800


def read_mat5(path: File) -> dict[str, Array]:
    """Read the real numeric variables of a MATLAB v5 file (-v6 or -v7) of either byte order.

    Compressed or not. Structures (see `read_mat5_records`), cells, text and sparse or complex matrices are passed
    over. The newer v7.3 is HDF5 and is refused.
    """
    variables: dict[str, Array] = {}
    payload = read_file(path, "a MATLAB v5 .mat file")
    for order, body in matrices(payload):
        variables.update(_variable(payload.name, body, order))
    return variables


def matrices(payload: Payload) -> Iterator[tuple[str, memoryview]]:
    """The byte order and the contents of every matrix of a file, decompressed."""
    name, data = payload
    order = {b"IM": "<", b"MI": ">"}.get(data[126:128])
    if order is None or struct.unpack(f"{order}H", data[124:126])[0] != 0x0100:
        hint = "v7.3, save it with -v7" if data[:10] == b"MATLAB 7.3" else f"starts with {data[:8].hex()}"
        raise DataError(f"{name}: {len(data):,} bytes, {hint}, expected the 128-byte header of a MATLAB v5 file")
    for kind, body in elements(name, memoryview(data)[128:], order):
        if kind == _COMPRESSED:
            body = _uncompressed(name, body, order)
            kind, body = next(elements(name, body, order), (0, body))
        if kind == _MATRIX and len(body):
            yield order, body


def elements(name: str, data: memoryview, order: str) -> Iterator[tuple[int, memoryview]]:
    """The (type, contents) of consecutive elements; up to 4 bytes of contents are packed into the tag."""
    position = 0
    while position < len(data):
        if len(data) - position < 8:
            raise DataError(f"{name}: {len(data) - position} bytes at the end, expected the 8 of an element's tag")
        kind, size = struct.unpack_from(f"{order}2I", data, position)
        start = position + 8
        if kind >> 16:
            kind, size, start = kind & 0xFFFF, kind >> 16, position + 4
        if size > len(data) - start or (start == position + 4 and size > 4):
            raise DataError(f"{name}: truncated, {len(data) - start:,} bytes left, expected an element of {size:,}")
        yield kind, data[start : start + size]
        position = start + size
        if kind != _COMPRESSED:
            position += -position % 8


def _uncompressed(name: str, body: memoryview, order: str) -> memoryview:
    """Decompress an element; it must have the size that its own first 8 bytes give."""
    head = inflate(name, body, 8)
    if len(head) < 8:
        raise DataError(f"{name}: {len(head)} bytes in a compressed element, expected the 8 of its tag")
    kind, size = struct.unpack(f"{order}2I", head)
    if kind != _MATRIX or size > min(LARGEST, DEFLATE_RATIO * len(body)):
        raise DataError(f"{name}: compressed element of type {kind}, {size:,} bytes, expected a matrix that fits")
    data = inflate(name, body, 8 + size + 1)
    if len(data) != 8 + size:
        raise DataError(f"{name}: {len(data):,} bytes in a compressed element, expected {8 + size:,}")
    return memoryview(data)


def _variable(name: str, body: memoryview, order: str) -> dict[str, Array]:
    """The variable in a matrix element, or nothing if it is not real and numeric."""
    parts = elements(name, body, order)
    empty = (0, memoryview(b""))
    _, flags = next(parts, empty)
    if len(flags) != 8:
        raise DataError(f"{name}: array flags of {len(flags)} bytes, expected 8")
    flag = struct.unpack_from(f"{order}I", flags)[0]
    if flag & 0xFF not in _CLASSES or flag & _COMPLEX:
        return {}
    (_, sizes), (_, label), (stored, values) = next(parts, empty), next(parts, empty), next(parts, empty)
    variable = bytes(label).decode("latin-1")
    if len(sizes) % 4 or not 2 <= len(sizes) // 4 <= 32 or stored not in STORED:
        raise DataError(f"{name}: variable {variable!r} has no size or values, expected 2 to 32 sizes and numbers")
    shape = struct.unpack(f"{order}{len(sizes) // 4}i", sizes)
    dtype = np.dtype(order + STORED[stored])
    if min(shape) < 0 or math.prod(shape) * dtype.itemsize != len(values):
        claim = "x".join(map(str, shape))
        raise DataError(f"{name}: {len(values):,} bytes in {variable!r}, expected {claim} values of {dtype.itemsize}")
    array = np.frombuffer(values, dtype).reshape(shape, order="F")
    return {variable: array.astype(_CLASSES[flag & 0xFF], copy=False)}
