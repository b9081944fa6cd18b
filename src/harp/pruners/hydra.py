"""HYDRA: learn which weights to keep, at given rates.

Sehwag, Wang, Mittal, Jana: "HYDRA: Pruning Adversarially Robust Neural Networks", NeurIPS 2020.

Every weight w has a score s; a layer keeps the k weights of largest |s| (M = mask, ŵ = w·M). Straight-through:

    ∂L/∂s = ∂L/∂ŵ · w · sign(s)          for kept and pruned weights alike
    s₀ = sqrt(6 / fan-in) · w / max|w|    so that the first mask is the magnitude mask

Departures from the authors' code: a layer's count comes from an exact integer allocation instead of ceil(rate · n),
so that the whole network meets its budget to the weight; masks are found once per optimiser step instead of in every
forward pass (scores do not change in between); the loss is whatever objective the training uses.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from harp.allocate import allocate
from harp.masks import Masks, top_k
from harp.pruners.base import Latent, ParameterGroup
from harp.units import Units


class Hydra(Latent):
    """Learn scores; the rates are a strategy's (the paper's: uniform)."""

    scores: nn.ParameterList

    def __init__(self, units: Units, keep: float, strategy: str | Mapping[str, float] = "uniform") -> None:
        super().__init__(units, keep)
        self.counts = allocate(strategy, units, self.total)
        self.scores = nn.ParameterList(nn.Parameter(initial_scores(weight)) for weight in units.weights)

    def latents(self) -> list[ParameterGroup]:
        """The scores."""
        return [{"params": list(self.scores)}]

    def current(self) -> Masks:
        """Top |s| of each layer at its count."""
        return self.top(self.counts)

    def masks(self) -> Masks:
        """The same: the counts are exact at every moment."""
        return self.current()

    def pull(self, gradients: list[Tensor | None]) -> None:
        """Straight through the mask: the score's gradient is the mask's, with the sign of |s|'s derivative."""
        for score, gradient in zip(self.scores, gradients, strict=True):
            score.grad = None if gradient is None else gradient.mul_(score.detach().sign())

    def top(self, counts: list[int]) -> Masks:
        """Mask each layer by its `count` largest |s|."""
        scores = zip(self.units.names, self.scores, counts, strict=True)
        return {name: top_k(score.detach().abs(), count) for name, score, count in scores}


@torch.no_grad()
def initial_scores(weight: Tensor) -> Tensor:
    """Scores in proportion to the weights, scaled by fan-in (HYDRA's equation for scaled initialisation)."""
    eta = math.sqrt(6 / weight[0].numel())
    largest = weight.detach().abs().max().clamp_min(torch.finfo(weight.dtype).tiny)
    return weight.detach() * (eta / largest)
