"""Free adversarial training.

Shafahi, Najibi, Ghiasi, Xu, Dickerson, Studer, Davis, Taylor, Goldstein: "Adversarial Training for Free!", NeurIPS
2019. Each batch is replayed m times. One forward and one backward pass give the gradients of the weights and of a
perturbation δ, which stays from replay to replay and from batch to batch:

    loss    CE(f_θ(clip_[0,1](x + δ)), y)
    δ  ←  clip_[-ε,ε](δ + step · sign ∂loss/∂δ),      step = ε
    θ  ←  the optimiser's step by ∂loss/∂θ

So an update costs what it costs in natural training, and an epoch of m replays stands for m of them: the authors
divide the 90 epochs of ImageNet by m = 4. The network is in train mode all the time.

The code of HARP sets δ to zero at the start of each epoch, which `fresh` does; the code of the Free-AT authors keeps
it for the whole training. Both step by ε; the 1/255 in HARP's text is the step of the attack that evaluates.

Departure from both: a rank of several holds the rows of δ that its part of the batch needs, so that the training does
not depend on the number of processes. δ is part of the training's state.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.attacks import Pgd, check_number
from harp.frozen import Logits


@dataclass(frozen=True, kw_only=True)
class FreeTraining:
    """Free-AT: `replays` updates a batch, each of them also moves the perturbation. `begin` makes the objective.

    Arguments:
        step: how far an update moves the perturbation; None: epsilon.
        fresh: start every epoch from no perturbation.
    """

    epsilon: float = 4 / 255
    step: float | None = None
    replays: int = 4
    fresh: bool = False

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon)
        check_number("step", self.epsilon if self.step is None else self.step)
        check_number("replays", self.replays, whole=True, least=1)

    def judge(self) -> Pgd:
        """The attack that held-out images are judged by."""
        return Pgd(self.epsilon)

    def begin(self) -> "Free":
        """The objective of one training, with no perturbation yet."""
        return Free(self)


class _Part(NamedTuple):
    """A part of a batch: its rows, the images that the loss was computed at, and where they were not clipped."""

    rows: slice
    points: Tensor
    inside: Tensor  # no gradient reaches the perturbation elsewhere


class Free:
    """The objective of one training: called for the loss, then told by `after_backward` to move the perturbation.

    A batch may come in parts, one call each before `after_backward`.
    """

    def __init__(self, options: FreeTraining) -> None:
        self.options = options
        self.noise: Tensor | None = None  # of the largest batch so far
        self._pending: list[_Part] = []

    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The images under the perturbation as it stands; their gradient will move it."""
        start = self._pending[-1].rows.stop if self._pending else 0
        rows = slice(start, start + len(x))
        moved = x.detach() + self._at_least(rows.stop, x)[rows]
        inside = (moved >= 0) & (moved <= 1)
        self._pending.append(_Part(rows, moved.clamp_(0, 1).requires_grad_(True), inside))
        return moved

    def loss(self, forward: Logits, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """The cross entropy at the perturbed images."""
        return F.cross_entropy(forward(x_adv), y)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, forward: Logits | None = None) -> Tensor:
        """The loss of a batch or of a part of it."""
        return self.loss(forward or model, x, self.attack(model, x, y), y)

    @torch.no_grad()
    def after_backward(self) -> None:
        """Move the perturbation along the gradient of the images."""
        epsilon, step = self.options.epsilon, self.options.step
        for part in self._pending:
            if self.noise is None or part.points.grad is None:  # a method may only look, and ask for no gradient
                continue
            sign = part.points.grad.sign().mul_(part.inside)
            self.noise[part.rows].add_(sign, alpha=epsilon if step is None else step).clamp_(-epsilon, epsilon)
        self._pending.clear()

    def start_epoch(self) -> None:
        """Forget the perturbation if every epoch is to start without one."""
        if self.options.fresh:
            self.noise = None

    def _at_least(self, rows: int, like: Tensor) -> Tensor:
        """The perturbation, with rows of zeros if there were not enough."""
        known = like.new_zeros(0, *like.shape[1:]) if self.noise is None else self.noise.to(like)
        if len(known) < rows:
            known = torch.cat([known, like.new_zeros(rows - len(known), *like.shape[1:])])
        self.noise = known
        return known
