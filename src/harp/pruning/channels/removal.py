"""Dead channels of a network that was pruned weight by weight, removed without changing an answer.

A channel can go if nobody reads it: all weights that read it are zero. Where it is the same number for every input,
because all that gives it was pruned, it can be made unread:

* a number of zero, as behind a ReLU, adds nothing, and the weights that read it may be zero as well;
* another number c adds Σ w·c to what a reader gives. This goes into the reader's bias, or into the mean of the batch
  norm behind it, or a bias is made. It is exact only where every result sees all of the kernel: with zero padding the
  sum is smaller at the borders. Note that a channel whose filter is pruned still sends on what its norm makes of zero;
* constants that stay because of padding are all alike to their readers, an image of ones times a number. So one of
  them can speak for the others: w·c of the others, over its own c, is added to its weights.

What a channel that goes was computed from may then be unread in turn, and so on to the end.

During training under fixed masks only the first of the three is exact: a channel that nobody reads gets no gradient
and keeps getting none, while a constant moves with its norm.
"""

import copy
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from harp.channels.constants import Reading, readings
from harp.channels.cutting import Cut, named_tensors, plan
from harp.channels.spaces import Space
from harp.channels.traces import Trace
from harp.channels.trial import difference
from harp.channels.units import Channels
from harp.errors import ModelError
from harp.frozen import frozen
from harp.masks import Masks, apply
from harp.seeds import derive

TOLERANCE = 1e-5  # relative to the largest answer
_IMAGES = 4  # random ones, on which the smaller network is checked
_LAYERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


@dataclass(frozen=True)
class Gone:
    """What went for one reason: channels, and weights that weren't zero."""

    channels: int
    weights: int


@dataclass(frozen=True)
class Removed:
    """A network without its dead channels.

    Attributes:
        model: the smaller network, a plain module in the modes of the large one.
        masks: which weights of it aren't zero, for the weights that had a mask (all that read channels, without masks).
        cut: what it keeps of the large network, and the biases that this one doesn't have.
        unread: what went because nobody read it, from the start or in the end.
        zero: what went because it was zero where it was read.
        folded: what went into biases and norms.
        merged: what another constant channel speaks for now.
        padded: constant channels that stay because a reader pads.
        stuck: constant channels that stay because a reader has no bias of its own to take them.
        parameters: how many the large and the smaller network have.
    """

    model: nn.Module
    masks: Masks
    cut: Cut
    unread: Gone
    zero: Gone
    folded: Gone
    merged: Gone
    padded: int
    stuck: int
    parameters: tuple[int, int]


@torch.inference_mode(False)
def remove_dead(model: nn.Module, example: Tensor, masks: Mapping[str, Tensor] | None = None) -> Removed:
    """Remove all channels that can go without changing an answer of the model in eval mode.

    Without masks the zeros among the weights count. The model is left as it is, and the smaller one is compared with
    it on random images. At least one channel of each space stays.
    """
    large = copy.deepcopy(model)
    apply(large, masks or {})
    example = example[:2].to(next(large.parameters()).device)
    images = _images(example)
    expected = _answer(large, images)
    search = _Search(large, example)
    search.run()
    cut = search.cut()
    small = cut.applied(large)
    gap = difference(_answer(small, images), expected)
    if not gap <= TOLERANCE:
        raise ModelError(
            f"without its dead channels the network is off by {gap:.1e}: it computes what can't be followed"
        )
    weights = dict(small.named_parameters())
    names = search.units.masked if masks is None else masks
    sizes = [sum(p.numel() for p in net.parameters()) for net in (model, small)]
    return Removed(
        small,
        {name: weights[name].detach() != 0 for name in names},
        cut,
        **{reason: Gone(search.channels[reason], search.weights[reason]) for reason in _REASONS},
        padded=search.padded,
        stuck=search.stuck,
        parameters=(sizes[0], sizes[1]),
    )


def unread(model: nn.Module, example: Tensor, masks: Mapping[str, Tensor]) -> Cut:
    """What is left of a network in training under fixed masks when the channels go that nobody can read.

    Weights without a mask are alive. A model with weights that were not seen in use is refused: they may read anything.
    """
    units = Channels(model, example)
    names = {site.name for site in units.trace.sites}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and parameter.requires_grad and name not in names:
            raise ModelError(f"weight {name!r} was not seen in use: what it reads in training can't be known")
    where = _Places(units.trace, units.spaces)
    alive = _alive(model, where.names, masks)
    gone = torch.zeros(where.count, dtype=torch.bool)
    while True:
        dead = ~where.read(alive)
        if torch.equal(dead, gone):
            return where.cut(model, where.spare(gone))
        gone = dead
        where.clear_givers(alive, gone)


def slim_for_training(model: nn.Module, example: Tensor, masks: Mapping[str, Tensor]) -> tuple[nn.Module, Masks, Cut]:
    """A smaller copy of a network to train under fixed masks, its masks, and what it keeps of the large one.

    Step by step it does what the large one would do, up to rounding, with any optimiser that treats each weight on
    its own. Dropout draws other numbers for fewer channels.
    """
    cut = unread(model, example, masks)
    return cut.applied(model), {name: cut.slice(name, mask) for name, mask in masks.items()}, cut


@torch.no_grad()
def spread_back(model: nn.Module, small: nn.Module, cut: Cut) -> None:
    """Write the weights and statistics of the small network into the large one; what was cut stays as it was."""
    tensors = [{**dict(net.named_parameters()), **dict(net.named_buffers())} for net in (model, small)]
    for name, tensor in tensors[0].items():
        tensor.copy_(cut.spread(name, tensors[1][name], tensor))


_REASONS = ("unread", "zero", "folded", "merged")


@torch.no_grad()
def _answer(model: nn.Module, images: Tensor) -> Tensor:
    with frozen(model, images, fast=False) as net:
        return net(images)


def _images(example: Tensor) -> Tensor:
    """Random images of the example's kind."""
    generator = torch.Generator().manual_seed(derive(0, "dead channels"))
    return torch.rand((_IMAGES, *example.shape[1:]), generator=generator).to(example)


def _alive(model: nn.Module, names: Collection[str], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A mask for each of these weights, to be written into."""
    parameters = dict(model.named_parameters())
    for name, mask in masks.items():
        if name not in parameters or parameters[name].shape != mask.shape:
            raise ModelError(f"no weight of shape {tuple(mask.shape)} called {name!r}: masks of another model?")
    tensors = dict(named_tensors(model))
    ones = {name: torch.ones_like(tensors[name], dtype=torch.bool) for name in names}
    return {name: masks[name].clone() if name in masks else alive for name, alive in ones.items()}


class _Places:
    """Where channels lie: along the axes of the weights that read them and of those that give them."""

    def __init__(self, trace: Trace, spaces: list[Space]) -> None:
        self.trace, self.spaces = trace, spaces
        self.atoms = [atom for space in spaces for atom in space.atoms]
        self.count = len(self.atoms)
        number = {atom: index for index, atom in enumerate(self.atoms)}
        self.names = {use.name for use in trace.uses} | {site.name for site in trace.sites if site.reads}
        self.readers: list[tuple[str, int, Tensor]] = []
        self.givers: list[tuple[str, int, Tensor]] = []
        for site, roots in zip(trace.sites, trace.roots, strict=True):
            channels = torch.tensor([number.get(atom, -1) for atom in roots.tolist()])
            if site.name in self.names and bool((channels >= 0).any()):
                (self.readers if site.reads else self.givers).append((site.name, site.axis, channels))

    def read(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Which channels some weight reads that isn't zero."""
        found = torch.zeros(self.count, dtype=torch.bool)
        for name, axis, channels in self.readers:
            found[channels[_lives(weights[name], axis) & (channels >= 0)]] = True
        return found

    def clear_givers(self, weights: Mapping[str, Tensor], channels: Tensor) -> None:
        """Let channels be computed from nothing."""
        self._clear(self.givers, weights, channels)

    def clear_readers(self, weights: Mapping[str, Tensor], channels: Tensor) -> None:
        """Let nobody read channels."""
        self._clear(self.readers, weights, channels)

    def _clear(self, places: list[tuple[str, int, Tensor]], weights: Mapping[str, Tensor], channels: Tensor) -> None:
        for name, axis, at in places:
            where = (channels[at] & (at >= 0)).nonzero().reshape(-1).to(weights[name].device)
            weights[name].index_fill_(axis, where, 0)

    def cut(self, model: nn.Module, gone: Tensor) -> Cut:
        """What is left when channels go."""
        dead = {atom for atom, goes in zip(self.atoms, gone.tolist(), strict=True) if goes}
        return plan(model, self.trace, self.spaces, dead)

    def spare(self, gone: Tensor) -> Tensor:
        """The same, but for the first channel of each space that would be left empty."""
        spared, first = gone.clone(), 0
        for space in self.spaces:
            spared[first] &= not bool(gone[first : first + len(space.atoms)].all())
            first += len(space.atoms)
        return spared


class _Search:
    """The search for dead channels of a network, whose weights change while they are found."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self.model = model
        self.units = Channels(model, example)
        self.places = _Places(self.units.trace, self.units.spaces)
        tensors = dict(named_tensors(model))  # a weight may be a buffer
        self.weights_of = {name: tensors[name].detach() for name in self.places.names}
        uses = Counter(use.name for use in self.units.trace.uses)
        found = readings(model, example)
        self.readings = {name: each for name, each in found.items() if len(each) == uses[name]}
        self.homes = {name: home for name, each in self.readings.items() if (home := self._home(name, each))}
        self.gone = torch.zeros(self.places.count, dtype=torch.bool)
        self.biases: list[str] = []
        self.reasons: list[str | None] = [None] * self.places.count
        self.channels: Counter[str | None] = Counter()
        self.weights: Counter[str] = Counter()
        self.left = self._count()
        self.padded = self.stuck = 0

    def run(self) -> None:
        """Find channels that can go, until there are no more."""
        while True:
            states = self._states()
            dying = {reason: flags & ~self.gone for reason, flags in states.items() if reason in _REASONS}
            dying["merged"] = torch.zeros_like(self.gone)
            if not any(bool(flags.any()) for flags in dying.values()):
                dying["merged"] = self._merge(states["padded"] & ~self.gone)
            reason = next((reason for reason, flags in dying.items() if bool(flags.any())), None)
            if reason is None:
                break
            self._bury(dying[reason], reason)
        stays = self.gone & ~self.places.spare(self.gone)
        self.gone &= ~stays
        self.channels = Counter(reason for reason, left in zip(self.reasons, stays.tolist(), strict=True) if not left)
        self.padded, self.stuck = (int((states[each] & ~self.gone).sum()) for each in ("padded", "stuck"))

    def cut(self) -> Cut:
        """What is left; biases that were made are cut like what they are added to."""
        cut = self.places.cut(self.model, self.gone)
        cut.added.extend(self.biases)
        for bias in self.biases:
            rows = cut.kept.get(bias.removesuffix("bias") + "weight", {}).get(0)
            if rows is not None:
                cut.kept[bias] = {0: rows}
                cut.shapes[bias] = list(self.model.get_parameter(bias).shape)
        return cut

    def _states(self) -> dict[str, Tensor]:
        """For each channel, whether it can go for each of the reasons, or why it can't."""
        read, moving, needs, padded, stuck = (torch.zeros(self.places.count, dtype=torch.bool) for _ in range(5))
        for name, channels, lives, readings_ in self._reads():
            constant, zero = torch.zeros_like(lives), torch.zeros_like(lives)
            if readings_:
                constant = torch.stack([each.constant for each in readings_]).all(dim=0).cpu()
                zero = constant & (torch.stack([each.values for each in readings_]) == 0).all(dim=0).cpu()
            here = lives & (channels >= 0)
            read[channels[here]] = True
            moving[channels[here & ~constant]] = True
            needs[channels[here & ~zero]] = True
            if name not in self.homes:
                stuck[channels[here & ~zero]] = True
            elif not readings_[0].bare:
                padded[channels[here & ~zero]] = True
        still = read & ~moving
        return {
            "unread": ~read,
            "zero": still & ~needs,
            "folded": still & needs & ~padded & ~stuck,
            "padded": still & padded & ~stuck,
            "stuck": still & stuck,
        }

    def _reads(self) -> Iterator[tuple[str, Tensor, Tensor, list[Reading]]]:
        """For each reading weight the channel of each index, whether weights live there, and what is read there."""
        for name, axis, channels in self.places.readers:
            known = [each for each in self.readings.get(name, []) if each.axis == axis]
            yield name, channels, _lives(self.weights_of[name], axis), known

    def _bury(self, channels: Tensor, reason: str) -> None:
        if reason in ("folded", "merged"):
            self._fold(channels)
        self.places.clear_readers(self.weights_of, channels)
        self.places.clear_givers(self.weights_of, channels)
        self.gone |= channels
        self.reasons = [reason if dies else old for old, dies in zip(self.reasons, channels.tolist(), strict=True)]
        left = self._count()
        self.weights[reason] += self.left - left
        self.left = left

    def _count(self) -> int:
        return sum(int(weight.count_nonzero()) for weight in self.weights_of.values())

    def _fold(self, channels: Tensor) -> None:
        """Add what constant channels give to their readers' biases, of those that can take it."""
        for name, axis, at in self.places.readers:
            where = (channels[at] & (at >= 0)).nonzero().reshape(-1).to(self.weights_of[name].device)
            if len(where) and name in self.homes and self.readings[name][0].bare:
                weight = self.weights_of[name].index_select(axis, where).movedim(axis, 0).double()
                values = self.readings[name][0].values[where]
                self._add(name, torch.tensordot(values, weight.reshape(*weight.shape[:2], -1).sum(dim=2), dims=1))

    def _merge(self, candidates: Tensor) -> Tensor:
        """Let one constant channel of each space speak for others to the readers that pad; which can go now."""
        merged = torch.zeros_like(candidates)
        padding = [_Padding.of(*reader, self) for reader in self.places.readers if self._pads(reader[0])]
        for reader in padding:
            candidates = candidates & ~reader.several
        for here in torch.split(torch.arange(len(candidates)), self.units.sizes):
            some = here[candidates[here]]
            if len(some) > 1:
                values, lives = (torch.stack([getattr(r, what)[some] for r in padding]) for what in ("values", "lives"))
                needed = values[lives.any(dim=1)].abs()
                best = int(((needed > 0).sum(dim=0) + needed.amin(dim=0).clamp(max=0.5)).argmax())
                goes = (~lives | (values[:, best : best + 1] != 0)).all(dim=0)
                goes[best] = False
                for reader in padding:
                    reader.lend(some[goes], some[best])
                merged[some[goes]] = True
        return merged

    def _pads(self, name: str) -> bool:
        return name in self.homes and not self.readings[name][0].bare

    def _add(self, name: str, gift: Tensor) -> None:
        """Add to what a weight gives, on every position."""
        if not bool(gift.any()):
            return
        home = self.homes[name]
        owner, _, attribute = home.rpartition(".")
        module = self.model.get_submodule(owner)
        target = getattr(module, attribute)
        if target is None:
            weight = self.weights_of[name]
            target = nn.Parameter(torch.zeros(len(gift), dtype=weight.dtype, device=weight.device))
            target.requires_grad_(dict(named_tensors(self.model))[name].requires_grad)
            setattr(module, attribute, target)
            self.biases.append(home)
        with torch.no_grad():
            target.copy_(target.double() + (-gift if attribute == "running_mean" else gift))

    def _home(self, name: str, found: list[Reading]) -> str | None:
        """Where a number can be added to what a weight gives; None if there is no place for it alone."""
        owner, _, attribute = name.rpartition(".")
        module = self.model.get_submodule(owner)
        if (
            len(found) > 1
            or not isinstance(module, _LAYERS)
            or attribute != "weight"
            or not self._is_single(module.weight)
        ):
            return None
        if module.bias is None:
            return found[0].norm or (f"{owner}.bias".lstrip(".") if type(module) in _LAYERS else None)
        return f"{owner}.bias".lstrip(".") if self._is_single(module.bias) else None

    def _is_single(self, parameter: Tensor) -> bool:
        return sum(p is parameter for _, p in self.model.named_parameters(remove_duplicate=False)) == 1


@dataclass(frozen=True)
class _Padding:
    """A weight that pads what it reads, by the channels of all spaces."""

    weight: Tensor
    axis: int
    index: Tensor  # where it reads a channel, -1 for nowhere
    several: Tensor  # whether it reads it at several places
    values: Tensor  # the constant that it reads, 0 for none
    lives: Tensor  # whether its weights there are something but zeros

    @classmethod
    def of(cls, name: str, axis: int, at: Tensor, search: _Search) -> Self:
        """A reader as it is now."""
        weight, reading, count = search.weights_of[name], search.readings[name][0], search.places.count
        places = (at >= 0).nonzero().reshape(-1)
        index = torch.full((count,), -1)
        index[at[places]] = places
        constants = torch.where(reading.constant, reading.values, 0.0).cpu()
        lives = torch.zeros(count, dtype=torch.bool)
        lives[at[places[_lives(weight, axis)[places]]]] = True
        several = torch.bincount(at[places], minlength=count) > 1
        return cls(weight, axis, index, several, torch.where(index >= 0, constants[index], 0.0), lives)

    def lend(self, others: Tensor, carrier: Tensor) -> None:
        """Add to the weights of one channel those of others, times their share of its constant."""
        others = others[self.lives[others]]
        if len(others):
            shares = (self.values[others] / self.values[carrier]).to(self.weight.device)
            weights = self.weight.index_select(self.axis, self.index[others].to(self.weight.device))
            gift = torch.tensordot(shares, weights.movedim(self.axis, 0).double(), dims=1)
            own = self.weight.select(self.axis, int(self.index[carrier]))
            own.copy_(own.double() + gift)


def _lives(weight: Tensor, axis: int) -> Tensor:
    """Which indices of an axis hold something but zeros."""
    others = [other for other in range(weight.ndim) if other != axis]
    return (weight != 0).any(dim=others).cpu()
