"""Taps as the native code reads them: rows one by one, or in blocks that share what they read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harp.sparse.planes import Plane
from harp.sparse.taps import Floats, Taps

Widest = Sequence[int]

_BLOCK = 4
# A block of rows computes all that any of them needs, at twice the speed: measured with AVX2 on 64 to 512
# channels, 77 against 36 billion operations a second.
FULL_ENOUGH = 0.47
_CACHE, _LINE = 24 << 10, 16  # bytes of the first level of the cache, floats of a line of it
_ENOUGH = 8  # taps of a block in a part
_SAMPLED = 16  # blocks that are looked at to find out
_ROOM = 64  # bytes of a map for each tap that is looked at
_FARTHEST = 2**31 - 1


@dataclass
class Matrix:
    """Taps as the native code reads them; `slot` says where the value of each tap is."""

    rows: int  # blocks of them
    block: int
    bounds: npt.NDArray[np.int32]  # where the taps of each block begin, in each part, and where they end
    tap: npt.NDArray[np.int32]
    weight: Floats
    slot: npt.NDArray[np.int64]

    def fill(self, values: Floats) -> None:
        """Take other values for the same taps."""
        self.weight[self.slot] = values


def matrices(each: Taps, x: Plane, widest: Widest) -> list[tuple[int, Matrix, npt.NDArray[np.int64] | None]]:
    """Taps in matrices of one block size: the first row, the matrix, and which taps are in it (None: all).

    `widest` are vectors of a run, for blocks of one to four rows.
    """
    if each.rows == 0:
        return []
    if fill(each) < FULL_ENOUGH:
        return [(0, matrix_of(each, range(each.rows), 1, x, widest), None)]
    whole = each.rows // _BLOCK * _BLOCK
    if whole == each.rows:
        return [(0, matrix_of(each, range(whole), _BLOCK, x, widest), None)]
    found: list[tuple[int, Matrix, npt.NDArray[np.int64] | None]] = []
    for rows, block in ((range(whole), _BLOCK), (range(whole, each.rows), each.rows - whole)):
        chosen = np.flatnonzero((each.row >= rows.start) & (each.row < rows.stop))
        if len(rows):
            found.append((rows.start, matrix_of(each.chosen(chosen), rows, block, x, widest), chosen))
    return found


def fill(each: Taps) -> float:
    """The share of weights that are none of the zeros in blocks of rows, from up to so many blocks."""
    block = min(each.rows, _BLOCK)
    apart = max(1, each.rows // block // _SAMPLED)
    some = each.chosen(np.flatnonzero(each.row // block % apart == 0))
    key, (_, _, tall, wide) = _keys(some, range(each.rows), block)
    places = -(-each.rows // block) * each.planes * tall * wide
    if places > _ROOM * len(key):  # a copy of many channels, weights far apart: a map of it could have any size
        distinct = len(np.unique(key))
    else:
        read = np.zeros(places, np.bool_)
        read[key] = True
        distinct = int(np.count_nonzero(read))
    return len(key) / (block * max(1, distinct))


def _keys(each: Taps, rows: range, block: int) -> tuple[npt.NDArray[np.int64], tuple[int, int, int, int]]:
    """A number for every tap that orders them by block, plane and place; and the box of the places."""
    (low, high), (left, right) = each.reach()
    tall, wide = high - low + 1, right - left + 1
    blocks = (each.row - rows.start) // block
    key = ((blocks * each.planes + each.plane) * tall + each.down - low) * wide + each.right - left
    return key, (low, left, tall, wide)


def offsets(each: Taps, x: Plane) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The places that any row reads, in floats from the position that is computed; and which of them each tap reads."""
    key, box = _keys(replace(each, row=np.zeros_like(each.row)), range(1), 1)
    read = np.zeros(each.planes * box[2] * box[3], np.bool_)
    read[key] = True
    _, _, far = _far(np.flatnonzero(read), each.planes, box, x)
    return np.ascontiguousarray(far, np.int32), (np.cumsum(read) - 1)[key]


def _far(
    union: npt.NDArray[np.int64], planes: int, box: tuple[int, int, int, int], x: Plane
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Of numbers that `_keys` gave: blocks, planes, and how far away the places are."""
    low, left, tall, wide = box
    at, rest = np.divmod(union, planes * tall * wide)
    plane, place = np.divmod(rest, tall * wide)
    down, right = np.divmod(place, wide)
    far = plane * x.size + ((down + low) * x.pitch + right + left) * x.lanes
    if len(far) and max(int(far.max()), -int(far.min())) > _FARTHEST:
        raise OverflowError("a layer is too large for the native code")
    return at, plane, far


def matrix_of(each: Taps, rows: range, block: int, x: Plane, widest: Widest) -> Matrix:
    """The taps of some rows, by blocks of one size."""
    key, box = _keys(each, rows, block)
    if block == 1 and not bool((key[1:] < key[:-1]).any()):
        union, slot = key, np.arange(len(key))
    else:
        union, inverse = np.unique(key, return_inverse=True)
        slot = inverse.reshape(-1) * block + (each.row - rows.start) % block
    at, plane, far = _far(union, each.planes, box, x)
    _, _, tall, wide = box
    blocks = len(rows) // block
    # A run reads all planes around it. They come in parts that stay in the cache until all blocks have read them. Sums
    # are put away after a part and taken up by the next, which few taps would not be worth.
    window = tall * (int(widest[block - 1]) * x.vector + (wide - 1) * x.lanes + _LINE)
    part = max(1, min(each.planes, _CACHE // (4 * window)))
    if len(union) * part < _ENOUGH * each.planes * blocks or (block == 1 and x.lanes == 1):
        part = each.planes  # one image is small enough
    edges = np.minimum(np.arange(0, each.planes + part, part), each.planes)
    bounds = np.searchsorted(at * each.planes + plane, np.arange(blocks) * each.planes + edges[:, None])
    weight = np.zeros(len(union) * block, np.float32)
    tap = np.ascontiguousarray(far, np.int32)
    matrix = Matrix(blocks, block, np.ascontiguousarray(bounds, np.int32), tap, weight, slot)
    matrix.fill(each.values)
    return matrix
