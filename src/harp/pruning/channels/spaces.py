"""Channel spaces: sets of interchangeable channels, and their positions in weights.

A space is a set of channels that the same weights compute and the same weights read, such as the stream of a residual
stage or the hidden width of a block. Any of its channels may be pruned, so it is the "layer" of channel pruning. It has
the name of the first weight that reads it.

A departure from HARP's authors, who give every layer a rate for its inputs (ResNet18: 18 rates for 21 layers, shortcuts
copy theirs): layers that read one stream share one rate here, 12 in ResNet18, so that pruned channels can be cut out.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from harp.pruning.channels.traces import Trace


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
    # Atoms of one space are equally often at every site, and at every use of a weight: so they cost the same.
    used = [part for use in trace.uses for part in (use.gives, use.reads) if isinstance(part, Tensor)]
    places: dict[int, Counter[int]] = {}
    for number, labels in enumerate([*trace.roots, *(trace.atoms.find(part) for part in used)]):
        for atom in labels.tolist():
            places.setdefault(atom, Counter())[number] += 1
    by_signature: dict[tuple[tuple[int, int], ...], dict[int, None]] = {}
    for site, roots in zip(trace.sites, trace.roots, strict=True):  # in the order in which they are read
        for atom in roots.tolist() if site.reads else ():
            by_signature.setdefault(tuple(sorted(places[atom].items())), {})[atom] = None
    prunable, whole = [], []
    for signature, atoms in by_signature.items():
        sites = [trace.sites[number] for number, _ in signature if number < len(trace.sites)]
        readers = list(dict.fromkeys(site.name for site in sites if site.reads))
        givers = [site.name for site in sites if not site.reads]
        free = [atom for atom in atoms if atom not in locked]
        if free and givers:
            prunable.append(Space(readers[0], free, readers, givers))
        if len(free) < len(atoms):
            reason = next(locked[atom] for atom in atoms if atom in locked)
            whole.append(Whole(readers, len(atoms) - len(free), reason))
    return _with_unique_names(prunable), whole


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


class Place(NamedTuple):
    """One axis of a weight, and the number of the channel at each of its indices, -1 for none."""

    name: str
    axis: int
    channels: Tensor

    def nonzero(self, weight: Tensor) -> Tensor:
        """The indices at which a weight or mask has an entry that isn't zero, as flags."""
        return (weight != 0).movedim(self.axis, 0).flatten(1).any(dim=1).cpu()

    def at(self, flags: Tensor) -> Tensor:
        """The flag of the channel at each index, false for none."""
        channels = self.channels.to(flags.device)
        return flags[channels] & (channels >= 0)

    def along(self, flags: Tensor, weight: Tensor) -> Tensor:
        """The flag of the channel at each index, true for none, in a shape that can be broadcast to the weight's."""
        return self.shaped(~self.at(~flags), weight)

    def shaped(self, values: Tensor, weight: Tensor) -> Tensor:
        """A value for each index, in a shape that can be broadcast to the weight's."""
        return values.to(weight.device).reshape([-1 if axis == self.axis else 1 for axis in range(weight.ndim)])

    def indices(self, channels: Tensor) -> Tensor:
        """The indices of flagged channels."""
        return self.at(channels).nonzero().reshape(-1)

    def clear(self, weight: Tensor, channels: Tensor) -> None:
        """Set a weight's entries at flagged channels to zero."""
        weight.index_fill_(self.axis, self.indices(channels).to(weight.device), 0)

    def read(self, weight: Tensor) -> Tensor:
        """The numbers of the channels at which a weight or mask has an entry that isn't zero."""
        return self.channels[self.nonzero(weight) & (self.channels >= 0)]


class Places:
    """The positions of the channels of all spaces, which are numbered in a row, along the axes of weights."""

    def __init__(self, trace: Trace, prunable: Sequence[Space]) -> None:
        self.sizes = [len(space.atoms) for space in prunable]
        self.atoms = [atom for space in prunable for atom in space.atoms]
        self.names = {use.name for use in trace.uses} | {site.name for site in trace.sites if site.reads}
        self.readers: list[Place] = []
        self.givers: list[Place] = []
        number = {atom: index for index, atom in enumerate(self.atoms)}
        for site, roots in zip(trace.sites, trace.roots, strict=True):
            channels = torch.tensor([number.get(atom, -1) for atom in roots.tolist()])
            if site.name in self.names and bool((channels >= 0).any()):
                (self.readers if site.reads else self.givers).append(Place(site.name, site.axis, channels))

    def none(self) -> Tensor:
        """A flag for each channel of all spaces, all of them false."""
        return torch.zeros(len(self.atoms), dtype=torch.bool)

    def read(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Which channels are read by a weight (or mask) that isn't zero."""
        read = self.none()
        for place in self.readers:
            read[place.read(weights[place.name])] = True
        return read

    def spare(self, gone: Tensor) -> Tensor:
        """The channels to remove, without the first channel of each space that would be empty."""
        parts = [part.clone() for part in torch.split(gone, self.sizes)]
        for part in parts:
            part[0] &= not bool(part.all())
        return torch.cat(parts)
