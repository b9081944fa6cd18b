"""HARP: learn how many and which units each layer keeps.

Zhao, Wressnegger: "Holistic Adversarially Robust Pruning", ICLR 2023. Scores s as in HYDRA, one quota r a layer:

    rate            a = g(r) = (a_max - a_min) σ(r) + a_min,   a_min = 0.1 a_t,  a_max = 1
    kept            k = n - floor((1 - a) n)
    budget loss     L_HW = max(Σ a n / (a_t N) - 1, 0)
    objective       L = L_robust + γ L_HW,   γ = e · step in epoch e = 1, 2, ... until L_HW is met, then frozen
    gradients       ∂L/∂s as in HYDRA,   ∂L/∂r = (Σ ∂L/∂ŵ · w) g'(r) + γ n g'(r) / (a_t N) while over budget
    first quotas    r₀ = log((a_init - a_min) / (a_max - a_init)),   a_init = 0.1 everywhere, or a strategy's rates

With channels as units, kept = round(a C), and what is spent is no longer Σ a n: L_HW = max(cost(a) / budget - 1, 0)
with the cost of the units at hand, a_t is the one rate of all layers that meets the budget, a_init = 1 and the step of
γ is twice as large.

The paper's ⟨·⟩ in ∂L/∂r is a sum over all entries of the layer, kept or not, as in the authors' code.

Departures from the authors' code:
- the budget is an integer, and the answer meets it exactly: the learned rates are scaled to it and rounded (theirs is
  met up to the tolerance of the stop rule and one weight a layer);
- an epoch may be chosen only while the soft rates are at the budget (theirs: ever after it was met once);
- a_init is at least the target: from 0.1 a target of 0.3 would never be left by the budget loss;
- quotas are their own parameter group, with learning rate, momentum and decay of their own if wished (default: the
  same as the scores'; decay pulls r to 0, i.e. rates up, and is part of why small layers stay dense);
- the step of γ may follow from the length of the training, see `paced_step`; the paper's is 0.01 at 391 steps an epoch.
"""

import logging
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from harp.allocate import allocate
from harp.apportion import nearest
from harp.errors import RecipeError
from harp.masks import Masks
from harp.pruners.base import ParameterGroup, Plan
from harp.pruners.hydra import Hydra
from harp.units import Units

logger = logging.getLogger("harp")


class Harp(Hydra):
    """Learn scores and rates together.

    Arguments:
        initial_rate: the rate of the strategy that the quotas start from, as a share of the whole network's cost;
            None: the paper's for such units, 0.1 for weights and 1 for channels.
        initial_strategy: the strategy that the quotas start from.
        gamma_step: how much γ grows an epoch; None: paced by the length of the training (the paper's if unknown).
        quota_lr, quota_momentum, quota_weight_decay: the quotas' own; None: the optimiser's.
        sharpness: the radius of S2AP; 0 is HARP as published.
    """

    remembered = (*Hydra.remembered, "unpaced", "step", "epoch", "reached", "gamma")

    def __init__(
        self,
        units: Units,
        keep: float,
        initial_rate: float | None = None,
        initial_strategy: str | Mapping[str, float] = "uniform",
        gamma_step: float | None = None,
        quota_lr: float | None = None,
        quota_momentum: float | None = None,
        quota_weight_decay: float | None = None,
        sharpness: float = 0.0,
        published: bool = False,
    ) -> None:
        self.published = published  # placeholder: nothing reads it yet
        initial_rate = units.initial_rate if initial_rate is None else initial_rate
        if not 0 < initial_rate <= 1:
            raise RecipeError(f"initial_rate {initial_rate:.6g}: give a share above 0 and at most 1")
        if gamma_step is not None and gamma_step <= 0:
            raise RecipeError(
                f"gamma_step {gamma_step:.6g}: give a positive number, or none to pace it by the training"
            )
        super().__init__(units, keep, sharpness=sharpness)
        self._options = {"lr": quota_lr, "momentum": quota_momentum, "weight_decay": quota_weight_decay}
        # Rates are a dozen scalars, read on the host at every step: they live there, in float64, since
        # n - floor((1 - a) n) is off by a few in float32 at millions of weights.
        self._low = torch.tensor(units.floors, dtype=torch.float64).clamp_min(0.1 * units.uniform_rate(self.total))
        self._span = torch.tensor(units.ceilings, dtype=torch.float64) - self._low
        rate = max(initial_rate, self.total / units.size)
        self.quotas = nn.Parameter(self._inverse(self._initial_rates(rate, initial_strategy)))
        self.unpaced = gamma_step is None
        self.step = units.gamma_step if gamma_step is None else gamma_step
        self.epoch = 1
        self.reached = False  # the target was met at the end of an epoch, and γ is frozen
        self.gamma = self.step

    def rates(self) -> Tensor:
        """a = g(r), one a layer."""
        return self._low + self._span * self.quotas.cpu().double().sigmoid()

    def budget_loss(self) -> Tensor:
        """L_HW: how far the soft rates are above the budget, relative to it."""
        return (self.units.cost(self.rates()) / self.total - 1).clamp_min(0)

    def latents(self) -> list[ParameterGroup]:
        """The scores, and the quotas as a group of their own."""
        own = {key: value for key, value in self._options.items() if value is not None}
        return [{"params": self.learned_scores()}, {"params": [self.quotas], **own}]

    def start(self, plan: Plan | None = None) -> None:
        """Pace γ by the training ahead, unless its step is given; write the first weights."""
        if self.unpaced and plan is not None:
            self.step = self.gamma = self.paced_step(plan)
            logger.info(
                "HARP: γ grows by %g an epoch, paced by %d epochs of %d steps", self.step, plan.epochs, plan.steps
            )
            self.unpaced = False  # a resumed training keeps the pace it has
        super().start(plan)

    @torch.no_grad()
    def current(self) -> Masks:
        """Top |s| at the rates' counts, n - floor((1 - a) n) for weights, within the layers' limits."""
        return self.top(self.units.counts(self.rates().tolist()))

    def masks(self) -> Masks:
        """Top |s| at the integer counts nearest to the learned rates within the budget."""
        wish = self.rates().detach().numpy() * np.array(self.units.sizes)
        return self.top(nearest(wish, self.units, self.total))

    def pull(self, gradients: list[Tensor | None]) -> None:
        """Scores as in HYDRA; quotas by the sum of the mask's gradient and the budget loss, both through g'."""
        sums = torch.stack([self.quotas.new_zeros(()) if g is None else g.sum().to(self.quotas) for g in gradients])
        super().pull(gradients)
        with torch.enable_grad():  # a dozen scalars: autograd writes g' and the budget's gradient for us
            objective = (sums.cpu().double() * self.rates()).sum() + self.gamma * self.budget_loss()
            (self.quotas.grad,) = torch.autograd.grad(objective, self.quotas)

    def after_epoch(self) -> None:
        """Freeze γ at the first epoch that ends within budget (to four digits); else let it grow."""
        self.reached = self.reached or round(float(self.budget_loss().detach()), 4) == 0
        self.epoch += 1
        if not self.reached:
            self.gamma = self.step * self.epoch

    @property
    def ready(self) -> bool:
        """Whether the budget was met and the soft rates are still within one per cent of it."""
        return self.reached and float(self.budget_loss().detach()) < 0.01

    def metrics(self) -> dict[str, float]:
        """γ of the epoch, the budget loss and the soft density."""
        soft = float(self.units.cost(self.rates().detach())) / self.units.size
        return {"gamma": self.gamma, "budget_loss": float(self.budget_loss().detach()), "rate": soft}

    def paced_step(self, plan: Plan) -> float:
        """The step of γ at which the budget loss alone would meet the target after a fifth of the training.

        γ is not free of scale: its push adds up over optimiser steps and grows with 1/a_t. The paper's runs (20 epochs
        of 391 steps, step 0.01) meet the target about half-way, and a simulation of their quotas under the budget loss
        alone does after a fifth to a third, as the task's gradient holds them back. The simulation costs a fraction of
        a second, needs no data, and gives short trainings the step that plays the same part in them.
        """
        low, high = 1e-8, 1e4
        for _ in range(24):
            middle = (low * high) ** 0.5
            low, high = (low, middle) if self._meets_budget(middle, plan) else (middle, high)
        return float(f"{high:.2g}")

    def _meets_budget(self, step: float, plan: Plan, share: float = 0.2) -> bool:
        """Simulate SGD on the quotas under γ L_HW and weight decay for the first part of the training."""
        defaults = {"lr": plan.lr, "momentum": plan.momentum, "weight_decay": plan.weight_decay}
        own = {**defaults, **{key: value for key, value in self._options.items() if value is not None}}
        low, span = self._low.numpy(), self._span.numpy()
        quotas = self.quotas.detach().cpu().double().numpy()
        velocity = np.zeros_like(quotas)
        steps = plan.epochs * plan.steps
        for t in range(max(1, int(share * steps))):
            sigmoid = 1 / (1 + np.exp(-quotas.clip(-60, 60)))
            cost, gradient = self.units.slope(low + span * sigmoid)
            if cost <= self.total:
                return True
            slope = step * (1 + t // plan.steps) * (gradient / self.total) * span * sigmoid * (1 - sigmoid)
            velocity = own["momentum"] * velocity + slope + own["weight_decay"] * quotas
            quotas = quotas - own["lr"] * plan.shape(t / steps) * velocity
        return False

    def _initial_rates(self, rate: float, strategy: str | Mapping[str, float]) -> Tensor:
        sizes = torch.tensor(self.units.sizes, dtype=torch.float64)
        feasible = min(rate, self.units.spend(self.units.upper) / self.units.size)
        return torch.tensor(allocate(strategy, self.units, self.units.total(feasible)), dtype=torch.float64) / sizes

    def _inverse(self, rates: Tensor) -> Tensor:
        """g⁻¹, kept off the ends of the sigmoid, where no gradient moves a quota (the authors clip at 0.99 too)."""
        share = torch.where(self._span > 0, (rates - self._low) / self._span.clamp_min(1e-12), 0.5)
        return torch.logit(share.clamp(1e-4, 0.99)).to(self.dense[0].dtype)


class HarpRates(Harp):
    """HARP-r, the paper's ablation: rates only. Scores stay where the weights put them: masks nest by magnitude."""

    def learned_scores(self) -> list[nn.Parameter]:
        """None."""
        return []


class HarpScores(Hydra):
    """HARP-S, the paper's ablation: scores only, every layer at the target rate; HYDRA under HARP's training.

    The authors' released code never sets its quotas in this mode and so runs at a density of 0.73.
    """

    same_as = "hydra"

    def __init__(self, units: Units, keep: float, sharpness: float = 0.0) -> None:
        super().__init__(units, keep, sharpness=sharpness)
