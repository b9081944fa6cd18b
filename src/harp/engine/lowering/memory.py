"""The memory of a program: where values and gradients lie, what is kept for the way back, the arrays it points to."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harp.sparse import native
from harp.sparse.layouts import layouts
from harp.sparse.lowering import MaxPool, Operation, Split, Stage, Value
from harp.sparse.planes import Plane

_LINE = 16  # floats of a cache line
_KEPT_LINE = 64  # bytes


@dataclass(eq=False)
class Region:
    """A place in the arena that holds a value or a gradient, and how many still need it."""

    at: int
    plane: Plane
    key: tuple[Any, ...]
    needed: int = 0
    owner: "Region | None" = None  # for a part of the channels of another

    @property
    def whole(self) -> "Region":
        """The region itself, or the one that it is a part of."""
        return self.owner or self

    @property
    def first(self) -> int:
        """Where the first pixel of the first channel is."""
        return self.at + self.plane.first

    def part(self, first: int) -> "Region":
        """The channels from one on."""
        return Region(self.at + first * self.plane.size, self.plane, self.key, 0, self.whole)


class Arena:
    """One for both directions of a stage, for a number of images at a time.

    Regions of one layout may follow each other in one place, as the zeros between their rows are the same.
    """

    def __init__(self, stage: Stage, lanes: int, kernels: native.Kernels) -> None:
        self.lanes, self.kernels = lanes, kernels
        self.widest = tuple(kernels.widest)
        self.planes = layouts(stage, lanes, kernels.lanes)
        self.size = self.scratch = 0  # floats of a group of images, and of a thread
        self.together = 1  # groups that a thread computes side by side
        self.kept = 0  # bytes of a group that stay for the way back
        self.alive: list[Any] = []
        self._free: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        self._kept: dict[Value | MaxPool, tuple[int, int]] = {}

    def region(self, value: Value, needed: int, operation: Operation | None = None) -> Region:
        """A place for a value, or its gradient, that so many need; `operation` is what makes it."""
        plane = self.planes[value]
        # A phase may have a row or column less than its plane: it stays zero only where nobody else writes.
        key = (value.size[0], plane, operation if isinstance(operation, Split) else None)
        at = self._free[key].pop() if self._free[key] else self.room(value.size[0] * plane.size)
        return Region(at, plane, key, needed)

    def release(self, region: Region, count: int = 1) -> None:
        """So many of those who needed a region don't any more."""
        whole = region.whole
        whole.needed -= count
        if whole.needed <= 0:
            self._free[whole.key].append(whole.at)

    def room(self, floats: int) -> int:
        """Where there is room for so many numbers that nobody else gets."""
        at = self.size
        self.size += floats
        return at

    def keep(self, count: int) -> int:
        """Where so many bytes are kept."""
        at = self.kept
        self.kept += -(-count // _KEPT_LINE) * _KEPT_LINE
        return at

    def mask(self, value: Value) -> tuple[int, int]:
        """Where the bits of a value's activation are kept, and how many bytes a channel has."""
        if value not in self._kept:
            row = int(self.planes[value].runs(self.widest[0])[:, 1].sum()) * self.kernels.word
            self._kept[value] = self.keep(row * value.size[0]), row
        return self._kept[value]

    def largest(self, pool: MaxPool) -> int:
        """Where it is kept which number of each window was the largest."""
        if pool not in self._kept:
            row = pool.y.size[1] * pool.y.size[2] * self.lanes
            self._kept[pool] = self.keep(row * pool.y.size[0]), row
        return self._kept[pool][0]

    def array(self, array: npt.NDArray[Any]) -> int:
        """The address of an array, which stays alive."""
        self.alive.append(array)
        return native.address(array)

    def memory(self, threads: int) -> tuple[int, int]:
        """The addresses of the arenas of each thread, where what no step writes to is zero, and of its scratch."""
        slack = int(self.widest[0] * self.kernels.lanes) + _LINE  # runs may read past the last plane
        self.size = -(-(self.size + slack) // _LINE) * _LINE
        self.scratch = -(-self.scratch // _LINE) * _LINE
        return self._zeros(self.size * threads * self.together), self._zeros(self.scratch * threads)

    def _zeros(self, count: int) -> int:
        return -(-self.array(np.zeros(count + _LINE, np.float32)) // (4 * _LINE)) * 4 * _LINE
