"""Weights of nearly dense 3x3 convolutions, transformed by F(2x2, 3x3) for native/winograd.h."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harp.engine.lowering.planes import Plane
from harp.engine.lowering.taps import Floats, Taps
from harp.engine.native import bindings

_PANEL = 6  # rows of a panel of weights, as in native/winograd.h
_ACROSS, _MOST_TILES = 4, 32  # vectors of tiles that are multiplied together, and of a block; as there
_PART = 128  # channels whose tiles stay in the first-level cache
_CACHE = 256 << 10  # bytes of the second-level cache that tiles may take


@dataclass
class Transformed:
    """Transformed weights: 16 matrices over the channels, in parts of channels and panels of rows."""

    rows: int
    tap: npt.NDArray[np.int32]  # the channels that are read
    down: int
    right: int
    part: int
    weight: Floats
    slot: npt.NDArray[np.int64]  # the position of each tap in (3, 3, row, channel)
    op = bindings.WINOGRAD

    def fill(self, values: Floats) -> None:
        """Replace the values of the taps."""
        rows, channels = padded(self.rows), len(self.tap)
        plain = np.zeros((3, 3, rows, channels), np.float32)
        plain.reshape(-1)[self.slot] = values
        whole = self.weight.reshape(16, rows * channels)
        for down, row in enumerate(_spread(*plain)):
            for right, piece in enumerate(_spread(*row)):
                panels = piece.reshape(rows // _PANEL, _PANEL, channels).swapaxes(1, 2)
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
        rows, size, wide = padded(self.rows), self._block(y), -(-y.width // 2)
        single = 8 * ((-(-y.height // 2) + 1) * wide + y.vector) + (4 * size + 4) * y.vector
        return 16 * ((len(self.tap) + rows) * size * y.vector + 160) + single

    def _block(self, y: Plane) -> int:
        """Vectors of tiles that are computed at once.

        A small block stays in the cache. If the weights don't fit into the cache, a large block is better, as each
        block reads them once.
        """
        tile_bytes = 16 * (len(self.tap) + self.rows) * y.vector * 4
        few = max(_ACROSS, _CACHE // tile_bytes // _ACROSS * _ACROSS)
        most = tiles(y) * (bindings.TOGETHER if self.joint(y) else 1)
        return min(_MOST_TILES if self.weight.nbytes > 2 * _CACHE else few, most, _MOST_TILES)


def _spread(first: Floats, second: Floats, third: Floats) -> tuple[Floats, ...]:
    """The one-dimensional transform of three weights to four."""
    around = (first + third) * np.float32(0.5)
    half = second * np.float32(0.5)
    return first, around + half, around - half, third


def suits(taps: Taps) -> bool:
    """Whether taps are those of a 3x3 convolution without a stride or a dilation.

    Smaller kernels are refused, as a tile would read beyond the zeros around a plane.
    """
    (low, high), (left, right) = taps.reach()
    return high - low == 2 and right - left == 2


def transformed(taps: Taps) -> Transformed:
    """The taps of a layer, transformed."""
    (low, _), (left, _) = taps.reach()
    read = np.zeros(taps.planes, np.bool_)
    read[taps.plane] = True
    planes, column = np.flatnonzero(read), (np.cumsum(read) - 1)[taps.plane]
    rows = padded(taps.rows)
    place = (taps.down - low) * 3 + taps.right - left
    slot = (place * rows + taps.row) * len(planes) + column
    weight = np.zeros(16 * rows * len(planes), np.float32)
    matrix = Transformed(taps.rows, planes.astype(np.int32), low, left, min(_PART, len(planes)), weight, slot)
    matrix.fill(taps.values)
    return matrix


def tiles(y: Plane) -> int:
    """The number of vectors of tiles for a group of images."""
    count = -(-y.height // 2) * -(-y.width // 2)
    return count if y.lanes > 1 else -(-count // y.vector)


def padded(rows: int) -> int:
    """The number of rows, rounded up to whole panels."""
    return -(-rows // _PANEL) * _PANEL
