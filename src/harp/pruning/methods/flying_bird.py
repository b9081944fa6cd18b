"""Flying Bird and Flying Bird+: train sparse from scratch, under masks that move.

Chen, Zhang, Wang, Balachandra, Ma, Wang, Wang: "Sparsity Winning Twice: Better Robust Generalization from More
Efficient Training", ICLR 2022.

    start        random masks at the counts of ideal gas quotas (IGQ)
    every Δ      a layer drops its ⌈d · live⌉ smallest weights and regrows as many at random, which start from zero;
                 Δ = 900 steps of 200 epochs, 1200 in the second half;  d from 0.5 to 0.005 along half a cosine
    Flying Bird+ in the second half, a move also
                 prunes ⌈0.4 d · live⌉ more if the gap between the robust accuracies of training and validation
                 rose in at least half of the last four epochs, and
                 grows 5 % more if validation got worse in at least half of them

A weight that was just dropped may be drawn again, as in sparse evolutionary training; then it keeps its value.

Departures from the authors' code:
- counts are exact: theirs regrow each position with a probability, so the density varies;
- Δ is a share of the training's length where it is not given; nothing moves after the last step;
- Flying Bird+ meets a budget, which theirs does not have. A layer's live weights stay between its part of the budget
  and `most` times that; the masks keep the largest of them, and only these live in the last tenth of the training;
- validation gets worse if its accuracy falls (theirs: its loss rises), as accuracies are what a training records;
- Flying Bird+ acts on the last four epochs only once there are five; without validation it is Flying Bird.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from harp.models.modes import Logits
from harp.pruning.allocation import READS_WEIGHTS, allocate
from harp.pruning.masks import Masks, at_random, kept
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
from harp.pruning.units import Units

PAPER_STEPS = 200 * 352  # the length of a training that is not known
PAPER_INTERVAL = 900
LEAST_DEATH_RATE = 0.005
SECOND_HALF = 4 / 3  # how much longer the intervals are


class FlyingBird(Dynamic):
    """Flying Bird: train sparse from random weights; the smallest weights move to random places.

    Arguments:
        units: what may be pruned: `harp.Weights` under a budget of weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        strategy: how many weights each layer keeps.
        death_rate: the share of a layer's weights that the first move drops; it falls along half a cosine.
        interval: optimiser steps between moves, a third more in the second half; None: 900 of 70 400, scaled.
        seed: of the random numbers.

    Example:
        pruner = harp.FlyingBird(harp.Weights(model), keep=0.1)
        harp.fit(model, batches, harp.Natural(), pruner, epochs=1, lr=0.1)
    """

    title = "Flying Bird"
    paper = Paper(
        "Sparsity Winning Twice: Better Robust Generalization from More Efficient Training",
        ("Chen", "Zhang", "Wang", "Balachandra", "Ma", "Wang", "Wang"),
        "ICLR",
        2022,
        "https://arxiv.org/abs/2202.09844",
    )
    taxonomy = Taxonomy(Criterion.MAGNITUDE, Locality.GLOBAL)
    granular = True
    # The authors' code: 200 epochs from 0.1, a tenth at 100 and 150, decay 5e-4.
    layout = Layout(prune=Phase(200, lr=0.1, weight_decay=5e-4, schedule="steps"))
    remembered = (*Dynamic.remembered, "step", "moved")

    def __init__(
        self,
        units: Units | nn.Module,
        keep: float | str,
        strategy: str | Mapping[str, float] = "igq",
        death_rate: float = 0.5,
        interval: int | None = None,
        seed: int = 0,
    ) -> None:
        check_option(0 <= death_rate < 1, "death_rate", death_rate, "give a share from 0 (= masks stay) to below 1")
        valid = interval is None or interval >= 1
        check_option(valid, "interval", interval, "give at least 1 step, or none to scale the paper's")
        units = as_units(units)
        counts = allocate(strategy, units, units.total(keep))
        super().__init__(units, random_masks(units, counts, seed), seed)
        self.counts = counts
        self.death_rate, self.interval = death_rate, interval
        self.step = self.moved = 0  # the steps so far, now and when the masks last moved
        self._length = PAPER_STEPS
        self._from_trained = strategy in READS_WEIGHTS

    @property
    def progress(self) -> float:
        """How much of the training is done."""
        return min(1.0, self.step / max(1, self._length))

    @property
    def death(self) -> float:
        """The share that a move would drop now."""
        least = min(LEAST_DEATH_RATE, self.death_rate)
        return least + (self.death_rate - least) * (1 + math.cos(math.pi * self.progress)) / 2

    def start(self, plan: Plan | None = None) -> None:
        """Take the length of the training; zero the weights outside the masks."""
        self._length = PAPER_STEPS if plan is None else plan.epochs * plan.steps
        if self._from_trained:  # the strategy has used trained weights
            self.reset()
        self.write(self.current())

    def after_step(self) -> None:
        """Zero the weights outside the masks, and move the masks if it is time."""
        self.step += 1
        self.write(self.current())
        if self.step - self.moved >= self._interval() and self.step < self._length and self.death_rate:
            self._rewire()
            self.moved = self.step

    def metrics(self) -> dict[str, float]:
        """The share that a move would drop."""
        return {"death_rate": self.death}

    def targets(self, counts: Sequence[int]) -> list[int]:
        """How many weights of each layer live after a move, given how many do before."""
        return list(counts)

    @torch.no_grad()
    def _rewire(self) -> None:
        generator = self.generator()
        counts = [int(mask.count_nonzero()) for mask in self.layer_buffers("mask")]
        targets = self.targets(counts)
        pairs = zip(counts, targets, strict=True)
        rests = [min(target, count - math.ceil(self.death * count - 1e-9)) for count, target in pairs]
        layers = zip(self.largest_live(rests), targets, rests, strict=True)
        self.move(self.by_name(stay | at_random(~stay, target - rest, generator) for stay, target, rest in layers))

    def _interval(self) -> int:
        first = self.interval or self._length * PAPER_INTERVAL / PAPER_STEPS
        return max(1, round(first * (SECOND_HALF if self.progress > 0.5 else 1)))


class FlyingBirdPlus(FlyingBird):
    """Flying Bird+: also prunes when the robust gap widens, and grows when validation gets worse.

    Arguments:
        units: what may be pruned: `harp.Weights` under a budget of weights.
        keep: the share of the budget's unit that is kept, such as 0.01 or "1%".
        strategy, death_rate, interval: as for `FlyingBird`.
        prune_ratio: how much more a move drops, relative to what it drops anyway.
        growth_ratio: how much more a move regrows, relative to what it drops.
        most: the most live weights of a layer, relative to what it keeps in the end.
        window: the number of past epochs that decide.
        seed: of the random numbers.

    Example:
        pruner = harp.FlyingBirdPlus(harp.Weights(model), keep=0.1)
        harp.fit(model, batches, harp.Natural(), pruner, epochs=1, lr=0.1)
    """

    title, paper, taxonomy = "Flying Bird+", FlyingBird.paper, FlyingBird.taxonomy
    remembered = (*FlyingBird.remembered, "gaps", "validated")
    answers: Tensor

    def __init__(
        self,
        units: Units | nn.Module,
        keep: float | str,
        strategy: str | Mapping[str, float] = "igq",
        death_rate: float = 0.5,
        interval: int | None = None,
        prune_ratio: float = 0.4,
        growth_ratio: float = 0.05,
        most: float = 1.5,
        window: int = 4,
        seed: int = 0,
    ) -> None:
        check_option(0 <= prune_ratio <= 1, "prune_ratio", prune_ratio, "give a share from 0 to 1")
        valid = 0 <= growth_ratio < math.inf
        check_option(valid, "growth_ratio", growth_ratio, "give a positive number, like 0.05, or 0 for none")
        check_option(1 <= most < math.inf, "most", most, "give a factor of at least 1 (= never more than the budget)")
        check_option(window >= 1, "window", window, "give at least 1 epoch")
        super().__init__(units, keep, strategy, death_rate, interval, seed)
        self.prune_ratio, self.growth_ratio, self.most, self.window = prune_ratio, growth_ratio, most, window
        self.gaps: list[float] = []
        self.validated: list[float] = []
        # The training images of this epoch: those classified correctly, and all.
        self.register_buffer("answers", torch.zeros(2, dtype=torch.int64, device=self.units.weights[0].device))

    def wrap(self, objective: Loss) -> Loss:
        """The objective; the correct answers of its last forward pass, on the attacked images, are counted."""

        def counting(model: nn.Module, x: Any, y: Any, forward: Logits | None = None) -> Tensor:
            check_labels(self, x, y, "use FlyingBird, which counts no correct answers")
            last: list[Tensor] = []

            def recording(images: Tensor) -> Tensor:
                logits = (forward or model)(images)
                last[:] = [logits.detach()]
                return logits

            loss = objective(model, x, y, forward=recording)
            for logits in last:
                right = (logits.argmax(1) == y).sum()
                self.answers += torch.stack([right, torch.full_like(right, len(y))])
            return loss

        return counting

    def observe(self, record: Mapping[str, Any]) -> None:
        """Note the gap between the accuracies of training and validation."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(
                self.answers
            )  # each rank has a part of the images, and all must decide the same
        right, seen = self.answers.tolist()
        self.answers.zero_()
        validated = record.get("robust", record.get("natural"))
        if validated is not None and seen:
            self.gaps = [*self.gaps, right / seen - validated][-self.window - 1 :]
            self.validated = [*self.validated, validated][-self.window - 1 :]

    def targets(self, counts: Sequence[int]) -> list[int]:
        """Fewer while the gap widens, more while validation gets worse, between the budget and `most` times it."""
        acting = self.progress >= 0.5
        prune = self.prune_ratio if acting and self._mostly_rose(self.gaps) else 0.0
        grow = self.growth_ratio if acting and self._mostly_rose([-value for value in self.validated]) else 0.0
        targets = []
        for count, least, upper in zip(counts, self.counts, self.units.upper, strict=True):
            dropped = self.death * count
            target = count - math.ceil(prune * dropped - 1e-9) + math.ceil(grow * dropped - 1e-9)
            targets.append(max(least, min(target, upper, int(least * (1 if self._closing else self.most)))))
        return targets

    def masks(self) -> Masks:
        """The largest live weights of each layer, at its part of the budget."""
        return self.by_name(self.largest_live(self.counts))

    @property
    def ready(self) -> bool:
        """Whether the live weights are exactly the budget."""
        return kept(self.current()) == self.total

    def after_step(self) -> None:
        """As Flying Bird; in the last tenth of the training only the final masks live."""
        super().after_step()
        if self._closing and not self.ready:
            self.move(self.masks())

    def metrics(self) -> dict[str, float]:
        """The share that a move would drop, and the live density."""
        return {**super().metrics(), "rate": kept(self.current()) / self.units.size}

    @property
    def _closing(self) -> bool:
        return self.progress >= 0.9

    def _mostly_rose(self, values: Sequence[float]) -> bool:
        """Whether at least half of the last epochs' values are above those of the epochs before them."""
        rises = sum(later > earlier for earlier, later in pairwise(values))
        return len(values) > self.window and 2 * rises >= self.window
