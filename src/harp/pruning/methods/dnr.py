"""DNR: train sparse from scratch, rewire by momentum. Reconstructed from the paper: the code is not public.

Kundu, Nazemi, Beerel, Pedram: "DNR: A Tunable Robust Pruning Framework Through Dynamic Network Rewiring of DNNs",
ASP-DAC 2021. The rewiring is that of Dettmers, Zettlemoyer: "Sparse Networks from Scratch: Faster Training without
Losing Performance", 2019 (sparse momentum), driven by a loss that mixes clean and adversarial images:

    start             random masks, every layer at the target rate
    loss              L = β CE(f(x), y) + (1 - β) L_robust + ρ/2 Σ_l ‖w_l - z_l‖²
    every epoch       each layer drops the smallest ⌈p · active⌉ of its weights, R in all
                      and regrows m_l R weights, m_l = mean |momentum| of its active weights, Σ m_l = 1,
                      at the free positions of largest |momentum|, starting from zero
    p                 0.5 at first, falls to 0 along half a cosine

The gradients of weights outside the masks reach the optimiser, so that its momentum knows what they would be good for;
the weights themselves are zeroed after every step.

Our choices where the paper leaves room: z is w without the weights that the next rewiring would drop, computed at
every step, so that the pull prepares for it; ρ falls as p does. L_robust is the objective of the training.

Departures from sparse momentum's code:
- the number of weights is exact after every epoch: theirs rounds up in each layer and corrects the error by a running
  average;
- weights that do not fit into a layer (99 % of its free positions, or its limit) go to the others in proportion to
  their shares instead of in equal parts; where all are too full for that, the budget comes before the 99 %;
- a layer that is nearly dense drops as the others do (theirs lowers p there);
- a weight that is dropped and regrown at once starts from zero as the others do (theirs keeps its value);
- p ends at 0 instead of 0.005, and then nothing moves: theirs leaves out the last epoch's rewiring;
- with Adam the momentum is the mean of the gradients, not divided by their root mean square.

Masks change before an epoch is validated, so early epochs are validated without the weights that they just dropped.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.models.modes import Logits
from harp.pruning.allocation import READS_WEIGHTS, allocate
from harp.pruning.masks import top_k
from harp.pruning.methods.base import (
    Dynamic,
    Layout,
    Loss,
    Phase,
    Plan,
    as_units,
    check_labels,
    check_option,
    random_masks,
)
from harp.pruning.papers import Criterion, Locality, Paper, Taxonomy
from harp.pruning.schedules import cosine
from harp.pruning.units import Units


class Dnr(Dynamic):
    """DNR: train sparse under a hybrid loss, rewire by momentum; reconstructed from the paper.

    Arguments:
        units: what may be pruned: `harp.Weights` under a budget of weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        strategy: how many weights each layer has at first.
        prune_rate: the share of each layer's weights that the first rewirings move; it falls to 0 over the training.
        clean_weight: the share of the clean images' cross entropy in the loss.
        pull: how hard the weights that the next rewiring drops are pulled to zero at first; 0: not at all.
        seed: of the random numbers.

    Example:
        pruner = harp.Dnr(harp.Weights(model), keep=0.1)
        harp.fit(model, batches, harp.Natural(), pruner, epochs=1, lr=0.1)
    """

    title = "DNR"
    paper = Paper(
        "DNR: A Tunable Robust Pruning Framework Through Dynamic Network Rewiring of DNNs",
        ("Kundu", "Nazemi", "Beerel", "Pedram"),
        "ASP-DAC",
        2021,
        "https://arxiv.org/abs/2011.03083",
    )
    taxonomy = Taxonomy(Criterion.SCORE, Locality.GLOBAL)
    granular = True
    # HARP's comparison: 200 epochs. The training code is not public: steps of the rate are from memory, their places
    # our guess.
    layout = Layout(prune=Phase(200, lr=0.1, schedule="steps"))
    remembered = (*Dynamic.remembered, "epoch")

    def __init__(
        self,
        units: Units | nn.Module,
        keep: float | str,
        strategy: str | Mapping[str, float] = "uniform",
        prune_rate: float = 0.5,
        clean_weight: float = 0.5,
        pull: float = 1e-4,
        seed: int = 0,
    ) -> None:
        check_option(0 <= prune_rate < 1, "prune_rate", prune_rate, "give a share from 0 (= masks stay) to below 1")
        check_option(0 <= clean_weight <= 1, "clean_weight", clean_weight, "give a share from 0 to 1")
        check_option(0 <= pull < math.inf, "pull", pull, "give a small positive number, like 0.0001, or 0 for none")
        units = as_units(units)
        counts = allocate(strategy, units, units.total(keep))
        super().__init__(units, random_masks(units, counts, seed), seed)
        self.prune_rate, self.clean_weight, self.pull = prune_rate, clean_weight, pull
        self._from_trained = strategy in READS_WEIGHTS
        self.epoch = 0
        self._epochs: int | None = None

    def wrap(self, objective: Loss) -> Loss:
        """The objective, mixed with the cross entropy of the clean images."""

        def hybrid(model: nn.Module, x: Any, y: Any, forward: Logits | None = None) -> Tensor:
            check_labels(self, x, y, "give clean_weight=0, which leaves out the cross entropy of clean images")
            robust = objective(model, x, y, forward=forward)
            clean = F.cross_entropy((forward or model)(x), y)
            return self.clean_weight * clean + (1 - self.clean_weight) * robust

        return hybrid if self.clean_weight else objective

    def start(self, plan: Plan | None = None) -> None:
        """Take the length of the training; zero the weights outside the masks."""
        self._epochs = None if plan is None else plan.epochs
        if self._from_trained:  # the strategy has used trained weights
            self.reset()
        super().start(plan)

    @property
    def rate(self) -> float:
        """The share that the rewiring at the end of this epoch drops."""
        return self.prune_rate * self._decay

    @torch.no_grad()
    def after_backward(self) -> None:
        """Leave the gradients dense, and add the pull on the weights that the next rewiring would drop."""
        strength = self.pull * self._decay
        if strength and self.rate:
            for weight, kept in zip(self.units.weights, self._without_smallest(), strict=True):
                if weight.grad is not None:
                    weight.grad.add_(weight.masked_fill(kept, 0.0), alpha=strength)

    @torch.no_grad()
    def after_epoch(self) -> None:
        """Drop the smallest weights of each layer, and regrow as many where the momentum is largest."""
        old, kept = self.layer_buffers("mask"), self._without_smallest()
        momenta = [self.momentum(weight).abs() for weight in self.units.weights]
        shares = [float(momentum[mask].float().mean()) for mask, momentum in zip(old, momenta, strict=True)]
        dropped = [int(mask.count_nonzero() - rest.count_nonzero()) for mask, rest in zip(old, kept, strict=True)]
        # Before the first step there is no momentum: each layer gets back what it lost.
        grown = spread(sum(dropped), shares if any(shares) else dropped, self._room(kept, sum(dropped)))
        self.write(self.by_name(kept))  # a weight that comes back at once starts from zero too
        layers = zip(kept, momenta, grown, strict=True)
        self.move(self.by_name(mask | top_k(momentum.masked_fill(mask, -1.0), n) for mask, momentum, n in layers))
        self.epoch += 1

    @torch.no_grad()
    def move(self, masks: Mapping[str, Tensor]) -> None:
        """Change the masks. The optimiser forgets nothing: the method needs a dense momentum."""
        for name, mask in self.current().items():
            mask.copy_(masks[name])
        self.write(self.masks())

    def metrics(self) -> dict[str, float]:
        """The share that this epoch's rewiring drops."""
        return {"prune_rate": self.rate}

    @property
    def _decay(self) -> float:
        return 1.0 if self._epochs is None else cosine(min(1.0, (self.epoch + 1) / max(1, self._epochs)))

    def _without_smallest(self) -> list[Tensor]:
        """The masks that the next rewiring leaves before it regrows; no layer falls below its minimum."""
        active = [int(mask.count_nonzero()) for mask in self.layer_buffers("mask")]
        layers = zip(active, self.units.lower, strict=True)
        return self.largest_live(max(low, n - math.ceil(self.rate * n - 1e-9)) for n, low in layers)

    def _room(self, kept: list[Tensor], amount: int) -> list[int]:
        """How many weights each layer may regrow."""
        counts = [int(mask.count_nonzero()) for mask in kept]
        limits = [high - count for high, count in zip(self.units.upper, counts, strict=True)]
        layers = zip(limits, self.units.sizes, counts, strict=True)
        room = [min(limit, 99 * (size - count) // 100) for limit, size, count in layers]
        return room if sum(room) >= amount else limits


def spread(amount: int, shares: Sequence[float], room: Sequence[int]) -> list[int]:
    """Whole numbers in proportion to shares that sum to the amount; the excess over a room goes to the others."""
    given, unfilled, full = [0] * len(room), set(range(len(room))), {-1}
    while full:
        left = amount - sum(given)
        whole = sum(shares[i] for i in unfilled)
        exact = {i: left * (shares[i] / whole) if whole else left / len(unfilled) for i in unfilled}
        full = {i for i in unfilled if exact[i] >= room[i]}
        unfilled -= full
        for i in full:
            given[i] = room[i]
    for i in unfilled:
        given[i] = int(exact[i])
    by_remainder = sorted(unfilled, key=lambda i: (int(exact[i]) - exact[i], i))
    for i in by_remainder[: amount - sum(given)]:
        given[i] += 1
    return given
