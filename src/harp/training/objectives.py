"""Training objectives: frozen dataclasses, called as `objective(model, x, y, forward=None) -> loss`.

An adversarial objective attacks `model` in eval mode, restores the modes it found, and computes the loss in them.
`forward` is what the loss pass calls instead of the model, such as a wrapper that averages gradients over several
processes. The attack always runs on the bare model: it needs no gradient of a weight.

The two halves can be had apart, `attack(model, x, y)` and `loss(forward, x, x_adv, y)`: methods that ask for several
losses at the same images attack once. One that keeps something from step to step is made anew for each training by
`begin()`, see `harp.free`. `judge()` is the attack that held-out images are judged by.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.attacks import Ball, Pgd, ascend, check_number, images_in_box, logits, step_size
from harp.free import FreeTraining
from harp.frozen import Logits, frozen
from harp.processes.noise import normal

# The published code of TRADES and MART starts the attack at normal noise of this size around the image.
_NOISE = 0.001


@dataclass(frozen=True)
class Natural:
    """Ordinary training: the cross entropy of the images as they are."""

    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The images as they are."""
        return x

    def loss(self, forward: Logits, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """The cross entropy."""
        return F.cross_entropy(forward(x_adv), y)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, forward: Logits | None = None) -> Tensor:
        """The loss of a batch."""
        return self.loss(forward or model, x, x, y)


@dataclass(frozen=True, kw_only=True)
class _Adversarial(ABC):
    epsilon: float = 8 / 255
    step: float | None = None  # a quarter of epsilon
    steps: int = 10
    norm: str = "linf"
    clean_statistics: bool = False
    fast: bool = True

    def __post_init__(self) -> None:
        Pgd(self.epsilon, self.step, self.steps, norm=self.norm)

    @abstractmethod
    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The images that the loss is computed on."""

    @abstractmethod
    def loss(self, forward: Logits, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """The loss at images and their attacked twins."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, forward: Logits | None = None) -> Tensor:
        """The loss of a batch: attack, then compute it."""
        forward = forward or model
        if self.clean_statistics:
            with torch.no_grad():
                forward(x)
        return self.loss(forward, x, self.attack(model, x, y), y)

    def judge(self) -> Pgd:
        """The attack that held-out images are judged by: the training's, of ten steps at least."""
        return Pgd(self.epsilon, self.step, max(10, self.steps), norm=self.norm)

    def _near(self, model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Logits, Tensor], Any]) -> Tensor:
        """Ascend from normal noise around `x` the loss that `loss(net, x)` makes."""
        x = images_in_box(x, y)
        if self.epsilon == 0 or len(x) == 0:
            return x
        ball = Ball(self.epsilon, self.norm)
        with torch.no_grad(), frozen(model, x, fast=self.fast) as net:
            start = ball.project(x + _NOISE * normal(x), x)
            return ascend(net, x, start, loss(net, x), ball, step_size(self.step, self.epsilon), self.steps)


@dataclass(frozen=True, kw_only=True)
class PgdTraining(_Adversarial):
    """Adversarial training (Madry et al. 2018): the cross entropy at the end of PGD from a random start.

        min_θ E max_{‖δ‖ ≤ ε} CE(f_θ(x + δ), y)

    The published pruning code makes one more forward pass in train mode for each batch, of the clean images and
    before the attack. It serves the display of an accuracy, but the batch norms take about half of their running
    statistics from it. `clean_statistics` makes that pass too; by default it is left out.
    """

    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The last iterate of PGD."""
        return Pgd(self.epsilon, self.step, self.steps, norm=self.norm, fast=self.fast)(model, x, y)

    def loss(self, forward: Logits, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """The cross entropy at the attacked images."""
        return F.cross_entropy(forward(x_adv), y)


@dataclass(frozen=True, kw_only=True)
class FastTraining(PgdTraining):
    """Fast adversarial training (Wong, Rice, Kolter: "Fast is better than free", ICLR 2020): one step, random start.

        δ ~ U(-ε, ε)    δ ← clip_ε(δ + step · sign ∇ CE(f(x + δ), y)),  step = 1.25 ε

    It can overfit to its own attack from one epoch to the next; held-out images are judged by PGD, which shows it.
    Departure from the authors' code: the gradient is taken in eval mode, as in all our objectives.
    """

    steps: int = 1

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon)
        if self.step is None:
            object.__setattr__(self, "step", 1.25 * self.epsilon)
        super().__post_init__()

    def judge(self) -> Pgd:
        """The attack that held-out images are judged by: PGD with steps of its own."""
        return Pgd(self.epsilon, norm=self.norm)


@dataclass(frozen=True, kw_only=True)
class Trades(_Adversarial):
    """TRADES (Zhang et al. 2019): accuracy on clean images, and the same answer around them.

        CE(f(x), y) + β · KL(p(x) ‖ p(x'))      x' = argmax KL(p(x) ‖ p(x')),  from x + 0.001 · N(0, 1)

    The gradient goes through both distributions. The published code makes three forward passes in train mode,
    twice the clean images; the second has the value of the first (without dropout), so here one serves both terms.
    Batch norms then see as many clean as adversarial images instead of two to one. In the attack, p(x) is constant
    and computed once. With the l2 norm this is plain PGD, the published code has an optimiser of its own there.
    `clean_statistics`: as in `PgdTraining`.
    """

    beta: float = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta)

    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The images near `x` whose answer is furthest from that of `x`."""

        def divergence(net: Logits, x: Tensor) -> Callable[[Tensor], Tensor]:
            clean = logits(net, x).softmax(1)
            return lambda z: F.kl_div(z.log_softmax(1), clean, reduction="sum")

        return self._near(model, x, y, divergence)

    def loss(self, forward: Logits, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """The clean cross entropy and the divergence between the two answers."""
        clean, adversarial = forward(x), forward(x_adv)
        divergence = F.kl_div(adversarial.log_softmax(1), clean.log_softmax(1), reduction="batchmean", log_target=True)
        return F.cross_entropy(clean, y) + self.beta * divergence


@dataclass(frozen=True, kw_only=True)
class Mart(_Adversarial):
    """MART (Wang et al. 2020): adversarial training that weighs an image by how wrong the clean answer is.

        CE(f(x'), y) − log(1.0001 − max_{j≠y} p_j(x') + 10⁻¹²) + β · KL(p(x) ‖ p(x')) · (1 − p_y(x) + 10⁻⁷)

    averaged over the batch, with x' from ascending the cross entropy, from x + 0.001 · N(0, 1).
    `clean_statistics`: as in `PgdTraining`.
    """

    beta: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta)

    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The images near `x` of a high cross entropy."""
        return self._near(model, x, y, lambda net, x: lambda z: F.cross_entropy(z, y, reduction="sum"))

    def loss(self, forward: Logits, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """The boosted cross entropy and the weighed divergence."""
        clean, adversarial = forward(x).log_softmax(1), forward(x_adv).log_softmax(1)
        rival = adversarial.exp().scatter(1, y[:, None], 0).amax(1)
        boosted = F.nll_loss(adversarial, y) - torch.log(1.0001 - rival + 1e-12).mean()
        divergence = F.kl_div(adversarial, clean, reduction="none", log_target=True).sum(1)
        doubt = 1 - clean.exp().gather(1, y[:, None]).squeeze(1) + 1e-7
        return boosted + self.beta * (divergence * doubt).mean()


OBJECTIVES: dict[str, type[Natural] | type[PgdTraining] | type[Trades] | type[Mart] | type[FreeTraining]] = {
    "natural": Natural,
    "pgd": PgdTraining,
    "fast": FastTraining,
    "free": FreeTraining,
    "trades": Trades,
    "mart": Mart,
}


def made(part: Mapping[str, Any]) -> Any:
    """The objective that a recipe describes: its name and its options."""
    options = dict(part)
    return OBJECTIVES[options.pop("name")](**options)
