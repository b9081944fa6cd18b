"""Structures in MATLAB v5 files: the format of the list of classes in ImageNet's development kit."""

import math
import struct
from collections.abc import Iterator

import numpy as np

from harp.data.formats.bounded import File, read_file
from harp.data.formats.matlab import STORED, elements, matrices
from harp.errors import DataError

_STRUCTURE, _TEXT = 2, 4
_LETTERS = {1: "latin-1", 2: "latin-1", 4: "utf-16", 16: "utf-8", 17: "utf-16"}
_MOST = 1 << 20  # records
_Elements = Iterator[tuple[int, memoryview]]


def read_mat5_records(path: File, variable: str) -> list[dict[str, str | float]]:
    """Read the records of a structure array: their fields that hold text or a single number."""
    payload = read_file(path, "a MATLAB v5 .mat file")
    for order, body in matrices(payload):
        parts = elements(payload.name, body, order)
        kind = _kind(payload.name, parts, order)
        sizes, label = _next(parts)[1], _next(parts)[1]
        if kind == _STRUCTURE and bytes(label).decode("latin-1") == variable:
            count = math.prod(struct.unpack(f"{order}{len(sizes) // 4}i", sizes[: len(sizes) // 4 * 4]))
            return _records(payload.name, parts, order, count)
    raise DataError(f"{payload.name}: no structure {variable!r} in it, expected one")


def _next(parts: _Elements) -> tuple[int, memoryview]:
    return next(parts, (0, memoryview(b"")))


def _kind(name: str, parts: _Elements, order: str) -> int:
    _, flags = _next(parts)
    if len(flags) != 8:
        raise DataError(f"{name}: array flags of {len(flags)} bytes, expected 8")
    return int(struct.unpack_from(f"{order}I", flags)[0]) & 0xFF


def _records(name: str, parts: _Elements, order: str, count: int) -> list[dict[str, str | float]]:
    width, letters = _next(parts)[1], bytes(_next(parts)[1])
    length = struct.unpack(f"{order}i", width)[0] if len(width) == 4 else 0
    if length < 1 or not letters or len(letters) % length or not 0 <= count <= _MOST:
        raise DataError(f"{name}: {count:,} records with names of {length} letters, expected some of each")
    cut = (letters[start : start + length] for start in range(0, len(letters), length))
    fields = [each.split(b"\0")[0].decode("latin-1") for each in cut]
    found = []
    for _ in range(count):
        values = {field: _value(name, elements(name, _next(parts)[1], order), order) for field in fields}
        found.append({field: value for field, value in values.items() if value is not None})
    return found


def _value(name: str, parts: _Elements, order: str) -> str | float | None:
    """The text or the number in a matrix, or nothing if it holds something else."""
    kind = _kind(name, parts, order)
    _next(parts), _next(parts)  # its sizes and its name, which fields don't have
    stored, values = _next(parts)
    if kind == _TEXT and stored in _LETTERS:
        encoding = _LETTERS[stored]
        ending = "" if encoding != "utf-16" else "-le" if order == "<" else "-be"
        return bytes(values).decode(encoding + ending, "replace")
    if kind == _TEXT or stored not in STORED:
        return None
    dtype = np.dtype(order + STORED[stored])
    return float(np.frombuffer(values, dtype)[0]) if len(values) == dtype.itemsize else None
