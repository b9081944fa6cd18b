"""Atoms and labels: which entries of tensors can only be removed together.

An atom is a set of entries, in the end a channel. A tensor of labels has the shape of an activation or a weight and
names the atom of each entry: a positive label is an atom, 0 is a constant, and a negative label stands for an entry
without channels (its number gives the reason). Labels have stride 0 along every axis on which they are constant, so
that most operations work on a few numbers.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Atoms:
    """Disjoint sets of atoms. Operations join sets, and lock those that can't be removed; neither is undone."""

    def __init__(self) -> None:
        self._parent: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        self._reasons: dict[int, str] = {}  # by any member of a set

    def fresh(self, count: int) -> Tensor:
        """New atoms."""
        first = len(self._parent)
        self._parent = np.concatenate([self._parent, np.arange(first, first + count)])
        return torch.arange(first, first + count)

    def find(self, labels: Tensor) -> Tensor:
        """The representative of each atom's set; labels that are no atoms are returned unchanged."""
        roots = labels.numpy()
        while True:
            parents = np.where(roots > 0, self._parent[np.maximum(roots, 0)], roots)
            if np.array_equal(parents, roots):
                return torch.from_numpy(roots)
            roots = parents

    def join(self, left: Tensor, right: Tensor) -> None:
        """Join pairs of atoms; pairs in which one label is no atom are skipped."""
        firsts, seconds = self.find(left).reshape(-1), self.find(right).reshape(-1)
        apart = (firsts > 0) & (seconds > 0) & (firsts != seconds)
        for one, other in set(zip(firsts[apart].tolist(), seconds[apart].tolist(), strict=True)):
            a, b = self._root(one), self._root(other)
            self._parent[max(a, b)] = min(a, b)

    def flags(self, atoms: Collection[int]) -> Tensor:
        """Flags for all atoms, by number: whether each is one of these."""
        flags = torch.zeros(len(self._parent), dtype=torch.bool)
        flags[list(atoms)] = True
        return flags

    def lock(self, labels: Tensor, reason: str) -> None:
        """Exclude these atoms from pruning; the first reason is kept."""
        for atom in torch.unique(self.find(labels)).tolist():
            if atom > 0:
                self._reasons.setdefault(atom, reason)

    def locked(self) -> dict[int, str]:
        """The reason of each locked set, by its representative."""
        reasons: dict[int, str] = {}
        for atom, reason in self._reasons.items():
            reasons.setdefault(self._root(atom), reason)
        return reasons

    def _root(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = int(self._parent[atom])
        return atom


def along(ids: Tensor, axis: int, shape: Sequence[int]) -> Tensor:
    """Labels that vary along one axis."""
    return ids.reshape([-1 if a == axis else 1 for a in range(len(shape))]).expand(tuple(shape))


def alike(label: int, shape: Sequence[int]) -> Tensor:
    """The same label for all entries."""
    return torch.tensor(label).expand(tuple(shape))


def is_constant(labels: Tensor, axis: int) -> bool:
    """Whether labels are constant along an axis."""
    return labels.shape[axis] <= 1 or labels.stride(axis) == 0


def varying(labels: Tensor) -> list[int]:
    """The axes along which labels vary."""
    return [axis for axis in range(labels.ndim) if not is_constant(labels, axis)]


def first(labels: Tensor, axes: Iterable[int]) -> Tensor:
    """The first entry along some axes, which are kept with length one."""
    for axis in axes:
        labels = labels.narrow(axis, 0, min(1, labels.shape[axis]))
    return labels


def core(labels: Tensor, keep: int | None = None) -> Tensor:
    """Labels with the axes on which they are constant reduced to length one, except for the axis `keep`."""
    return first(labels, [axis for axis in range(labels.ndim) if axis != keep and is_constant(labels, axis)])


def cores(*several: Tensor) -> list[Tensor]:
    """Labels of one shape with the axes on which all are constant reduced to length one."""
    fixed = [axis for axis in range(several[0].ndim) if all(is_constant(labels, axis) for labels in several)]
    return [first(labels, fixed) for labels in several]


def tidy(labels: Tensor) -> Tensor:
    """The same labels with stride 0 along every axis on which they are constant."""
    small = core(labels)
    for axis in range(small.ndim):
        if small.shape[axis] > 1 and bool((small == small.narrow(axis, 0, 1)).all()):
            small = small.narrow(axis, 0, 1)
    return small.expand(labels.shape)
