"""The trace of a model's channels: their positions in tensors, and the weights that read and compute them."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from harp.pruning.channels.labels import Atoms


@dataclass(frozen=True)
class Site:
    """One axis of a parameter or buffer: the atom of each of its indices."""

    name: str
    axis: int
    atoms: Tensor
    reads: bool = False  # the input axis of a layer's weight: where masks act


@dataclass(frozen=True)
class Use:
    """One application of a weight to one image: the atoms that it reads and writes, at a number of positions."""

    name: str  # "" for a weight that is computed: it has a cost, and can't be pruned
    positions: int
    kernel: int  # weights for each pair of a channel read and a channel written
    reads: Tensor | int  # a number: each output of a grouped convolution reads so many channels
    gives: Tensor


@dataclass(frozen=True)
class Trace:
    """The result of tracing a model."""

    atoms: Atoms
    sites: list[Site]
    uses: list[Use]
    computed: list[Use]  # of weights that are no parameters
    placed: list[tuple[Tensor, str]]  # atoms whose position matters, and the operation
    trains_more: bool  # whether some layers run in training only

    @cached_property
    def roots(self) -> list[Tensor]:
        """The representatives of the atoms of each site."""
        return [self.atoms.find(site.atoms) for site in self.sites]

    def shared(self) -> list[bool]:
        """For each site, whether some of its atoms are along another axis as well."""
        counts: Counter[int] = Counter()
        for roots in self.roots:
            counts.update(set(roots.tolist()))
        return [any(counts[atom] > 1 for atom in roots.tolist()) for roots in self.roots]
