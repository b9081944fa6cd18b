"""Weights for single images of few pixels, as native/narrow.h reads them: the outputs of a place side by side."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harp.sparse import native
from harp.sparse.matrices import offsets
from harp.sparse.planes import Plane
from harp.sparse.taps import Floats, Taps

_DEEP = 3  # vectors of a panel, as in native/narrow.h
MOST_PIXELS = 64  # likewise
_CACHE = 12 << 10  # bytes of weights that stay in the first level of the cache


@dataclass
class Panels:
    """All places that some row reads, with a weight for each row."""

    rows: int
    tap: npt.NDArray[np.int32]
    part: int  # taps of a part
    weight: Floats
    slot: npt.NDArray[np.int64]
    op = native.NARROW

    def fill(self, values: Floats) -> None:
        """Take other values for the same taps."""
        self.weight[self.slot] = values

    def joint(self, y: Plane) -> bool:
        """Never: there is one image."""
        return False

    def sizes(self, y: Plane) -> tuple[int, ...]:
        """What the native code needs to know, as it says there."""
        return y.height, y.width, y.pitch, len(self.tap), self.part

    def scratch(self, y: Plane) -> int:
        """Floats that a thread needs."""
        return (y.height * y.width + 4) * _DEEP * y.vector


def panels(each: Taps, x: Plane) -> Panels:
    """The taps of a layer in panels of rows."""
    deep = _DEEP * x.vector
    tap, column = offsets(each, x)
    panel, row = np.divmod(each.row, deep)
    slot = (panel * len(tap) + column) * deep + row
    weight = np.zeros(padded(each.rows, x.vector) * len(tap), np.float32)
    made = Panels(each.rows, tap, max(1, _CACHE // (4 * deep)), weight, slot)
    made.fill(each.values)
    return made


def padded(rows: int, vector: int) -> int:
    """Rows of whole panels."""
    return -(-rows // (_DEEP * vector)) * _DEEP * vector
