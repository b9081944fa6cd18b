"""Label tensors: the atom of each entry of an activation or a weight.

A positive label is an atom, 0 is a constant, and a negative label stands for an entry without channels (its number
gives the reason). Labels have stride 0 along every axis on which they are constant, so that most operations work on a
few numbers.
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
    """Whether labels are constant along an axis."""
    return labels.shape[axis] <= 1 or labels.stride(axis) == 0


def varying(labels: Tensor) -> list[int]:
    """The axes along which labels vary."""
    return [axis for axis in range(labels.ndim) if not still(labels, axis)]


def first(labels: Tensor, axes: Iterable[int]) -> Tensor:
    """The first entry along some axes, which are kept with length one."""
    for axis in axes:
        labels = labels.narrow(axis, 0, min(1, labels.shape[axis]))
    return labels


def core(labels: Tensor, keep: int | None = None) -> Tensor:
    """Labels with the axes on which they are constant reduced to length one, except for the axis `keep`."""
    return first(labels, [axis for axis in range(labels.ndim) if axis != keep and still(labels, axis)])


def cores(*several: Tensor) -> list[Tensor]:
    """Labels of one shape with the axes on which all are constant reduced to length one."""
    fixed = [axis for axis in range(several[0].ndim) if all(still(labels, axis) for labels in several)]
    return [first(labels, fixed) for labels in several]


def tidy(labels: Tensor) -> Tensor:
    """The same labels with stride 0 along every axis on which they are constant."""
    small = core(labels)
    for axis in range(small.ndim):
        if small.shape[axis] > 1 and bool((small == small.narrow(axis, 0, 1)).all()):
            small = small.narrow(axis, 0, 1)
    return small.expand(labels.shape)
