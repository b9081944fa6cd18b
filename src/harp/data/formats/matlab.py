"""MATLAB v5 files: the format of SVHN, and of the list of classes in ImageNet's development kit."""

import math
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from harp.data.formats.bounded import DEFLATE_RATIO, LARGEST, Array, File, Payload, inflate, read_file
from harp.errors import DataError

_MATRIX, _COMPRESSED = 14, 15  # types of elements
_STORED = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_ENCODINGS = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16"}
_STRUCTURE, _TEXT = 2, 4  # classes of matrices
_CLASSES = dict(zip(range(6, 16), ("f8", "f4", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"), strict=True))
_COMPLEX = 0x0800
_MOST_RECORDS = 1 << 20
_MOST_SIZES = 32  # of an array: numpy has no more

_Element = tuple[int, memoryview]  # type and contents
_EMPTY: _Element = (0, memoryview(b""))


class _Matrix(NamedTuple):
    """The header of a matrix, and the elements that follow it."""

    flags: int
    shape: tuple[int, ...]
    name: str
    contents: Iterator[_Element]


def read_mat5(file: File) -> dict[str, Array]:
    """Read the real numeric variables of a MATLAB v5 file (-v6 or -v7) of either byte order, compressed or not.

    Structures (see `read_mat5_records`), cells, text and sparse or complex matrices are skipped. The newer v7.3 is HDF5
    and is refused.
    """
    payload = read_file(file, "a MATLAB v5 .mat file")
    variables: dict[str, Array] = {}
    for order, body in _matrices(payload):
        matrix = _header(payload.name, body, order)
        if matrix.flags & 0xFF in _CLASSES and not matrix.flags & _COMPLEX:
            variables[matrix.name] = _array(payload.name, matrix, order)
    return variables


def read_mat5_records(file: File, variable: str) -> list[dict[str, str | float]]:
    """Read the records of a structure array: those of their fields that are text or a single number."""
    payload = read_file(file, "a MATLAB v5 .mat file")
    for order, body in _matrices(payload):
        matrix = _header(payload.name, body, order)
        if matrix.flags & 0xFF == _STRUCTURE and matrix.name == variable:
            return _records(payload.name, matrix, order)
    raise DataError(f"{payload.name}: no structure {variable!r} in it, expected one")


def _matrices(payload: Payload) -> Iterator[tuple[str, memoryview]]:
    """The byte order and the decompressed contents of every matrix of a file."""
    name, data = payload
    order = {b"IM": "<", b"MI": ">"}.get(data[126:128])
    if order is None or struct.unpack(f"{order}H", data[124:126])[0] != 0x0100:
        hint = "v7.3, save it with -v7" if data[:10] == b"MATLAB 7.3" else f"starts with {data[:8].hex()}"
        raise DataError(f"{name}: {len(data):,} bytes, {hint}, expected the 128-byte header of a MATLAB v5 file")
    for kind, body in _elements(name, memoryview(data)[128:], order):
        if kind == _COMPRESSED:
            body = _uncompressed(name, body, order)
            kind, body = next(_elements(name, body, order), (0, body))
        if kind == _MATRIX and len(body):
            yield order, body


def _elements(name: str, data: memoryview, order: str) -> Iterator[_Element]:
    """Consecutive elements; up to 4 bytes of contents are packed into the tag."""
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


def _header(name: str, body: memoryview, order: str) -> _Matrix:
    parts = _elements(name, body, order)
    (_, flags), (_, sizes), (_, label) = (next(parts, _EMPTY) for _ in range(3))
    if len(flags) != 8 or len(sizes) % 4 or len(sizes) > 4 * _MOST_SIZES:
        expected = f"expected 8 and 4 a size, of at most {_MOST_SIZES}"
        raise DataError(f"{name}: array flags of {len(flags)} bytes, sizes of {len(sizes)}, {expected}")
    shape = struct.unpack(f"{order}{len(sizes) // 4}i", sizes)
    return _Matrix(struct.unpack_from(f"{order}I", flags)[0], shape, bytes(label).decode("latin-1"), parts)


def _array(name: str, matrix: _Matrix, order: str) -> Array:
    stored, values = next(matrix.contents, _EMPTY)
    if len(matrix.shape) < 2 or stored not in _STORED:
        raise DataError(
            f"{name}: variable {matrix.name!r} has no size or values, expected two sizes or more, and numbers"
        )
    dtype = np.dtype(order + _STORED[stored])
    if min(matrix.shape) < 0 or math.prod(matrix.shape) * dtype.itemsize != len(values):
        claim = f"{'x'.join(map(str, matrix.shape))} values of {dtype.itemsize}"
        raise DataError(f"{name}: {len(values):,} bytes in {matrix.name!r}, expected {claim}")
    array = np.frombuffer(values, dtype).reshape(matrix.shape, order="F")
    return array.astype(_CLASSES[matrix.flags & 0xFF], copy=False)


def _records(name: str, matrix: _Matrix, order: str) -> list[dict[str, str | float]]:
    parts, count = matrix.contents, math.prod(matrix.shape)
    (_, width), (_, letters) = next(parts, _EMPTY), next(parts, _EMPTY)
    length = struct.unpack(f"{order}i", width)[0] if len(width) == 4 else 0
    if length < 1 or not letters or len(letters) % length or not 0 <= count <= _MOST_RECORDS:
        raise DataError(f"{name}: {count:,} records with names of {length} letters, expected some of each")
    names = (bytes(letters[start : start + length]) for start in range(0, len(letters), length))
    fields = [field.split(b"\0")[0].decode("latin-1") for field in names]
    records = []
    for _ in range(count):
        values = {field: _value(name, next(parts, _EMPTY)[1], order) for field in fields}
        records.append({field: value for field, value in values.items() if value is not None})
    return records


def _value(name: str, body: memoryview, order: str) -> str | float | None:
    """The text or the number in a field of a record; None if it holds something else."""
    matrix = _header(name, body, order)
    stored, values = next(matrix.contents, _EMPTY)
    if matrix.flags & 0xFF == _TEXT:
        encoding = _ENCODINGS.get(stored)
        if encoding == "utf-16":
            encoding += "-le" if order == "<" else "-be"
        return None if encoding is None else bytes(values).decode(encoding, "replace")
    if stored not in _STORED:
        return None
    dtype = np.dtype(order + _STORED[stored])
    return float(np.frombuffer(values, dtype)[0]) if len(values) == dtype.itemsize else None
