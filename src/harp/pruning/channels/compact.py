"""Fine-tuning without the channels that nobody reads under fixed masks: the same training, of a smaller network."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from harp import cost
from harp.channels import Cut
from harp.channels.dead import slim_for_training
from harp.errors import ModelError
from harp.masks import Masks

logger = logging.getLogger("harp")

WORTHWHILE = 0.8  # the share of multiplications below which training a smaller network pays for making it


@dataclass(frozen=True)
class Compacted:
    """A network in training without the channels that nobody reads, its masks, and what was cut."""

    model: nn.Module
    masks: Masks
    cut: Cut


def compacted(
    model: nn.Module, example: Tensor, masks: Masks, macs: int, note: Callable[[str], None]
) -> Compacted | None:
    """The network without the channels that nobody reads under these masks, if that saves work.

    `macs` are the dense network's multiplications for an image like those of `example`.
    """
    if not _may_have_died(masks):
        return None
    try:
        small, small_masks, cut = slim_for_training(model, example, masks)
    except ModelError as error:  # it can't be followed, and is trained as it is
        logger.debug("not compacted: %s", error)
        return None
    except Exception as error:  # a model may do anything, and a short cut must not cost the training
        logger.warning("trained with all channels, as they can't be followed: %s: %s", type(error).__name__, error)
        return None
    channels, height, width = example.shape[1:]
    work = cost.cost(small, (channels, height, width), {})["macs"]
    if work > WORTHWHILE * macs:
        return None
    note(f"compact: {work / macs:.1%} of the multiplications are left to train")
    return Compacted(small, small_masks, cut)


def _may_have_died(masks: Masks) -> bool:
    """Whether so many inputs of the layers are unread that it is worth a closer look."""
    read = [mask.flatten(2).any(2).any(0) if mask.ndim > 2 else mask.any(0) for mask in masks.values() if mask.ndim > 1]
    return sum(int(each.sum()) for each in read) < 0.9 * sum(len(each) for each in read)
