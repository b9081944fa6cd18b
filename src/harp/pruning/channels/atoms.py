"""Atoms: sets of tensor entries that can only be removed together.

Every entry of an activation belongs to at most one atom (in the end, a channel), written as a positive number; other
numbers mean none. Operations join atoms, and lock those that can't be removed, with the reason. Neither is undone.
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
        """The representative of each atom's set; numbers that are no atoms are returned unchanged."""
        roots = ids.numpy()
        while True:
            parents = np.where(roots > 0, self._parent[np.maximum(roots, 0)], roots)
            if np.array_equal(parents, roots):
                return torch.from_numpy(roots)
            roots = parents

    def join(self, left: Tensor, right: Tensor) -> None:
        """Join pairs of atoms; pairs in which one is no atom are skipped."""
        firsts, seconds = self.find(left).reshape(-1), self.find(right).reshape(-1)
        apart = (firsts > 0) & (seconds > 0) & (firsts != seconds)
        for one, other in set(zip(firsts[apart].tolist(), seconds[apart].tolist(), strict=True)):
            a, b = self._root(one), self._root(other)
            self._parent[max(a, b)] = min(a, b)

    def join_all(self, ids: Tensor) -> None:
        """Join all of these atoms to one."""
        atoms = torch.unique(ids[ids > 0])
        if len(atoms) > 1:
            self.join(atoms[1:], atoms[:1].expand(len(atoms) - 1))

    def flags(self, atoms: Collection[int]) -> Tensor:
        """Flags for all atoms, by number: whether each is one of these."""
        flags = torch.zeros(len(self._parent), dtype=torch.bool)
        flags[list(atoms)] = True
        return flags

    def lock(self, ids: Tensor, reason: str) -> None:
        """Exclude these atoms from pruning; the first reason is kept."""
        for atom in torch.unique(self.find(ids)).tolist():
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
