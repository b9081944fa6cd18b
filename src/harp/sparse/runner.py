"""Runs a stage: groups of images side by side, and single ones where a group would not be full."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from harp.errors import DataError, RecipeError
from harp.sparse import native
from harp.sparse.lowering import Product, Stage
from harp.sparse.program import Builder, Code, finished

Array = npt.NDArray[np.float32]
Kept = list[npt.NDArray[np.uint8]]

_MOST = 1 << 28  # numbers of all results of a group; larger images are computed one by one


class Runner:
    """One stage, compiled when it is needed: for single images and for as many as a vector has lanes."""

    def __init__(self, stage: Stage, kernels: native.Kernels, threads: int) -> None:
        self.stage, self.kernels, self.threads = stage, kernels, threads
        self.given = sum(math.prod(value.size) for value in stage.inputs.values())
        self.made = sum(math.prod(value.size) for value in stage.outputs.values())
        self._numbers = sum(math.prod(operation.y.size) for operation in stage.operations)
        self._codes: dict[tuple[int, bool], tuple[Builder, Code, Code | None]] = {}

    @property
    def lanes(self) -> int:
        """How many images are computed together, where there are as many."""
        return int(self.kernels.lanes) if self._numbers * int(self.kernels.lanes) <= _MOST else 1

    def forward(self, x: Array, *, keep: bool) -> tuple[Array, Kept]:
        """Rows of inputs to rows of outputs; what the way back needs, if it is to be kept."""
        _check_rows(x, self.given)
        kept: Kept = []
        made = self._run(x, np.empty((len(x), self.made), np.float32), kept, keep=keep, back=False)
        return made, kept

    def backward(self, gradient: Array, kept: Kept) -> Array:
        """The gradients of the outputs to those of the inputs."""
        _check_rows(gradient, self.made)
        if len(kept) != sum(map(bool, divmod(len(gradient), self.lanes))):
            raise _foreign(len(gradient))
        made = np.empty((len(gradient), self.given), np.float32)
        return self._run(gradient, made, kept, keep=True, back=True)

    def refill(self, values: Mapping[Product, tuple[Array, Array | None]]) -> None:
        """Other weights and biases for the products, in all programs."""
        for product, (weights, bias) in values.items():
            product.change(weights, bias)
        for builder, _, _ in self._codes.values():
            builder.refill()

    def __reduce__(self) -> tuple[Any, ...]:
        """Programs are made anew where a copy is used: they hold addresses."""
        return _restored, (type(self), self.stage, self.threads)

    def _run(self, x: Array, y: Array, kept: Kept, *, keep: bool, back: bool) -> Array:
        for number, (lanes, (given, made)) in enumerate(self._groups(x, y)):
            _, ahead, behind = self._code(lanes, keep)
            code = behind if back else ahead
            assert code is not None
            count = len(given) // lanes
            if not back:
                kept.append(np.empty(count * code.program.kept, np.uint8))
            elif kept[number].nbytes != count * code.program.kept:
                raise _foreign(len(x))
            given_at, made_at, kept_at = native.address(given), native.address(made), native.address(kept[number])
            native.run(code.program, count, self.threads, given_at, made_at, kept_at)
        return y

    def _groups(self, *arrays: Array) -> Iterator[tuple[int, tuple[Array, ...]]]:
        """Rows of arrays by groups of images, with how many are in a group; the last array is written to."""
        lanes = self.lanes
        groups, rest = divmod(len(arrays[0]), lanes)
        done = groups * lanes
        if groups:
            yield lanes, tuple(each[:done] for each in arrays)
        if rest > lanes // 2:  # a group that is not full is still faster than one image after the other
            padded = tuple(np.zeros((lanes, each.shape[1]), np.float32) for each in arrays)
            for each, short in zip(padded[:-1], arrays, strict=False):
                each[:rest] = short[done:]
            yield lanes, padded
            arrays[-1][done:] = padded[-1][:rest]
        elif rest:
            yield 1, tuple(each[done:] for each in arrays)

    def _code(self, lanes: int, keep: bool) -> tuple[Builder, Code, Code | None]:
        if (lanes, keep) not in self._codes:
            builder = Builder(self.stage, lanes, self.kernels, keep=keep)
            ahead = builder.forward()
            back = builder.backward() if keep else None
            memory = builder.arena.memory(self.threads)
            given, made = self.given * lanes, self.made * lanes
            behind = None if back is None else finished(builder.arena, back, memory, (made, 0, given))
            self._codes[lanes, keep] = builder, finished(builder.arena, ahead, memory, (given, 0, made)), behind
        return self._codes[lanes, keep]


class Learner(Runner):
    """A stage of one product, which also gives the gradients of its weights."""

    def __init__(self, stage: Stage, kernels: native.Kernels, threads: int) -> None:
        super().__init__(stage, kernels, threads)
        self._learning: dict[tuple[int, bool], tuple[Builder, Code]] = {}

    def learn(self, gradient: Array, x: Array, *, deeper: bool) -> tuple[Array | None, Array]:
        """The gradients of the input, if asked for, and of the weights, from that of the output."""
        _check_rows(gradient, self.made)
        _check_rows(x, self.given)
        if len(gradient) != len(x):
            raise DataError(f"{len(gradient)} gradients for {len(x)} images")
        back = np.empty((len(x), self.given if deeper else 0), np.float32)
        total: Array | None = None
        for lanes, (given, more, made) in self._groups(gradient, x, back):
            builder, code = self._learning_code(lanes, deeper)
            count = len(given) // lanes
            sums = np.empty((count, code.program.kept // 4), np.float32)
            outside = map(native.address, (given, made, sums, more))
            native.run(code.program, count, self.threads, *outside)
            part = sums[:, : len(builder.learned)].sum(0)[builder.learned]  # what follows is not written
            total = part if total is None else total + part
        assert total is not None
        return back if deeper else None, total

    def refill(self, values: Mapping[Product, tuple[Array, Array | None]]) -> None:
        """Other weights and biases for the product, in all programs."""
        super().refill(values)
        for builder, _ in self._learning.values():
            builder.refill()

    def _learning_code(self, lanes: int, deeper: bool) -> tuple[Builder, Code]:
        if (lanes, deeper) not in self._learning:
            builder = Builder(self.stage, lanes, self.kernels, keep=False)
            steps = builder.learning(deeper=deeper)
            memory = builder.arena.memory(self.threads)
            sizes = self.made * lanes, self.given * lanes, self.given * lanes if deeper else 0
            self._learning[lanes, deeper] = builder, finished(builder.arena, steps, memory, sizes)
        return self._learning[lanes, deeper]


def _restored(kind: type[Runner], stage: Stage, threads: int) -> Runner:
    fit = native.kernels()
    if fit is None:
        raise RecipeError("a network that native code computes was copied to where there is none: load its file there")
    return kind(stage, fit, threads)


def _foreign(count: int) -> DataError:
    return DataError(f"what was kept on the way forward is not that of {count} images of this network")


def _check_rows(array: Array, size: int) -> None:
    """The native code takes addresses: what is there must be what it expects."""
    if array.shape != (len(array), size) or array.dtype != np.float32 or not array.flags.c_contiguous:
        raise DataError(
            f"{array.dtype} of shape {array.shape}: rows of {size} float32 are needed, one behind the other"
        )
