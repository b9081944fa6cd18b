"""Fine-tuning without the channels that no weight reads under fixed masks: the same training of a smaller network.

Each step gives the same weights as in the large network, up to rounding, with any optimiser that updates each weight
independently: unread channels never get a gradient. (A constant channel changes with its norm, so it must stay.)
Dropout draws other random numbers for fewer channels.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from harp.errors import ModelError
from harp.pruning import macs as cost
from harp.pruning.channels.cutting import Cut, named_tensors
from harp.pruning.channels.units import Channels
from harp.pruning.masks import Masks, check_shapes

logger = logging.getLogger("harp")

WORTHWHILE = 0.8  # the largest share of multiplications at which training the smaller network saves time


@dataclass(frozen=True)
class Compacted:
    """A network to train without its unread channels, its masks, and what was cut."""

    model: nn.Module
    masks: Masks
    cut: Cut


def compacted(
    model: nn.Module, example: Tensor, masks: Masks, macs: int, note: Callable[[str], None]
) -> Compacted | None:
    """The network without the channels that no weight reads under these masks; None if that saves little work.

    `macs` are the dense network's multiplications for an image like those of `example`.
    """
    if not _may_have_unread_channels(masks):
        return None
    try:
        small = slim_for_training(model, example, masks)
    except ModelError as error:  # its channels can't be traced, so it is trained as it is
        logger.debug("not compacted: %s", error)
        return None
    except Exception as error:  # a model may raise any error, and an optimisation must not stop the training
        logger.warning("trained with all channels, as they can't be followed: %s: %s", type(error).__name__, error)
        return None
    work = cost.cost(small.model, example.shape[1:], {})["macs"]
    if work > WORTHWHILE * macs:
        return None
    note(f"compact: {work / macs:.1%} of the multiplications are left to train")
    return small


def _may_have_unread_channels(masks: Masks) -> bool:
    """Whether so many inputs of the layers are unread that tracing the channels is worthwhile."""
    read = [mask.flatten(2).any(2).any(0) if mask.ndim > 2 else mask.any(0) for mask in masks.values() if mask.ndim > 1]
    return sum(int(flags.sum()) for flags in read) < 0.9 * sum(len(flags) for flags in read)


def slim_for_training(model: nn.Module, example: Tensor, masks: Mapping[str, Tensor]) -> Compacted:
    """A smaller copy of a network to train under fixed masks."""
    cut = unread(model, example, masks)
    return Compacted(cut.applied(model), {name: cut.slice(name, mask) for name, mask in masks.items()}, cut)


def unread(model: nn.Module, example: Tensor, masks: Mapping[str, Tensor]) -> Cut:
    """The cut that removes the channels of a network that stay unread in training under fixed masks.

    Weights without a mask count as not pruned. A model with weights that the trace did not see is refused, as they may
    read any channel.
    """
    units = Channels(model, example)
    names = {site.name for site in units.trace.sites}
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and parameter.requires_grad and name not in names:
            raise ModelError(f"weight {name!r} was not seen in use: what it reads in training can't be known")
    check_shapes(model, masks)
    tensors = dict(named_tensors(model))  # a weight may be a buffer
    alive = {name: torch.ones_like(tensors[name], dtype=torch.bool) for name in units.places.names}
    alive |= {name: mask.clone() for name, mask in masks.items() if name in alive}
    gone = units.places.none()
    while not torch.equal(gone, dead := ~units.places.read(alive)):
        gone = dead
        for place in units.places.givers:
            place.clear(alive[place.name], gone)
    return units.without(units.places.spare(gone))


@torch.no_grad()
def spread_back(model: nn.Module, small: nn.Module, cut: Cut) -> None:
    """Write the weights and statistics of the small network into the large one; the rest is not changed."""
    tensors = {**dict(small.named_parameters()), **dict(small.named_buffers())}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.copy_(cut.spread(name, tensors[name], tensor))
