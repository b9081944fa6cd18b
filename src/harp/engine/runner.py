"""Runs a stage of the native code: as many images at once as a vector has lanes, or one by one."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from harp.engine.lowering.lower import Product, Stage
from harp.engine.lowering.program import Builder, Code, finished
from harp.engine.native import bindings
from harp.errors import DataError, RecipeError

Array = npt.NDArray[np.float32]
Kept = list[npt.NDArray[np.uint8]]

MOST = 1 << 28  # numbers in all results of a group of images; larger images are computed one by one


class Runner:
    """One stage. Its programs, for single images and for groups, are built when they are first needed."""

    def __init__(self, stage: Stage, kernels: bindings.Kernels, threads: int) -> None:
        self.stage, self.kernels, self.threads = stage, kernels, threads
        self.input_size = sum(math.prod(value.size) for value in stage.inputs.values())
        self.output_size = sum(math.prod(value.size) for value in stage.outputs.values())
        self._numbers = sum(math.prod(operation.y.size) for operation in stage.operations)
        self._codes: dict[tuple[int, bool], tuple[Builder, Code, Code | None]] = {}

    @property
    def lanes(self) -> int:
        """How many images a full group has."""
        return int(self.kernels.lanes) if self._numbers * int(self.kernels.lanes) <= MOST else 1

    def forward(self, x: Array, *, keep: bool) -> tuple[Array, Kept]:
        """Rows of outputs for rows of inputs, and with `keep` what the backward pass needs."""
        _check_rows(x, self.input_size)
        kept: Kept = []
        outputs = self._run(x, np.empty((len(x), self.output_size), np.float32), kept, keep=keep, back=False)
        return outputs, kept

    def backward(self, gradient: Array, kept: Kept) -> Array:
        """The gradients of the inputs from the gradients of the outputs."""
        _check_rows(gradient, self.output_size)
        if len(kept) != sum(map(bool, divmod(len(gradient), self.lanes))):
            raise _kept_error(len(gradient))
        gradients = np.empty((len(gradient), self.input_size), np.float32)
        return self._run(gradient, gradients, kept, keep=True, back=True)

    def refill(self, values: Mapping[Product, tuple[Array, Array | None]]) -> None:
        """Replace the weights and biases of the products, in all programs."""
        for product, (weights, bias) in values.items():
            product.change(weights, bias)
        for builder, _, _ in self._codes.values():
            builder.refill()

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the programs, which hold addresses: a copy builds them again."""
        return _restored, (type(self), self.stage, self.threads)

    def _run(self, x: Array, y: Array, kept: Kept, *, keep: bool, back: bool) -> Array:
        for number, (lanes, (read, written)) in enumerate(self._groups(x, y)):
            _, forward, backward = self._code(lanes, keep)
            code = backward if back else forward
            assert code is not None
            count = len(read) // lanes
            if not back:
                kept.append(np.empty(count * code.program.kept, np.uint8))
            elif kept[number].nbytes != count * code.program.kept:
                raise _kept_error(len(x))
            arrays: tuple[npt.NDArray[Any], ...] = (read, written, kept[number])
            bindings.run(code.program, count, self.threads, *map(bindings.address, arrays))
        return y

    def _groups(self, *arrays: Array) -> Iterator[tuple[int, tuple[Array, ...]]]:
        """The rows of arrays in pieces, each with the size of its groups; the last array is the output.

        What is written to the last array of a piece reaches the output when the generator continues.
        """
        lanes = self.lanes
        groups, rest = divmod(len(arrays[0]), lanes)
        done = groups * lanes
        if groups:
            yield lanes, tuple(array[:done] for array in arrays)
        if rest > lanes // 2:  # a padded group is still faster than one image after the other
            padded = tuple(np.zeros((lanes, array.shape[1]), np.float32) for array in arrays)
            for full, array in zip(padded[:-1], arrays, strict=False):
                full[:rest] = array[done:]
            yield lanes, padded
            arrays[-1][done:] = padded[-1][:rest]
        elif rest:
            yield 1, tuple(array[done:] for array in arrays)

    def _code(self, lanes: int, keep: bool) -> tuple[Builder, Code, Code | None]:
        if (lanes, keep) not in self._codes:
            builder = Builder(self.stage, lanes, self.kernels, keep=keep)
            forward_steps = builder.forward()
            backward_steps = builder.backward() if keep else None
            memory = builder.arena.memory(self.threads)
            input_size, output_size = self.input_size * lanes, self.output_size * lanes
            forward = finished(builder.arena, forward_steps, memory, (input_size, 0, output_size))
            backward = None
            if backward_steps is not None:
                backward = finished(builder.arena, backward_steps, memory, (output_size, 0, input_size))
            self._codes[lanes, keep] = builder, forward, backward
        return self._codes[lanes, keep]


class Learner(Runner):
    """A stage with one product that also computes the gradients of its weights."""

    def __init__(self, stage: Stage, kernels: bindings.Kernels, threads: int) -> None:
        super().__init__(stage, kernels, threads)
        self._learning: dict[tuple[int, bool], tuple[Builder, Code]] = {}

    def learn(self, gradient: Array, x: Array, *, input_gradient: bool) -> tuple[Array | None, Array]:
        """The gradients of the input, if asked for, and of the weights, from the gradient of the output."""
        _check_rows(gradient, self.output_size)
        _check_rows(x, self.input_size)
        if len(gradient) != len(x):
            raise DataError(f"{len(gradient)} gradients for {len(x)} images")
        all_gradients = np.empty((len(x), self.input_size if input_gradient else 0), np.float32)
        total: Array | None = None
        for lanes, (gradients, inputs, input_gradients) in self._groups(gradient, x, all_gradients):
            builder, code = self._learning_code(lanes, input_gradient)
            count = len(gradients) // lanes
            sums = np.empty((count, code.program.kept // 4), np.float32)
            addresses = map(bindings.address, (gradients, input_gradients, sums, inputs))
            bindings.run(code.program, count, self.threads, *addresses)
            summed = sums[:, : len(builder.learned)].sum(0)[builder.learned]  # the rest of a row is padding
            total = summed if total is None else total + summed
        assert total is not None
        return all_gradients if input_gradient else None, total

    def refill(self, values: Mapping[Product, tuple[Array, Array | None]]) -> None:
        """Replace the weights and the bias of the product, in all programs."""
        super().refill(values)
        for builder, _ in self._learning.values():
            builder.refill()

    def _learning_code(self, lanes: int, input_gradient: bool) -> tuple[Builder, Code]:
        if (lanes, input_gradient) not in self._learning:
            builder = Builder(self.stage, lanes, self.kernels, keep=False)
            steps = builder.learning(input_gradient=input_gradient)
            memory = builder.arena.memory(self.threads)
            sizes = self.output_size * lanes, self.input_size * lanes, self.input_size * lanes if input_gradient else 0
            self._learning[lanes, input_gradient] = builder, finished(builder.arena, steps, memory, sizes)
        return self._learning[lanes, input_gradient]


def _restored(kind: type[Runner], stage: Stage, threads: int) -> Runner:
    kernels = bindings.kernels()
    if kernels is None:
        raise RecipeError("a network with native code was copied to where there is none: load its file there instead")
    return kind(stage, kernels, threads)


def _kept_error(count: int) -> DataError:
    return DataError(f"the state kept by the forward pass is not that of {count} images of this network")


def _check_rows(array: Array, size: int) -> None:
    """Check an array whose address is passed to native code, which can't check it."""
    if array.shape != (len(array), size) or array.dtype != np.float32 or not array.flags.c_contiguous:
        raise DataError(f"{array.dtype} of shape {array.shape}: contiguous rows of {size} float32 are needed")
