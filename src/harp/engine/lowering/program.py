"""Builds programs of the native code: the operations of a stage one after the other, forward and backward.

In the backward pass, every product is a product with the transposed taps.
"""

import ctypes
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from harp.engine.lowering.gradients import Gradients
from harp.engine.lowering.liveness import liveness
from harp.engine.lowering.lower import Concat, Flatten, MaxPool, Operation, Product, Split, Stage, Value, read
from harp.engine.lowering.memory import Arena, Region
from harp.engine.lowering.steps import Steps
from harp.engine.native import bindings

# Threads share a group of images from this number of multiplications on (some milliseconds): they have to wait for each
# other, which takes time.
WORTH = 1e8


@dataclass
class Code:
    """A finished program, and the arrays that it points to (`alive`, so that they are not freed)."""

    program: bindings.Program
    steps: list[bindings.Step]
    alive: list[Any] = field(default_factory=list)


class Builder:
    """Builds the programs of one stage for groups of `lanes` images, with one arena for both directions."""

    def __init__(self, stage: Stage, lanes: int, kernels: bindings.Kernels, *, keep: bool) -> None:
        self.stage, self.keep = stage, keep
        self.arena = Arena(stage, lanes, kernels)
        self.live = liveness(stage)
        self.learned = np.zeros(0, np.int64)  # the position of the gradient of each tap's weight
        self._programs: list[Steps] = []

    def refill(self) -> None:
        """Copy the current weights and biases of the products."""
        for steps in self._programs:
            steps.refill()

    def forward(self) -> Steps:
        """The steps from the inputs to the outputs."""
        stage, arena, steps = self.stage, self.arena, self._steps()
        uses = Counter(value for operation in stage.operations for value in read(operation))
        uses.update(stage.outputs.values())
        regions = {value: arena.region(value, uses[value]) for value in stage.inputs.values()}
        for value, offset, record in _records(stage.inputs.values()):
            steps.outside(bindings.PACK, regions[value], value, offset, record)
        for operation in stage.operations:
            target = regions[operation.y] = arena.region(operation.y, uses[operation.y], operation)
            self._compute(operation, target, regions, steps)
            for value in read(operation):
                arena.release(regions[value])
            if uses[operation.y] == 0:
                arena.release(target, 0)
        for value, offset, record in _records(stage.outputs.values()):
            steps.outside(bindings.UNPACK, regions[value], value, offset, record)
            arena.release(regions[value])
        return steps

    def backward(self) -> Steps:
        """The steps from the outputs' gradients to the inputs' gradients; call `forward` first."""
        arena, steps = self.arena, self._steps()
        gradients = Gradients(self.stage, steps)
        for value, offset, record in _records(self.stage.outputs.values()):
            region = arena.region(value, 1)
            steps.outside(bindings.PACK, region, value, offset, record)
            gradients.give(value, region)
        for operation in reversed(self.stage.operations):
            gradient = gradients.take(operation.y)
            if gradient is not None:
                self._compute_back(operation, gradient, gradients)
                arena.release(gradient)
        for value, offset, record in _records(self.stage.inputs.values()):
            gradient = gradients.take(value)
            assert gradient is not None
            steps.outside(bindings.UNPACK, gradient, value, offset, record)
            arena.release(gradient)
        return steps

    def learning(self, *, input_gradient: bool) -> Steps:
        """The steps from the gradient of one product's output to that of its weights, and of its input if asked for.

        The program gets the input of the forward pass again.
        """
        arena, steps = self.arena, self._steps()
        (product,) = (operation for operation in self.stage.operations if isinstance(operation, Product))
        (x_value,), (y_value,) = self.stage.inputs.values(), self.stage.outputs.values()
        regions = {x_value: arena.region(x_value, 1)}
        steps.outside(bindings.PACK, regions[x_value], x_value, 0, math.prod(x_value.size), more=True)
        for operation in self.stage.operations:
            if operation is not product:
                regions[operation.y] = arena.region(operation.y, 1, operation)
                self._compute(operation, regions[operation.y], regions, steps)
        y = arena.region(y_value, 1)
        steps.outside(bindings.PACK, y, y_value, 0, math.prod(y_value.size))
        self.learned = steps.weigh(product, regions[product.x], y)
        if input_gradient:
            gradients = Gradients(self.stage, steps)
            gradients.give(y_value, y)
            for operation in reversed(self.stage.operations):
                gradient = gradients.take(operation.y)
                assert gradient is not None
                self._compute_back(operation, gradient, gradients)
            gradient = gradients.take(x_value)
            assert gradient is not None
            steps.outside(bindings.UNPACK, gradient, x_value, 0, math.prod(x_value.size))
        return steps

    def _steps(self) -> Steps:
        self._programs.append(Steps(self.arena, self.live))
        return self._programs[-1]

    def _compute(self, operation: Operation, target: Region, regions: dict[Value, Region], steps: Steps) -> None:
        if isinstance(operation, Product):
            summand = None if operation.summand is None else regions[operation.summand]
            activation = operation.y.activation
            mask = bindings.WRITE_MASK if self.keep and activation.kind != bindings.LINEAR else bindings.NO_MASK
            steps.multiply(operation, regions[operation.x], target, summand, activation, mask)
        elif isinstance(operation, Split):
            steps.split(operation, regions[operation.x], target, self.live.read[operation.y])
        elif isinstance(operation, Flatten):
            steps.flatten(operation, regions[operation.x], target, self.live.read[operation.x])
        elif isinstance(operation, MaxPool):
            steps.pool(operation, regions[operation.x], target, keep=self.keep)
        else:
            first = 0
            for value in operation.xs:
                flags = self.live.read[operation.y][first : first + value.size[0]]
                steps.copy(flags, regions[value], target.part(first))
                first += value.size[0]

    def _compute_back(self, operation: Operation, gradient: Region, gradients: Gradients) -> None:
        if isinstance(operation, Product):
            if operation.summand is not None:
                gradients.share(operation.summand, gradient)
            gradients.add_product(operation, gradient)
        elif isinstance(operation, Concat):
            first = 0
            for value in operation.xs:
                gradients.share(value, gradient.part(first))
                first += value.size[0]
        else:
            steps, target = gradients.steps, self.arena.region(operation.x, 1)
            needed = self.live.needed[operation.x]
            if isinstance(operation, Split):
                wanted = np.tile(needed, math.prod(operation.stride))
                steps.split(operation, target, gradient, wanted, back=True)
            elif isinstance(operation, Flatten):
                steps.flatten(operation, target, gradient, needed, back=True)
            else:
                steps.pool_back(operation, gradient, target)
            gradients.give(operation.x, target)


def _records(values: Iterable[Value]) -> Iterable[tuple[Value, int, int]]:
    """Each value with the offset of its numbers in the record of an image, and the length of that record."""
    values = list(values)
    record, offset = sum(math.prod(value.size) for value in values), 0
    for value in values:
        yield value, offset, record
        offset += math.prod(value.size)


def finished(arena: Arena, steps: Steps, memory: tuple[int, int], sizes: tuple[int, int, int]) -> Code:
    """Steps as a program over an arena; `sizes` are the floats of a group's input, further input, and output."""
    native_steps = steps.steps
    array = (bindings.Step * max(1, len(native_steps)))(*native_steps)
    program = bindings.Program(
        steps=ctypes.cast(array, ctypes.POINTER(bindings.Step)),
        count=len(native_steps),
        lanes=arena.lanes,
        arena=memory[0],
        arena_size=arena.size,
        together=arena.together,
        scratch=memory[1],
        scratch_size=arena.scratch,
        worth=steps.work >= WORTH,
        input=sizes[0],
        more=sizes[1],
        output=sizes[2],
        kept=arena.kept,
    )
    return Code(program, native_steps, [array, *arena.alive])
