"""Sparse matrices as the native code reads them: rows one by one, or in blocks that share what they read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from harp.engine.lowering.memory import Plane
from harp.engine.lowering.taps import Floats, Ints, Taps

Widest = Sequence[int]
Box = tuple[int, int, int, int]  # the smallest shifts downwards and to the right, height, width

_BLOCK = 4
# A block of rows reads every input that any of its rows needs, at twice the speed of single rows: measured with AVX2 on
# 64 to 512 channels, 77 against 36 billion operations a second.
FULL_ENOUGH = 0.47
CACHE, _LINE = 24 << 10, 16  # bytes of the first-level cache that may be used, floats of a cache line
ENOUGH = 8  # the least number of taps of a block in a part
_SAMPLED = 16  # blocks that are sampled to estimate the fill
_ROOM = 64  # the largest number of bytes of a bitmap for each sampled tap
FARTHEST = 2**31 - 1  # offsets are 32-bit integers


@dataclass
class Matrix:
    """Taps as the native code reads them; `slot` is the position of each tap's value in `weight`."""

    rows: int  # blocks of rows
    block: int  # rows of a block
    bounds: npt.NDArray[np.int32]  # where the taps of each block begin in each part, and where they end
    tap: npt.NDArray[np.int32]
    weight: Floats
    slot: Ints

    def fill(self, values: Floats) -> None:
        """Replace the values of the taps."""
        self.weight[self.slot] = values


def matrices(taps: Taps, x: Plane, widest: Widest) -> list[tuple[int, Matrix, Ints | None]]:
    """Taps in matrices of one block size each: the first row, the matrix, and which taps are in it (None: all).

    `widest` is the number of vectors in a run, for blocks of one to four rows.
    """
    if taps.rows == 0:
        return []
    block = 1 if fill(taps) < FULL_ENOUGH else _BLOCK
    whole = taps.rows // block * block
    if whole == taps.rows:
        return [(0, matrix_of(taps, range(whole), block, x, widest), None)]
    parts: list[tuple[int, Matrix, Ints | None]] = []
    for rows, block in ((range(whole), _BLOCK), (range(whole, taps.rows), taps.rows - whole)):
        chosen = np.flatnonzero((taps.row >= rows.start) & (taps.row < rows.stop))
        if len(rows):
            parts.append((rows.start, matrix_of(taps.chosen(chosen), rows, block, x, widest), chosen))
    return parts


def fill(taps: Taps) -> float:
    """The share of nonzero weights in blocks of rows, estimated from a sample of blocks."""
    block = min(taps.rows, _BLOCK)
    spacing = max(1, taps.rows // block // _SAMPLED)
    sample = taps.chosen(np.flatnonzero(taps.row // block % spacing == 0))
    key, (_, _, tall, wide) = _keys(sample, range(taps.rows), block)
    places = -(-taps.rows // block) * taps.planes * tall * wide
    if places > _ROOM * len(key):  # weights that lie far apart: a bitmap could have any size
        distinct = len(np.unique(key))
    else:
        read = np.zeros(places, np.bool_)
        read[key] = True
        distinct = int(np.count_nonzero(read))
    return len(key) / (block * max(1, distinct))


def _keys(taps: Taps, rows: range, block: int) -> tuple[Ints, Box]:
    """A key for every tap that orders taps by block, plane and shift; and the bounding box of the shifts."""
    (low, high), (left, right) = taps.reach()
    tall, wide = high - low + 1, right - left + 1
    blocks = (taps.row - rows.start) // block
    key = ((blocks * taps.planes + taps.plane) * tall + taps.down - low) * wide + taps.right - left
    return key, (low, left, tall, wide)


def offsets(taps: Taps, x: Plane) -> tuple[npt.NDArray[np.int32], Ints]:
    """The offsets in floats that any row reads, and which of them each tap reads."""
    key, box = _keys(replace(taps, row=np.zeros_like(taps.row)), range(1), 1)
    read = np.zeros(taps.planes * box[2] * box[3], np.bool_)
    read[key] = True
    _, _, far = _far(np.flatnonzero(read), taps.planes, box, x)
    return np.ascontiguousarray(far, np.int32), (np.cumsum(read) - 1)[key]


def _far(union: Ints, planes: int, box: Box, x: Plane) -> tuple[Ints, Ints, Ints]:
    """The blocks, planes and offsets (in floats) of keys from `_keys`."""
    low, left, tall, wide = box
    block, rest = np.divmod(union, planes * tall * wide)
    plane, place = np.divmod(rest, tall * wide)
    down, right = np.divmod(place, wide)
    far = plane * x.size + ((down + low) * x.pitch + right + left) * x.lanes
    if len(far) and max(int(far.max()), -int(far.min())) > FARTHEST:
        raise OverflowError("a layer is too large for the native code")
    return block, plane, far


def matrix_of(taps: Taps, rows: range, block: int, x: Plane, widest: Widest) -> Matrix:
    """The taps of some rows as a matrix with blocks of one size."""
    key, box = _keys(taps, rows, block)
    if block == 1 and not bool((key[1:] < key[:-1]).any()):
        union, slot = key, np.arange(len(key))
    else:
        union, inverse = np.unique(key, return_inverse=True)
        slot = inverse.reshape(-1) * block + (taps.row - rows.start) % block
    row_block, plane, far = _far(union, taps.planes, box, x)
    _, _, tall, wide = box
    blocks = len(rows) // block
    # A run reads a window of every plane. Planes are processed in parts that stay in the cache until all blocks have
    # read them. Sums are stored after a part and loaded by the next, which does not pay for few taps.
    window = tall * (int(widest[block - 1]) * x.vector + (wide - 1) * x.lanes + _LINE)
    part = max(1, min(taps.planes, CACHE // (4 * window)))
    if len(union) * part < ENOUGH * taps.planes * blocks or (block == 1 and x.lanes == 1):
        part = taps.planes  # a single image fits into the cache
    edges = np.minimum(np.arange(0, taps.planes + part, part), taps.planes)
    bounds = np.searchsorted(row_block * taps.planes + plane, np.arange(blocks) * taps.planes + edges[:, None])
    weight = np.zeros(len(union) * block, np.float32)
    tap = np.ascontiguousarray(far, np.int32)
    matrix = Matrix(blocks, block, np.ascontiguousarray(bounds, np.int32), tap, weight, slot)
    matrix.fill(taps.values)
    return matrix
