"""Differences between checkpoints of other projects and our models that say nothing about the network."""

from collections.abc import Mapping

import torch
from torch import Tensor

_UNUSED = "sub_block1."  # a copy of block1 that the code of TRADES declares and does not use
_COUNTER = ".num_batches_tracked"  # older versions of torch did not write it
_MEAN = ".running_mean"


def evened(found: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file without those that the published network never uses, and with all counters of norms."""
    tensors = dict(found)
    if not any(_UNUSED in name for name in own):
        for name in found:
            if _UNUSED in name and name.replace(_UNUSED, "block1.") in found:
                del tensors[name]
    if any(name.endswith(_COUNTER) for name in own):
        for name in list(tensors):
            if name.endswith(_MEAN):
                tensors.setdefault(name.removesuffix(_MEAN) + _COUNTER, torch.zeros((), dtype=torch.long))
    return tensors
