"""BCS-P: train sparse from scratch, with connections that die and are drawn anew.

Özdenizci, Legenstein: "Training Adversarially Robust Sparse Networks via Bayesian Connectivity Sampling", ICML 2021.

    weights      w = s θ [θ > 0],   s = ±1 drawn once; a connection is active while θ > 0 and dormant otherwise
    start        a random mask a layer, active θ = |He normal|; density 0.6 in the first stage and the last layer, 0.2
                 in the second stage, 0.5 p elsewhere (p = keep)
    step         θ ← SGD step on active θ;  θ ← (1 - λ η / η₀) θ;  θ ← θ + η N(0, σ²) where it was active before
    rewire       K = ⌊p N⌋ - active; K layers drawn with probability n_l / N, in each as many dormant θ ← 10⁻¹²

The count is never raised above ⌊p N⌋. At small p it starts above (76 439 instead of 15 302 on VGG16 at 0.001) and falls
by deaths alone. As replacements come in proportion to the layers' sizes, the rates drift towards uniform ones.

With a strategy this is BCS-P + LAMP as in HARP's paper: the strategy's counts, read off the weights that the model
has when the pruner is made, are the start, and replacements are drawn in proportion to them instead of to n_l.

A stage ends where the image gets smaller (pooling, strides) and with a child of the model, which gives the authors'
densities on their VGG16 and ResNets. A stage with more than a tenth of all weights gets 0.5 p: 0.6 of it could not fall
to the budget in time.

Departures from the authors' code (TensorFlow):
- the answer has exactly ⌊p N⌋ weights at every moment: while more are active, the largest θ of them;
- the first rewiring is before the first step instead of after it: at large p the start has too few connections;
- a connection that dies has θ = 0 and no momentum; theirs keeps both, so that a stale momentum can kill what is drawn
  there next;
- what is drawn for a full layer goes to the others (theirs is lost for the step), and a layer that fell below its
  minimum (1 unless set) is served first;
- decay is for θ only: norms and biases have the optimiser's own. It follows the gradient step instead of preceding it.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from harp.errors import BudgetError, RecipeError
from harp.pruning.allocation import allocate
from harp.pruning.masks import Masks, top_k
from harp.pruning.methods.base import Layout, ParameterGroup, Phase, Plan, Pruner, random_masks
from harp.pruning.papers import Criterion, Paper, Taxonomy
from harp.pruning.rounding import best
from harp.pruning.units import Units

PAPER_RATE = 0.1  # the learning rate where no optimiser is known

_POOLS = (
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
)


class BcsP(Pruner):
    """BCS-P: train sparse from random weights; dead connections are replaced by random ones.

    Arguments:
        units: what may be pruned: `harp.Weights` under a budget of weights.
        keep: the share of the budget's unit that is kept, above 0 and at most 1.
        strategy: BCS-P + LAMP: the counts to start from and to draw replacements by; None: the authors' start and n_l.
        noise: the standard deviation of the noise on active connections, times the learning rate.
        decay: the share of θ that is lost in every step, scaled by the learning rate's schedule only.
        new: θ of a new connection.
        seed: of what is drawn at random.

    Example:
        units = harp.Weights(model)
        pruner = harp.BcsP(units, keep=0.1)
        harp.fit(model, batches, harp.Natural(), pruner, epochs=1, lr=0.1)
    """

    title = "BCS-P"
    paper = Paper(
        "Training Adversarially Robust Sparse Networks via Bayesian Connectivity Sampling",
        ("Özdenizci", "Legenstein"),
        "ICML",
        2021,
        "https://proceedings.mlr.press/v139/ozdenizci21a/ozdenizci21a.pdf",
    )
    taxonomy = Taxonomy(Criterion.SAMPLING, strategy="global")
    from_scratch = True
    granular = True
    # The authors' code: 200 epochs from 0.1, a tenth at 50 % and 75 %; the decay of θ is an option of its own.
    layout = Layout(prune=Phase(200, lr=0.1, schedule="steps"))
    theta: nn.ParameterList

    def __init__(
        self,
        units: Units,
        keep: float,
        strategy: str | Mapping[str, float] | None = None,
        noise: float = 1e-6,
        decay: float = 5e-4,
        new: float = 1e-12,
        seed: int = 0,
    ) -> None:
        if not 0 <= noise < float("inf"):
            raise RecipeError(f"noise {noise:.6g}: give a small positive number, like 1e-6, or 0 for none")
        if not 0 <= decay < 1:
            raise RecipeError(f"decay {decay:.6g}: give a share from 0 to below 1, like 5e-4")
        if not 0 < new < float("inf"):
            raise RecipeError(f"new {new:.6g}: give a small positive number, like 1e-12")
        super().__init__(units, _total(units, keep), seed)
        self.noise, self.decay, self.new = noise, decay, new
        self._rate = PAPER_RATE
        if strategy is None:
            counts = [int(rate * n) for rate, n in zip(start_rates(units, keep), units.sizes, strict=True)]
            limits = zip(counts, units.lower, units.upper, strict=True)
            counts = [min(max(count, low), high) for count, low, high in limits]
            self._shares = np.array(units.sizes) / units.size
        else:
            counts = allocate(strategy, units, self.total)
            self._shares = np.array(counts) / self.total
        generator, first = self.generator(), random_masks(units, counts, seed).values()
        self.theta = nn.ParameterList()
        for i, (weight, mask) in enumerate(zip(units.weights, first, strict=True)):
            sign = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.int8) * 2 - 1
            self.register_buffer(f"sign{i}", sign.to(weight.device))
            self.theta.append(nn.Parameter(_he_normal(weight, mask, generator)))
        self._rewire()

    def active(self) -> list[int]:
        """How many connections of each layer are active."""
        return [int((theta > 0).count_nonzero()) for theta in self.theta]

    def current(self) -> Masks:
        """The masks in force: where θ > 0."""
        return {name: theta.detach() > 0 for name, theta in zip(self.units.names, self.theta, strict=True)}

    def masks(self) -> Masks:
        """The largest θ of all, within the layers' limits."""
        scores = []
        for theta, low in zip(self.theta, self.units.lower, strict=True):
            alive = theta.detach()[theta > 0].double().cpu().numpy()
            scores.append(np.pad(alive, (0, max(0, low - len(alive)))))
        counts = best(scores, self.units.lower, self.units.upper, self.total)
        return {name: top_k(t.detach(), k) for name, t, k in zip(self.units.names, self.theta, counts, strict=True)}

    @property
    def ready(self) -> bool:
        """Whether the connections have fallen to the budget."""
        return sum(self.active()) == self.total

    def trainable(self) -> list[ParameterGroup]:
        """θ, whose decay is this method's own, and all else that the model trains; weights only lend gradients."""
        others = self._lend()
        groups: list[ParameterGroup] = [{"params": list(self.theta), "weight_decay": 0.0}]
        return [*groups, {"params": others}] if others else groups

    def bind(self, optimizer: Optimizer) -> None:
        """Get to know the optimiser and the learning rate that it begins with."""
        super().bind(optimizer)
        self._rate = self._current_rate()

    def start(self, plan: Plan | None = None) -> None:
        """Forget what the model has learned before; write the first weights."""
        self.reset()
        self.write(self.current())

    def after_backward(self) -> None:
        """Pull the weights' gradients back to the active θ."""
        for i, (theta, weight) in enumerate(zip(self.theta, self.units.weights, strict=True)):
            if weight.grad is None:
                theta.grad = None
            else:
                theta.grad = weight.grad.mul_(self.get_buffer(f"sign{i}")).masked_fill_(theta.detach() <= 0, 0.0)
            weight.grad = None  # the optimiser never sees these weights, so nobody else would clear it

    @torch.no_grad()
    def after_step(self) -> None:
        """Decay, shake and bury what was active, replace the dead, and write the weights."""
        rate, generator = self._current_rate(), self.generator()
        for theta, weight in zip(self.theta, self.units.weights, strict=True):
            was = weight != 0  # the weights still are those of before the step
            theta.mul_(1 - self.decay * rate / self._rate if self._rate else 1.0)
            shaken = theta[was]
            theta[was] = shaken + rate * self.noise * torch.randn(shaken.shape, generator=generator).to(shaken)
            dormant = ~was | (theta <= 0)
            theta.masked_fill_(dormant, 0.0)
            self.forget(theta, dormant)
        self._rewire()
        self.write(self.current())

    @torch.no_grad()
    def write(self, masks: Masks) -> None:
        """Let the model hold s θ under these masks."""
        for i, (weight, theta, mask) in enumerate(zip(self.units.weights, self.theta, masks.values(), strict=True)):
            weight.copy_(torch.where(mask, theta * self.get_buffer(f"sign{i}"), 0.0))

    def metrics(self) -> dict[str, float]:
        """The density."""
        return {"rate": sum(self.active()) / self.units.size}

    @torch.no_grad()
    def _rewire(self) -> None:
        """Make dormant connections active until the budget is met."""
        active = np.array(self.active())
        missing = self.total - int(active.sum())
        if missing <= 0:
            return
        # Draws without replacement that cost what they draw, not what they draw from: these are for every step.
        generator = np.random.default_rng(self.generator().initial_seed())
        for theta, count in zip(self.theta, self._replacements(missing, active, generator), strict=True):
            if count:
                dormant = (theta.detach().reshape(-1) <= 0).nonzero().reshape(-1)
                chosen = generator.choice(len(dormant), count, replace=False, shuffle=False)
                theta.view(-1)[dormant[torch.from_numpy(chosen).to(dormant.device)]] = self.new

    def _replacements(
        self, missing: int, active: npt.NDArray[np.int64], generator: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        """How many of the missing connections each layer gets."""
        short = np.maximum(np.array(self.units.lower) - active, 0)
        given: npt.NDArray[np.int64] = np.diff(np.minimum(np.cumsum(short), missing), prepend=0)
        while left := missing - int(given.sum()):
            room = np.array(self.units.upper) - active - given
            odds = self._shares * (room > 0)
            given += np.minimum(generator.multinomial(left, odds / odds.sum()), room)
        return given

    def _current_rate(self) -> float:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return next((float(g["lr"]) for g in groups if any(p is self.theta[0] for p in g["params"])), PAPER_RATE)


def start_rates(units: Units, keep: float) -> list[float]:
    """The authors' densities at the start, for any model."""
    shared = _shared_prefix(units.names)
    stage, child, stages = 0, "", {}
    for name, module in units.model.named_modules():
        inner = name.removeprefix(shared).partition(".")[0]
        strides = np.atleast_1d(getattr(module, "stride", 1) or 1)  # a pooling layer's may be None
        if inner != child or isinstance(module, _POOLS) or (strides > 1).any():
            stage, child = stage + 1, inner
        stages[name] = stage
    found = [stages[name.rpartition(".")[0]] for name in units.names]
    boosts = dict(zip(sorted(set(found)), (0.6, 0.2), strict=False))
    few = 0.1 * units.size
    crowds = {s: sum(n for n, other in zip(units.sizes, found, strict=True) if other == s) for s in boosts}
    rates = [boosts[s] if s in boosts and crowds[s] <= few else 0.5 * keep for s in found]
    return [*rates[:-1], 0.6 if units.sizes[-1] <= few else rates[-1]]


def _shared_prefix(names: list[str]) -> str:
    """The modules that hold all layers, such as a wrapper's only child."""
    parts = [name.split(".")[:-2] for name in names]
    shared = 0
    while all(len(part) > shared and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return "".join(f"{part}." for part in parts[0][:shared])


def _total(units: Units, keep: float) -> int:
    """⌊keep · N⌋, the paper's rounding, checked against the limits."""
    total = min(units.total(keep), int(keep * units.size + 1e-9))
    if total < sum(units.lower):
        raise BudgetError(f"keep {keep:.6g} leaves {total:,} weights, but the layers need {sum(units.lower):,}")
    return total


def _he_normal(weight: nn.Parameter, mask: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """|He normal| where the mask is; truncated at two standard deviations as in TensorFlow."""
    deviation = (2 / weight[0].numel()) ** 0.5 / 0.87962566  # the truncated normal's own is 1
    drawn = torch.empty(int(mask.count_nonzero()))
    nn.init.trunc_normal_(drawn, 0.0, deviation, -2 * deviation, 2 * deviation, generator=generator)
    theta = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    theta[mask] = drawn.abs().clamp_min(torch.finfo(drawn.dtype).tiny).to(theta)
    return theta
