"""S2AP: learn scores whose neighbours are good too.

Piras, Zhao, Brau, Pintor, Wressnegger, Biggio: "S2AP: Score-space Sharpness Minimization for Adversarial Pruning",
2025. While masks are searched for, the robust loss is minimised at the worst scores near the current ones,

    s' = s + ρ ‖s‖ g / ‖g‖   a layer,   g = ∂L/∂s,        s ← s - lr · ∂L/∂s at s'

so that the mask does not change by a small step of the scores. It is a switch on every method that learns scores.

The authors' code was not at hand; the rule above is our reading of the paper: the perturbation of sharpness-aware
minimisation (Foret et al. 2021), relative to the scores' norm in each layer as in adversarial weight perturbation
(Wu et al. 2020). Images are attacked once, before the scores are moved, and both passes use them. Batch norms take
their running statistics from the second pass only. Several processes move the scores by the gradient of the whole
batch, as one would: were each to follow its own part, their scores would differ in sign, and what they learn with it.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from harp.errors import ModelError
from harp.models.modes import Logits
from harp.pruning.methods.base import Loss, TwoPartLoss
from harp.system.distributed.sync_batchnorm import beside


class Scored(Protocol):
    """A method whose scores can be moved for one loss pass."""

    def perturb(self, gradients: list[Tensor | None]) -> None:
        """Put the worst scores near the current ones in force, given the gradients on the weights."""
        ...

    @property
    def prunable(self) -> list[nn.Parameter]:
        """The weights."""
        ...


class SharpnessAware:
    """An objective at the worst scores near a pruner's."""

    def __init__(self, pruner: Scored, objective: Loss) -> None:
        if not isinstance(objective, TwoPartLoss):
            raise ModelError("sharpness needs an objective with `attack` and `loss`: see harp.training.objectives")
        self.pruner, self.objective = pruner, objective

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, forward: Logits | None = None) -> Tensor:
        """The loss of a batch at the perturbed scores, which stay in force until its gradient is taken."""
        objective = self.objective
        x_adv = objective.attack(model, x, y)
        statistics = [buffer.clone() for buffer in model.buffers()]
        weights = self.pruner.prunable
        gradients = torch.autograd.grad(objective.loss(beside(model), x, x_adv, y), weights, allow_unused=True)
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), statistics, strict=True):
                buffer.copy_(value)
        self.pruner.perturb([None if gradient is None else _summed(gradient) for gradient in gradients])
        return objective.loss(forward or model, x, x_adv, y)


def _summed(gradient: Tensor) -> Tensor:
    """The sum over all processes: only its direction matters."""
    gradient = gradient.contiguous()  # what is exchanged must be
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(gradient)
    return gradient
