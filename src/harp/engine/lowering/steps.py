"""Builds single steps of the native code: products and their matrices, pooling, moves of numbers."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from harp.engine.lowering import dense, taps
from harp.engine.lowering.liveness import Flags, Liveness
from harp.engine.lowering.lower import MaxPool, Product, Split, Value
from harp.engine.lowering.matrices import Matrix, matrices, matrix_of
from harp.engine.lowering.memory import Arena, Plane, Region
from harp.engine.lowering.taps import Floats, Ints
from harp.engine.native import bindings

Places = npt.NDArray[np.int32]


class Steps:
    """The steps of one program, and `work`, their multiplications for a group of images."""

    def __init__(self, arena: Arena, live: Liveness) -> None:
        self.arena, self.live = arena, live
        self.steps: list[bindings.Step] = []
        self.work = 0
        # What `refill` updates: which taps of a product are in a matrix, and which of its rows in a bias.
        self._matrices: list[tuple[Product, Ints | None, Matrix | dense.Tiles | dense.Panels]] = []
        self._biases: list[tuple[Product, Places, Floats]] = []

    def refill(self) -> None:
        """Copy the current weights and biases of the products."""
        for product, chosen, matrix in self._matrices:
            matrix.fill(product.taps.values if chosen is None else product.taps.values[chosen])
        for product, rows, bias in self._biases:
            assert product.bias is not None
            bias[:] = product.bias[rows]

    def outside(self, op: int, region: Region, value: Value, offset: int, record: int, *, more: bool = False) -> None:
        """Copy a value from or to the layout of torch; `record` is how many numbers an image has there."""
        channels, height, width = value.size
        x, y = (None, region) if op == bindings.PACK else (region, None)
        self._add(op, x, y, np.arange(channels), (height, width, region.plane.pitch, offset, record, int(more)))

    def multiply(
        self, product: Product, x: Region, y: Region, summand: Region | None, value: Value | None, mask: int, back: bool
    ) -> None:
        """Add a product, or in the backward pass its transpose, without the rows that are not needed.

        The activation is that of `value`.
        """
        all_taps = product.taps.transposed if back else product.taps
        rows = self.live.needed[product.x] if back else self.live.read[product.y]
        alive = rows[all_taps.row]
        if back:  # gradients that are not needed are not computed, so they must not be read
            alive &= self.live.needed[product.y][all_taps.plane]
        place = np.flatnonzero(rows).astype(np.int32)
        needed_taps, chosen = all_taps, None
        if not (rows.all() and alive.all()):
            chosen = np.flatnonzero(alive)
            row = (np.cumsum(rows) - 1)[all_taps.row[chosen]]
            needed_taps = replace(all_taps.chosen(chosen), rows=len(place), row=row)
        whole = dense.dense(needed_taps, x.plane, y.plane)
        for first, matrix, piece in [(0, whole, None)] if whole else matrices(needed_taps, x.plane, self.arena.widest):
            if isinstance(matrix, Matrix):
                part = place[first : first + matrix.rows * matrix.block]
                begin, end = self._product(matrix, part, x, y)
            else:
                part = place
                begin, end = self._dense(matrix, part, x, y)
            if not back and product.bias is not None:
                begin.bias = self.arena.array(bias := np.ascontiguousarray(product.bias[part]))
                self._biases.append((product, part, bias))
            self._finish(end, summand, value, mask)
            which = chosen if piece is None else piece if chosen is None else chosen[piece]
            self._matrices.append((product, which, matrix))

    def copy(
        self, rows: Flags, x: Region, y: Region, summand: Region | None = None, value: Value | None = None
    ) -> None:
        """Copy channels; optionally add a summand and apply the activation mask of a value."""
        place = np.flatnonzero(rows).astype(np.int32)
        copies = replace(taps.identity(len(place)), planes=len(rows), plane=place.astype(np.int64))
        for first, matrix, _ in matrices(copies, x.plane, self.arena.widest):
            part = place[first : first + matrix.rows * matrix.block]
            self._finish(self._product(matrix, part, x, y)[1], summand, value, bindings.APPLY_MASK)

    def pool(self, pool: MaxPool, x: Region, y: Region, *, keep: bool) -> None:
        """Add a max pooling; with `keep`, the position of each largest number is kept for the backward pass."""
        step = self._add(bindings.MAXPOOL, x, y, np.flatnonzero(self.live.read[pool.y]))
        step.size[:] = _window(pool, y.plane, x.plane)
        if keep:
            step.mask, step.kept = bindings.WRITE_MASK, self.arena.mask(pool)[0]

    def pool_back(self, pool: MaxPool, gradient: Region, target: Region) -> None:
        """Add the gradient of a max pooling."""
        needed, read = self.live.needed[pool.x], self.live.read[pool.y]
        # The forward pass did not compute channels that are not read: their gradient is zero.
        place = np.flatnonzero(needed & ~read).astype(np.int32)
        no_taps = replace(taps.identity(len(place)).chosen(np.zeros(0, np.int64)), planes=len(needed))
        for _, matrix, _ in matrices(no_taps, target.plane, self.arena.widest):
            self._product(matrix, place, target, target)
        step = self._add(bindings.MAXPOOL_BACK, gradient, target, np.flatnonzero(needed & read))
        step.size[:] = _window(pool, gradient.plane, target.plane)
        step.kept = self.arena.mask(pool)[0]

    def split(self, split: Split, whole: Region, parts: Region, *, back: bool = False) -> None:
        """Copy pixels of the wanted channels to channels of their own, or back."""
        (channels, height, width), lanes = split.x.size, self.arena.lanes
        wanted = (self.live.needed if back else self.live.read)[split.y]
        if split.stride is None:
            rows, lines = np.flatnonzero(wanted.reshape(channels, -1).any(1)), np.arange(height)
            starts = lines * whole.plane.pitch * lanes, lines * width * parts.plane.size
            step = self._move(whole, parts, rows, starts, (width, lanes, parts.plane.size), back)
            if back:
                step.xplane *= height * width
            else:
                step.yplane *= height * width
            return
        down, right = split.stride
        phases = wanted.reshape(-1, channels)
        for phase in np.flatnonzero(phases.any(1)).tolist():
            top, left = divmod(phase, right)
            columns, lines = -(-(width - left) // right), np.arange(max(0, -(-(height - top) // down)))
            if len(lines) and columns > 0:
                starts = ((lines * down + top) * whole.plane.pitch + left) * lanes, lines * parts.plane.pitch * lanes
                part, rows = parts.part(phase * channels), np.flatnonzero(phases[phase])
                self._move(whole, part, rows, starts, (columns, right * lanes, lanes), back)

    def weigh(self, product: Product, x: Region, y: Region) -> Ints:
        """Add the gradients of the weights, from the input and the output's gradient; the position of each tap's."""
        arena = self.arena
        matrix = matrix_of(product.taps, range(product.taps.rows), 1, x.plane, arena.widest)
        step = self._add(bindings.WEIGHTS, x, y, np.arange(matrix.rows))
        bounds, step.tap = map(arena.array, (matrix.bounds, matrix.tap))
        step.start, step.stop = bounds, bounds + 4 * matrix.rows * (len(matrix.bounds) - 1)
        self._run(step, y.plane.runs(arena.widest[0]))
        step.r = arena.room(len(matrix.tap) * int(arena.kernels.lanes))
        step.kept = arena.keep(4 * len(matrix.tap))
        return matrix.slot

    def _add(
        self, op: int, x: Region | None, y: Region | None, rows: npt.NDArray[Any], sizes: tuple[int, ...] = ()
    ) -> bindings.Step:
        step = bindings.Step(op=op, r=-1, rows=len(rows), block=1)
        step.place = self.arena.array(np.ascontiguousarray(rows, np.int32))
        if x is not None:
            step.x, step.xplane = x.first, x.plane.size
        if y is not None:
            step.y, step.yplane = y.first, y.plane.size
        step.size[: len(sizes)] = list(sizes)
        self.steps.append(step)
        return step

    def _run(self, step: bindings.Step, runs: npt.NDArray[np.int32]) -> None:
        step.runs, step.run = len(runs), self.arena.array(runs)

    def _tidy(self, step: bindings.Step, plane: Plane) -> None:
        """Let a step restore the zeros between the rows that its runs overwrite."""
        zeros = plane.zeros()
        step.zeros, step.zero = len(zeros), self.arena.array(zeros)

    def _product(self, matrix: Matrix, place: Places, x: Region, y: Region) -> tuple[bindings.Step, bindings.Step]:
        """Add the steps of a matrix, one for each of its parts; the first and the last of them."""
        arena = self.arena
        runs = y.plane.runs(arena.widest[matrix.block - 1])
        bounds, tap, weight = map(arena.array, (matrix.bounds, matrix.tap, matrix.weight))
        self.work += len(matrix.weight) * y.plane.height * y.plane.width * arena.lanes
        steps = []
        for part in range(len(matrix.bounds) - 1):
            step = self._add(bindings.PRODUCT, x, y, place)
            step.rows, step.block = matrix.rows, matrix.block
            self._run(step, runs)
            step.start, step.stop = (bounds + 4 * matrix.rows * index for index in (part, part + 1))
            step.tap, step.weight = tap, weight
            step.goes_on = part > 0
            steps.append(step)
        self._tidy(steps[-1], y.plane)
        return steps[0], steps[-1]

    def _dense(
        self, matrix: dense.Tiles | dense.Panels, place: Places, x: Region, y: Region
    ) -> tuple[bindings.Step, bindings.Step]:
        """Add the steps of a dense matrix; the first and the last of them."""
        arena = self.arena
        first = last = self._add(matrix.op, x, y, place, matrix.sizes(y.plane))
        first.tap, first.weight = arena.array(matrix.tap), arena.array(matrix.weight)
        if matrix.joint(y.plane):
            first.joint, arena.together = 1, bindings.TOGETHER
        arena.scratch = max(arena.scratch, matrix.scratch(y.plane))
        self.work += len(matrix.slot) * y.plane.height * y.plane.width * arena.lanes
        if arena.lanes == 1:  # a step without taps adds the summand and the activation to the stored sums
            last = self._add(bindings.PRODUCT, y, y, place)
            self._run(last, y.plane.runs(arena.widest[0]))
            last.goes_on = 1
            last.start = last.stop = arena.array(np.zeros(len(place), np.int32))
            self._tidy(last, y.plane)
        return first, last

    def _finish(self, step: bindings.Step, summand: Region | None, value: Value | None, mask: int) -> None:
        """Let the last step of a product add the summand, and apply the activation of a value with its mask."""
        if summand is not None:
            step.r = summand.first
        if value is None or value.activation.kind == bindings.LINEAR:
            return
        step.activation, step.low, step.high = value.activation.kind, value.activation.low, value.activation.high
        if mask != bindings.NO_MASK:
            step.mask = mask
            step.kept, step.maskrow = self.arena.mask(value)

    def _move(
        self,
        whole: Region,
        part: Region,
        rows: npt.NDArray[Any],
        starts: tuple[npt.NDArray[Any], npt.NDArray[Any]],
        sizes: tuple[int, int, int],
        back: bool,
    ) -> bindings.Step:
        """Copy numbers from each start in the whole to that in the part, or back.

        `sizes` are how many, and the floats from one to the next, in the whole and in the part.
        """
        count, *distances = sizes
        x, y = whole, part
        if back:
            x, y, starts, distances = part, whole, starts[::-1], distances[::-1]
        step = self._add(bindings.MOVE, x, y, rows, (count, *distances))
        self._run(step, np.ascontiguousarray(np.stack(starts, 1), np.int32))
        return step


def _window(pool: MaxPool, output: Plane, source: Plane) -> tuple[int, ...]:
    sizes = (*pool.y.size[1:], *pool.x.size[1:], *pool.kernel, *pool.stride, *pool.padding, *pool.dilation)
    return (*sizes, output.pitch, source.pitch)
