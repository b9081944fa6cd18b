"""HARP: learn how many and which units each layer keeps.

Zhao, Wressnegger: "Holistic Adversarially Robust Pruning", ICLR 2023. Scores s as in HYDRA, one quota r a layer:

    rate            a = g(r) = (a_max - a_min) σ(r) + a_min,   a_min = 0.1 a_t,  a_max = 1
    kept            k = n - floor((1 - a) n)
    budget loss     L_HW = max(Σ a n / (a_t N) - 1, 0)
    objective       L = L_robust + γ L_HW,   γ = e · step in epoch e = 1, 2, ... until L_HW is met, then frozen
    gradients       ∂L/∂s as in HYDRA,   ∂L/∂r = (Σ ∂L/∂ŵ · w) g'(r) + γ n g'(r) / (a_t N) while over budget
    first quotas    r₀ = log((a_init - a_min) / (a_max - a_init)),   a_init = 0.1 everywhere, or a strategy's rates

With channels as units, kept = round(a C), and the cost is no longer Σ a n: L_HW = max(cost(a) / budget - 1, 0) with the
cost of the units, a_t is the one rate of all layers that meets the budget, a_init = 1 and the step of γ is twice as
large. The paper's ⟨·⟩ in ∂L/∂r is a sum over all entries of the layer, kept or not.

`published=True` is that. In short trainings or with a few hundred kept weights its quotas diverge
(docs/reference/methods.md says why). So four things differ by default:

    budget          met at every step: one shift of all quotas, a = g(r + shift), brings the rates to the current
                    budget, which falls from `start` times the target to the target in the first half of the training
    quotas          r grows by  η clip(v / √(mean of v²), -1, 1)  a step, η falling to 0 so that no quota moves further
                    than `reach` in the whole training, whatever its length and optimiser
                    v = -mean of ∂L/∂ŵ · w over pruned weights of filters with a kept weight: a kept weight says
                    nothing about keeping more, and neither does a dead filter
    first quotas    the rates of a strategy that keeps every layer alive, at the target
    scores          chosen among weights on a path through the network (`connectivity.py`); a step moves a layer's
                    scores by at most their own norm times the learning rate

`benchmarks/README.md` has other variants that were tried, and what each of these differences gains.

Departures from the authors' code in both forms:
- the budget is an integer, and the masks meet it exactly: the learned rates are scaled to it and rounded (theirs meet
  it up to the tolerance of the stop rule and one weight a layer);
- an epoch may be chosen only while the soft rates are at the budget (theirs: ever after it was met once); rates that
  never came down to it are not scaled, LAMP's are used instead;
- a_init is at least the target: the budget loss would never move rates from 0.1 to a target of 0.3;
- quotas are their own parameter group, with learning rate, momentum and decay of their own if wanted (published: those
  of the scores; decay pulls r to 0, i.e. rates up, and is part of why small layers stay dense).
"""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from harp.errors import Diverged, ModelError, RecipeError
from harp.models.inputs import copied
from harp.pruning.allocation import allocate
from harp.pruning.connectivity import Paths, prefer
from harp.pruning.masks import Masks, top_k
from harp.pruning.methods.base import ParameterGroup, Plan, as_units, check_option
from harp.pruning.methods.hydra import Hydra
from harp.pruning.papers import Criterion, Locality, Paper, Taxonomy
from harp.pruning.rounding import nearest
from harp.pruning.units import Units

logger = logging.getLogger("harp")

_DESCENT = 0.5  # the part of the training in which the budget falls to the target
_DECAY = 0.95  # of the mean of v², a step
_TOLERANCE = 0.01  # the excess, relative to the budget, up to which it counts as met
_UNKNOWN_LENGTH = 1000  # steps that are assumed in a loop that does not tell its length
_REFRESH = 10  # steps between two searches for the weights on a path


class Harp(Hydra):
    """Learn scores and rates together.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        initial_strategy: the strategy of the first rates; None: `blend`, or `uniform` as published.
        published: exactly as in the paper, see the top of this file.
        start: the first budget relative to the target; at most the whole network.
        reach: how far a quota can move in the training (2: a rate by a factor of 7); 0 leaves rates to the strategy.
        initial_rate: published only: the rate of the strategy that the quotas start from, as a share of the whole
            network's cost; None: the paper's for such units, 0.1 for weights and 1 for channels.
        gamma_step: published only: how much γ grows an epoch; None: the paper's, 0.01 for weights, 0.02 for channels.
        quota_lr, quota_momentum, quota_weight_decay: published only: the quotas' own; None: the optimiser's.
        sharpness: the radius of S2AP; 0 is HARP without it.

    Example:
        pruner = harp.Harp(harp.Weights(model), keep=0.1)
        harp.fit(model, batches, harp.Natural(), pruner, epochs=1, lr=0.1)
    """

    title = "HARP"
    paper = Paper(
        "Holistic Adversarially Robust Pruning",
        ("Qi Zhao", "Christian Wressnegger"),
        "ICLR",
        2023,
        "https://openreview.net/forum?id=sAJDi9lD06L",
    )
    taxonomy = Taxonomy(Criterion.SCORE, Locality.GLOBAL)
    revision = 2
    spread: Tensor
    remembered = (*Hydra.remembered, "step", "epoch", "reached", "gamma", "done", "length", "shift")

    def __init__(
        self,
        units: Units | nn.Module,
        keep: float | str,
        initial_strategy: str | Mapping[str, float] | None = None,
        published: bool = False,
        start: float = 8.0,
        reach: float = 2.0,
        initial_rate: float | None = None,
        gamma_step: float | None = None,
        quota_lr: float | None = None,
        quota_momentum: float | None = None,
        quota_weight_decay: float | None = None,
        sharpness: float = 0.0,
    ) -> None:
        infinity = float("inf")
        check_option(1 <= start < infinity, "start", start, "give the first budget as a multiple, 1 or more, like 8")
        check_option(0 <= reach < infinity, "reach", reach, "give a positive number, like 2, or 0 for fixed rates")
        own = {"quota_lr": quota_lr, "quota_momentum": quota_momentum, "quota_weight_decay": quota_weight_decay}
        for name, value in {"initial_rate": initial_rate, "gamma_step": gamma_step, **own}.items():
            if value is not None and not published:
                raise RecipeError(f"{name} {value:.6g} is part of HARP as published: add published=true, or omit it")
        units = as_units(units)
        super().__init__(units, keep, sharpness=sharpness)
        first_rate, self.step = self.total / units.size, 0.0
        if published:
            rate = units.initial_rate if initial_rate is None else initial_rate
            self.step = units.gamma_step if gamma_step is None else gamma_step
            check_option(0 < rate <= 1, "initial_rate", rate, "give a share above 0 and at most 1")
            check_option(0 < self.step < infinity, "gamma_step", self.step, "give a positive number")
            first_rate = max(first_rate, rate)
        self.published, self.start_factor, self.reach = published, start, reach
        self._own = {name.removeprefix("quota_"): value for name, value in own.items() if value is not None}
        # There is one rate a layer, read on the CPU at every step. In float64: n - floor((1 - a) n) is off by a few in
        # float32 at millions of weights.
        self.low = torch.tensor(units.floors, dtype=torch.float64).clamp_min(0.1 * units.uniform_rate(self.total))
        self.span = torch.tensor(units.ceilings, dtype=torch.float64) - self.low
        strategy = initial_strategy or ("uniform" if published else "blend")
        self.quotas = nn.Parameter(self._inverse(self._initial_rates(first_rate, strategy)))
        self.register_buffer("spread", torch.zeros_like(self.quotas.detach()))  # the mean of v²
        self._safe = allocate("lamp", units, self.total)  # keeps every layer alive, whatever was learned
        self.gamma = self.step
        self.epoch = 1
        self.reached = False  # whether the target was met at the end of an epoch
        self.done, self.length = 0, 0  # steps of this training; 0 if its length is not known
        self.shift = 0.0  # of all quotas, which brings the rates to the current budget
        self.kept: list[Tensor] = []  # the current masks of the units, one a layer
        self._paths: Paths | None = None
        self._follows_paths = not published and units.kind == "weights"
        if self._follows_paths:
            self.add_buffers("open", [torch.ones_like(score, dtype=torch.bool) for score in self.scores])

    def rates(self) -> Tensor:
        """a = g(r), one a layer; by default at the shift that meets the current budget."""
        return self._rates(self.shift)

    def budget_loss(self) -> Tensor:
        """L_HW: the excess of the soft rates over the budget, relative to it."""
        return (self.units.cost(self.rates()) / self.total - 1).clamp_min(0)

    def latents(self) -> list[ParameterGroup]:
        """The scores, and as published the quotas as a group of their own; by default `pull` moves the quotas."""
        return [{"params": self.learned_scores()}, *([{"params": [self.quotas], **self._own}] * self.published)]

    def start(self, plan: Plan | None = None) -> None:
        """Take the length of the training; write the first weights."""
        if plan is not None:
            self.length = plan.epochs * plan.steps
        self.follow_budget()
        if not self.done:
            self._find_open()
        super().start(plan)

    def after_step(self) -> None:
        """Meet the current budget, then write the weights that the new latents give."""
        self.done += 1
        self.follow_budget()
        if self.done % _REFRESH == 0:
            self._find_open()
        super().after_step()

    @torch.no_grad()
    def current(self) -> Masks:
        """Top |s| at the rates' counts, n - floor((1 - a) n) for weights, within the layers' limits."""
        strengths = self.strengths()
        if self._follows_paths:
            strengths = [prefer(s, on_path) for s, on_path in zip(strengths, self.layer_buffers("open"), strict=True)]
        rates = self.rates()
        if not rates.isfinite().all():
            raise Diverged("the rates of the layers are no longer finite numbers: try a smaller learning rate")
        counts = self.units.counts(rates.tolist())
        self.kept = [top_k(strength, count) for strength, count in zip(strengths, counts, strict=True)]
        return self.units.expand(self.kept)

    @torch.no_grad()
    def masks(self) -> Masks:
        """Top |s| at the integer counts nearest to the learned rates within the budget.

        If the budget loss has not brought the rates down to the budget, LAMP's rates are used.
        """
        if self.published and float(self.budget_loss()) >= _TOLERANCE:
            return self.top(self._safe)
        rates = self.rates() if self.published else self._rates(self.balance(self.total))
        counts = nearest(rates.numpy() * np.array(self.units.sizes), self.units, self.total)
        paths = self._known_paths()
        if paths is None:
            return self.top(counts)
        masks, _ = paths.choose(dict(zip(self.units.names, self.strengths(), strict=True)), counts)
        return masks

    @torch.no_grad()
    def pull(self, gradients: list[Tensor | None]) -> None:
        """Scores as in HYDRA; quotas by the worth of more weights, or as published."""
        if self.published:
            self._pull_as_published(gradients)
            return
        worth = self.worth(gradients)
        super().pull(gradients)
        for score in self.scores:
            if score.grad is not None:
                score.grad.nan_to_num_(0.0, 0.0, 0.0)  # behind norms of variance 0 gradients may overflow
                score.grad.mul_((score.detach().norm() / score.grad.norm().clamp_min(1e-12)).clamp(max=1.0))
        self.spread.mul_(_DECAY).addcmul_(worth, worth, value=1 - _DECAY)
        length = self.length or _UNKNOWN_LENGTH
        step = self.reach * 2 / length * max(0.0, 1 - self.done / length)
        self.quotas.add_((worth / self.spread.sqrt().clamp_min(1e-12)).clamp(-1, 1), alpha=step)

    def _pull_as_published(self, gradients: list[Tensor | None]) -> None:
        """Quotas by the sum of the mask's gradient and the budget loss, both through g'."""
        sums = torch.stack([self.quotas.new_zeros(()) if g is None else g.sum().to(self.quotas) for g in gradients])
        super().pull(gradients)
        with torch.enable_grad():  # autograd computes g' and the budget's gradient of these few scalars
            objective = (sums.cpu().double() * self.rates()).sum() + self.gamma * self.budget_loss()
            (self.quotas.grad,) = torch.autograd.grad(objective, self.quotas)

    def after_epoch(self) -> None:
        """As published: freeze γ at the first epoch that ends within budget (to four digits); else let it grow."""
        self.reached = self.reached or round(float(self.budget_loss().detach()), 4) == 0
        self.epoch += 1
        if not self.reached:
            self.gamma = self.step * self.epoch

    @property
    def ready(self) -> bool:
        """Whether the budget was met and the soft rates are still within one per cent of it."""
        return self.reached and float(self.budget_loss().detach()) < _TOLERANCE

    def metrics(self) -> dict[str, float]:
        """The budget loss, the soft density, and as published γ of the epoch."""
        density = float(self.units.cost(self.rates().detach())) / self.units.size
        metrics = {"budget_loss": float(self.budget_loss().detach()), "rate": density}
        return {"gamma": self.gamma, **metrics} if self.published else metrics

    def worth(self, gradients: Sequence[Tensor | None]) -> Tensor:
        """v: how much the loss falls by a pruned unit's mask, on average; without filters that keep no weight."""
        values = []
        for gradient, kept in zip(gradients, self.kept, strict=True):
            if gradient is None:
                values.append(self.quotas.new_zeros(()))
                continue
            alive = kept.flatten(1).any(dim=1).view(-1, *[1] * (kept.ndim - 1)) if kept.ndim > 1 else True
            pruned = ~kept & alive
            values.append(-(gradient.nan_to_num(0.0, 0.0, 0.0) * pruned).sum() / pruned.sum().clamp_min(1))
        # The square must be finite: an infinite mean of v² would stop the quota for the rest of the training.
        most = torch.finfo(self.quotas.dtype).max ** 0.5 / 2
        return torch.stack([value.to(self.quotas) for value in values]).nan_to_num(0.0).clamp(-most, most)

    def follow_budget(self) -> None:
        """Bring the rates to the current budget, which falls from `start` times the target by even factors."""
        if self.published:
            return
        left = max(0.0, 1 - self.done / (_DESCENT * self.length)) if self.length else 0.0
        most = max(1.0, min(self.start_factor, self.units.spend(self.units.upper) / self.total))
        self.shift = self.balance(self.total * most**left)

    def balance(self, budget: float) -> float:
        """The shift of all quotas at which the soft rates cost a budget."""
        low, span = self.low.numpy(), self.span.numpy()
        quotas = self.quotas.detach().cpu().double().numpy()
        below, above = -60.0, 60.0
        for _ in range(60):
            middle = (below + above) / 2
            cost, _ = self.units.slope(low + span / (1 + np.exp(-(quotas + middle))))
            below, above = (middle, above) if cost <= budget else (below, middle)
        return below

    def _rates(self, shift: float) -> Tensor:
        return self.low + self.span * (self.quotas.cpu().double() + shift).sigmoid()

    def _known_paths(self) -> Paths | None:
        """The paths through the network, if an example of its images is known and the network can be traced."""
        if self._paths is None and self._follows_paths and self.example is not None:
            try:
                self._paths = Paths(self.units.model, copied(self.example, self.units.weights[0]))
            except ModelError as error:
                logger.info("weights are chosen without regard to the paths through the network: %s", error)
                self._follows_paths = False
        return self._paths

    @torch.no_grad()
    def _find_open(self) -> None:
        """Find the weights that are or could be on a path: until the next search the others are chosen last."""
        paths = self._known_paths()
        if paths is None:
            return
        strengths = dict(zip(self.units.names, self.strengths(), strict=True))
        _, possible = paths.choose(strengths, self.units.counts(self.rates().tolist()))
        for name, on_path in zip(self.units.names, self.layer_buffers("open"), strict=True):
            on_path.copy_(possible[name])

    def _initial_rates(self, rate: float, strategy: str | Mapping[str, float]) -> Tensor:
        sizes = torch.tensor(self.units.sizes, dtype=torch.float64)
        feasible = min(rate, self.units.spend(self.units.upper) / self.units.size)
        return torch.tensor(allocate(strategy, self.units, self.units.total(feasible)), dtype=torch.float64) / sizes

    def _inverse(self, rates: Tensor) -> Tensor:
        """g⁻¹, kept off the ends of the sigmoid, where no gradient moves a quota (the authors clip at 0.99 too)."""
        share = torch.where(self.span > 0, (rates - self.low) / self.span.clamp_min(1e-12), 0.5)
        return torch.logit(share.clamp(1e-4, 0.99)).to(self.dense[0].dtype)


class HarpRates(Harp):
    """HARP-r, the paper's ablation: rates only. Scores stay in the order of the weights' magnitudes.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        initial_strategy, published, start, reach, initial_rate, gamma_step: as for `Harp`.
        quota_lr, quota_momentum, quota_weight_decay: as for `Harp`.
        sharpness: must be 0, as no scores are learned.

    Example:
        pruner = harp.HarpRates(harp.Weights(model), keep=0.1)
        harp.fit(model, batches, harp.Natural(), pruner, epochs=1, lr=0.1)
    """

    title, paper = "HARP-r (rates only)", Harp.paper
    taxonomy = Taxonomy(Criterion.MAGNITUDE, Locality.GLOBAL)

    def learned_scores(self) -> list[nn.Parameter]:
        """None."""
        return []


class HarpScores(Hydra):
    """HARP-S, the paper's ablation: scores only, every layer at the target rate; HYDRA under HARP's training.

    The authors' released code never sets its quotas in this mode and so runs at a density of 0.73.

    Arguments:
        units: what may be pruned: `harp.Weights`, `harp.Channels`, or a model for its weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        sharpness: the radius of S2AP; 0 is without it.

    Example:
        pruner = harp.HarpScores(harp.Weights(model), keep=0.1)
        harp.fit(model, batches, harp.Natural(), pruner, epochs=1, lr=0.1)
    """

    title, paper = "HARP-S (scores only)", Harp.paper
    taxonomy = Taxonomy(Criterion.SCORE, Locality.LOCAL)
    same_as = "hydra"

    def __init__(self, units: Units | nn.Module, keep: float | str, sharpness: float = 0.0) -> None:
        super().__init__(units, keep, sharpness=sharpness)
