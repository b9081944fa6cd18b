"""What following a model's channels has shown: where channels lie, and which weights read and give them."""

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from harp.channels.atoms import Atoms


@dataclass(frozen=True)
class Site:
    """One axis of a parameter or buffer: the atom of each of its indices."""

    name: str
    axis: int
    atoms: Tensor
    reads: bool = False  # a mixing layer's input side: where masks act


@dataclass(frozen=True)
class Use:
    """One application of a weight to one image: what it reads and what it gives, and how often."""

    name: str
    positions: int
    kernel: int  # weights for each pair of a channel read and one given
    reads: Tensor | None  # None: grouped, every output reads a fixed number
    gives: Tensor
    fixed: int = 1  # channels that each output of a grouped convolution reads


@dataclass(frozen=True)
class Trace:
    """What one run has shown."""

    atoms: Atoms
    sites: list[Site]
    uses: list[Use]
    computed: list[Use] = field(default_factory=list)  # of weights that are no parameters: they cost, and stay
    placed: list[tuple[Tensor, str]] = field(default_factory=list)  # atoms whose place counts, and where
    trains_more: bool = False  # whether layers run in training that don't run otherwise

    @cached_property
    def roots(self) -> list[Tensor]:
        """The representatives of the atoms of each site."""
        return [self.atoms.find(site.atoms) for site in self.sites]

    def shared(self) -> list[bool]:
        """For each site, whether some of its atoms lie along another axis as well."""
        counts: Counter[int] = Counter()
        for roots in self.roots:
            counts.update(set(roots.tolist()))
        return [any(counts[atom] > 1 for atom in roots.tolist()) for roots in self.roots]
