"""BCS-P: train sparse from scratch, with connections that die and are replaced at random.

Özdenizci, Legenstein: "Training Adversarially Robust Sparse Networks via Bayesian Connectivity Sampling", ICML 2021.

    weights      w = s θ [θ > 0],   s = ±1 drawn once; a connection is active while θ > 0 and dormant otherwise
    start        a random mask a layer, active θ = |He normal|; density 0.6 in the first stage and the last layer, 0.2
                 in the second stage, 0.5 p elsewhere (p = keep)
    step         θ ← SGD step on active θ;  θ ← (1 - λ η / η₀) θ;  θ ← θ + η N(0, σ²) where it was active before
    rewire       K = ⌊p N⌋ - active; K layers drawn with probability n_l / N, in each as many dormant θ ← 10⁻¹²

The count is never raised above ⌊p N⌋. At small p it starts above (76 439 instead of 15 302 on VGG16 at 0.001) and falls
only because connections die. As replacements are in proportion to the layers' sizes, the rates become more uniform.

With a strategy this is BCS-P + LAMP as in HARP's paper: it starts from the strategy's counts, computed from the weights
that the model has when the pruner is created, and replacements are drawn in proportion to them instead of to n_l.

A stage ends where the image gets smaller (pooling, strides) and with a child of the model, which gives the authors'
densities on their VGG16 and ResNets. A stage with more than a tenth of all weights gets 0.5 p: 0.6 of it could not fall
to the budget in time.

Departures from the authors' code (TensorFlow):
- the masks always keep exactly ⌊p N⌋ weights: while more are active, those of largest θ;
- the first rewiring is before the first step instead of after it: at large p the start has too few connections;
- a connection that dies has θ = 0 and no momentum; theirs keeps both, so that a stale momentum can kill the next
  connection there;
- a replacement for a full layer goes to the others (theirs is lost for the step), and a layer below its minimum
  (1 unless set) comes first;
- decay is for θ only: norms and biases have the optimiser's own. It follows the gradient step instead of preceding it.
"""

import math
from collections.abc import Mapping
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from harp.errors import BudgetError
from harp.pruning.allocation import allocate
from harp.pruning.masks import Masks, top_k
from harp.pruning.methods.base import Layout, ParameterGroup, Phase, Plan, Pruner, as_units, check_option, random_masks
from harp.pruning.papers import Criterion, Paper, Taxonomy
from harp.pruning.rounding import best
from harp.pruning.units import Units
from harp.system.numbers import share

PAPER_RATE = 0.1  # the learning rate while the optimiser is not known

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
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        strategy: BCS-P + LAMP: the counts to start from and to draw replacements by; None: the authors' start and n_l.
        noise: the standard deviation of the noise on active connections, times the learning rate.
        decay: the share of θ that is lost in every step, scaled by the learning rate's schedule only.
        new: θ of a new connection.
        seed: of the random numbers.

    Example:
        pruner = harp.BcsP(harp.Weights(model), keep=0.1)
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
        units: Units | nn.Module,
        keep: float | str,
        strategy: str | Mapping[str, float] | None = None,
        noise: float = 1e-6,
        decay: float = 5e-4,
        new: float = 1e-12,
        seed: int = 0,
    ) -> None:
        check_option(0 <= noise < math.inf, "noise", noise, "give a small positive number, like 1e-6, or 0 for none")
        check_option(0 <= decay < 1, "decay", decay, "give a share from 0 to below 1, like 5e-4")
        check_option(0 < new < math.inf, "new", new, "give a small positive number, like 1e-12")
        units, keep = as_units(units), share(keep)
        super().__init__(units, _total(units, keep), seed)
        self.noise, self.decay, self.new = noise, decay, new
        self.first_rate = PAPER_RATE
        if strategy is None:
            counts = [int(rate * n) for rate, n in zip(start_rates(units, keep), units.sizes, strict=True)]
            counts = np.clip(counts, units.lower, units.upper).tolist()
            self._shares = np.array(units.sizes) / units.size
        else:
            counts = allocate(strategy, units, self.total)
            self._shares = np.array(counts) / self.total
        generator, signs = self.generator(), []
        self.theta = nn.ParameterList()
        for weight, mask in zip(units.weights, random_masks(units, counts, seed).values(), strict=True):
            sign = torch.randint(0, 2, weight.shape, generator=generator, dtype=torch.int8) * 2 - 1
            signs.append(sign.to(weight.device))
            self.theta.append(nn.Parameter(_he_normal(weight, mask, generator)))
        self.add_buffers("sign", signs)
        self._rewire()

    def active(self) -> list[int]:
        """How many connections of each layer are active."""
        return [int((theta > 0).count_nonzero()) for theta in self.theta]

    def current(self) -> Masks:
        """The masks that the weights have now: where θ > 0."""
        return self.by_name(theta.detach() > 0 for theta in self.theta)

    def masks(self) -> Masks:
        """The largest θ of all, within the layers' limits."""
        scores = []
        for theta, low in zip(self.theta, self.units.lower, strict=True):
            alive = theta.detach()[theta > 0].double().cpu().numpy()
            scores.append(np.pad(alive, (0, max(0, low - len(alive)))))
        counts = best(scores, self.units.lower, self.units.upper, self.total)
        return self.by_name(top_k(theta.detach(), k) for theta, k in zip(self.theta, counts, strict=True))

    @property
    def ready(self) -> bool:
        """Whether the connections have fallen to the budget."""
        return sum(self.active()) == self.total

    def trainable(self) -> list[ParameterGroup]:
        """θ, which decays in `after_step`, and all else that the model trains; weights give their gradients only."""
        others = self.train_others()
        groups: list[ParameterGroup] = [{"params": list(self.theta), "weight_decay": 0.0}]
        return [*groups, {"params": others}] if others else groups

    def bind(self, optimizer: Optimizer) -> None:
        """Take the optimiser and its first learning rate."""
        super().bind(optimizer)
        self.first_rate = self.learning_rate()

    def start(self, plan: Plan | None = None) -> None:
        """Start from random weights."""
        self.reset()
        self.write(self.current())

    def after_backward(self) -> None:
        """Pull the weights' gradients back to the active θ."""
        for theta, gradient, sign in zip(self.theta, self.take_gradients(), self.layer_buffers("sign"), strict=True):
            theta.grad = None if gradient is None else gradient.mul_(sign).masked_fill_(theta.detach() <= 0, 0.0)

    @torch.no_grad()
    def after_step(self) -> None:
        """Decay θ, add noise to the active, zero those that died, replace them, and write the weights."""
        rate, generator = self.learning_rate(), self.generator()
        for theta, weight in zip(self.theta, self.units.weights, strict=True):
            was_active = weight != 0  # the model still holds the weights of before the step
            theta.mul_(1 - self.decay * rate / self.first_rate if self.first_rate else 1.0)
            active = theta[was_active]
            theta[was_active] = active + rate * self.noise * torch.randn(active.shape, generator=generator).to(active)
            dormant = ~was_active | (theta <= 0)
            theta.masked_fill_(dormant, 0.0)
            self.forget(theta, dormant)
        self._rewire()
        self.write(self.current())

    @torch.no_grad()
    def write(self, masks: Masks) -> None:
        """Put s θ under these masks into the model."""
        layers = zip(self.units.weights, self.theta, self.layer_buffers("sign"), masks.values(), strict=True)
        for weight, theta, sign, mask in layers:
            weight.copy_(torch.where(mask, theta * sign, 0.0))

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
        # numpy draws a few of many without replacement fast, which is needed in every step.
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

    def learning_rate(self) -> float:
        """The current learning rate of θ."""
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
    by_layer = [stages[name.rpartition(".")[0]] for name in units.names]
    densities = dict(zip(sorted(set(by_layer)), (0.6, 0.2), strict=False))
    few = 0.1 * units.size
    sizes = {s: sum(n for n, other in zip(units.sizes, by_layer, strict=True) if other == s) for s in densities}
    rates = [densities[s] if s in densities and sizes[s] <= few else 0.5 * keep for s in by_layer]
    return [*rates[:-1], 0.6 if units.sizes[-1] <= few else rates[-1]]


def _shared_prefix(names: list[str]) -> str:
    """The modules that hold all layers, such as a wrapper's only child."""
    levels = zip(*(name.split(".")[:-2] for name in names), strict=False)
    return "".join(f"{level[0]}." for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _total(units: Units, keep: float) -> int:
    """⌊keep · N⌋, the paper's rounding, checked against the limits."""
    total = min(units.total(keep), int(keep * units.size + 1e-9))
    if total < sum(units.lower):
        raise BudgetError(f"keep {keep:.6g} leaves {total:,} weights, but the layers need {sum(units.lower):,}")
    return total


def _he_normal(weight: nn.Parameter, mask: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """|He normal| inside the mask; truncated at two standard deviations as in TensorFlow."""
    deviation = (2 / weight[0].numel()) ** 0.5 / 0.87962566  # the deviation of the truncated standard normal
    drawn = torch.empty(int(mask.count_nonzero()))
    nn.init.trunc_normal_(drawn, 0.0, deviation, -2 * deviation, 2 * deviation, generator=generator)
    theta = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device)
    theta[mask] = drawn.abs().clamp_min(torch.finfo(drawn.dtype).tiny).to(theta)
    return theta
