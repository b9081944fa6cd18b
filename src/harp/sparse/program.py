"""Programs of the native code: the operations of a stage with their memory, forwards and backwards.

Backwards, every product is the product of its transposed taps. A value's gradient is the sum over those who read the
value; each adds the sum so far in the same pass, and the last one also applies the mask of the activation.
"""

import ctypes
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harp.sparse import native, taps, ways
from harp.sparse.layouts import layouts
from harp.sparse.liveness import Flags, liveness
from harp.sparse.lowering import Activation, Concat, Flatten, MaxPool, Operation, Product, Split, Stage, Value, read
from harp.sparse.matrices import Matrix, matrices, matrix_of
from harp.sparse.planes import Plane
from harp.sparse.taps import Floats
from harp.sparse.ways import Dense

_LINE = 16  # floats of a cache line
_WORTH = 1e8  # multiplications of a group from which on threads share it: some milliseconds, as waiting takes time


@dataclass(eq=False)
class Region:
    """A place in the arena that holds a value or a gradient, and how many still need it."""

    at: int
    plane: Plane
    key: tuple[Any, ...]
    needed: int = 0
    owner: "Region | None" = None  # for a part of the channels of another


class Steps(NamedTuple):
    """The steps of one program, and how many multiplications they are for a group of images."""

    steps: list[native.Step]
    work: int


@dataclass
class Code:
    """A finished program, and the arrays that it points to."""

    program: native.Program
    steps: list[native.Step]
    alive: list[Any] = field(default_factory=list)


class Builder:
    """The programs of one stage for a number of images at a time, with one arena for both directions."""

    def __init__(self, stage: Stage, lanes: int, kernels: native.Kernels, *, keep: bool) -> None:
        self.stage, self.lanes, self.kernels, self.keep = stage, lanes, kernels, keep
        self.widest = tuple(kernels.widest)
        self.planes = layouts(stage, lanes, kernels.lanes)
        self.live = liveness(stage)
        self.steps: list[native.Step] = []
        self.alive: list[Any] = []
        self.free: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        self.arena = self.kept = self.scratch = self.work = 0
        self.together = 1
        self.masks: dict[Value | MaxPool, tuple[int, int]] = {}
        self.learned = np.zeros(0, np.int64)  # where the gradient of each tap's weight is
        # What is filled in anew when weights change: which taps of a product are in a matrix, which rows in a bias.
        self.matrices: list[tuple[Product, npt.NDArray[np.int64] | None, Matrix | Dense]] = []
        self.biases: list[tuple[Product, npt.NDArray[np.int32], Floats]] = []

    def refill(self) -> None:
        """Take the present weights and biases of the products."""
        for product, chosen, matrix in self.matrices:
            matrix.fill(product.taps.values if chosen is None else product.taps.values[chosen])
        for product, rows, bias in self.biases:
            assert product.bias is not None
            bias[:] = product.bias[rows]

    def memory(self, threads: int) -> tuple[int, int]:
        """The addresses of the arenas of each thread, where what no step writes to is zero, and of its scratch."""
        slack = int(self.widest[0] * self.kernels.lanes) + _LINE  # runs may read past the last plane
        self.arena = -(-(self.arena + slack) // _LINE) * _LINE
        self.scratch = -(-self.scratch // _LINE) * _LINE
        return self._zeros(self.arena * threads * self.together), self._zeros(self.scratch * threads)

    def _zeros(self, count: int) -> int:
        return -(-self._array(np.zeros(count + _LINE, np.float32)) // (4 * _LINE)) * 4 * _LINE

    def forward(self) -> Steps:
        """The steps from the inputs to the outputs."""
        stage, self.steps, self.work = self.stage, [], 0
        uses = Counter(value for operation in stage.operations for value in read(operation))
        uses.update(stage.outputs.values())
        where: dict[Value, Region] = {}
        record = sum(math.prod(value.size) for value in stage.inputs.values())
        offset = 0
        for value in stage.inputs.values():
            where[value] = self._region(value, uses[value])
            self._outside(native.PACK, where[value], value, offset, record)
            offset += math.prod(value.size)
        for operation in stage.operations:
            target = where[operation.y] = self._region(operation.y, uses[operation.y], operation)
            self._compute(operation, target, where)
            for value in read(operation):
                self._release(where[value])
            if uses[operation.y] == 0:
                self._release(target, 0)
        record, offset = sum(math.prod(value.size) for value in stage.outputs.values()), 0
        for value in stage.outputs.values():
            self._outside(native.UNPACK, where[value], value, offset, record)
            self._release(where[value])
            offset += math.prod(value.size)
        return Steps(self.steps, self.work)

    def backward(self) -> Steps:
        """The steps from the outputs' gradients to those of the inputs; after `forward`."""
        self.steps, self.work = [], 0
        gradients = _Gradients(self)
        record = sum(math.prod(value.size) for value in self.stage.outputs.values())
        offset = 0
        for value in self.stage.outputs.values():
            region = self._region(value, 1)
            self._outside(native.PACK, region, value, offset, record)
            gradients.give(value, region)
            offset += math.prod(value.size)
        for operation in reversed(self.stage.operations):
            given = gradients.take(operation.y)
            if given is not None:
                self._compute_back(operation, given, gradients)
                self._release(given)
        record, offset = sum(math.prod(value.size) for value in self.stage.inputs.values()), 0
        for value in self.stage.inputs.values():
            given = gradients.take(value)
            assert given is not None
            self._outside(native.UNPACK, given, value, offset, record)
            self._release(given)
            offset += math.prod(value.size)
        return Steps(self.steps, self.work)

    def learning(self, *, deeper: bool) -> Steps:
        """The steps from the gradient of one product's output to that of its weights, and of its input if asked for.

        The input of the way forward is given once more.
        """
        self.steps, self.work = [], 0
        (product,) = (each for each in self.stage.operations if isinstance(each, Product))
        (given,), (made,) = self.stage.inputs.values(), self.stage.outputs.values()
        where = {given: self._region(given, 1)}
        self._outside(native.PACK, where[given], given, 0, math.prod(given.size), more=True)
        for operation in self.stage.operations:
            if operation is not product:
                where[operation.y] = self._region(operation.y, 1, operation)
                self._compute(operation, where[operation.y], where)
        x, y = where[product.x], self._region(made, 1)
        self._outside(native.PACK, y, made, 0, math.prod(made.size))
        matrix = matrix_of(product.taps, range(product.taps.rows), 1, x.plane, self.widest)
        step = self._step(native.WEIGHTS, x, y, np.arange(matrix.rows))
        bounds, step.tap = map(self._array, (matrix.bounds, matrix.tap))
        step.start, step.stop = bounds, bounds + 4 * matrix.rows * (len(matrix.bounds) - 1)
        runs = y.plane.runs(self.widest[0])
        step.runs, step.run = len(runs), self._array(runs)
        step.r = self.arena
        self.arena += len(matrix.tap) * int(self.kernels.lanes)
        step.kept = self._keep_bytes(4 * len(matrix.tap))
        self.learned = matrix.slot
        if deeper:
            gradients = _Gradients(self)
            gradients.give(made, y)
            for operation in reversed(self.stage.operations):
                found = gradients.take(operation.y)
                assert found is not None
                self._compute_back(operation, found, gradients)
            found = gradients.take(given)
            assert found is not None
            self._outside(native.UNPACK, found, given, 0, math.prod(given.size))
        return Steps(self.steps, self.work)

    # Memory: regions of one layout may follow each other in one place, as the zeros between their rows are the same.

    def _region(self, value: Value, needed: int, operation: Operation | None = None) -> Region:
        plane = self.planes[value]
        # A phase may have a row or column less than its plane: it stays zero only where nobody else writes.
        key = (value.size[0], plane, operation if isinstance(operation, Split) else None)
        if self.free[key]:
            at = self.free[key].pop()
        else:
            at = self.arena
            self.arena += value.size[0] * plane.size
        return Region(at, plane, key, needed)

    def _release(self, region: Region, count: int = 1) -> None:
        if region.owner is not None:
            self._release(region.owner, count)
            return
        region.needed -= count
        if region.needed <= 0:
            self.free[region.key].append(region.at)

    def _keep_bytes(self, count: int) -> int:
        at = self.kept
        self.kept += -(-count // 64) * 64
        return at

    def _array(self, array: npt.NDArray[Any]) -> int:
        self.alive.append(array)
        return native.address(array)

    # Steps.

    def _step(
        self, op: int, x: Region | None, y: Region | None, rows: npt.NDArray[Any], sizes: tuple[int, ...] = ()
    ) -> native.Step:
        step = native.Step(op=op, r=-1, rows=len(rows), block=1)
        step.place = self._array(np.ascontiguousarray(rows, np.int32))
        if x is not None:
            step.x, step.xplane = x.at + x.plane.first, x.plane.size
        if y is not None:
            step.y, step.yplane = y.at + y.plane.first, y.plane.size
        step.size[: len(sizes)] = list(sizes)
        self.steps.append(step)
        return step

    def _outside(self, op: int, region: Region, value: Value, offset: int, record: int, *, more: bool = False) -> None:
        channels, height, width = value.size
        x, y = (None, region) if op == native.PACK else (region, None)
        self._step(op, x, y, np.arange(channels), (height, width, region.plane.pitch, offset, record, int(more)))

    def _compute(self, operation: Operation, target: Region, where: dict[Value, Region]) -> None:
        if isinstance(operation, Product):
            summand = None if operation.summand is None else where[operation.summand]
            activation, mask = operation.y.activation, native.NO_MASK
            if self.keep and activation.kind != native.LINEAR:
                mask = native.WRITE_MASK
                self._mask(operation.y)
            self._multiply(operation, where[operation.x], target, summand, activation, mask)
        elif isinstance(operation, Split):
            wanted = self.live.read[operation.y]
            for phase in np.flatnonzero(wanted.reshape(math.prod(operation.stride), -1).any(1)).tolist():
                self._phase(operation, phase, where[operation.x], target, wanted)
        elif isinstance(operation, Flatten):
            self._flatten(operation, where[operation.x], target, self.live.read[operation.x])
        elif isinstance(operation, MaxPool):
            rows = np.flatnonzero(self.live.read[operation.y])
            step = self._step(native.MAXPOOL, where[operation.x], target, rows)
            step.size[:] = _window(operation, target.plane, where[operation.x].plane)
            if self.keep:
                self.masks[operation] = self._keep_bytes(math.prod(operation.y.size) * self.lanes), 0
                step.mask, step.kept = native.WRITE_MASK, self.masks[operation][0]
        else:
            first = 0
            for value in operation.xs:
                flags = self.live.read[operation.y][first : first + value.size[0]]
                self._copy(flags, where[value], _part(target, first))
                first += value.size[0]

    def _compute_back(self, operation: Operation, given: Region, gradients: "_Gradients") -> None:
        if isinstance(operation, Product):
            if operation.summand is not None:
                gradients.share(operation.summand, given)
            gradients.add_product(operation, given)
        elif isinstance(operation, Concat):
            first = 0
            for value in operation.xs:
                gradients.share(value, _part(given, first))
                first += value.size[0]
        else:
            target = self._region(operation.x, 1)
            if isinstance(operation, Split):
                for phase in range(math.prod(operation.stride)):
                    wanted = np.tile(self.live.needed[operation.x], math.prod(operation.stride))
                    self._phase(operation, phase, target, given, wanted, back=True)
            elif isinstance(operation, Flatten):
                self._flatten(operation, target, given, self.live.needed[operation.x], back=True)
            else:
                needed, read = self.live.needed[operation.x], self.live.read[operation.y]
                self._clear(needed & ~read, target)  # which number was the largest is known of what is read
                step = self._step(native.MAXPOOL_BACK, given, target, np.flatnonzero(needed & read))
                step.size[:] = _window(operation, given.plane, target.plane)
                step.kept = self.masks[operation][0]
            gradients.give(operation.x, target)

    def _multiply(
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
            found += matrices(fewer, x.plane, self.widest)
        for first, matrix, some in found:
            if isinstance(matrix, Matrix):
                part = place[first : first + matrix.rows * matrix.block]
                steps = self._product(matrix, part, x, y, summand)
                begin, end = steps[0], steps[-1]
            else:
                part = place
                begin, end = self._dense(matrix, part, x, y, summand)
            if not back and product.bias is not None:
                begin.bias = self._array(bias := np.ascontiguousarray(product.bias[part]))
                self.biases.append((product, part, bias))
            self._finish(end, activation, mask, product.x if back else product.y)
            if some is not None and chosen is not None:
                some = chosen[some]
            self.matrices.append((product, chosen if some is None else some, matrix))

    def _dense(
        self, matrix: Dense, place: npt.NDArray[np.int32], x: Region, y: Region, summand: Region | None
    ) -> tuple[native.Step, native.Step]:
        """The steps of a dense matrix: the first begins the sums, the last ends them."""
        first = last = self._step(matrix.op, x, y, place, matrix.sizes(y.plane))
        first.tap, first.weight = self._array(matrix.tap), self._array(matrix.weight)
        if matrix.joint(y.plane):
            first.joint, self.together = 1, native.TOGETHER
        self.scratch = max(self.scratch, matrix.scratch(y.plane))
        self.work += len(matrix.slot) * y.plane.height * y.plane.width * self.lanes
        if self.lanes == 1:
            last = self._ending(place, y)
        if summand is not None:
            last.r = summand.at + summand.plane.first
        return first, last

    def _ending(self, place: npt.NDArray[np.int32], y: Region) -> native.Step:
        """A step without taps that ends sums which another step has stored."""
        step = self._step(native.PRODUCT, y, y, place)
        runs = y.plane.runs(self.widest[0])
        step.runs, step.run, step.goes_on = len(runs), self._array(runs), 1
        step.start = step.stop = self._array(np.zeros(len(place), np.int32))
        zeros = y.plane.zeros()
        step.zeros, step.zero = len(zeros), self._array(zeros)
        return step

    def _copy(
        self, rows: Flags, x: Region, y: Region, summand: Region | None = None, value: Value | None = None
    ) -> None:
        """Channels as they are, or with another gradient added and a value's mask applied."""
        activation = Activation() if value is None else value.activation
        mask = native.APPLY_MASK if activation.kind != native.LINEAR else native.NO_MASK
        place = np.flatnonzero(rows).astype(np.int32)
        each = replace(taps.identity(len(place)), planes=len(rows), plane=place.astype(np.int64))
        for first, matrix, _ in matrices(each, x.plane, self.widest):
            part = place[first : first + matrix.rows * matrix.block]
            self._finish(self._product(matrix, part, x, y, summand)[-1], activation, mask, value)

    def _clear(self, rows: Flags, y: Region) -> None:
        """Zeros in channels."""
        place = np.flatnonzero(rows).astype(np.int32)
        each = replace(taps.identity(len(place)).chosen(np.zeros(0, np.int64)), planes=len(rows))
        for _, matrix, _ in matrices(each, y.plane, self.widest):
            self._product(matrix, place, y, y, None)

    def _product(
        self, matrix: Matrix, place: npt.NDArray[np.int32], x: Region, y: Region, summand: Region | None
    ) -> list[native.Step]:
        """The steps of a matrix, one for each of its parts; the last one ends the sums."""
        runs = self._array(pairs := y.plane.runs(self.widest[matrix.block - 1]))
        bounds, tap, weight = map(self._array, (matrix.bounds, matrix.tap, matrix.weight))
        self.work += len(matrix.weight) * y.plane.height * y.plane.width * self.lanes
        steps = []
        for part in range(len(matrix.bounds) - 1):
            step = self._step(native.PRODUCT, x, y, place)
            step.rows, step.block = matrix.rows, matrix.block
            step.runs, step.run = len(pairs), runs
            step.start, step.stop = (bounds + 4 * matrix.rows * each for each in (part, part + 1))
            step.tap, step.weight = tap, weight
            step.goes_on = part > 0
            steps.append(step)
        zeros = y.plane.zeros()
        steps[-1].zeros, steps[-1].zero = len(zeros), self._array(zeros)
        if summand is not None:
            steps[-1].r = summand.at + summand.plane.first
        return steps

    def _finish(self, step: native.Step, activation: Activation, mask: int, value: Value | None) -> None:
        step.activation, step.low, step.high, step.mask = activation.kind, activation.low, activation.high, mask
        if mask != native.NO_MASK:
            assert value is not None
            step.kept, step.maskrow = self._mask(value)

    def _mask(self, value: Value) -> tuple[int, int]:
        """Where the bits of a value's activation are, and how many bytes a channel has."""
        if value not in self.masks:
            row = int(self.planes[value].runs(self.widest[0])[:, 1].sum()) * self.kernels.word
            self.masks[value] = self._keep_bytes(row * value.size[0]), row
        return self.masks[value]

    def _phase(
        self, split: Split, phase: int, whole: Region, parts: Region, wanted: Flags, *, back: bool = False
    ) -> None:
        """One phase out of the whole, or back into it; of the channels that are wanted of each phase."""
        (channels, height, width), (down, right) = split.x.size, split.stride
        top, left = divmod(phase, right)
        rows, columns = -(-(height - top) // down), -(-(width - left) // right)
        if rows <= 0 or columns <= 0:
            return
        many = np.arange(rows)
        outside = ((many * down + top) * whole.plane.pitch + left) * self.lanes
        inside = many * parts.plane.pitch * self.lanes
        part = _part(parts, phase * channels)
        channel = np.flatnonzero(wanted[phase * channels : (phase + 1) * channels])
        if len(channel) == 0:
            return
        self._move(whole, part, channel, (outside, inside), columns, (right * self.lanes, self.lanes), back=back)

    def _flatten(self, flatten: Flatten, whole: Region, flat: Region, wanted: Flags, *, back: bool = False) -> None:
        _, height, width = flatten.x.size
        many = np.arange(height)
        outside, inside = many * whole.plane.pitch * self.lanes, many * width * flat.plane.size
        steps = self.lanes, flat.plane.size
        self._move(
            whole, flat, np.flatnonzero(wanted), (outside, inside), width, steps, back=back, group=height * width
        )

    def _move(
        self,
        whole: Region,
        part: Region,
        rows: npt.NDArray[Any],
        starts: tuple[npt.NDArray[Any], npt.NDArray[Any]],
        count: int,
        steps: tuple[int, int],
        *,
        back: bool,
        group: int = 1,
    ) -> None:
        x, y, ways = (part, whole, starts[::-1]) if back else (whole, part, starts)
        there, here = steps[::-1] if back else steps
        step = self._step(native.MOVE, x, y, rows, (count, there, here))
        step.runs, step.run = len(starts[0]), self._array(np.ascontiguousarray(np.stack(ways, 1), np.int32))
        if back:
            step.xplane *= group
        else:
            step.yplane *= group


class _Gradients:
    """The gradients that have come together so far, value by value."""

    def __init__(self, builder: Builder) -> None:
        self.builder = builder
        self.parts: dict[Value, list[Region]] = defaultdict(list)
        self.masked: set[Value] = set()
        self.left = Counter(value for operation in builder.stage.operations for value in read(operation))
        self.left.update(builder.stage.outputs.values())

    def give(self, value: Value, region: Region) -> None:
        """A gradient in a place of its own."""
        self.left[value] -= 1
        self.parts[value].append(region)

    def share(self, value: Value, region: Region) -> None:
        """A gradient that is another's as well."""
        owner = region.owner or region
        owner.needed += 1
        self.give(value, region)

    def add_product(self, product: Product, given: Region) -> None:
        """Transposed taps, with what is there already added, and the mask if nothing is to come."""
        builder, value = self.builder, product.x
        self.left[value] -= 1
        parts = self.parts[value]
        summand = parts.pop() if parts else None
        target = builder._region(value, 1)
        last = self.left[value] == 0 and not parts and value.activation.kind != native.LINEAR
        mask = native.APPLY_MASK if last else native.NO_MASK
        if last:
            self.masked.add(value)
        activation = value.activation if last else Activation()
        builder._multiply(product, given, target, summand, activation, mask, back=True)
        if summand is not None:
            builder._release(summand)
        parts.append(target)

    def take(self, value: Value) -> Region | None:
        """The whole gradient, None if nobody needs the value."""
        parts = self.parts.pop(value, [])
        if not parts:
            return None
        while len(parts) > 1 or (value.activation.kind != native.LINEAR and value not in self.masked):
            first, second = parts.pop(), parts.pop() if parts else None
            target = self.builder._region(value, 1)
            last = not parts
            self.builder._copy(self.builder.live.needed[value], first, target, second, value if last else None)
            for region in (first, second):
                if region is not None:
                    self.builder._release(region)
            if last:
                self.masked.add(value)
            parts.append(target)
        return parts[0]


def _part(region: Region, first: int) -> Region:
    """The channels of a region from one on."""
    return Region(region.at + first * region.plane.size, region.plane, region.key, 0, region.owner or region)


def _window(pool: MaxPool, output: Plane, given: Plane) -> tuple[int, ...]:
    sizes = (*pool.y.size[1:], *pool.x.size[1:], *pool.kernel, *pool.stride, *pool.padding, *pool.dilation)
    return (*sizes, output.pitch, given.pitch)


def finished(builder: Builder, made: Steps, memory: tuple[int, int], sizes: tuple[int, int, int]) -> Code:
    """Steps as a program over an arena; `sizes` are floats of a group's input, of what else is given, of its output."""
    steps = made.steps
    array = (native.Step * max(1, len(steps)))(*steps)
    program = native.Program(
        steps=ctypes.cast(array, ctypes.POINTER(native.Step)),
        count=len(steps),
        lanes=builder.lanes,
        arena=memory[0],
        arena_size=builder.arena,
        together=builder.together,
        scratch=memory[1],
        scratch_size=builder.scratch,
        worth=made.work >= _WORTH,
        input=sizes[0],
        more=sizes[1],
        output=sizes[2],
        kept=builder.kept,
    )
    return Code(program, steps, [array, *builder.alive])
