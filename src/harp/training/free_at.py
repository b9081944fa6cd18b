"""Free adversarial training.

Shafahi, Najibi, Ghiasi, Xu, Dickerson, Studer, Davis, Taylor, Goldstein: "Adversarial Training for Free!", NeurIPS
2019. Each batch is replayed m times. One forward and one backward pass give the gradients of the weights and of a
perturbation δ, which stays from replay to replay and from batch to batch:

    loss    CE(f_θ(clip_[0,1](x + δ)), y)
    δ  ←  clip_[-ε,ε](δ + step · sign ∂loss/∂δ),      step = ε
    θ  ←  the optimiser's step by ∂loss/∂θ

So an update costs as much as in natural training, and one epoch of m replays replaces m epochs: the authors divide the
90 epochs of ImageNet by m = 4. The network is in train mode all the time.

The code of HARP sets δ to zero at the start of each epoch, as `fresh` does; the code of the Free-AT authors keeps it
for the whole training. Both step by ε; the 1/255 in HARP's text is the step of the attack that evaluates.

Departure from both: each of several ranks holds the rows of δ for its part of the batch, so that the training does not
depend on the number of processes. δ is part of the training's state.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from harp.attacks import Pgd, check_ball, check_number
from harp.models.modes import Logits
from harp.pruning.papers import Paper
from harp.training.base import AttackingObjective, Objective


@dataclass(frozen=True, kw_only=True)
class FreeTraining(Objective):
    """Free-AT: `replays` updates a batch; each of them also moves the perturbation. `begin` makes the objective.

    Arguments:
        epsilon: the largest perturbation of a pixel.
        step: how far an update moves the perturbation; None: epsilon.
        fresh: start every epoch from no perturbation.
        replays: updates on each batch.

    Example:
        harp.fit(model, batches, harp.FreeTraining(replays=2), harp.Dense(units), epochs=1)
    """

    title: ClassVar[str] = "free adversarial training"
    paper: ClassVar[Paper | None] = Paper(
        "Adversarial Training for Free!",
        ("Shafahi", "Najibi", "Ghiasi", "Xu", "Dickerson", "Studer", "Davis", "Taylor", "Goldstein"),
        "NeurIPS",
        2019,
        "https://arxiv.org/abs/1904.12843",
    )
    taxonomy: ClassVar[str] = "Adversarial Training (AT) Free"

    epsilon: float = 4 / 255
    step: float | None = None
    replays: int = 4
    fresh: bool = False

    def __post_init__(self) -> None:
        check_ball(self)
        check_number("replays", self.replays, whole=True, least=1)

    def judge(self) -> Pgd:
        """The attack that held-out images are validated with."""
        return Pgd(self.epsilon)

    def begin(self) -> "Free":
        """The objective of one training, with no perturbation yet."""
        return Free(self)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, forward: Logits | None = None) -> Tensor:
        """The loss of a batch at the start of a training, where there is no perturbation."""
        return self.begin()(model, x, y, forward)


class _Part(NamedTuple):
    """A part of a batch: its rows, the perturbed images, and the pixels that are not clipped."""

    rows: slice
    points: Tensor
    inside: Tensor  # elsewhere the perturbation gets no gradient


class Free(AttackingObjective):
    """The objective of one training: a call gives the loss, then `after_backward` moves the perturbation.

    A batch may come in parts, with one call for each part before `after_backward`.
    """

    def __init__(self, options: FreeTraining) -> None:
        self.options, self.replays = options, options.replays
        self.noise = None  # the perturbation, with as many rows as the largest batch so far
        self._pending: list[_Part] = []

    def __repr__(self) -> str:
        return f"Free({self.options!r})"

    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The images with the current perturbation; `after_backward` uses their gradient."""
        start = self._pending[-1].rows.stop if self._pending else 0
        rows = slice(start, start + len(x))
        moved = x.detach() + self._at_least(rows.stop, x)[rows]
        inside = (moved >= 0) & (moved <= 1)
        self._pending.append(_Part(rows, moved.clamp_(0, 1).requires_grad_(True), inside))
        return moved

    @torch.no_grad()
    def after_backward(self) -> None:
        """Move the perturbation along the gradient of the images."""
        epsilon, step = self.options.epsilon, self.options.step
        for part in self._pending:
            if self.noise is None or part.points.grad is None:  # some methods compute no gradient
                continue
            sign = part.points.grad.sign().mul_(part.inside)
            self.noise[part.rows].add_(sign, alpha=epsilon if step is None else step).clamp_(-epsilon, epsilon)
        self._pending.clear()

    def start_epoch(self) -> None:
        """Reset the perturbation if every epoch starts without one."""
        if self.options.fresh:
            self.noise = None

    def _at_least(self, rows: int, like: Tensor) -> Tensor:
        """The perturbation, extended by rows of zeros to at least so many rows."""
        noise = like.new_zeros(0, *like.shape[1:]) if self.noise is None else self.noise.to(like)
        if len(noise) < rows:
            noise = torch.cat([noise, like.new_zeros(rows - len(noise), *like.shape[1:])])
        self.noise = noise
        return noise
