"""Fine-tuning without the channels that no weight reads under fixed masks: the same training of a smaller network."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from harp.errors import ModelError
from harp.pruning import macs as cost
from harp.pruning.channels import Cut
from harp.pruning.channels.removal import slim_for_training
from harp.pruning.masks import Masks

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
        small, small_masks, cut = slim_for_training(model, example, masks)
    except ModelError as error:  # its channels can't be traced, so it is trained as it is
        logger.debug("not compacted: %s", error)
        return None
    except Exception as error:  # a model may raise any error, and an optimisation must not stop the training
        logger.warning("trained with all channels, as they can't be followed: %s: %s", type(error).__name__, error)
        return None
    channels, height, width = example.shape[1:]
    work = cost.cost(small, (channels, height, width), {})["macs"]
    if work > WORTHWHILE * macs:
        return None
    note(f"compact: {work / macs:.1%} of the multiplications are left to train")
    return Compacted(small, small_masks, cut)


def _may_have_unread_channels(masks: Masks) -> bool:
    """Whether so many inputs of the layers are unread that tracing the channels is worthwhile."""
    read = [mask.flatten(2).any(2).any(0) if mask.ndim > 2 else mask.any(0) for mask in masks.values() if mask.ndim > 1]
    return sum(int(flags.sum()) for flags in read) < 0.9 * sum(len(flags) for flags in read)
