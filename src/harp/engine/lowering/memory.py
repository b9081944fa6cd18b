"""The memory of a program: layouts of tensors, regions of values and gradients, what the backward pass needs."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harp.engine.lowering.lower import Concat, MaxPool, Operation, Product, Split, Stage, Value, read
from harp.engine.native import bindings

_LINE = 16  # floats of a cache line
_KEPT_LINE = 64  # bytes
_ROWS_FROM = 8  # rows of at least this width are computed one by one, without the padding between them


@dataclass(frozen=True)
class Plane:
    """The layout of one channel, with zeros around its rows.

    It has `lanes` floats a position, `pitch` positions from row to row, `pad` rows of zeros.
    """

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
        """The pieces that a plane is computed in: a start, in floats from the first pixel, and a number of vectors."""
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


def layouts(stage: Stage, lanes: int, vector: int) -> dict[Value, Plane]:
    """The layout of every value. Values that a product or a concatenation links share one pitch and padding."""
    group: dict[Value, Value] = {}

    def root(value: Value) -> Value:
        while (above := group.setdefault(value, value)) is not value:
            group[value] = group[above]  # path compression: a long chain is not walked twice
            value = above
        return value

    for value in (*stage.inputs.values(), *stage.outputs.values()):
        root(value)
    for operation in stage.operations:
        for value in (*read(operation), operation.y):
            root(value)
            if isinstance(operation, (Product, Concat)):
                group[root(value)] = root(operation.y)
    pad: dict[Value, int] = defaultdict(int)
    width: dict[Value, int] = defaultdict(int)
    for operation in stage.operations:
        if isinstance(operation, Product):
            pad[root(operation.y)] = max(pad[root(operation.y)], _reach(operation))
    for value in group:
        width[root(value)] = max(width[root(value)], value.size[2])
    return {
        value: Plane(*value.size[1:], pad[root(value)], width[root(value)] + pad[root(value)], lanes, vector)
        for value in group
    }


def _reach(product: Product) -> int:
    """How far outside a plane a product reads, in the forward or the backward pass."""
    reach = 0
    sizes = zip(product.taps.reach(), product.x.size[1:], product.y.size[1:], strict=True)
    for (low, high), inputs, outputs in sizes:
        reach = max(reach, -low, outputs - 1 + high - (inputs - 1), high, inputs - 1 - low - (outputs - 1))
    return reach


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
        self.stage, self.lanes, self.kernels = stage, lanes, kernels
        self.widest = tuple(kernels.widest)
        self.planes = layouts(stage, lanes, kernels.lanes)
        self.size = self.scratch = 0  # floats of a group of images, and of a thread
        self.together = 1  # groups that a thread computes together
        self.kept = 0  # bytes of a group that are kept for the backward pass
        self.alive: list[Any] = []
        self._free: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        self._kept: dict[Value | MaxPool, tuple[int, int]] = {}
        self._uses = stage.uses()

    def input_regions(self) -> dict[Value, Region]:
        """Regions for the inputs of the stage."""
        return {value: self.region(value, self._uses[value]) for value in self.stage.inputs.values()}

    def operations(self, regions: dict[Value, Region]) -> Iterator[Operation]:
        """The operations in their order, each when `regions` has its result; frees what is not read any more."""
        for operation in self.stage.operations:
            y = operation.y
            regions[y] = self.region(y, self._uses[y], operation)
            yield operation
            for value in read(operation):
                self.release(regions[value])
            if self._uses[y] == 0:
                self.release(regions[y], 0)

    def region(self, value: Value, needed: int = 1, operation: Operation | None = None) -> Region:
        """A region for a value or its gradient with `needed` readers; `operation` computes it."""
        plane = self.planes[value]
        # A phase may have one row or column less than its plane, which must stay zero: its region is not shared.
        phases = operation if isinstance(operation, Split) and operation.stride is not None else None
        key = (value.size[0], plane, phases)
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
        self.size += floats
        return self.size - floats

    def keep(self, count: int) -> int:
        """The offset of newly allocated bytes that are kept for the backward pass."""
        at = self.kept
        self.kept += -(-count // _KEPT_LINE) * _KEPT_LINE
        return at

    def mask(self, owner: Value | MaxPool) -> tuple[int, int]:
        """Where the backward pass finds the activation mask of a value, or the positions that a pooling chose.

        Gives the offset and the bytes of a channel.
        """
        if owner not in self._kept:
            if isinstance(owner, MaxPool):
                channels, height, width = owner.y.size
                row = height * width * self.lanes
            else:
                channels, row = owner.size[0], int(self.planes[owner].runs(self.widest[0])[:, 1].sum())
                row *= self.kernels.word
            self._kept[owner] = self.keep(row * channels), row
        return self._kept[owner]

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
