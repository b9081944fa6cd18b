"""Weights as taps: the plane that an output reads, the shift from the output's own position, and the weight.

A convolution, a linear layer, an average, a sum, a scale for each channel: all are products with taps. With a stride,
the planes are the *phases* of the input, every second (third, ...) pixel of it, so that neighbouring outputs read
neighbouring inputs.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harp.engine.format.reader import Stored

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Pair = tuple[int, int]
Size = tuple[int, int, int]


class Window(NamedTuple):
    """How a convolution moves over its input."""

    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1


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
        parts = self.planes, self.rows, self.plane, self.row, -self.down, -self.right
        return Taps(*parts, self.index, self.values)

    def chosen(self, which: Ints) -> "Taps":
        """Some of the taps."""
        parts = ("row", "plane", "down", "right", "index", "values")
        return replace(self, **{name: getattr(self, name)[which] for name in parts})

    def reach(self) -> tuple[Pair, Pair]:
        """The smallest and the largest shift, downwards and to the right."""
        if len(self.row) == 0:
            return (0, 0), (0, 0)
        return (int(self.down.min()), int(self.down.max())), (int(self.right.min()), int(self.right.max()))


def sparse(tensor: Any) -> Stored:
    """A stored tensor, or an array without its zeros, with indices."""
    if isinstance(tensor, Stored) and tensor.indices is not None:
        return Stored(tensor.shape, np.asarray(tensor.indices, np.int64), np.asarray(tensor.values, np.float32))
    full = dense(tensor)
    indices = np.flatnonzero(full)
    return Stored(full.shape, indices, full.reshape(-1)[indices])


def dense(tensor: Any) -> Floats:
    """A stored tensor or an array, with all its zeros."""
    return np.ascontiguousarray(tensor.dense() if isinstance(tensor, Stored) else tensor, np.float32)


def convolution(weight: Stored, size: Size, window: Window) -> Taps:
    """A convolution of an input of this size, over the phases of the input if there is a stride."""
    (stride, padding, dilation, groups), (outputs, inputs, height, width) = window, weight.shape
    assert weight.indices is not None
    row, rest = np.divmod(weight.indices, inputs * height * width)
    channel, place = np.divmod(rest, height * width)
    channel += row // (outputs // groups) * inputs
    down = place // width * dilation[0] - padding[0]
    right = place % width * dilation[1] - padding[1]
    plane = (down % stride[0] * stride[1] + right % stride[1]) * size[0] + channel
    planes = size[0] * math.prod(stride)
    return Taps(outputs, planes, row, plane, down // stride[0], right // stride[1], weight.indices, weight.values)


def whole(weight: Stored, size: Size, window: Window) -> Taps:
    """A convolution whose output is one pixel: a linear layer on the flattened input."""
    taps = convolution(weight, size, window._replace(stride=(1, 1)))
    _, height, width = size
    inside = (taps.down >= 0) & (taps.down < height) & (taps.right >= 0) & (taps.right < width)
    taps = taps.chosen(np.flatnonzero(inside))
    plane, zeros = (taps.plane * height + taps.down) * width + taps.right, np.zeros_like(taps.row)
    return replace(taps, planes=math.prod(size), plane=plane, down=zeros, right=zeros)


def diagonal(scale: Floats) -> Taps:
    """A factor for each channel."""
    channels, zeros = np.arange(len(scale)), np.zeros(len(scale), np.int64)
    return Taps(len(scale), len(scale), channels, channels, zeros, zeros, channels, scale)


def identity(channels: int) -> Taps:
    """The identity on the channels."""
    return diagonal(np.ones(channels, np.float32))
