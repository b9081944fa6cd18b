"""Atoms: the classes of tensor entries that live or die together.

Every entry of an activation belongs to at most one atom (a channel, in the end), written as a positive number; 0 means
none. Operations join atoms, and lock those that can't be removed, with the reason. Both are undone never.
"""

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
        """The representative of each atom's set; 0 stays 0."""
        found = ids.numpy()
        while True:
            above = self._parent[found]
            if np.array_equal(above, found):
                return torch.from_numpy(found)
            found = above

    def join(self, left: Tensor, right: Tensor) -> None:
        """Let pairs of atoms share their fate; pairs with a 0 are skipped."""
        pairs = torch.stack([self.find(left).reshape(-1), self.find(right).reshape(-1)], dim=1)
        pairs = pairs[(pairs > 0).all(dim=1) & (pairs[:, 0] != pairs[:, 1])]
        for one, other in torch.unique(pairs, dim=0).tolist():
            a, b = self._root(one), self._root(other)
            self._parent[max(a, b)] = min(a, b)

    def join_all(self, ids: Tensor) -> None:
        """Let all of these share their fate."""
        some = torch.unique(ids[ids > 0])
        if len(some) > 1:
            self.join(some[1:], some[:1].expand(len(some) - 1))

    def lock(self, ids: Tensor, reason: str) -> None:
        """Let these stay, whatever happens; the first reason counts."""
        for atom in torch.unique(self.find(ids)).tolist():
            if atom:
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
