"""Normalisation as a part of the model, so that an attack's ε is always measured on [0, 1] images."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from harp.errors import ModelError


class Normalized(nn.Module):
    """`net` behind the per-channel normalisation (x - mean) / std.

    `mean` and `std` are buffers: they move with the model, and they are saved with its weights.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: nn.Module, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not len(mean):
            raise ModelError(f"normalisation has {len(mean)} means and {len(std)} stds; one of each per channel")
        if not all(math.isfinite(value) for value in (*mean, *std)) or min(std) <= 0:
            raise ModelError(f"normalisation mean {list(mean)}, std {list(std)}: finite numbers, std above 0")
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std, dtype=torch.float32).view(-1, 1, 1))
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of [0, 1] images."""
        logits: Tensor = self.net((x - self.mean) / self.std)
        return logits
