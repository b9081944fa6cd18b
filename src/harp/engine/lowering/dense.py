"""Products with all weights including zeros, where that is faster than skipping the zeros.

Two kernels do it: `Tiles`, F(2x2, 3x3) of Winograd, and `Panels`, for single images of few pixels. The times are in
nanoseconds of one CPU with AVX2, for a group of images or for one. They were measured with layers of 16 to 512 channels
and of 2x2 to 32x32 pixels, each with all kernels and at densities from 0.1 to 1. With AVX-512 the same numbers choose
well enough: in the sweeps of benchmarks/inference.py no density is slower than dense there either. The estimates depend
on counts alone, so the choice is the same every time.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harp.engine.lowering.matrices import FULL_ENOUGH, fill, offsets
from harp.engine.lowering.memory import Plane
from harp.engine.lowering.taps import Floats, Ints, Taps
from harp.engine.native import bindings

_TAP = 0.28, 0.36  # a vector times a weight with its own offset: several images, or one
_BLOCK = 0.18  # a vector times a weight of a block, a panel or a transformed matrix
# Reading a weight with its own offset, or one of a block; with one image this overlaps with the products.
_READ = 1.3, 0.5
_TILE = 40.0  # the transform of a vector of tiles, of the input or the output
_BYTE = 0.06  # a byte of weights from memory, read sequentially

_TILE_ROWS = 6  # rows of a panel of transformed weights, as in native/winograd.h
_ACROSS, _MOST_TILES = 4, 32  # vectors of tiles that are multiplied together, and of a block; as there
_TILE_CHANNELS = 128  # channels whose tiles stay in the first-level cache
_TILE_CACHE = 256 << 10  # bytes of the second-level cache that tiles may take

_DEEP, _MOST_PIXELS = 3, 64  # vectors of a panel, pixels of an image; as in native/narrow.h
_PANEL_CACHE = 12 << 10  # bytes of weights that stay in the first-level cache


@dataclass
class _Dense:
    """What both forms have in common; `slot` is the position of each tap in the weights."""

    rows: int
    tap: npt.NDArray[np.int32]  # what is read: channels, or offsets
    part: int  # how many of these are computed before the next
    weight: Floats
    slot: Ints


@dataclass
class Tiles(_Dense):
    """Weights of a 3x3 convolution, transformed to 16 matrices, in parts of channels and panels of rows."""

    down: int
    right: int
    op = bindings.WINOGRAD

    def fill(self, values: Floats) -> None:
        """Replace the values of the taps; a slot is a position in (3, 3, row, channel)."""
        rows, channels = _padded(self.rows, _TILE_ROWS), len(self.tap)
        plain = np.zeros((3, 3, rows, channels), np.float32)
        plain.reshape(-1)[self.slot] = values
        whole = self.weight.reshape(16, rows * channels)
        for down, row in enumerate(_spread(*plain)):
            for right, piece in enumerate(_spread(*row)):
                panels = piece.reshape(rows // _TILE_ROWS, _TILE_ROWS, channels).swapaxes(1, 2)
                for first in range(0, channels, self.part):
                    part = panels[:, first : first + self.part]
                    to = whole[4 * down + right, first * rows : first * rows + part.size]
                    to.reshape(part.shape)[:] = part

    def joint(self, y: Plane) -> bool:
        """Whether to compute several groups of images together: if there are more weights than inputs and outputs."""
        return y.lanes > 1 and self.weight.size > y.size * (self.rows + len(self.tap))

    def sizes(self, y: Plane) -> tuple[int, ...]:
        """The `size` field of the step, as native/winograd.h describes it."""
        place = y.height, y.width, y.pitch, len(self.tap), self.down, self.right
        return (*place, y.row_of_mask, self._block(y), self.part)

    def scratch(self, y: Plane) -> int:
        """Floats of scratch memory for a thread."""
        rows, size, wide = _padded(self.rows, _TILE_ROWS), self._block(y), -(-y.width // 2)
        single = 8 * ((-(-y.height // 2) + 1) * wide + y.vector) + (4 * size + 4) * y.vector
        return 16 * ((len(self.tap) + rows) * size * y.vector + 160) + single

    def _block(self, y: Plane) -> int:
        """Vectors of tiles that are computed at once.

        A small block stays in the cache. If the weights don't fit into the cache, a large block is better, as each
        block reads them once.
        """
        tile_bytes = 16 * (len(self.tap) + self.rows) * y.vector * 4
        few = max(_ACROSS, _TILE_CACHE // tile_bytes // _ACROSS * _ACROSS)
        most = _tiles(y) * (bindings.TOGETHER if self.joint(y) else 1)
        return min(_MOST_TILES if self.weight.nbytes > 2 * _TILE_CACHE else few, most, _MOST_TILES)


@dataclass
class Panels(_Dense):
    """All offsets that some row reads, each with a weight for every row, in panels of rows."""

    op = bindings.NARROW

    def fill(self, values: Floats) -> None:
        """Replace the values of the taps."""
        self.weight[self.slot] = values

    def joint(self, y: Plane) -> bool:
        """False: a single image is never computed together with others."""
        return False

    def sizes(self, y: Plane) -> tuple[int, ...]:
        """The `size` field of the step, as native/narrow.h describes it."""
        return y.height, y.width, y.pitch, len(self.tap), self.part

    def scratch(self, y: Plane) -> int:
        """Floats of scratch memory for a thread."""
        return (y.height * y.width + 4) * _DEEP * y.vector


def dense(taps: Taps, x: Plane, y: Plane) -> Tiles | Panels | None:
    """The weights including zeros in the fastest dense form, None if skipping the zeros is faster."""
    if len(taps.row) == 0:
        return None
    tiles, panels = tiles_time(taps, y), panels_time(taps, y)
    if min(tiles, panels) >= direct_time(taps, y):
        return None
    matrix = _tiles_of(taps) if tiles < panels else _panels_of(taps, x)
    matrix.fill(taps.values)
    return matrix


def direct_time(taps: Taps, y: Plane) -> float:
    """The time with the weights one by one, or in blocks if these are full enough."""
    vectors = int(y.runs(1)[:, 1].sum())
    single = y.lanes == 1
    share = fill(taps)
    if share >= FULL_ENOUGH:
        return len(taps.row) / share * max(vectors * _BLOCK, single * _READ[1])
    if single:
        return len(taps.row) * max(vectors * _TAP[1], _READ[0])
    return len(taps.row) * (vectors * _TAP[0] + _READ[0])


def tiles_time(taps: Taps, y: Plane) -> float:
    """The time with Winograd's tiles; infinite if they can't compute the layer.

    Kernels smaller than 3x3 are refused, as a tile would read beyond the zeros around a plane.
    """
    (low, high), (left, right) = taps.reach()
    if high - low != 2 or right - left != 2:
        return float("inf")
    weights, tiles = 16 * taps.planes * _padded(taps.rows, _TILE_ROWS), _tiles(y)
    read = 0.0 if y.lanes > 1 else 4 * weights * _BYTE  # several groups of images share the weights that are read
    return max(weights * tiles * _BLOCK, read) + (taps.planes + taps.rows) * tiles * _TILE


def panels_time(taps: Taps, y: Plane) -> float:
    """The time with vectors of output channels; infinite if they can't compute the layer."""
    pixels = y.height * y.width
    if y.lanes > 1 or pixels > _MOST_PIXELS:
        return float("inf")
    (low, high), (left, right) = taps.reach()
    weights = taps.planes * (high - low + 1) * (right - left + 1) * _padded(taps.rows, _DEEP * y.vector)
    return max(weights / y.vector * pixels * _BLOCK, 4 * weights * _BYTE)


def _tiles_of(taps: Taps) -> Tiles:
    (low, _), (left, _) = taps.reach()
    read = np.zeros(taps.planes, np.bool_)
    read[taps.plane] = True
    planes, column = np.flatnonzero(read), (np.cumsum(read) - 1)[taps.plane]
    rows = _padded(taps.rows, _TILE_ROWS)
    slot = (((taps.down - low) * 3 + taps.right - left) * rows + taps.row) * len(planes) + column
    weight = np.zeros(16 * rows * len(planes), np.float32)
    part = min(_TILE_CHANNELS, len(planes))
    return Tiles(taps.rows, planes.astype(np.int32), part, weight, slot, low, left)


def _panels_of(taps: Taps, x: Plane) -> Panels:
    deep = _DEEP * x.vector
    tap, column = offsets(taps, x)
    panel, row = np.divmod(taps.row, deep)
    weight = np.zeros(_padded(taps.rows, deep) * len(tap), np.float32)
    return Panels(taps.rows, tap, max(1, _PANEL_CACHE // (4 * deep)), weight, (panel * len(tap) + column) * deep + row)


def _spread(first: Floats, second: Floats, third: Floats) -> tuple[Floats, ...]:
    """The one-dimensional transform of three weights to four."""
    around = (first + third) * np.float32(0.5)
    half = second * np.float32(0.5)
    return first, around + half, around - half, third


def _tiles(y: Plane) -> int:
    """The number of vectors of tiles for a group of images."""
    count = -(-y.height // 2) * -(-y.width // 2)
    return count if y.lanes > 1 else -(-count // y.vector)


def _padded(rows: int, panel: int) -> int:
    return -(-rows // panel) * panel
