"""Runs a stage of the native code: as many images at once as a vector has lanes, or one by one."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from harp.engine.lowering.lower import Product, Stage
from harp.engine.lowering.program import Builder, Kind
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
        self._builders: dict[tuple[int, Kind], Builder] = {}

    @property
    def lanes(self) -> int:
        """How many images a full group has."""
        return int(self.kernels.lanes) if self._numbers * int(self.kernels.lanes) <= MOST else 1

    def forward(self, x: Array, *, keep: bool) -> tuple[Array, Kept]:
        """Rows of outputs for rows of inputs, and with `keep` what the backward pass needs."""
        _check_rows(x, self.input_size)
        outputs, kept = np.empty((len(x), self.output_size), np.float32), []
        for lanes, count, read, written in self._groups(x, outputs):
            program = self.builder(lanes, "backward" if keep else "forward").programs[0]
            kept.append(np.empty(count * program.kept, np.uint8))
            bindings.run(program, count, self.threads, read, written, kept[-1])
        return outputs, kept

    def backward(self, gradient: Array, kept: Kept) -> Array:
        """The gradients of the inputs from the gradients of the outputs."""
        _check_rows(gradient, self.output_size)
        gradients = np.empty((len(gradient), self.input_size), np.float32)
        problem = DataError(f"the state kept by the forward pass is not that of {len(gradient)} images of this network")
        if len(kept) != sum(map(bool, divmod(len(gradient), self.lanes))):
            raise problem
        for (lanes, count, read, written), state in zip(self._groups(gradient, gradients), kept, strict=True):
            program = self.builder(lanes, "backward").programs[1]
            if state.nbytes != count * program.kept:
                raise problem
            bindings.run(program, count, self.threads, read, written, state)
        return gradients

    def learn(self, gradient: Array, x: Array) -> tuple[Array, Array]:
        """The gradients of the input and of the weights of a stage with one product.

        `gradient` is that of the output, `x` the input of the forward pass.
        """
        _check_rows(gradient, self.output_size)
        _check_rows(x, self.input_size)
        if len(gradient) != len(x):
            raise DataError(f"{len(gradient)} gradients for {len(x)} images")
        gradients, total = np.empty((len(x), self.input_size), np.float32), []
        for lanes, count, read, inputs, written in self._groups(gradient, x, gradients):
            builder = self.builder(lanes, "weights")
            program, slots = builder.programs[0], builder.weight_slots
            sums = np.empty((count, program.kept // 4), np.float32)
            bindings.run(program, count, self.threads, read, written, sums, inputs)
            total.append(sums[:, : len(slots)].sum(0)[slots])  # the rest of a row is padding
        return gradients, sum(total[1:], start=total[0])

    def refill(self, values: Mapping[Product, tuple[Array, Array | None]]) -> None:
        """Replace the weights and biases of the products, in all programs."""
        for product, (weights, bias) in values.items():
            product.change(weights, bias)
        for builder in self._builders.values():
            builder.refill()

    def builder(self, lanes: int, kind: Kind) -> Builder:
        """The programs of a kind for groups of some size."""
        if (lanes, kind) not in self._builders:
            self._builders[lanes, kind] = Builder(self.stage, lanes, self.kernels, self.threads, kind)
        return self._builders[lanes, kind]

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the programs, which hold addresses: a copy builds them again."""
        return _restored, (self.stage, self.threads)

    def _groups(self, *arrays: Array) -> Iterator[tuple[Any, ...]]:
        """The rows of arrays in pieces: the size of their groups, the number of groups, the arrays.

        The last array is the output; what is written to it reaches the output when the generator continues.
        """
        lanes = self.lanes
        groups, rest = divmod(len(arrays[0]), lanes)
        done = groups * lanes
        if groups:
            yield lanes, groups, *(array[:done] for array in arrays)
        if rest > lanes // 2:  # a padded group is still faster than one image after the other
            padded = [np.zeros((lanes, array.shape[1]), np.float32) for array in arrays]
            for full, array in zip(padded[:-1], arrays, strict=False):
                full[:rest] = array[done:]
            yield lanes, 1, *padded
            arrays[-1][done:] = padded[-1][:rest]
        elif rest:
            yield 1, rest, *(array[done:] for array in arrays)


def _restored(stage: Stage, threads: int) -> Runner:
    kernels = bindings.kernels()
    if kernels is None:
        raise RecipeError("a network with native code was copied to where there is none: load its file there instead")
    return Runner(stage, kernels, threads)


def _check_rows(array: Array, size: int) -> None:
    """Check an array whose address is passed to native code, which can't check it."""
    if array.shape != (len(array), size) or array.dtype != np.float32 or not array.flags.c_contiguous:
        raise DataError(f"{array.dtype} of shape {array.shape}: contiguous rows of {size} float32 are needed")
