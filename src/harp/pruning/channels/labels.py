"""Label tensors: of the shape of an activation or a weight, the atom of each entry.

A positive label is an atom, 0 a constant, and a negative one something that has no channels, for a reason that is
known. Labels are kept with stride 0 along every axis on which nothing changes, so that most work is on a few numbers.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def along(ids: Tensor, axis: int, shape: Sequence[int]) -> Tensor:
    """Labels that vary along one axis."""
    return ids.reshape([-1 if a == axis else 1 for a in range(len(shape))]).expand(tuple(shape))


def alike(label: int, shape: Sequence[int]) -> Tensor:
    """One label for all."""
    return torch.tensor(label).expand(tuple(shape))


def still(labels: Tensor, axis: int) -> bool:
    """Whether nothing changes along an axis."""
    return labels.shape[axis] <= 1 or labels.stride(axis) == 0


def varying(labels: Tensor) -> list[int]:
    """The axes along which labels change."""
    return [axis for axis in range(labels.ndim) if not still(labels, axis)]


def first(labels: Tensor, axes: Iterable[int]) -> Tensor:
    """The first entry along some axes, which stay as axes of length one."""
    for axis in axes:
        labels = labels.narrow(axis, 0, min(1, labels.shape[axis]))
    return labels


def core(labels: Tensor, keep: int | None = None) -> Tensor:
    """Labels without the axes on which nothing changes (of length one then), but for one to keep."""
    return first(labels, [axis for axis in range(labels.ndim) if axis != keep and still(labels, axis)])


def cores(*several: Tensor) -> list[Tensor]:
    """The cores of labels of one shape, which have the same shape again."""
    fixed = [axis for axis in range(several[0].ndim) if all(still(labels, axis) for labels in several)]
    return [first(labels, fixed) for labels in several]


def tidy(labels: Tensor) -> Tensor:
    """The same labels with stride 0 wherever nothing changes."""
    small = core(labels)
    for axis in range(small.ndim):
        if small.shape[axis] > 1 and bool((small == small.narrow(axis, 0, 1)).all()):
            small = small.narrow(axis, 0, 1)
    return small.expand(labels.shape)
