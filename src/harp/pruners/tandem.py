"""Tandem: learn weights and scores together, at rates between uniform and LAMP's. Our own method.

HYDRA freezes the weights while it learns which of them to keep, and its scores move at whatever speed the gradients of
a layer happen to have. In a short training, or at a budget of a few hundred weights, most layers' masks then hardly
leave the magnitude mask, and what is kept does not fit together until fine-tuning. Here

    scores     ∂L/∂s as in HYDRA, but scaled in each layer to the norm  p ‖s‖   (p = `pace`)
    weights    ∂L/∂w = ∂L/∂ŵ · M · q   on kept weights; biases and norms as always   (q = `share`)
    rates      fixed: by default  q · uniform + (1 − q) · LAMP  on the dense network (the strategy `blend`)

    q = √(10 keep), at most 1

so a step moves every layer's scores by the same share of their size, whatever its width, depth or the loss's scale
(the idea of layer-wise rates: You et al. 2017), and kept weights follow their masks slowly. There are no quotas and
no γ. What is not kept stays as it was but for weight decay, so a weight that comes back is a trained one. With much to
keep nothing is gained by searching slowly, and weights train at full speed; with little, masks must settle first.

What each part is worth is measured in `benchmarks/`: `share` 0 and the strategy are the ablations, HYDRA is the rest.
"""

from collections.abc import Mapping

from harp.allocate import evenness
from harp.errors import RecipeError
from harp.pruners.base import ParameterGroup
from harp.pruners.hydra import Hydra
from harp.units import Units


class Tandem(Hydra):
    """Learn weights and scores together; every layer's scores move at one pace. Our own.

    Arguments:
        pace: how far a step of learning rate 1 moves a layer's scores, relative to their norm.
        share: the weights' gradients relative to those of ordinary training; 0 freezes them, as HYDRA does. Default:
            the square root of ten times `keep`, at most 1.
    """

    def __init__(
        self,
        units: Units,
        keep: float,
        strategy: str | Mapping[str, float] = "blend",
        pace: float = 0.02,
        share: float | None = None,
        sharpness: float = 0.0,
    ) -> None:
        if not 0 < pace < float("inf"):
            raise RecipeError(f"pace {pace:.6g}: give a positive number, like 0.02")
        if share is None:
            share = evenness(keep)
        if not 0 <= share < float("inf"):
            raise RecipeError(f"share {share:.6g}: give a positive number, like 0.1, or 0 to freeze the weights")
        super().__init__(units, keep, strategy, sharpness)
        self.pace, self.share = pace, share
        for dense in self.dense:
            dense.requires_grad_(share > 0)

    def trainable(self) -> list[ParameterGroup]:
        """Scores, weights, and all else that the model trains."""
        if not self.share:
            return super().trainable()
        return [{"params": [*self.scores, *self.dense, *self._lend()]}]

    def after_backward(self) -> None:
        """Weights take their share of the gradient where they are kept; scores take its direction."""
        if self.share:
            for weight, dense in zip(self.units.weights, self.dense, strict=True):
                kept = weight.detach() != 0
                dense.grad = None if weight.grad is None else weight.grad * kept * self.share
        super().after_backward()
        for score in self.scores:
            if score.grad is not None:
                score.grad.mul_(self.pace * score.detach().norm() / score.grad.norm().clamp_min(1e-12))
