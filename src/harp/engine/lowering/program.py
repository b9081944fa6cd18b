"""Programs of the native code: the operations of a stage one after the other, forwards and backwards.

Backwards, every product is the product of its transposed taps.
"""

import ctypes
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harp.sparse import native
from harp.sparse.arena import Arena, Region
from harp.sparse.gradients import Gradients
from harp.sparse.liveness import liveness
from harp.sparse.lowering import Concat, Flatten, MaxPool, Operation, Product, Split, Stage, Value, read
from harp.sparse.steps import Steps

_WORTH = 1e8  # multiplications of a group from which on threads share it: some milliseconds, as waiting takes time


@dataclass
class Code:
    """A finished program, and the arrays that it points to."""

    program: native.Program
    steps: list[native.Step]
    alive: list[Any] = field(default_factory=list)


class Builder:
    """The programs of one stage for a number of images at a time, with one arena for both directions."""

    def __init__(self, stage: Stage, lanes: int, kernels: native.Kernels, *, keep: bool) -> None:
        self.stage, self.keep = stage, keep
        self.arena = Arena(stage, lanes, kernels)
        self.live = liveness(stage)
        self.learned = np.zeros(0, np.int64)  # where the gradient of each tap's weight is
        self._programs: list[Steps] = []

    def refill(self) -> None:
        """Take the present weights and biases of the products."""
        for steps in self._programs:
            steps.refill()

    def forward(self) -> Steps:
        """The steps from the inputs to the outputs."""
        stage, arena, steps = self.stage, self.arena, self._steps()
        uses = Counter(value for operation in stage.operations for value in read(operation))
        uses.update(stage.outputs.values())
        where = {value: arena.region(value, uses[value]) for value in stage.inputs.values()}
        for value, offset, record in _records(stage.inputs.values()):
            steps.outside(native.PACK, where[value], value, offset, record)
        for operation in stage.operations:
            target = where[operation.y] = arena.region(operation.y, uses[operation.y], operation)
            self._compute(operation, target, where, steps)
            for value in read(operation):
                arena.release(where[value])
            if uses[operation.y] == 0:
                arena.release(target, 0)
        for value, offset, record in _records(stage.outputs.values()):
            steps.outside(native.UNPACK, where[value], value, offset, record)
            arena.release(where[value])
        return steps

    def backward(self) -> Steps:
        """The steps from the outputs' gradients to those of the inputs; after `forward`."""
        arena, steps = self.arena, self._steps()
        gradients = Gradients(self.stage, steps)
        for value, offset, record in _records(self.stage.outputs.values()):
            region = arena.region(value, 1)
            steps.outside(native.PACK, region, value, offset, record)
            gradients.give(value, region)
        for operation in reversed(self.stage.operations):
            given = gradients.take(operation.y)
            if given is not None:
                self._compute_back(operation, given, gradients)
                arena.release(given)
        for value, offset, record in _records(self.stage.inputs.values()):
            given = gradients.take(value)
            assert given is not None
            steps.outside(native.UNPACK, given, value, offset, record)
            arena.release(given)
        return steps

    def learning(self, *, deeper: bool) -> Steps:
        """The steps from the gradient of one product's output to that of its weights, and of its input if asked for.

        The input of the way forward is given once more.
        """
        arena, steps = self.arena, self._steps()
        (product,) = (each for each in self.stage.operations if isinstance(each, Product))
        (given,), (made,) = self.stage.inputs.values(), self.stage.outputs.values()
        where = {given: arena.region(given, 1)}
        steps.outside(native.PACK, where[given], given, 0, math.prod(given.size), more=True)
        for operation in self.stage.operations:
            if operation is not product:
                where[operation.y] = arena.region(operation.y, 1, operation)
                self._compute(operation, where[operation.y], where, steps)
        y = arena.region(made, 1)
        steps.outside(native.PACK, y, made, 0, math.prod(made.size))
        self.learned = steps.weigh(product, where[product.x], y)
        if deeper:
            gradients = Gradients(self.stage, steps)
            gradients.give(made, y)
            for operation in reversed(self.stage.operations):
                found = gradients.take(operation.y)
                assert found is not None
                self._compute_back(operation, found, gradients)
            found = gradients.take(given)
            assert found is not None
            steps.outside(native.UNPACK, found, given, 0, math.prod(given.size))
        return steps

    def _steps(self) -> Steps:
        self._programs.append(Steps(self.arena, self.live))
        return self._programs[-1]

    def _compute(self, operation: Operation, target: Region, where: dict[Value, Region], steps: Steps) -> None:
        if isinstance(operation, Product):
            summand = None if operation.summand is None else where[operation.summand]
            activation = operation.y.activation
            mask = native.WRITE_MASK if self.keep and activation.kind != native.LINEAR else native.NO_MASK
            steps.multiply(operation, where[operation.x], target, summand, activation, mask)
        elif isinstance(operation, Split):
            steps.split(operation, where[operation.x], target, self.live.read[operation.y])
        elif isinstance(operation, Flatten):
            steps.flatten(operation, where[operation.x], target, self.live.read[operation.x])
        elif isinstance(operation, MaxPool):
            steps.pool(operation, where[operation.x], target, keep=self.keep)
        else:
            first = 0
            for value in operation.xs:
                flags = self.live.read[operation.y][first : first + value.size[0]]
                steps.copy(flags, where[value], target.part(first))
                first += value.size[0]

    def _compute_back(self, operation: Operation, given: Region, gradients: Gradients) -> None:
        if isinstance(operation, Product):
            if operation.summand is not None:
                gradients.share(operation.summand, given)
            gradients.add_product(operation, given)
        elif isinstance(operation, Concat):
            first = 0
            for value in operation.xs:
                gradients.share(value, given.part(first))
                first += value.size[0]
        else:
            steps, target = gradients.steps, self.arena.region(operation.x, 1)
            needed = self.live.needed[operation.x]
            if isinstance(operation, Split):
                wanted = np.tile(needed, math.prod(operation.stride))
                steps.split(operation, target, given, wanted, back=True)
            elif isinstance(operation, Flatten):
                steps.flatten(operation, target, given, needed, back=True)
            else:
                steps.pool_back(operation, given, target)
            gradients.give(operation.x, target)


def _records(values: Iterable[Value]) -> Iterable[tuple[Value, int, int]]:
    """Values with where their numbers begin among those of an image, and how many an image has in all."""
    values = list(values)
    record, offset = sum(math.prod(value.size) for value in values), 0
    for value in values:
        yield value, offset, record
        offset += math.prod(value.size)


def finished(arena: Arena, steps: Steps, memory: tuple[int, int], sizes: tuple[int, int, int]) -> Code:
    """Steps as a program over an arena; `sizes` are floats of a group's input, of what else is given, of its output."""
    made = steps.made
    array = (native.Step * max(1, len(made)))(*made)
    program = native.Program(
        steps=ctypes.cast(array, ctypes.POINTER(native.Step)),
        count=len(made),
        lanes=arena.lanes,
        arena=memory[0],
        arena_size=arena.size,
        together=arena.together,
        scratch=memory[1],
        scratch_size=arena.scratch,
        worth=steps.work >= _WORTH,
        input=sizes[0],
        more=sizes[1],
        output=sizes[2],
        kept=arena.kept,
    )
    return Code(program, made, [array, *arena.alive])
