"""Weights of nearly dense 3x3 convolutions as native/winograd.h takes them: transformed, by F(2x2, 3x3)."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harp.sparse import native
from harp.sparse.planes import Plane
from harp.sparse.taps import Floats, Taps

_PANEL = 6  # rows of weights that lie together, as in native/winograd.h
_ACROSS, _MOST_TILES = 4, 32  # vectors of tiles that are multiplied together, and of a block, likewise
_PART = 128  # channels whose tiles stay in the first level of the cache
_CACHE = 256 << 10  # bytes of the second level that tiles may take


@dataclass
class Transformed:
    """Transformed weights: 16 matrices over the channels, in parts of channels and panels of rows."""

    rows: int
    tap: npt.NDArray[np.int32]  # the channels that are read
    down: int
    right: int
    part: int
    weight: Floats
    slot: npt.NDArray[np.int64]  # where a tap is in (3, 3, row, channel)
    op = native.WINOGRAD

    def fill(self, values: Floats) -> None:
        """Take other values for the same taps."""
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
        """Whether several groups of images are better computed together: the weights are more than what they meet."""
        return y.lanes > 1 and self.weight.size > y.size * (self.rows + len(self.tap))

    def sizes(self, y: Plane) -> tuple[int, ...]:
        """What the native code needs to know, as it says there."""
        place = y.height, y.width, y.pitch, len(self.tap), self.down, self.right
        return (*place, y.row_of_mask, self._block(y), self.part)

    def scratch(self, y: Plane) -> int:
        """Floats that a thread needs."""
        rows, size, wide = padded(self.rows), self._block(y), -(-y.width // 2)
        single = 8 * ((-(-y.height // 2) + 1) * wide + y.vector) + (4 * size + 4) * y.vector
        return 16 * ((len(self.tap) + rows) * size * y.vector + 160) + single

    def _block(self, y: Plane) -> int:
        """Vectors of tiles that are computed at once.

        Few, so that they stay in the cache; many where the weights don't stay there, as each block reads them once.
        """
        each = 16 * (len(self.tap) + self.rows) * y.vector * 4
        few = max(_ACROSS, _CACHE // each // _ACROSS * _ACROSS)
        most = tiles(y) * (native.TOGETHER if self.joint(y) else 1)
        return min(_MOST_TILES if self.weight.nbytes > 2 * _CACHE else few, most, _MOST_TILES)


def _spread(first: Floats, second: Floats, third: Floats) -> tuple[Floats, ...]:
    """The transform of three weights to four."""
    around = (first + third) * np.float32(0.5)
    half = second * np.float32(0.5)
    return first, around + half, around - half, third


def suits(each: Taps) -> bool:
    """Whether taps are those of a 3x3 convolution without a stride or a dilation.

    Smaller ones would do, but a tile then reads beyond the zeros around a plane.
    """
    (low, high), (left, right) = each.reach()
    return high - low == 2 and right - left == 2


def transformed(each: Taps) -> Transformed:
    """The taps of a layer, transformed."""
    (low, _), (left, _) = each.reach()
    read = np.zeros(each.planes, np.bool_)
    read[each.plane] = True
    planes, column = np.flatnonzero(read), (np.cumsum(read) - 1)[each.plane]
    rows = padded(each.rows)
    place = (each.down - low) * 3 + each.right - left
    slot = (place * rows + each.row) * len(planes) + column
    weight = np.zeros(16 * rows * len(planes), np.float32)
    made = Transformed(each.rows, planes.astype(np.int32), low, left, min(_PART, len(planes)), weight, slot)
    made.fill(each.values)
    return made


def tiles(y: Plane) -> int:
    """Vectors of tiles of a group of images."""
    count = -(-y.height // 2) * -(-y.width // 2)
    return count if y.lanes > 1 else -(-count // y.vector)


def padded(rows: int) -> int:
    """Rows of whole panels."""
    return -(-rows // _PANEL) * _PANEL
