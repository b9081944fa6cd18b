"""Tandem: learn weights, scores and rates together. Our own method, and the default of `harp prune`.

HYDRA and HARP freeze the weights while they learn the masks, and their scores move at a speed that depends on the size
of a layer's gradients. In a short training, or with a few hundred kept weights, most masks then hardly differ from the
magnitude mask, and the kept weights do not fit together until fine-tuning. Here

    scores     ∂L/∂s as in HYDRA, but scaled in each layer to the norm  p ‖s‖   (p = `pace`)
    weights    ∂L/∂w = ∂L/∂ŵ · M · q   on kept weights; biases and norms as always   (q = `share`)
    rates      as in HARP: from a strategy's, under a budget that falls to the target in the first half of the training

    q = √(10 keep), at most 1

so a step moves every layer's scores by the same share of their size, independent of width, depth and the scale of the
loss (as layer-wise learning rates do: You et al. 2017), and kept weights follow their masks slowly. Pruned weights only
decay, so a weight that comes back is a trained one. With a large budget, weights train at full speed; with a small one
the masks must settle first.

`benchmarks/` measures the gain of each part: `share` 0, `start` 1, `reach` 0 and the strategy are the ablations, HYDRA
is the rest.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from harp.pruning.methods.base import ParameterGroup, check_option
from harp.pruning.methods.harp import Harp
from harp.pruning.papers import Criterion, Taxonomy
from harp.pruning.units import Units
from harp.system import numbers


class Tandem(Harp):
    """Learn weights, scores and rates together; every layer's scores move at one pace. Our own.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        strategy: the strategy of the first rates.
        pace: how far a step of learning rate 1 moves a layer's scores, relative to their norm.
        share: the weights' gradients relative to those of ordinary training; 0 freezes them, as HYDRA does. Default:
            the square root of ten times `keep`, at most 1.
        start: the first budget relative to the target; at most the whole network.
        reach: how far a quota can move in the training; 0 leaves the rates to the strategy.
        sharpness: the radius of S2AP; 0 is without it.

    Example:
        pruner = harp.Tandem(harp.Weights(model), keep=0.1)
        harp.fit(model, batches, harp.Natural(), pruner, epochs=1, lr=0.1)
    """

    title = "Tandem, a method of HARP's developers"
    taxonomy = Taxonomy(Criterion.SCORE, strategy="lamp")

    def __init__(
        self,
        units: Units | nn.Module,
        keep: float | str,
        strategy: str | Mapping[str, float] = "blend",
        pace: float = 0.02,
        share: float | None = None,
        start: float = 8.0,
        reach: float = 2.0,
        sharpness: float = 0.0,
    ) -> None:
        if share is None:
            share = math.sqrt(min(1.0, 10 * numbers.share(keep)))
        check_option(0 < pace < math.inf, "pace", pace, "give a positive number, like 0.02")
        check_option(0 <= share < math.inf, "share", share, "give a positive number, like 0.1, or 0 for frozen weights")
        super().__init__(units, keep, strategy, start=start, reach=reach, sharpness=sharpness)
        self.pace, self.share = pace, share
        for dense in self.dense:
            dense.requires_grad_(share > 0)

    def trainable(self) -> list[ParameterGroup]:
        """Scores, weights, and all else that the model trains."""
        if not self.share:
            return super().trainable()
        return [{"params": [*self.scores, *self.dense, *self.train_others()]}]

    def after_backward(self) -> None:
        """Kept weights take their share of the gradient."""
        if self.share:
            for weight, dense in zip(self.units.weights, self.dense, strict=True):
                kept = weight.detach() != 0
                dense.grad = None if weight.grad is None else weight.grad * kept * self.share
        super().after_backward()

    @torch.no_grad()
    def pull(self, gradients: list[Tensor | None]) -> None:
        """Quotas as in HARP; scores take the direction of the gradient."""
        super().pull(gradients)
        for score in self.scores:
            if score.grad is not None:
                score.grad.mul_(self.pace * score.detach().norm() / score.grad.norm().clamp_min(1e-12))
