"""Atoms: the classes of tensor entries that live or die together.

Every entry of an activation belongs to at most one atom (a channel, in the end), written as a positive number; other
numbers mean none. Operations join atoms, and lock those that can't be removed, with the reason. Neither is ever undone.
"""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Ids = npt.NDArray[np.int64]


class Atoms:
    """Disjoint sets of atoms, some of them locked."""

    def __init__(self) -> None:
        self._parent: Ids = np.zeros(1, dtype=np.int64)
        self._reasons: dict[int, str] = {}  # by any member of a set

    def fresh(self, count: int) -> Tensor:
        """New atoms."""
        first = len(self._parent)
        self._parent = np.concatenate([self._parent, np.arange(first, first + count)])
        return torch.arange(first, first + count)

    def find(self, ids: Tensor) -> Tensor:
        """The representative of each atom's set; what is no atom stays as it is."""
        found = ids.numpy()
        while True:
            above = np.where(found > 0, self._parent[np.maximum(found, 0)], found)
            if np.array_equal(above, found):
                return torch.from_numpy(found)
            found = above

    def join(self, left: Tensor, right: Tensor) -> None:
        """Let pairs of atoms share their fate; pairs with what is no atom are skipped."""
        ours, theirs = self.find(left).reshape(-1), self.find(right).reshape(-1)
        apart = (ours > 0) & (theirs > 0) & (ours != theirs)
        for one, other in set(zip(ours[apart].tolist(), theirs[apart].tolist(), strict=True)):
            a, b = self._root(one), self._root(other)
            self._parent[max(a, b)] = min(a, b)

    def join_all(self, ids: Tensor) -> None:
        """Let all of these share their fate."""
        some = torch.unique(ids[ids > 0])
        if len(some) > 1:
            self.join(some[1:], some[:1].expand(len(some) - 1))

    def flags(self, atoms: Collection[int]) -> Tensor:
        """Whether each atom, by its number, is one of these."""
        found = torch.zeros(len(self._parent), dtype=torch.bool)
        found[list(atoms)] = True
        return found

    def lock(self, ids: Tensor, reason: str) -> None:
        """Let these stay, whatever happens; the first reason counts."""
        for atom in torch.unique(self.find(ids)).tolist():
            if atom > 0:
                self._reasons.setdefault(atom, reason)

    def locked(self) -> dict[int, str]:
        """The reason by the representative of each locked set."""
        found: dict[int, str] = {}
        for atom, reason in self._reasons.items():
            found.setdefault(self._root(atom), reason)
        return found

    def _root(self, atom: int) -> int:
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = int(self._parent[atom])
        return atom
