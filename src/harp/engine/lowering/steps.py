"""Single steps of the native code: products and their matrices, pooling, numbers that move."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harp.sparse import native, taps, ways
from harp.sparse.arena import Arena, Region
from harp.sparse.liveness import Flags, Liveness
from harp.sparse.lowering import Activation, Flatten, MaxPool, Product, Split, Value
from harp.sparse.matrices import Matrix, matrices, matrix_of
from harp.sparse.planes import Plane
from harp.sparse.taps import Floats
from harp.sparse.ways import Dense

Places = npt.NDArray[np.int32]


class Steps:
    """The steps of one program as they are made, and how many multiplications they are for a group of images."""

    def __init__(self, arena: Arena, live: Liveness) -> None:
        self.arena, self.live = arena, live
        self.made: list[native.Step] = []
        self.work = 0
        # What is filled in anew when weights change: which taps of a product are in a matrix, which rows in a bias.
        self._matrices: list[tuple[Product, npt.NDArray[np.int64] | None, Matrix | Dense]] = []
        self._biases: list[tuple[Product, Places, Floats]] = []

    def refill(self) -> None:
        """Take the present weights and biases of the products."""
        for product, chosen, matrix in self._matrices:
            matrix.fill(product.taps.values if chosen is None else product.taps.values[chosen])
        for product, rows, bias in self._biases:
            assert product.bias is not None
            bias[:] = product.bias[rows]

    def outside(self, op: int, region: Region, value: Value, offset: int, record: int, *, more: bool = False) -> None:
        """A value from or to the layout of torch, where an image has so many numbers in all."""
        channels, height, width = value.size
        x, y = (None, region) if op == native.PACK else (region, None)
        self._add(op, x, y, np.arange(channels), (height, width, region.plane.pitch, offset, record, int(more)))

    def multiply(
        self,
        product: Product,
        x: Region,
        y: Region,
        summand: Region | None,
        activation: Activation,
        mask: int,
        *,
        back: bool = False,
    ) -> None:
        """A product, or on the way back that of its transposed taps; of the rows that matter."""
        each = product.taps.transposed if back else product.taps
        rows = self.live.needed[product.x] if back else self.live.read[product.y]
        alive = rows[each.row]
        if back:  # a gradient that was not computed must not be read
            alive &= self.live.needed[product.y][each.plane]
        place = np.flatnonzero(rows).astype(np.int32)
        chosen = None if rows.all() and alive.all() else np.flatnonzero(alive)
        if chosen is None:
            fewer = each
        else:
            fewer = replace(each.chosen(chosen), rows=len(place), row=(np.cumsum(rows) - 1)[each.row[chosen]])
        found: list[tuple[int, Matrix | Dense, npt.NDArray[np.int64] | None]] = []
        dense = ways.dense(fewer, x.plane, y.plane)
        if dense is not None:
            found.append((0, dense, None))
        else:
            found += matrices(fewer, x.plane, self.arena.widest)
        for first, matrix, some in found:
            if isinstance(matrix, Matrix):
                part = place[first : first + matrix.rows * matrix.block]
                steps = self._product(matrix, part, x, y, summand)
                begin, end = steps[0], steps[-1]
            else:
                part = place
                begin, end = self._dense(matrix, part, x, y, summand)
            if not back and product.bias is not None:
                begin.bias = self.arena.array(bias := np.ascontiguousarray(product.bias[part]))
                self._biases.append((product, part, bias))
            self._finish(end, activation, mask, product.x if back else product.y)
            if some is not None and chosen is not None:
                some = chosen[some]
            self._matrices.append((product, chosen if some is None else some, matrix))

    def copy(
        self, rows: Flags, x: Region, y: Region, summand: Region | None = None, value: Value | None = None
    ) -> None:
        """Channels as they are, or with another gradient added and a value's mask applied."""
        activation = Activation() if value is None else value.activation
        mask = native.APPLY_MASK if activation.kind != native.LINEAR else native.NO_MASK
        place = np.flatnonzero(rows).astype(np.int32)
        each = replace(taps.identity(len(place)), planes=len(rows), plane=place.astype(np.int64))
        for first, matrix, _ in matrices(each, x.plane, self.arena.widest):
            part = place[first : first + matrix.rows * matrix.block]
            self._finish(self._product(matrix, part, x, y, summand)[-1], activation, mask, value)

    def pool(self, pool: MaxPool, x: Region, y: Region, *, keep: bool) -> None:
        """The largest number of each window; which it was is kept if asked for."""
        step = self._add(native.MAXPOOL, x, y, np.flatnonzero(self.live.read[pool.y]))
        step.size[:] = _window(pool, y.plane, x.plane)
        if keep:
            step.mask, step.kept = native.WRITE_MASK, self.arena.largest(pool)

    def pool_back(self, pool: MaxPool, given: Region, target: Region) -> None:
        """The gradient of what was the largest."""
        needed, read = self.live.needed[pool.x], self.live.read[pool.y]
        self._clear(needed & ~read, target)  # which number was the largest is known of what is read
        step = self._add(native.MAXPOOL_BACK, given, target, np.flatnonzero(needed & read))
        step.size[:] = _window(pool, given.plane, target.plane)
        step.kept = self.arena.largest(pool)

    def split(self, split: Split, whole: Region, parts: Region, wanted: Flags, *, back: bool = False) -> None:
        """All phases out of the whole, or back into it; of the channels that are wanted of each phase."""
        for phase in np.flatnonzero(wanted.reshape(math.prod(split.stride), -1).any(1)).tolist():
            self._phase(split, phase, whole, parts, wanted, back=back)

    def flatten(self, flatten: Flatten, whole: Region, flat: Region, wanted: Flags, *, back: bool = False) -> None:
        """Pixels of the wanted channels as channels of their own, or back."""
        _, height, width = flatten.x.size
        many, lanes = np.arange(height), self.arena.lanes
        starts = many * whole.plane.pitch * lanes, many * width * flat.plane.size
        apart = lanes, flat.plane.size
        self._move(whole, flat, np.flatnonzero(wanted), starts, width, apart, back=back, group=height * width)

    def weigh(self, product: Product, x: Region, y: Region) -> npt.NDArray[np.int64]:
        """The gradients of the weights from the input and the output's gradient; where that of each tap is."""
        arena = self.arena
        matrix = matrix_of(product.taps, range(product.taps.rows), 1, x.plane, arena.widest)
        step = self._add(native.WEIGHTS, x, y, np.arange(matrix.rows))
        bounds, step.tap = map(arena.array, (matrix.bounds, matrix.tap))
        step.start, step.stop = bounds, bounds + 4 * matrix.rows * (len(matrix.bounds) - 1)
        self._run(step, y.plane.runs(arena.widest[0]))
        step.r = arena.room(len(matrix.tap) * int(arena.kernels.lanes))
        step.kept = arena.keep(4 * len(matrix.tap))
        return matrix.slot

    def _add(
        self, op: int, x: Region | None, y: Region | None, rows: npt.NDArray[Any], sizes: tuple[int, ...] = ()
    ) -> native.Step:
        step = native.Step(op=op, r=-1, rows=len(rows), block=1)
        step.place = self.arena.array(np.ascontiguousarray(rows, np.int32))
        if x is not None:
            step.x, step.xplane = x.first, x.plane.size
        if y is not None:
            step.y, step.yplane = y.first, y.plane.size
        step.size[: len(sizes)] = list(sizes)
        self.made.append(step)
        return step

    def _run(self, step: native.Step, runs: npt.NDArray[np.int32]) -> None:
        step.runs, step.run = len(runs), self.arena.array(runs)

    def _tidy(self, step: native.Step, plane: Plane) -> None:
        """Let a step put zeros between the rows that runs write to."""
        zeros = plane.zeros()
        step.zeros, step.zero = len(zeros), self.arena.array(zeros)

    def _product(
        self, matrix: Matrix, place: Places, x: Region, y: Region, summand: Region | None
    ) -> list[native.Step]:
        """The steps of a matrix, one for each of its parts; the last one ends the sums."""
        arena = self.arena
        runs = y.plane.runs(arena.widest[matrix.block - 1])
        bounds, tap, weight = map(arena.array, (matrix.bounds, matrix.tap, matrix.weight))
        self._count(len(matrix.weight), y.plane)
        steps = []
        for part in range(len(matrix.bounds) - 1):
            step = self._add(native.PRODUCT, x, y, place)
            step.rows, step.block = matrix.rows, matrix.block
            self._run(step, runs)
            step.start, step.stop = (bounds + 4 * matrix.rows * each for each in (part, part + 1))
            step.tap, step.weight = tap, weight
            step.goes_on = part > 0
            steps.append(step)
        self._tidy(steps[-1], y.plane)
        if summand is not None:
            steps[-1].r = summand.first
        return steps

    def _dense(
        self, matrix: Dense, place: Places, x: Region, y: Region, summand: Region | None
    ) -> tuple[native.Step, native.Step]:
        """The steps of a dense matrix: the first begins the sums, the last ends them."""
        arena = self.arena
        first = last = self._add(matrix.op, x, y, place, matrix.sizes(y.plane))
        first.tap, first.weight = arena.array(matrix.tap), arena.array(matrix.weight)
        if matrix.joint(y.plane):
            first.joint, arena.together = 1, native.TOGETHER
        arena.scratch = max(arena.scratch, matrix.scratch(y.plane))
        self._count(len(matrix.slot), y.plane)
        if arena.lanes == 1:
            last = self._ending(place, y)
        if summand is not None:
            last.r = summand.first
        return first, last

    def _ending(self, place: Places, y: Region) -> native.Step:
        """A step without taps that ends sums which another step has stored."""
        step = self._add(native.PRODUCT, y, y, place)
        self._run(step, y.plane.runs(self.arena.widest[0]))
        step.goes_on = 1
        step.start = step.stop = self.arena.array(np.zeros(len(place), np.int32))
        self._tidy(step, y.plane)
        return step

    def _clear(self, rows: Flags, y: Region) -> None:
        """Zeros in channels."""
        place = np.flatnonzero(rows).astype(np.int32)
        each = replace(taps.identity(len(place)).chosen(np.zeros(0, np.int64)), planes=len(rows))
        for _, matrix, _ in matrices(each, y.plane, self.arena.widest):
            self._product(matrix, place, y, y, None)

    def _count(self, weights: int, y: Plane) -> None:
        self.work += weights * y.height * y.width * self.arena.lanes

    def _finish(self, step: native.Step, activation: Activation, mask: int, value: Value | None) -> None:
        step.activation, step.low, step.high, step.mask = activation.kind, activation.low, activation.high, mask
        if mask != native.NO_MASK:
            assert value is not None
            step.kept, step.maskrow = self.arena.mask(value)

    def _phase(self, split: Split, phase: int, whole: Region, parts: Region, wanted: Flags, *, back: bool) -> None:
        (channels, height, width), (down, right) = split.x.size, split.stride
        top, left = divmod(phase, right)
        rows, columns = -(-(height - top) // down), -(-(width - left) // right)
        if rows <= 0 or columns <= 0:
            return
        many, lanes = np.arange(rows), self.arena.lanes
        starts = ((many * down + top) * whole.plane.pitch + left) * lanes, many * parts.plane.pitch * lanes
        channel = np.flatnonzero(wanted[phase * channels : (phase + 1) * channels])
        self._move(whole, parts.part(phase * channels), channel, starts, columns, (right * lanes, lanes), back=back)

    def _move(
        self,
        whole: Region,
        part: Region,
        rows: npt.NDArray[Any],
        starts: tuple[npt.NDArray[Any], npt.NDArray[Any]],
        count: int,
        apart: tuple[int, int],
        *,
        back: bool,
        group: int = 1,
    ) -> None:
        """So many numbers from each start in a whole to that in a part of it, or back; `apart` is their distance."""
        x, y, runs = (part, whole, starts[::-1]) if back else (whole, part, starts)
        there, here = apart[::-1] if back else apart
        step = self._add(native.MOVE, x, y, rows, (count, there, here))
        self._run(step, np.ascontiguousarray(np.stack(runs, 1), np.int32))
        if back:
            step.xplane *= group
        else:
            step.yplane *= group


def _window(pool: MaxPool, output: Plane, given: Plane) -> tuple[int, ...]:
    sizes = (*pool.y.size[1:], *pool.x.size[1:], *pool.kernel, *pool.stride, *pool.padding, *pool.dilation)
    return (*sizes, output.pitch, given.pitch)
