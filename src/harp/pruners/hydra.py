"""HYDRA: learn which weights to keep, at given rates.

Sehwag, Wang, Mittal, Jana: "HYDRA: Pruning Adversarially Robust Neural Networks", NeurIPS 2020.

Every weight w has a score s; a layer keeps the k weights of largest |s| (M = mask, ŵ = w·M). Straight-through:

    ∂L/∂s = ∂L/∂ŵ · w · sign(s)          for kept and pruned weights alike
    s₀ = sqrt(6 / fan-in) · w / max|w|    so that the first mask is the magnitude mask

Departures from the authors' code: a layer's count comes from an exact integer allocation instead of ceil(rate · n),
so that the whole network meets its budget to the weight; masks are found once per optimiser step instead of in every
forward pass (scores do not change in between); the loss is whatever objective the training uses. `sharpness` is the
radius of S2AP, a later paper's addition: see `s2ap.py`; 0 is HYDRA as published.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from harp.allocate import allocate
from harp.errors import RecipeError
from harp.masks import Masks, top_k
from harp.pruners.base import Latent, Objective, ParameterGroup
from harp.pruners.s2ap import SharpnessAware
from harp.units import Units


class Hydra(Latent):
    """Learn scores; the rates are a strategy's (the paper's: uniform)."""

    scores: nn.ParameterList

    def __init__(
        self, units: Units, keep: float, strategy: str | Mapping[str, float] = "uniform", sharpness: float = 0.0
    ) -> None:
        super().__init__(units, keep)
        self.counts = allocate(strategy, units, self.total)
        self.scores = nn.ParameterList(nn.Parameter(initial_scores(weight)) for weight in units.weights)
        self.sharpness = sharpness
        self._unperturbed: list[Tensor] = []
        if not 0 <= sharpness < math.inf:
            raise RecipeError(f"sharpness {sharpness:.6g}: give S2AP's radius, like 0.01, or 0 for none")
        if sharpness and not self.learned_scores():
            raise RecipeError(f"sharpness {sharpness:.6g}: {type(self).__name__} learns no scores that it could act on")

    def learned_scores(self) -> list[nn.Parameter]:
        """The scores that are learned: all."""
        return list(self.scores)

    def latents(self) -> list[ParameterGroup]:
        """The scores."""
        return [{"params": self.learned_scores()}]

    def wrap(self, objective: Objective) -> Objective:
        """With S2AP, the loss at the worst scores near the current ones."""
        return SharpnessAware(self, objective) if self.sharpness else objective

    @property
    def prunable(self) -> list[nn.Parameter]:
        """The weights."""
        return self.units.weights

    @torch.no_grad()
    def perturb(self, gradients: list[Tensor | None]) -> None:
        """Move each layer's scores by `sharpness` times their norm along their gradient, for one pass."""
        self._restore()
        self._unperturbed = [score.detach().clone() for score in self.scores]
        for score, dense, gradient in zip(self.scores, self.dense, gradients, strict=True):
            if gradient is not None:
                slope = gradient * dense * score.sign()
                score.add_(slope, alpha=self.sharpness * float(score.norm() / slope.norm().clamp_min(1e-12)))
        self.write(self.current())

    def after_backward(self) -> None:
        """Pull the gradients back where they were taken, then leave the perturbed scores."""
        super().after_backward()
        self._restore()

    @torch.no_grad()
    def _restore(self) -> None:
        for score, value in zip(self.scores, self._unperturbed, strict=bool(self._unperturbed)):
            score.copy_(value)
        self._unperturbed = []

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
