"""Weights for single images of few pixels, as native/narrow.h reads them: a vector holds several output channels."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harp.engine.lowering.matrices import offsets
from harp.engine.lowering.planes import Plane
from harp.engine.lowering.taps import Floats, Taps
from harp.engine.native import bindings

_DEEP = 3  # vectors of a panel, as in native/narrow.h
MOST_PIXELS = 64  # as in native/narrow.h
_CACHE = 12 << 10  # bytes of weights that stay in the first-level cache


@dataclass
class Panels:
    """All offsets that some row reads, each with a weight for every row, in panels of rows."""

    rows: int
    tap: npt.NDArray[np.int32]
    part: int  # taps of a part
    weight: Floats
    slot: npt.NDArray[np.int64]
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


def panels(taps: Taps, x: Plane) -> Panels:
    """The taps of a layer in panels of rows."""
    deep = _DEEP * x.vector
    tap, column = offsets(taps, x)
    panel, row = np.divmod(taps.row, deep)
    slot = (panel * len(tap) + column) * deep + row
    weight = np.zeros(padded(taps.rows, x.vector) * len(tap), np.float32)
    result = Panels(taps.rows, tap, max(1, _CACHE // (4 * deep)), weight, slot)
    result.fill(taps.values)
    return result


def padded(rows: int, vector: int) -> int:
    """The number of rows, rounded up to whole panels."""
    return -(-rows // (_DEEP * vector)) * _DEEP * vector
