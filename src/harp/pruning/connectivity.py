"""Paths: which of the kept weights lie on a path from the images to the logits.

At a budget of a few hundred weights some of the kept ones are wasted: a filter that no weight reads, or a weight that
reads a channel whose filter is pruned. Such weights change nothing, and their gradients are zero, so no score ever
drops them. The channels are followed as for channel pruning (`harp.pruning.channels`); what is not understood there
counts as connected.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from harp.models.inputs import Inputs
from harp.pruning.masks import Masks, top_k

if TYPE_CHECKING:
    from harp.pruning.channels.spaces import Place

_ROUNDS = 8  # of choosing again; each drops less than the one before


class Paths:
    """The channels of a model, by the weights that give them and the weights that read them."""

    def __init__(self, model: nn.Module, example: Inputs) -> None:
        from harp.pruning.channels.spaces import Places, spaces  # most methods never need these
        from harp.pruning.channels.tracing import trace

        traced = trace(model, example)
        places = Places(traced, spaces(traced)[0])
        self.count = len(places.atoms)
        self.order = [use.name for use in traced.uses]  # a weight is there as often as it is used
        self.readers = [place for place in places.readers if place.name in self.order]
        self.givers = [place for place in places.givers if place.name in self.order]

    def choose(self, strengths: Mapping[str, Tensor], counts: Sequence[int]) -> tuple[Masks, Masks]:
        """Masks of the strongest weights that lie on a path, so many a tensor, and the weights they were chosen from.

        The places of weights that are of no use go to the strongest that are. Where the strongest weights of all
        layers are not connected, one path through the network is kept first.
        """
        possible = _all(strengths)
        for _ in range(_ROUNDS):
            masks = _strongest(strengths, counts, possible)
            useful = self.useful(masks)
            if self.count > 0 and self._last(useful) is None:
                strengths, possible = self._with_a_path(strengths, counts), _all(strengths)
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
        """The weights that would lie on a path beside these: between channels that some path leads through."""
        _, reached = self._pass(useful, self.order, self.readers, self.givers)
        possible = _all(useful)
        for place in (*self.readers, *self.givers):
            if place.name in possible:
                possible[place.name] &= place.along(reached, possible[place.name])
        return possible

    def _pass(
        self, masks: Mapping[str, Tensor], order: Sequence[str], before: Sequence["Place"], behind: Sequence["Place"]
    ) -> tuple[Masks, Tensor]:
        """Go through the weights in order: which are reached by those that came before, and which channels are.

        From the images to the logits `before` are the axes that read; on the way back, those that give.
        """
        reached = torch.zeros(self.count, dtype=torch.bool)
        connected = {name: torch.zeros_like(mask) for name, mask in masks.items()}
        for name in order:
            after = [place for place in behind if place.name == name]
            if name not in masks:  # not pruned: it reaches all its channels
                for place in after:
                    reached[place.channels[place.channels >= 0]] = True
                continue
            here = masks[name].clone()
            for place in before:
                if place.name == name:
                    here &= place.along(reached, here)
            connected[name] |= here
            for place in after:
                reached[place.read(here)] = True
        return connected, reached

    def _last(self, useful: Mapping[str, Tensor]) -> str | None:
        """The last weight that reads a channel and is of use; None if the network is cut in two."""
        names = [place.name for place in self.readers if place.name in useful and bool(useful[place.name].any())]
        return names[-1] if names else None

    def _with_a_path(self, strengths: Mapping[str, Tensor], counts: Sequence[int]) -> dict[str, Tensor]:
        """The same strengths, infinite along one path: a strong one of the sparsest choice that has any."""
        sizes, wider = [strength.numel() for strength in strengths.values()], list(counts)
        useful: Masks = {}
        while (last := self._last(useful)) is None and wider != sizes:
            wider = [min(2 * count, size) for count, size in zip(wider, sizes, strict=True)]
            useful = self.useful(_strongest(strengths, wider, _all(strengths)))
        raised = {name: strength.clone() for name, strength in strengths.items()}
        candidates = [] if last is None else [(last, useful[last])]  # None: all weights that read are ignored
        seen: set[str] = set()
        while candidates:  # from the last weight to those that give what it reads, and so on to the images
            values = [torch.where(here, strengths[name], -1.0).reshape(-1) for name, here in candidates]
            best = max(range(len(values)), key=lambda i: float(values[i].max()))
            name, index = candidates[best][0], int(values[best].argmax())
            raised[name].view(-1)[index] = torch.inf
            seen |= {later for later in self.order if self.order.index(later) >= self.order.index(name)}
            channel = self._read(name, index, strengths[name])
            candidates = [] if channel is None else self._giving(channel, useful, seen)
        return raised

    def _read(self, name: str, index: int, weight: Tensor) -> int | None:
        """The channel that one entry of a weight reads, if it is followed."""
        where = torch.unravel_index(torch.tensor(index), weight.shape)
        channels = [int(place.channels[where[place.axis]]) for place in self.readers if place.name == name]
        return next((channel for channel in channels if channel >= 0), None)

    def _giving(self, channel: int, useful: Mapping[str, Tensor], later: set[str]) -> list[tuple[str, Tensor]]:
        """The useful entries of every earlier weight that gives a channel."""
        givers = [place for place in self.givers if place.name in useful and place.name not in later]
        entries = [
            (place.name, useful[place.name] & place.shaped(place.channels == channel, useful[place.name]))
            for place in givers
        ]
        return [(name, here) for name, here in entries if bool(here.any())]


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
