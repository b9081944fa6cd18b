"""MAD: keep the weights that matter for the damage of an attack.

Lee, Kim, Ro: "Masking Adversarial Damage: Finding Adversarial Saliency for Robust and Sparse Network", CVPR 2022.

The weights are frozen. For every batch, soft masks m = softplus(u) are optimised that undo the attack's damage,

    min_u CE(f_{W⊙m}(x'), y)      20 steps of Adam from m = 1, m in [10⁻⁴, 1]

and the damage D = W ⊙ (1 − m) is measured by the second-order change of the loss that it causes, with the block K-FAC
factors of the masked network on the true labels (see `_kfac.py`):

    saliency_ij = ½ G_ii D_ij (D A)_ij       averaged over the batches

The weights of lowest saliency are pruned: over all layers at once, except for the last linear one, which loses the same
share of each of its rows (classes) as the whole network. Then the network is fine-tuned by MART's loss with a factor of
½ before its divergence.

Negative saliencies are pruned first. Many weights have a saliency of exactly 0, as their masks stayed at 1: among equal
ones the larger |W| stays. So before the first batch, the masks are those of the magnitudes.

Departures from the authors' code: ties are broken by |W| instead of by the sort, and counted; the counts are integers
that meet the budget exactly, so rows may differ by one; biases are neither masked nor pruned, as in every other method
here, so the factors have no columns for them; the factors are applied without forming them, layer by layer, and cover
groups, dilation and transposition; weights without factors use the diagonal of the Fisher matrix; the last linear layer
is the only one treated by rows (the authors' networks have no other).
"""

import logging
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from harp.attacks import Attack
from harp.errors import ModelError
from harp.models.modes import Logits, evaluating
from harp.pruning.allocation import allocate
from harp.pruning.masks import Masks, top_k
from harp.pruning.methods._kfac import fisher_products
from harp.pruning.methods.base import (
    AttackingLoss,
    Layout,
    Loss,
    ParameterGroup,
    Phase,
    Pruner,
    as_units,
    check_labels,
    check_option,
)
from harp.pruning.papers import Criterion, Paper, Taxonomy
from harp.pruning.rounding import best, flat
from harp.pruning.units import Units
from harp.system.numbers import share

logger = logging.getLogger("harp")

_LOW, _ONE = (math.log(math.expm1(mask)) for mask in (1e-4, 1.0))  # softplus of these: the limits of a soft mask


class Mad(Pruner):
    """Measure the adversarial saliency in one pass over the data, then prune once.

    Arguments:
        units: what may be pruned: `harp.Weights` under a budget of weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        strategy: how many weights each layer keeps; None: all layers compete, the last linear one keeps its share.
        mask_steps, mask_lr: the optimisation of a batch's soft masks.
        batches: how many batches to measure; None: all.

    Example:
        pruner = harp.Mad(harp.Weights(model), keep=0.1, mask_steps=2)
        harp.fit(model, batches, harp.PgdTraining(steps=1), pruner, epochs=1, lr=0.1)
    """

    title = "MAD"
    paper = Paper(
        "Masking Adversarial Damage: Finding Adversarial Saliency for Robust and Sparse Network",
        ("Lee", "Kim", "Ro"),
        "CVPR",
        2022,
        "https://arxiv.org/abs/2204.02738",
    )
    taxonomy = Taxonomy(Criterion.SCORE, strategy="global")
    passes = 1
    granular = True
    finetuning: ClassVar[Mapping[str, Any]] = {"name": "mart", "beta": 0.5}
    # The authors' code: 60 epochs from 0.1 before and after, a tenth at 50 % and 75 %, decay 2e-4, steps of 0.0069.
    # HARP's table says 60/20/60, where 20 are the steps of a batch's masks (`mask_steps`): there is one pass over the
    # data. The authors' 200 natural epochs before all this are left out, as in that table. Their ε is 0.03; here it is
    # the recipe's, and the step is in proportion to it: 0.0069 at 8/255.
    layout = Layout(
        pretrain=Phase(60, lr=0.1, weight_decay=2e-4, schedule="steps"),
        finetune=Phase(60, lr=0.1, weight_decay=2e-4, schedule="steps"),
        step=0.0069 / (8 / 255),
    )
    remembered = (*Pruner.remembered, "seen")

    saliency: nn.ParameterList

    def __init__(
        self,
        units: Units | nn.Module,
        keep: float | str,
        strategy: str | Mapping[str, float] | None = None,
        mask_steps: int = 20,
        mask_lr: float = 0.1,
        batches: int | None = None,
    ) -> None:
        check_option(mask_steps >= 1, "mask_steps", mask_steps, "give at least 1")
        check_option(0 < mask_lr < math.inf, "mask_lr", mask_lr, "give a number above 0")
        check_option(batches is None or batches >= 1, "batches", batches, "give at least 1, or none for all")
        units = as_units(units)
        super().__init__(units, units.total(keep))
        self.mask_steps, self.mask_lr, self.batches = mask_steps, mask_lr, batches
        self.head = _last_linear(units)
        if strategy is None:
            self.lower, self.upper = _limits(units, self.total, share(keep), self.head)
        else:
            self.lower = self.upper = allocate(strategy, units, self.total)
        # Parameters, so that the loop averages a batch's measurement, stored as their gradient, over the ranks.
        self.saliency = nn.ParameterList(nn.Parameter(_zeros_like(w), requires_grad=False) for w in units.weights)
        self.loss = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.seen = 0
        self._samples = 0

    def wrap(self, objective: Loss) -> Loss:
        """Measure on the images that the objective attacks; its loss is not used."""
        if not isinstance(objective, AttackingLoss):
            raise ModelError(
                "MAD needs an objective with an `attack`: use harp.fit with one, such as harp.PgdTraining()"
            )
        return partial(self._measure, objective.attack)

    def trainable(self) -> list[ParameterGroup]:
        """The measurements, which have no gradient in the optimiser's step, so it does not move them.

        `requires_grad` of the model stays as it is, since data parallelism refuses a model with nothing to train.
        """
        return [{"params": list(self.parameters()), "weight_decay": 0.0}]

    def _measure(self, attack: Attack, model: nn.Module, x: Tensor, y: Tensor, forward: Logits | None = None) -> Tensor:
        """The adversarial loss of a batch; its saliencies become gradients, weighted by the number of images."""
        if self.batches is not None and self.seen >= self.batches:
            return self.loss.detach().clone()  # of the measured batches, so that the epoch's mean is theirs
        check_labels(self, x, y, "use another method")
        x_adv = attack(model, x, y)
        weights = dict(zip(self.units.names, (w.detach() for w in self.units.weights), strict=True))
        with evaluating(model), torch.autocast(x.device.type, enabled=False):
            latents, loss = soft_masks(model, weights, x_adv, y, self.mask_steps, self.mask_lr)
            masked = {name: _masked(weight, latents[name]) for name, weight in weights.items()}
            damage = {name: removed(weight, latents[name]) for name, weight in weights.items()}
            losses = partial(F.cross_entropy, reduction="sum")
            parameters = dict(zip(self.units.names, self.saliency, strict=True))
            for name, product in fisher_products(model, masked, damage, x_adv, y, losses):
                _add_gradient(parameters[name], 0.5 * len(x) * damage[name] * product)
        _add_gradient(self.loss, len(x) * loss)
        self._samples += len(x)
        return loss

    @torch.no_grad()
    def after_backward(self) -> None:
        """Add the batch to the running means, and leave the optimiser no gradient."""
        if self._samples:
            self.seen += 1
            for mean in self.parameters():
                if mean.grad is not None:
                    mean.add_((mean.grad / self._samples - mean) / self.seen)
                    mean.grad = None
            self._samples = 0

    def after_epoch(self) -> None:
        """Log how many weights are ranked by |W|."""
        ties = int(self.metrics()["ties"])
        logger.info("MAD: %d of %d weights have a saliency of 0; among them |W| decides", ties, self.units.size)

    def metrics(self) -> dict[str, float]:
        """How many weights have a saliency of exactly 0."""
        return {"ties": float(sum(int((saliency == 0).sum()) for saliency in self.saliency))}

    def masks(self) -> Masks:
        """The highest saliencies, the larger |W| among equal ones; the last linear layer row by row."""
        weights = self.units.weights
        scores = [order(*pair) for pair in zip(self.saliency, weights, strict=True)]
        counts = best([flat(score) for score in scores], self.lower, self.upper, self.total)
        kept = [(by_rows if i == self.head else top_k)(scores[i], count) for i, count in enumerate(counts)]
        return self.by_name(mask.to(weight.device) for mask, weight in zip(kept, weights, strict=True))


def soft_masks(
    model: nn.Module, weights: Mapping[str, Tensor], x: Tensor, y: Tensor, steps: int, lr: float
) -> tuple[dict[str, Tensor], Tensor]:
    """The latents u of the soft masks that lower the loss at these images, and the loss before."""
    latents = {name: torch.full_like(weight, _ONE, requires_grad=True) for name, weight in weights.items()}
    adam = torch.optim.Adam(latents.values(), lr=lr)
    losses = []
    for _ in range(steps):
        masked = {name: _masked(weight, latents[name]) for name, weight in weights.items()}
        loss = F.cross_entropy(functional_call(model, masked, (x,)), y)
        gradients = torch.autograd.grad(loss, list(latents.values()), allow_unused=True)
        for latent, gradient in zip(latents.values(), gradients, strict=True):
            latent.grad = gradient
        adam.step()
        with torch.no_grad():
            for latent in latents.values():
                latent.clamp_(_LOW, _ONE)
        losses.append(loss.detach())
    return {name: latent.detach() for name, latent in latents.items()}, losses[0]


def by_rows(scores: Tensor, count: int) -> Tensor:
    """Mark `count` positive scores of a matrix: equally many of each row, its best, and the best of the next ones."""
    per_row, remainder = divmod(count, len(scores))
    rank = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    next_ones = torch.where(rank == per_row, scores, -1.0)
    return (rank < per_row) | top_k(next_ones, remainder)


def _masked(weight: Tensor, latent: Tensor) -> Tensor:
    return weight * F.softplus(latent)


def removed(weight: Tensor, latent: Tensor) -> Tensor:
    """W (1 - m), and exactly 0 where the mask is 1, in spite of the rounding of softplus."""
    return torch.where(latent >= latent.new_tensor(_ONE), 0.0, weight * (1 - F.softplus(latent)))


def _add_gradient(parameter: nn.Parameter, value: Tensor) -> None:
    value = value.to(parameter.dtype)
    parameter.grad = value if parameter.grad is None else parameter.grad + value


def _zeros_like(weight: Tensor) -> Tensor:
    """Zeros of at least single precision, for means over many batches."""
    return torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))


def _last_linear(units: Units) -> int | None:
    owners = [units.model.get_submodule(name.rpartition(".")[0]) for name in units.names]
    return max((i for i, owner in enumerate(owners) if isinstance(owner, nn.Linear)), default=None)


def _limits(units: Units, total: int, keep: float, head: int | None) -> tuple[list[int], list[int]]:
    """The units' limits; the last linear layer keeps exactly its share, as near as the limits of the others allow."""
    lower, upper = list(units.lower), list(units.upper)
    if head is not None:
        least = max(lower[head], total - sum(upper) + upper[head])
        most = min(upper[head], total - sum(lower) + lower[head])
        lower[head] = upper[head] = min(max(round(keep * units.sizes[head]), least), most)
    return lower, upper


def order(saliency: Tensor, weight: Tensor) -> Tensor:
    """One number a weight that sorts as (saliency, |W|) does: the bits of both, side by side.

    The bits of positive floats sort as the floats do, those of negative ones in reverse. 32 bits of saliency and 31 of
    |W| are then those of a positive double, which is finite if both are. So a threshold can be selected, which is
    several times faster than sorting millions of weights by two keys.
    """
    if not saliency.isfinite().all():
        raise ModelError("a saliency is not finite: the network has diverged or its weights are damaged")
    first = (saliency.detach().cpu().float() + 0.0).view(torch.int32).long()  # + 0.0 turns -0.0 into 0.0
    second = weight.detach().cpu().float().abs().view(torch.int32).long()
    return ((torch.where(first < 0, ~first, first + 2**31) << 31) | second).view(torch.float64)
