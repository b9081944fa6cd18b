"""Normalisation as a part of the model, so that an attack's ε is always measured on [0, 1] images."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harp.errors import ModelError

USUAL: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion-mnist": ((0.2860,), (0.3530,)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "tiny-imagenet": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
}
"""Mean and standard deviation of the channels of data sets, as networks of others usually have them."""


def constants(text: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation from text: MEAN/STD, such as 0.5/0.25 or 0.49,0.48,0.45/0.25,0.24,0.26, or a name."""
    if text in USUAL:
        mean, std = USUAL[text]
        return list(mean), list(std)
    parts = text.split("/")
    try:
        first, second = ([float(value) for value in part.split(",")] for part in parts)
    except ValueError as error:
        known = ", ".join(USUAL)
        raise ModelError(
            f"normalisation {text!r}: write MEAN/STD, like 0.5/0.25 with a value or one for each channel, "
            f"or one of {known}"
        ) from error
    if max(*first, *second) > 1:
        raise ModelError(f"normalisation {text!r}: pixels are from 0 to 1, so divide values for 0 to 255 by 255")
    check_constants(first, second)
    return first, second


def check_constants(mean: Sequence[float], std: Sequence[float]) -> None:
    """Raise an error unless there is a standard deviation above 0 for every mean."""
    if len(mean) != len(std) or not len(mean):
        raise ModelError(f"normalisation has {len(mean)} means and {len(std)} stds; one of each per channel")
    if not all(math.isfinite(value) for value in (*mean, *std)) or min(std) <= 0:
        raise ModelError(f"normalisation mean {list(mean)}, std {list(std)}: finite numbers, std above 0")


class Normalized(nn.Module):
    """`net` behind the per-channel normalisation (x - mean) / std.

    `mean` and `std` are buffers: they move with the model, and they are saved with its weights.

    Arguments:
        net: the network, which gets normalised images.
        mean, std: of each channel, for images in [0, 1].

    Example:
        network = harp.Normalized(model, mean=(0.49, 0.48, 0.45), std=(0.25, 0.24, 0.26))
        print(network(images).shape)
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        check_constants(mean, std)
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1))
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of [0, 1] images."""
        logits: Tensor = self.net((x - self.mean) / self.std)
        return logits
