"""Builds programs of the native code: the operations of a stage one after the other, forward and backward.

In the backward pass, every product is a product with the transposed taps. A value's gradient is a sum over the
operations that read the value. Each of them adds the sum so far in the same step, and the last one also applies the
mask of the activation.
"""

import ctypes
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

import numpy as np

from harp.engine.lowering.liveness import liveness
from harp.engine.lowering.lower import Concat, MaxPool, Operation, Product, Split, Stage, Value
from harp.engine.lowering.memory import Arena, Region
from harp.engine.lowering.steps import Steps
from harp.engine.native import bindings

# Threads share a group of images from this number of multiplications on (some milliseconds): they have to wait for each
# other, which takes time.
WORTH = 1e8

Kind = Literal["forward", "backward", "weights"]


class Builder:
    """Builds the programs of one stage for groups of `lanes` images, with one arena for all of them.

    "forward" is one program; "backward" are two, the forward pass with what has to be kept, and the backward pass.
    "weights" computes the gradients of the input and of the weights of the stage's only product, from the gradient of
    the output and, once more, the input.
    """

    def __init__(self, stage: Stage, lanes: int, kernels: bindings.Kernels, threads: int, kind: Kind) -> None:
        self.stage, self.keep = stage, kind == "backward"
        self.arena = Arena(stage, lanes, kernels)
        self.live = liveness(stage)
        self.weight_slots = np.zeros(0, np.int64)  # the position of the gradient of each tap's weight
        inputs, outputs = (
            lanes * sum(math.prod(value.size) for value in values.values()) for values in (stage.inputs, stage.outputs)
        )
        if kind == "weights":
            programs = [(self._weights(), (outputs, inputs, inputs))]
        else:
            programs = [(self._forward(), (inputs, 0, outputs))]
            programs += [(self._backward(), (outputs, 0, inputs))] if self.keep else []
        memory = self.arena.memory(threads)
        self.steps = [steps for steps, _ in programs]
        self.programs = [self._program(steps, memory, sizes) for steps, sizes in programs]

    def refill(self) -> None:
        """Copy the current weights and biases of the products."""
        for steps in self.steps:
            steps.refill()

    def _forward(self) -> Steps:
        steps, regions = Steps(self.arena, self.live), self.arena.input_regions()
        for value, offset, record in _records(self.stage.inputs.values()):
            steps.outside(bindings.PACK, regions[value], value, offset, record)
        for operation in self.arena.operations(regions):
            self._compute(operation, regions, steps)
        for value, offset, record in _records(self.stage.outputs.values()):
            steps.outside(bindings.UNPACK, regions[value], value, offset, record)
            self.arena.release(regions[value])
        return steps

    def _backward(self) -> Steps:
        steps = Steps(self.arena, self.live)
        gradients = _Gradients(self.stage, steps)
        for value, offset, record in _records(self.stage.outputs.values()):
            region = self.arena.region(value)
            steps.outside(bindings.PACK, region, value, offset, record)
            gradients.give(value, region)
        gradients.propagate()
        return steps

    def _weights(self) -> Steps:
        arena, steps = self.arena, Steps(self.arena, self.live)
        (product,) = (operation for operation in self.stage.operations if isinstance(operation, Product))
        (x_value,), (y_value,) = self.stage.inputs.values(), self.stage.outputs.values()
        regions = {x_value: arena.region(x_value)}
        steps.outside(bindings.PACK, regions[x_value], x_value, 0, math.prod(x_value.size), more=True)
        for operation in self.stage.operations:
            if operation is not product:
                regions[operation.y] = arena.region(operation.y, operation=operation)
                self._compute(operation, regions, steps)
        y = arena.region(y_value)
        steps.outside(bindings.PACK, y, y_value, 0, math.prod(y_value.size))
        self.weight_slots = steps.weigh(product, regions[product.x], y)
        gradients = _Gradients(self.stage, steps)
        gradients.give(y_value, y)
        gradients.propagate()
        return steps

    def _compute(self, operation: Operation, regions: dict[Value, Region], steps: Steps) -> None:
        target = regions[operation.y]
        if isinstance(operation, Product):
            summand = None if operation.summand is None else regions[operation.summand]
            mask = bindings.WRITE_MASK if self.keep else bindings.NO_MASK
            steps.multiply(operation, regions[operation.x], target, summand, operation.y, mask, back=False)
        elif isinstance(operation, Split):
            steps.split(operation, regions[operation.x], target)
        elif isinstance(operation, MaxPool):
            steps.pool(operation, regions[operation.x], target, keep=self.keep)
        else:
            for value, channels in operation.parts():
                flags = self.live.read[operation.y][channels.start : channels.stop]
                steps.copy(flags, regions[value], target.part(channels.start))

    def _program(self, steps: Steps, memory: tuple[int, int], sizes: tuple[int, int, int]) -> bindings.Program:
        """Steps as a program; `sizes` are the floats of a group's input, second input, and output."""
        arena, count = self.arena, len(steps.steps)
        array = (bindings.Step * max(1, count))(*steps.steps)
        arena.alive.append(array)
        return bindings.Program(
            steps=ctypes.cast(array, ctypes.POINTER(bindings.Step)),
            count=count,
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


class _Gradients:
    """The partial gradients of every value so far; adds the steps that sum them."""

    def __init__(self, stage: Stage, steps: Steps) -> None:
        self.stage, self.steps, self.arena = stage, steps, steps.arena
        self._parts: dict[Value, list[Region]] = defaultdict(list)
        self._masked: set[Value] = set()
        self._left = stage.uses()

    def give(self, value: Value, region: Region) -> None:
        """Add a partial gradient."""
        self._left[value] -= 1
        self._parts[value].append(region)

    def propagate(self) -> None:
        """Add the steps from the gradients of the outputs to those of the inputs."""
        for operation in reversed(self.stage.operations):
            if (gradient := self._take(operation.y)) is not None:
                self._compute(operation, gradient)
                self.arena.release(gradient)
        for value, offset, record in _records(self.stage.inputs.values()):
            gradient = self._take(value)
            assert gradient is not None
            self.steps.outside(bindings.UNPACK, gradient, value, offset, record)
            self.arena.release(gradient)

    def _compute(self, operation: Operation, gradient: Region) -> None:
        if isinstance(operation, Product):
            if operation.summand is not None:
                self._share(operation.summand, gradient)
            self._add_product(operation, gradient)
        elif isinstance(operation, Concat):
            for value, channels in operation.parts():
                self._share(value, gradient.part(channels.start))
        else:
            target = self.arena.region(operation.x)
            if isinstance(operation, Split):
                self.steps.split(operation, target, gradient, back=True)
            else:
                self.steps.pool_back(operation, gradient, target)
            self.give(operation.x, target)

    def _share(self, value: Value, region: Region) -> None:
        """Add a partial gradient whose region another value uses too."""
        region.whole.needed += 1
        self.give(value, region)

    def _add_product(self, product: Product, gradient: Region) -> None:
        """Add a product's gradient: transposed taps, the sum so far, and the mask if this is the last part."""
        value = product.x
        self._left[value] -= 1
        parts = self._parts[value]
        summand = parts.pop() if parts else None
        target, last = self.arena.region(value), self._left[value] == 0 and not parts
        if last:
            self._masked.add(value)
        self.steps.multiply(product, gradient, target, summand, value if last else None, bindings.APPLY_MASK, back=True)
        if summand is not None:
            self.arena.release(summand)
        parts.append(target)

    def _take(self, value: Value) -> Region | None:
        """The complete gradient of a value, None if it has none."""
        parts = self._parts.pop(value, [])
        if not parts:
            return None
        while len(parts) > 1 or (value.activation.kind != bindings.LINEAR and value not in self._masked):
            first, second = parts.pop(), parts.pop() if parts else None
            target = self.arena.region(value)
            last = not parts
            self.steps.copy(self.steps.live.needed[value], first, target, second, value if last else None)
            for region in (first, second):
                if region is not None:
                    self.arena.release(region)
            if last:
                self._masked.add(value)
            parts.append(target)
        return parts[0]


def _records(values: Iterable[Value]) -> Iterable[tuple[Value, int, int]]:
    """Each value with the offset of its numbers in the record of an image, and the length of that record."""
    values = list(values)
    record, offset = sum(math.prod(value.size) for value in values), 0
    for value in values:
        yield value, offset, record
        offset += math.prod(value.size)
