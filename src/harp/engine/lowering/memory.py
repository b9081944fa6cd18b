"""The memory of a program: regions of values and gradients, what is kept for the backward pass, referenced arrays."""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harp.engine.lowering.layouts import layouts
from harp.engine.lowering.lower import MaxPool, Operation, Split, Stage, Value
from harp.engine.lowering.planes import Plane
from harp.engine.native import bindings

_LINE = 16  # floats of a cache line
_KEPT_LINE = 64  # bytes


@dataclass(eq=False)
class Region:
    """A region of the arena that holds a value or a gradient; `needed` counts its remaining readers."""

    at: int
    plane: Plane
    key: tuple[Any, ...]
    needed: int = 0
    owner: "Region | None" = None  # the region that this is a part of

    @property
    def whole(self) -> "Region":
        """The owner, or the region itself."""
        return self.owner or self

    @property
    def first(self) -> int:
        """The offset of the first pixel of the first channel."""
        return self.at + self.plane.first

    def part(self, first: int) -> "Region":
        """The channels from number `first` on."""
        return Region(self.at + first * self.plane.size, self.plane, self.key, 0, self.whole)


class Arena:
    """Allocates the memory for both directions of a stage, for a group of images.

    A region is reused only for the same layout, as the zeros between the rows then stay valid.
    """

    def __init__(self, stage: Stage, lanes: int, kernels: bindings.Kernels) -> None:
        self.lanes, self.kernels = lanes, kernels
        self.widest = tuple(kernels.widest)
        self.planes = layouts(stage, lanes, kernels.lanes)
        self.size = self.scratch = 0  # floats of a group of images, and of a thread
        self.together = 1  # groups that a thread computes together
        self.kept = 0  # bytes of a group that are kept for the backward pass
        self.alive: list[Any] = []
        self._free: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        self._kept: dict[Value | MaxPool, tuple[int, int]] = {}

    def region(self, value: Value, needed: int, operation: Operation | None = None) -> Region:
        """A region for a value or its gradient with `needed` readers; `operation` computes it."""
        plane = self.planes[value]
        # A phase may have one row or column less than its plane, which must stay zero: its region is not shared.
        key = (value.size[0], plane, operation if isinstance(operation, Split) else None)
        at = self._free[key].pop() if self._free[key] else self.room(value.size[0] * plane.size)
        return Region(at, plane, key, needed)

    def release(self, region: Region, count: int = 1) -> None:
        """Tell that `count` readers of a region are done with it."""
        whole = region.whole
        whole.needed -= count
        if whole.needed <= 0:
            self._free[whole.key].append(whole.at)

    def room(self, floats: int) -> int:
        """The offset of newly allocated floats."""
        at = self.size
        self.size += floats
        return at

    def keep(self, count: int) -> int:
        """The offset of newly allocated bytes that are kept for the backward pass."""
        at = self.kept
        self.kept += -(-count // _KEPT_LINE) * _KEPT_LINE
        return at

    def mask(self, value: Value) -> tuple[int, int]:
        """The offset of the mask of a value's activation, and the bytes of a channel."""
        if value not in self._kept:
            row = int(self.planes[value].runs(self.widest[0])[:, 1].sum()) * self.kernels.word
            self._kept[value] = self.keep(row * value.size[0]), row
        return self._kept[value]

    def largest(self, pool: MaxPool) -> int:
        """The offset of the positions of the largest numbers of a pooling."""
        if pool not in self._kept:
            row = pool.y.size[1] * pool.y.size[2] * self.lanes
            self._kept[pool] = self.keep(row * pool.y.size[0]), row
        return self._kept[pool][0]

    def array(self, array: npt.NDArray[Any]) -> int:
        """The address of an array, which is kept alive."""
        self.alive.append(array)
        return bindings.address(array)

    def memory(self, threads: int) -> tuple[int, int]:
        """The addresses of the zero-filled arenas and of the scratch memory, for all threads."""
        slack = int(self.widest[0] * self.kernels.lanes) + _LINE  # runs may read past the last plane
        self.size = -(-(self.size + slack) // _LINE) * _LINE
        self.scratch = -(-self.scratch // _LINE) * _LINE
        return self._zeros(self.size * threads * self.together), self._zeros(self.scratch * threads)

    def _zeros(self, count: int) -> int:
        return -(-self.array(np.zeros(count + _LINE, np.float32)) // (4 * _LINE)) * 4 * _LINE
