"""R-ADMM: train adversarially while the weights are pulled towards sparse ones, then cut.

Ye, Xu, Liu, Cheng, Lambrechts, Zhang, Zhou, Ma, Wang, Lin: "Adversarial Robustness vs. Model Compression, or Both?",
ICCV 2019. Each layer l must lie in S_l = {at most k_l weights are not zero}. Beside the weights W there are a sparse
copy Z and a scaled dual variable U, at first Z = Proj(W) and U = 0:

    every step          SGD on  L(W) + Σ_l ρ/2 ‖W_l - Z_l + U_l‖²
    every T epochs      ρ ← 1.3 ρ,   Z ← Proj(W + U),   U ← U + W - Z
    projection          Proj keeps the k_l entries of largest magnitude and zeroes the others; with channels as units,
                        the k_l of largest l2 norm
    at the end          the masks are Proj(W)'s; fine-tuning keeps them

Within a period the authors let the learning rate fall to a tenth twice, and the next period starts again from the full
rate: that is the schedule `sawtooth`, whose ten periods are those of the default `period` where ten divides the epochs.
U is not rescaled when ρ grows, as in the authors' code (textbook ADMM would divide it by the growth).

Departures from the authors' code:
- counts are exact integers that meet the budget: theirs are cut at a percentile, with < for the weights and > for the
  masks, so that where (n - 1) · sparsity is whole one weight survives outside its mask and is never trained again;
- Z and U are part of the saved state: theirs are created in epoch 0 only, and a resumed training has none;
- every prunable layer takes part, linear layers too, as in HARP's comparison (theirs: convolutions);
- the attack runs in eval mode, as everywhere here: theirs moves the batch norms' statistics in every attack step;
- the epoch is chosen by validation, if there is any, with the weights cut (theirs: by the test loss);
- ρ is one number for all layers as in their code, where the paper allows one a layer.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from harp.pruning.allocation import allocate
from harp.pruning.masks import Masks
from harp.pruning.methods.base import Layout, Phase, Plan, Pruner, as_units, check_option, largest
from harp.pruning.papers import Criterion, Paper, Taxonomy
from harp.pruning.units import Units

AUTHORS_PERIOD = 20


class Admm(Pruner):
    """R-ADMM: pull the weights towards sparse ones while all of them train, and cut at the end.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        strategy: how many units each layer keeps.
        rho: how hard the pull is at first.
        rho_growth: the factor of `rho` at every update; 1: it stays.
        period: epochs between updates of the sparse copy; None: a tenth of the training (the authors' 20 if unknown).

    Example:
        pruner = harp.Admm(harp.Weights(model), keep=0.1)
        harp.fit(model, batches, harp.Natural(), pruner, epochs=1, lr=0.1)
    """

    title = "R-ADMM"
    paper = Paper(
        "Adversarial Robustness vs. Model Compression, or Both?",
        ("Ye", "Xu", "Liu", "Cheng", "Lambrechts", "Zhang", "Zhou", "Ma", "Wang", "Lin"),
        "ICCV",
        2019,
        "https://arxiv.org/abs/1903.12561",
    )
    taxonomy = Taxonomy(Criterion.SOLVER)
    # HARP's comparison: 100/100/100 epochs, and in both later stages the settings of its fork: rate 0.01, a tenth of it
    # after 80 epochs of fine-tuning, decay 1e-4. The fork warms up for 15 epochs and updates every 30; here the updates
    # are the authors' ten (every 20 of 200 epochs), at which `sawtooth` restarts.
    layout = Layout(
        prune=Phase(100, lr=0.01, weight_decay=1e-4, schedule="sawtooth"),
        finetune=Phase(100, lr=0.01, weight_decay=1e-4, schedule={"name": "steps", "at": [0.8]}),
    )
    remembered = (*Pruner.remembered, "counts", "period", "epoch", "rho")

    def __init__(
        self,
        units: Units | nn.Module,
        keep: float | str,
        strategy: str | Mapping[str, float] = "uniform",
        rho: float = 1e-3,
        rho_growth: float = 1.3,
        period: int | None = None,
    ) -> None:
        check_option(0 < rho < math.inf, "rho", rho, "give a positive number, like 0.001")
        check_option(1 <= rho_growth < math.inf, "rho_growth", rho_growth, "give a factor of at least 1 (= rho stays)")
        valid = period is None or period >= 1
        check_option(valid, "period", period, "give at least 1 epoch, or none for a tenth of the training")
        units = as_units(units)
        super().__init__(units, units.total(keep))
        self.counts = allocate(strategy, units, self.total)
        self.rho, self.rho_growth, self.period = rho, rho_growth, period
        self.epoch = 0
        weights = [weight.detach() for weight in units.weights]
        self.add_buffers("z", project(units, weights, self.counts))
        self.add_buffers("u", [torch.zeros_like(weight) for weight in weights])

    def layers(self) -> Iterator[tuple[nn.Parameter, Tensor, Tensor]]:
        """W, Z and U of each layer."""
        return zip(self.units.weights, self.layer_buffers("z"), self.layer_buffers("u"), strict=True)

    def start(self, plan: Plan | None = None) -> None:
        """Derive the period from the training's length, unless an option or a saved state gives it."""
        if self.period is None and plan is not None:
            self.period = max(1, plan.epochs // 10)

    @torch.no_grad()
    def after_backward(self) -> None:
        """Add the gradient of the pull, ρ (W - Z + U); an unused weight has no other."""
        for weight, z, u in self.layers():
            if weight.requires_grad:
                pull = (weight - z + u).mul_(self.rho)
                weight.grad = pull if weight.grad is None else weight.grad.add_(pull)

    @torch.no_grad()
    def after_epoch(self) -> None:
        """Update the sparse copy and the dual variable when the coming epoch begins a period."""
        self.epoch += 1
        if self.epoch % (self.period or AUTHORS_PERIOD):
            return
        self.rho *= self.rho_growth
        sparse = project(self.units, [weight + u for weight, _, u in self.layers()], self.counts)
        for (weight, z, u), projected in zip(self.layers(), sparse, strict=True):
            z.copy_(projected)
            u.add_(weight - projected)

    def masks(self) -> Masks:
        """The largest units of each layer."""
        return largest(self.units, self.units.strength(self.units.weights, 2), self.counts)

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        """The distance of the weights from the sparse copy, relative to their norm, and ρ."""
        distance = math.hypot(*(float((weight - z).norm()) for weight, z, _ in self.layers()))
        norm = math.hypot(*(float(weight.norm()) for weight in self.units.weights))
        return {"residual": distance / norm if norm else 0.0, "rho": self.rho}


def project(units: Units, values: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """The nearest tensors with at most so many nonzero units in each layer."""
    masks = largest(units, units.strength(values, 2), counts)
    return [torch.where(mask, value, 0.0) for mask, value in zip(masks.values(), values, strict=True)]
