"""The memory layout of a tensor: planes with zeros around the rows, and the runs in which they are computed."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_LINE = 16  # floats of a cache line
_ROWS_FROM = 8  # rows of at least this width are computed one by one, without the padding between them


@dataclass(frozen=True)
class Plane:
    """The layout of one channel: `lanes` floats a position, `pitch` positions from row to row, `pad` rows of zeros."""

    height: int
    width: int
    pad: int
    pitch: int
    lanes: int
    vector: int

    @property
    def first(self) -> int:
        """The offset of the first pixel, in floats."""
        return self.pad * (self.pitch + 1) * self.lanes

    @property
    def size(self) -> int:
        """Floats from plane to plane: an odd number of cache lines, as powers of two collide in the cache."""
        positions = (self.height + 2 * self.pad) * self.pitch + 2 * self.pad
        floats = positions * self.lanes + (self.vector if self.lanes == 1 else 0)
        if self.height == self.width == 1 and self.pad == 0:
            return self.vector
        return (-(-floats // _LINE) | 1) * _LINE

    @property
    def _by_rows(self) -> bool:
        return self.lanes > 1 and self.width >= _ROWS_FROM and self.pitch > self.width

    @property
    def row_of_mask(self) -> int:
        """Mask words from one row to the next, if a vector holds several images."""
        return self.width if self._by_rows else self.pitch

    def runs(self, widest: int) -> npt.NDArray[np.int32]:
        """Pairs of a start, in floats from the first pixel, and a number of vectors."""
        rows = self._by_rows
        starts = np.arange(self.height if rows else 1) * self.pitch * self.lanes
        vectors = -(-(self.width if rows else (self.height - 1) * self.pitch + self.width) * self.lanes // self.vector)
        pieces = -(-vectors // widest)
        lengths = np.full(pieces, vectors // pieces)
        lengths[: vectors % pieces] += 1
        inner = (np.cumsum(lengths) - lengths) * self.vector
        pairs = np.stack(np.broadcast_arrays(starts[:, None] + inner, lengths), -1)
        return np.ascontiguousarray(pairs.reshape(-1, 2), np.int32)

    def zeros(self) -> npt.NDArray[np.int32]:
        """Pairs of a start and a length, in floats, of the gaps between rows that runs overwrite."""
        gap = (self.pitch - self.width) * self.lanes
        if gap == 0 or (self.lanes > 1 and self.width >= _ROWS_FROM):
            return np.zeros((0, 2), np.int32)
        starts = (np.arange(self.height) * self.pitch + self.width) * self.lanes
        lengths = np.full(self.height, gap)
        lengths[-1] = max(gap, self.vector if self.lanes == 1 else 0)
        return np.ascontiguousarray(np.stack([starts, lengths], 1), np.int32)
