"""S2AP: learn scores whose neighbours are good too.

Piras, Zhao, Brau, Pintor, Wressnegger, Biggio: "S2AP: Score-space Sharpness Minimization for Adversarial Pruning",
2025. While the masks are learned, the robust loss is minimised at the worst scores near the current ones,

    s' = s + ρ ‖s‖ g / ‖g‖   a layer,   g = ∂L/∂s,        s ← s - lr · ∂L/∂s at s'

so that a small step of the scores does not change the mask. It is an option of every method that learns scores.

The authors' code was not available; the rule above is our reading of the paper: the perturbation of sharpness-aware
minimisation (Foret et al. 2021), relative to the scores' norm in each layer as in adversarial weight perturbation
(Wu et al. 2020). Images are attacked once, before the scores are moved, and both passes use them. Batch norms take
their running statistics from the second pass only. With several processes, all move the scores by the gradient of the
whole batch. If each used its own part, scores and what is learned from them would differ between processes.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from harp.errors import ModelError
from harp.models.modes import Logits
from harp.pruning.methods.base import Loss, TwoPartLoss
from harp.pruning.units import Units
from harp.system.distributed.sync_batchnorm import beside


def sharpness_aware(objective: Loss, units: Units, perturb: Callable[[list[Tensor | None]], None]) -> Loss:
    """An objective at the worst scores near the current ones.

    `perturb` moves the scores to the worst ones, given the gradients of the weights. They stay there until the pruner
    has taken the gradient of the loss.
    """
    if not isinstance(objective, TwoPartLoss):
        raise ModelError("sharpness needs an objective with `attack` and `loss`: see harp.training.objectives")

    def loss_at_worst_scores(model: nn.Module, x: Tensor, y: Tensor, forward: Logits | None = None) -> Tensor:
        x_adv = objective.attack(model, x, y)
        statistics = [buffer.clone() for buffer in model.buffers()]
        gradients = torch.autograd.grad(objective.loss(beside(model), x, x_adv, y), units.weights, allow_unused=True)
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), statistics, strict=True):
                buffer.copy_(value)
        perturb([None if gradient is None else _summed(gradient) for gradient in gradients])
        return objective.loss(forward or model, x, x_adv, y)

    return loss_at_worst_scores


def _summed(gradient: Tensor) -> Tensor:
    """The sum over all processes; only its direction is used."""
    gradient = gradient.contiguous()  # `all_reduce` requires it
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(gradient)
    return gradient
