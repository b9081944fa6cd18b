"""Paths: which of the kept weights lie on a way from the images to the logits.

At a budget of a few hundred weights some of the kept ones are wasted: a filter that nobody reads, or a weight that
reads a channel whose filter is pruned. Such weights change nothing, and their gradients are zero, so no score ever
drops them. The channels are followed as for channel pruning (`harp.pruning.channels`); what is not understood
there counts as a way.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from harp.pruning.masks import Masks, top_k

_ROUNDS = 8  # of choosing again; each drops less than the one before


class _Side(NamedTuple):
    """One axis of a weight, and the channel at each of its indices, -1 for none that is followed."""

    name: str
    axis: int
    channels: Tensor

    def spread(self, flags: Tensor, shape: torch.Size) -> Tensor:
        """A flag of each channel, along this axis of the weight; what is not followed is true."""
        along = flags[self.channels] | (self.channels < 0)
        return along.view(-1, *[1] * (len(shape) - self.axis - 1))

    def any(self, mask: Tensor, count: int) -> Tensor:
        """The channels at which some entry of a mask is true."""
        here = mask.movedim(self.axis, 0).flatten(1).any(dim=1).cpu() & (self.channels >= 0)
        found = torch.zeros(count, dtype=torch.bool)
        found[self.channels[here]] = True
        return found


class Paths:
    """The channels of a model, by the weights that give them and the weights that read them."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        from harp.pruning.channels.spaces import spaces  # here, so that importing a method does not load them
        from harp.pruning.channels.tracing import trace

        followed = trace(model, example)
        atoms = [atom for space in spaces(followed)[0] for atom in space.atoms]
        number = {atom: index for index, atom in enumerate(atoms)}
        self.count = len(atoms)
        self.order = [use.name for use in followed.uses]  # a weight is there as often as it is used
        self.readers: list[_Side] = []
        self.givers: list[_Side] = []
        for site, roots in zip(followed.sites, followed.roots, strict=True):
            channels = torch.tensor([number.get(atom, -1) for atom in roots.tolist()])
            if site.name in self.order and bool((channels >= 0).any()):
                (self.readers if site.reads else self.givers).append(_Side(site.name, site.axis, channels))

    def choose(self, strengths: Mapping[str, Tensor], counts: Sequence[int]) -> tuple[Masks, Masks]:
        """Masks of the strongest weights that lie on a way, so many a tensor, and the weights they were chosen from.

        The places of weights that are of no use go to the strongest that are. Where the strongest weights of all
        layers meet nowhere, one way through the network is kept first.
        """
        possible = _all(strengths)
        for _ in range(_ROUNDS):
            masks = _strongest(strengths, counts, possible)
            useful = self.useful(masks)
            if self._severed(useful):
                strengths, possible = self._with_a_way(strengths, counts), _all(strengths)
                continue
            if all(torch.equal(useful[name], masks[name]) for name in masks):
                break
            possible = self.open(useful)
        return masks, possible

    def useful(self, masks: Mapping[str, Tensor]) -> Masks:
        """The masks without weights that no image reaches or from which nothing reaches the logits."""
        fed, _ = self._pass(masks, self.order, self.readers, self.givers)
        used, _ = self._pass(fed, self.order[::-1], self.givers, self.readers)
        return used

    def open(self, useful: Mapping[str, Tensor]) -> Masks:
        """The weights that would lie on a way beside these: between channels that some way leads through."""
        _, reached = self._pass(useful, self.order, self.readers, self.givers)
        possible = _all(useful)
        for side in (*self.readers, *self.givers):
            if side.name in possible:
                possible[side.name] &= side.spread(reached, possible[side.name].shape).to(possible[side.name].device)
        return possible

    def _pass(
        self, masks: Mapping[str, Tensor], order: Sequence[str], before: Sequence[_Side], behind: Sequence[_Side]
    ) -> tuple[Masks, Tensor]:
        """Go through the weights in order: which are reached by those that came before, and which channels are.

        From the images to the logits `before` are the sides that read; on the way back, those that give.
        """
        reached = torch.zeros(self.count, dtype=torch.bool)
        found = {name: torch.zeros_like(mask) for name, mask in masks.items()}
        for name in order:
            sides = [side for side in before if side.name == name]
            if name not in masks:  # not pruned: it leads on to all its channels
                for side in behind:
                    if side.name == name:
                        reached[side.channels[side.channels >= 0]] = True
                continue
            here = masks[name].clone()
            for side in sides:
                here &= side.spread(reached, here.shape).to(here.device)
            found[name] |= here
            for side in behind:
                if side.name == name:
                    reached |= side.any(here, self.count)
        return found, reached

    def _severed(self, useful: Mapping[str, Tensor]) -> bool:
        return self.count > 0 and self._last(useful) is None

    def _last(self, useful: Mapping[str, Tensor]) -> _Side | None:
        """The last weight that reads something and is of use."""
        sides = [side for side in self.readers if side.name in useful and bool(useful[side.name].any())]
        return sides[-1] if sides else None

    def _with_a_way(self, strengths: Mapping[str, Tensor], counts: Sequence[int]) -> dict[str, Tensor]:
        """The same strengths, infinite along one way: a strong one of the sparsest choice that has any."""
        sizes, wider = [strength.numel() for strength in strengths.values()], list(counts)
        useful: Masks = _all(strengths)
        while wider != sizes:
            wider = [min(2 * count, size) for count, size in zip(wider, sizes, strict=True)]
            useful = self.useful(_strongest(strengths, wider, _all(strengths)))
            if not self._severed(useful):
                break
        raised = {name: strength.clone() for name, strength in strengths.items()}
        side = self._last(useful)
        candidates = [] if side is None else [(side.name, useful[side.name])]
        seen: set[str] = set()
        while candidates:  # from the last weight to who gives what it reads, and so on to the images
            values = [torch.where(here, strengths[name], -1.0).reshape(-1) for name, here in candidates]
            best = max(range(len(values)), key=lambda i: float(values[i].max()))
            name, place = candidates[best][0], int(values[best].argmax())
            raised[name].view(-1)[place] = torch.inf
            seen |= {later for later in self.order if self.order.index(later) >= self.order.index(name)}
            channel = self._read(name, place, strengths[name])
            candidates = [] if channel is None else self._giving(channel, useful, seen)
        return raised

    def _read(self, name: str, place: int, weight: Tensor) -> int | None:
        """The channel that one entry of a weight reads, if it is followed."""
        where = torch.unravel_index(torch.tensor(place), weight.shape)
        found = [int(side.channels[where[side.axis]]) for side in self.readers if side.name == name]
        return next((channel for channel in found if channel >= 0), None)

    def _giving(self, channel: int, useful: Mapping[str, Tensor], later: set[str]) -> list[tuple[str, Tensor]]:
        """The useful entries of every earlier weight that gives a channel."""
        found = []
        for name, axis, at in self.givers:
            if name in useful and name not in later and bool((at == channel).any()):
                rows = (at == channel).view(-1, *[1] * (useful[name].ndim - axis - 1)).to(useful[name].device)
                found.append((name, useful[name] & rows))
        return [(name, here) for name, here in found if bool(here.any())]


def _all(like: Mapping[str, Tensor]) -> Masks:
    return {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in like.items()}


def _strongest(strengths: Mapping[str, Tensor], counts: Sequence[int], possible: Mapping[str, Tensor]) -> Masks:
    """So many of the strongest entries of each tensor; what is not possible comes after all that is."""
    return {
        name: top_k(prefer(strength, possible[name]), count)
        for (name, strength), count in zip(strengths.items(), counts, strict=True)
    }


def prefer(strength: Tensor, possible: Tensor) -> Tensor:
    """Strengths whose order has all that is possible before all that is not."""
    return torch.where(possible, strength, strength - (strength.nan_to_num(posinf=0.0).max() + 1))
