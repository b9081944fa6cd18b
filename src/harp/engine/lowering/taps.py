"""Weights as taps: the plane that an output reads, the shift from the output's own position, and the weight.

A convolution, a linear layer, an average, a sum, a scale for each channel: all are products with taps. With a stride,
the planes are the *phases* of the input, every second (third, ...) pixel of it, so that neighbouring outputs read
neighbouring inputs.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Taps:
    """A sparse matrix with a shift for each entry; `index` is the position of an entry's weight in its tensor."""

    rows: int
    planes: int
    row: Ints
    plane: Ints
    down: Ints
    right: Ints
    index: Ints
    values: Floats

    @property
    def transposed(self) -> "Taps":
        """The taps of the backward pass: for every plane, the rows that read it."""
        return replace(
            self,
            rows=self.planes,
            planes=self.rows,
            row=self.plane,
            plane=self.row,
            down=-self.down,
            right=-self.right,
        )

    def chosen(self, which: Ints) -> "Taps":
        """Some of the taps."""
        parts = ("row", "plane", "down", "right", "index", "values")
        return replace(self, **{name: getattr(self, name)[which] for name in parts})

    def reach(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The smallest and the largest shift, downwards and to the right."""
        if len(self.row) == 0:
            return (0, 0), (0, 0)
        return (int(self.down.min()), int(self.down.max())), (int(self.right.min()), int(self.right.max()))


@dataclass(frozen=True)
class Weight:
    """A sparse weight tensor: the indices and the values of its entries."""

    shape: tuple[int, ...]
    index: Ints
    values: Floats


def weight_of(tensor: Any) -> Weight:
    """The sparse form of a stored tensor (shape, indices, values), or of an array without its zeros."""
    if isinstance(tensor, Weight):
        return tensor
    if isinstance(tensor, tuple):
        shape, indices, values = tensor
        if indices is not None:
            return Weight(tuple(shape), np.asarray(indices, np.int64), np.asarray(values, np.float32))
        tensor = np.asarray(values).reshape(shape)
    full = np.ascontiguousarray(tensor, np.float32)
    index = np.flatnonzero(full)
    return Weight(full.shape, index, full.reshape(-1)[index])


def convolution(
    weight: Weight,
    size: tuple[int, int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> Taps:
    """A convolution of an input of this size, over the phases of the input if there is a stride."""
    outputs, inputs, height, width = weight.shape
    row, rest = np.divmod(weight.index, inputs * height * width)
    channel, place = np.divmod(rest, height * width)
    channel += row // (outputs // groups) * inputs
    down = place // width * dilation[0] - padding[0]
    right = place % width * dilation[1] - padding[1]
    phase = down % stride[0] * stride[1] + right % stride[1]
    planes = size[0] * stride[0] * stride[1]
    plane = phase * size[0] + channel
    return Taps(outputs, planes, row, plane, down // stride[0], right // stride[1], weight.index, weight.values)


def whole(
    weight: Weight,
    size: tuple[int, int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    groups: int,
) -> Taps:
    """A convolution whose output is one pixel: a linear layer on the flattened input."""
    plain = convolution(weight, size, (1, 1), padding, dilation, groups)
    _, height, width = size
    inside = (plain.down >= 0) & (plain.down < height) & (plain.right >= 0) & (plain.right < width)
    plane = plain.plane * height * width + plain.down * width + plain.right
    zeros = np.zeros(int(inside.sum()), np.int64)
    return Taps(
        plain.rows,
        size[0] * height * width,
        plain.row[inside],
        plane[inside],
        zeros,
        zeros,
        weight.index[inside],
        weight.values[inside],
    )


def linear(weight: Weight) -> Taps:
    """A matrix product."""
    rows, planes = weight.shape
    row, plane = np.divmod(weight.index, planes)
    zeros = np.zeros(len(row), np.int64)
    return Taps(rows, planes, row, plane, zeros, zeros, weight.index, weight.values)


def diagonal(scale: Floats) -> Taps:
    """A factor for each channel."""
    channels, zeros = np.arange(len(scale)), np.zeros(len(scale), np.int64)
    return Taps(len(scale), len(scale), channels, channels, zeros, zeros, channels, np.asarray(scale, np.float32))


def identity(channels: int) -> Taps:
    """The identity on the channels."""
    return diagonal(np.ones(channels, np.float32))


def average(channels: int, kernel: tuple[int, int], part: tuple[int, int] | None = None) -> Weight:
    """The mean of a window, or a part of the window, as the weight of a convolution with one group per channel."""
    shape = (channels, 1, *(kernel if part is None else part))
    number = math.prod(shape)
    return Weight(shape, np.arange(number), np.full(number, 1 / math.prod(kernel), np.float32))
