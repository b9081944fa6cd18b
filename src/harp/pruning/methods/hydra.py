"""HYDRA: learn which units to keep, at given rates.

Sehwag, Wang, Mittal, Jana: "HYDRA: Pruning Adversarially Robust Neural Networks", NeurIPS 2020.

Every weight w has a score s; a layer keeps the k weights of largest |s| (mask M, ŵ = w·M). Straight-through:

    ∂L/∂s = ∂L/∂ŵ · w · sign(s)          for kept and pruned weights alike
    s₀ = sqrt(6 / fan-in) · w / max|w|    so that the first mask is the magnitude mask

A unit that masks several weights, such as a channel, has one score: its gradient is the sum over these weights, and
their l1 norm takes the place of |w| in s₀.

Departures from the authors' code: a layer's count comes from an exact integer allocation instead of ceil(rate · n),
so that the whole network meets its budget exactly; masks are computed once per optimiser step instead of in every
forward pass (scores do not change in between); the loss is the objective of the training. `sharpness` is the radius of
S2AP, the addition of a later paper: see `s2ap.py`; 0 is HYDRA as published.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from harp.pruning.allocation import allocate
from harp.pruning.masks import Masks
from harp.pruning.methods.base import Latent, Loss, ParameterGroup, as_units, check_option, largest
from harp.pruning.methods.s2ap import sharpness_aware
from harp.pruning.papers import Criterion, Paper, Taxonomy
from harp.pruning.units import Units


class Hydra(Latent):
    """Learn scores; the rates are a strategy's (the paper's: uniform).

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        strategy: how many units each layer keeps: a name such as "uniform" or "lamp", or rates by layer.
        sharpness: the radius of S2AP; 0 is HYDRA as published.

    Example:
        pruner = harp.Hydra(harp.Weights(model), keep=0.1, strategy="lamp")
        harp.fit(model, batches, harp.Natural(), pruner, epochs=1, lr=0.1)
    """

    title = "HYDRA"
    paper = Paper(
        "HYDRA: Pruning Adversarially Robust Neural Networks",
        ("Sehwag", "Wang", "Mittal", "Jana"),
        "NeurIPS",
        2020,
        "https://arxiv.org/abs/2002.10509",
    )
    taxonomy = Taxonomy(Criterion.SCORE)
    scores: nn.ParameterList

    def __init__(
        self,
        units: Units | nn.Module,
        keep: float | str,
        strategy: str | Mapping[str, float] = "uniform",
        sharpness: float = 0.0,
    ) -> None:
        units = as_units(units)
        super().__init__(units, keep)
        self.counts = allocate(strategy, units, self.total)
        self.scores = nn.ParameterList(nn.Parameter(score) for score in initial_scores(units))
        self.sharpness = sharpness
        self._unperturbed: list[Tensor] = []
        check_option(0 <= sharpness < math.inf, "sharpness", sharpness, "give S2AP's radius, like 0.01, or 0 for none")
        usable = not sharpness or bool(self.learned_scores())
        check_option(usable, "sharpness", sharpness, f"{type(self).__name__} learns no scores, so give 0")

    def learned_scores(self) -> list[nn.Parameter]:
        """The scores that are learned: all."""
        return list(self.scores)

    def latents(self) -> list[ParameterGroup]:
        """The scores."""
        return [{"params": self.learned_scores()}]

    def wrap(self, objective: Loss) -> Loss:
        """With S2AP, the loss at the worst scores near the current ones."""
        return sharpness_aware(objective, self.units, self.perturb) if self.sharpness else objective

    @torch.no_grad()
    def perturb(self, gradients: list[Tensor | None]) -> None:
        """Move each layer's scores by `sharpness` times their norm along their gradient, for one pass."""
        self._restore()
        self._unperturbed = [score.detach().clone() for score in self.scores]
        pairs = zip(gradients, self.dense, strict=True)
        on_masks = self.units.gather([None if gradient is None else gradient * dense for gradient, dense in pairs])
        for score, gradient in zip(self.scores, on_masks, strict=True):
            if gradient is not None:
                slope = gradient * score.sign()
                score.add_(slope, alpha=self.sharpness * float(score.norm() / slope.norm().clamp_min(1e-12)))
        self.write(self.current())

    def after_backward(self) -> None:
        """Pull the gradients back at the perturbed scores, then restore the scores."""
        super().after_backward()
        self._restore()

    @torch.no_grad()
    def _restore(self) -> None:
        if self._unperturbed:
            for score, value in zip(self.scores, self._unperturbed, strict=True):
                score.copy_(value)
        self._unperturbed = []

    def current(self) -> Masks:
        """Top |s| of each layer at its count."""
        return self.top(self.counts)

    def masks(self) -> Masks:
        """The same: the counts are always exact."""
        return self.current()

    def pull(self, gradients: list[Tensor | None]) -> None:
        """Straight through the mask: the score's gradient is the mask's, with the sign of |s|'s derivative."""
        for score, gradient in zip(self.scores, gradients, strict=True):
            score.grad = None if gradient is None else gradient.mul_(score.detach().sign())

    def strengths(self) -> list[Tensor]:
        """|s|, by which units are chosen."""
        return [score.detach().abs() for score in self.scores]

    def top(self, counts: list[int]) -> Masks:
        """The masks of so many units of largest |s| in each layer."""
        return largest(self.units, self.strengths(), counts)


@torch.no_grad()
def initial_scores(units: Units) -> list[Tensor]:
    """HYDRA's scaled initialisation: scores in proportion to the units' strengths.

    Their signs are those of the weights (of the sum of a unit's weights); the masks do not depend on them.
    """
    scores = []
    signed = units.gather([weight.detach() for weight in units.weights])
    for strength, sign, fan in zip(units.strength(units.weights, 1), signed, units.fans, strict=True):
        most = strength.max().clamp_min(torch.finfo(strength.dtype).tiny)
        scores.append((strength if sign is None else strength.copysign(sign)) * (math.sqrt(6 / fan) / most))
    return scores
