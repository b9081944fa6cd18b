"""Channel spaces: sets of interchangeable channels, and the cost of keeping some of them.

A space is a set of channels that the same weights compute and the same weights read, such as the stream of a residual
stage or the hidden width of a block. Any of its channels may be pruned, so it is the "layer" of channel pruning. It has
the name of the first weight that reads it.

A departure from HARP's authors, who give every layer a rate for its inputs (ResNet18: 18 rates for 21 layers, shortcuts
copy theirs): layers that read one stream share one rate here, 12 in ResNet18, so that pruned channels can be cut out.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from harp.pruning.channels.traces import Trace

Matrix = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Space:
    """Channels that may be pruned, each an atom."""

    name: str
    atoms: list[int]
    readers: list[str]  # weights that read it
    givers: list[str]  # weights that compute it, and biases, norms and statistics along it
    numbers: dict[tuple[str, str], int] = field(default_factory=dict)  # how much a channel adds to a module's attribute
    swaps: list[str] = field(default_factory=list)  # attention modules to replace, as they can't have fewer heads


@dataclass(frozen=True)
class Whole:
    """Channels that can't be pruned, the weights that read them, and the reason."""

    readers: list[str]
    count: int
    reason: str


def spaces(trace: Trace) -> tuple[list[Space], list[Whole]]:
    """The channels that may be pruned, by space, and those that may not."""
    locked = trace.atoms.locked()
    places: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))  # atom -> site -> number of indices
    for number, site in enumerate(trace.sites):
        for atom in trace.atoms.find(site.atoms).tolist():
            places[atom][number] += 1
    for number, part in enumerate(
        _parts(trace), start=len(trace.sites)
    ):  # the costs of atoms with the same sites may differ
        for atom in trace.atoms.find(part).tolist():
            places[atom][number] += 1
    by_signature: dict[tuple[tuple[int, int], ...], dict[int, None]] = {}
    for site in trace.sites:  # in the order in which they are read
        for atom in trace.atoms.find(site.atoms).tolist() if site.reads else ():
            by_signature.setdefault(tuple(sorted(places[atom].items())), {})[atom] = None
    prunable, whole = [], []
    for signature, members in by_signature.items():
        sites = [trace.sites[number] for number, _ in signature if number < len(trace.sites)]
        readers = list(dict.fromkeys(site.name for site in sites if site.reads))
        givers = [site.name for site in sites if not site.reads]
        atoms = list(members)
        free = [atom for atom in atoms if atom not in locked]
        if free and givers:
            prunable.append(Space(readers[0], free, readers, givers))
        if len(free) < len(atoms):
            reason = next(locked[atom] for atom in atoms if atom in locked)
            whole.append(Whole(readers, len(atoms) - len(free), reason))
    return _with_unique_names(prunable), whole


def _parts(trace: Trace) -> Iterator[Tensor]:
    """The atoms that are written and read at each use of a weight."""
    for use in trace.uses:
        yield use.gives
        if not isinstance(use.reads, int):
            yield use.reads


def _with_unique_names(prunable: list[Space]) -> list[Space]:
    """The spaces with unique names: where one weight reads several (a concatenation), the giver's name is added."""
    names = [space.name for space in prunable]
    named = [s if names.count(s.name) == 1 else replace(s, name=f"{s.name} ({s.givers[0]})") for s in prunable]
    seen: Counter[str] = Counter()
    for number, space in enumerate(named):
        seen[space.name] += 1
        if seen[space.name] > 1:
            named[number] = replace(space, name=f"{space.name} {seen[space.name]}")
    return named


@dataclass(frozen=True)
class Product:
    """A cost `price · (channels read) · (channels written)`; a side may be atoms or a fixed number."""

    price: int
    reads: Tensor | int
    gives: Tensor | int


@dataclass(frozen=True)
class Tariff:
    """The cost as a function of the channel counts: a sum of products of two factors, each linear in the counts.

    cost(n) = Σ_t price_t · (R n + r)_t · (G n + g)_t
    """

    prices: Matrix
    reads: Matrix  # R, one row a product, one column a space
    read: Matrix  # r
    gives: Matrix
    given: Matrix

    def exact(self, counts: Sequence[int]) -> int:
        """The cost of keeping so many channels of each space."""
        n = np.asarray(counts, dtype=np.int64)
        return int((self.prices * (self.reads @ n + self.read) * (self.gives @ n + self.given)).sum())

    def slope(self, counts: npt.NDArray[np.float64]) -> tuple[float, npt.NDArray[np.float64]]:
        """The cost at real counts, and its gradient."""
        read, given = self.reads @ counts + self.read, self.gives @ counts + self.given
        gradient = (self.prices * given) @ self.reads + (self.prices * read) @ self.gives
        return float((self.prices * read * given).sum()), gradient

    def soft(self, counts: Tensor) -> Tensor:
        """The cost at real counts, for autograd."""
        prices, reads, read, gives, given = (
            torch.as_tensor(m, dtype=counts.dtype, device=counts.device)
            for m in (self.prices, self.reads, self.read, self.gives, self.given)
        )
        return (prices * (reads @ counts + read) * (gives @ counts + given)).sum()


def tariff(trace: Trace, prunable: Sequence[Space], products: Iterable[Product]) -> Tariff:
    """The tariff of costs that are given over atoms: the same costs over the counts of the spaces."""
    owner = {atom: number for number, space in enumerate(prunable) for atom in space.atoms}
    per_space = [len(space.atoms) for space in prunable]
    rows = []
    for product in products:
        sides = [_side(trace, owner, per_space, side) for side in (product.reads, product.gives)]
        rows.append((product.price, *sides[0], *sides[1]))
    prices, reads, read, gives, given = zip(*rows, strict=True)
    return Tariff(*(np.array(column, dtype=np.int64) for column in (prices, reads, read, gives, given)))


def _side(trace: Trace, owner: Mapping[int, int], sizes: Sequence[int], side: Tensor | int) -> tuple[list[int], int]:
    """The number of indices that one channel of each space takes, and the number that always stays."""
    row = [0] * len(sizes)
    if isinstance(side, int):
        return row, side
    fixed = 0
    for atom in trace.atoms.find(side).tolist():
        if atom in owner:
            row[owner[atom]] += 1
        else:
            fixed += 1
    return [total // size for total, size in zip(row, sizes, strict=True)], fixed
