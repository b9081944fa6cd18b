"""Images standardised one by one, and an attack that they cripple: how some results were measured.

The code of ANP-VS (see `harp.pruning.methods.anp`) standardises every image and then clips the attacked one to
[0, 1]. Most of a standardised image is outside, so the attack can't move those pixels, and ε is in another unit.
To show what that hides, compare `CrippledPgd` on `standardise(x)` with an honest attack on `Standardised(model)`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.attacks import Ball, ascend, step_size
from harp.attacks.fast_forward import frozen


def standardise(x: Tensor) -> Tensor:
    """Images with mean 0 and deviation 1 each, as the authors' network sees them (TensorFlow's function of pixels)."""
    flat = x.flatten(1)
    least = 1 / (255 * math.sqrt(flat.shape[1]))  # theirs is 1/√n for pixels up to 255
    flat = (flat - flat.mean(1, keepdim=True)) / flat.std(1, correction=0, keepdim=True).clamp_min(least)
    return flat.view_as(x)


class Standardised(nn.Module):
    """A network that was trained on standardised images, as one of plain images: what an honest attack attacks."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        """The logits of a batch of [0, 1] images."""
        logits: Tensor = self.net(standardise(x))
        return logits


@dataclass(frozen=True)
class CrippledPgd:
    """The authors' attack: PGD on standardised images, whose ball it leaves by clipping to [0, 1]."""

    epsilon: float = 0.03
    step: float | None = 0.007
    steps: int = 10
    norm: str = "linf"

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """What it makes of standardised images `x`."""
        ball = Ball(self.epsilon, self.norm)
        with torch.no_grad(), frozen(model, x) as net:
            loss = lambda z: F.cross_entropy(z, y, reduction="none")  # noqa: E731
            return ascend(net, x, ball.random(x), loss, ball, step_size(self.step, self.epsilon), self.steps)
