"""TwinRep: train a product of two factors, cut once by magnitude, train on.

Li, Qiu, Zhang, Guo, Cheng: "Learning Adversarially Robust Sparse Networks via Weight Reparameterization", AAAI 2023.

    weights      W = U ⊙ V ⊙ M
    gradients    ∂L/∂U = ∂L/∂W ⊙ V ⊙ M,   ∂L/∂V = ∂L/∂W ⊙ U ⊙ M
    cut          once, early in the training: M keeps the largest |U ⊙ V| of the whole network

Weight decay on both factors acts as an l1 penalty on the weights: λ/2 (U² + V²) ≥ λ |U V|, equal where |U| = |V|.

Departures from the authors' code:
- the cut keeps exactly the budget, and within the layers' limits (theirs: a threshold);
- the product, not each factor, has the variance of Kaiming's initialisation. Theirs draws both factors by PyTorch's
  default, a variance of 1 / (9 fan-in²) for the product: with a norm behind every layer that is as good, but three
  linear layers without one (the classifier of the VGG16 here) stay at the saddle at zero;
- where whole channels are cut, the weights are the same products of single entries, and channels are ranked by the l2
  norm of the products that they mask; at least one a layer stays. This is not their Channel-Rep, another method, which
  multiplies each weight by a matrix over its output channels and regularises that.
"""

import math

import torch
from torch import Tensor, nn

from harp.pruning.masks import Masks
from harp.pruning.methods.base import Layout, ParameterGroup, Phase, Plan, Pruner, as_units, check_option, largest
from harp.pruning.papers import Criterion, Locality, Paper, Taxonomy
from harp.pruning.rounding import flat, highest
from harp.pruning.units import Units

PAPER_STEPS = 100 * 391  # the length of a training that is not known


class TwinRep(Pruner):
    """TwinRep: train a product of two factors from random weights, cut it once by global magnitude.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        cut: the share of the training after which weights are cut.
        seed: of the random numbers.

    Example:
        pruner = harp.TwinRep(harp.Weights(model), keep=0.1)
        harp.fit(model, batches, harp.Natural(), pruner, epochs=1, lr=0.1)
    """

    title = "TwinRep"
    paper = Paper(
        "Learning Adversarially Robust Sparse Networks via Weight Reparameterization",
        ("Li", "Qiu", "Zhang", "Guo", "Cheng"),
        "AAAI",
        2023,
    )
    taxonomy = Taxonomy(Criterion.REGULARISED, Locality.GLOBAL)
    from_scratch = True
    layout = Layout(prune=Phase(100, weight_decay=2e-4))  # the authors' code
    remembered = (*Pruner.remembered, "step", "is_cut")
    left: nn.ParameterList
    right: nn.ParameterList

    def __init__(self, units: Units | nn.Module, keep: float | str, cut: float = 0.1, seed: int = 0) -> None:
        check_option(0 <= cut < 1, "cut", cut, "give a share of the training from 0 to below 1")
        units = as_units(units)
        super().__init__(units, units.total(keep), seed)
        self.cut, self.step, self.is_cut = cut, 0, False
        self._length = PAPER_STEPS
        generator = self.generator()
        self.left, self.right = (nn.ParameterList(_factor(w, generator) for w in units.weights) for _ in range(2))
        self.add_buffers("mask", [torch.ones_like(weight, dtype=torch.bool) for weight in units.weights])

    def products(self) -> list[Tensor]:
        """U V of each layer."""
        return [u.detach() * v.detach() for u, v in zip(self.left, self.right, strict=True)]

    def current(self) -> Masks:
        """The masks that the weights have now: all ones before the cut."""
        return self.by_name(self.layer_buffers("mask"))

    def masks(self) -> Masks:
        """The masks of the cut; before it, those that it would give now."""
        if self.is_cut:
            return self.current()
        strengths = self.units.strength(self.products(), 2)
        counts = highest([flat(strength) for strength in strengths], self.units, self.total)
        return largest(self.units, strengths, counts)

    @property
    def ready(self) -> bool:
        """Whether the cut is done."""
        return self.is_cut

    def trainable(self) -> list[ParameterGroup]:
        """Both factors and all else that the model trains; of the weights only the gradients are needed."""
        return [{"params": [*self.left, *self.right, *self.train_others()]}]

    def start(self, plan: Plan | None = None) -> None:
        """Start from random weights."""
        self._length = PAPER_STEPS if plan is None else plan.epochs * plan.steps
        self.reset()
        self._cut_if_due()
        self.write(self.current())

    @torch.no_grad()
    def after_backward(self) -> None:
        """Pull the weights' gradients back to both factors."""
        layers = zip(self.left, self.right, self.take_gradients(), self.layer_buffers("mask"), strict=True)
        for u, v, gradient, mask in layers:
            u.grad = None if gradient is None else gradient.masked_fill_(~mask, 0.0) * v
            v.grad = None if gradient is None else gradient * u

    def after_step(self) -> None:
        """Cut if it is time, and write the new products."""
        self.step += 1
        self._cut_if_due()
        self.write(self.current())

    @torch.no_grad()
    def write(self, masks: Masks) -> None:
        """Put U V under these masks into the model."""
        for weight, product, mask in zip(self.units.weights, self.products(), masks.values(), strict=True):
            weight.copy_(product.masked_fill_(~mask, 0.0))

    def _cut_if_due(self) -> None:
        if not self.is_cut and self.step >= self.cut * self._length:
            for buffer, mask in zip(self.layer_buffers("mask"), self.masks().values(), strict=True):
                buffer.copy_(mask)
            self.is_cut = True


def _factor(weight: nn.Parameter, generator: torch.Generator) -> nn.Parameter:
    """One of two normal factors whose product has the variance 2 / fan-in."""
    drawn = torch.randn(weight.shape, generator=generator) * math.pow(2 / weight[0].numel(), 0.25)
    return nn.Parameter(drawn.to(weight))
