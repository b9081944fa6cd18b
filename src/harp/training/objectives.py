"""Training objectives: frozen dataclasses, called as `objective(model, x, y, forward=None) -> loss`.

An adversarial objective attacks `model` in eval mode, restores its modes, and computes the loss in them. The loss pass
calls `forward` instead of the model, such as a wrapper that averages gradients over several processes. The attack
always runs on the bare model, as it needs no gradient of a weight. `base.py` has the interface; an objective with a
state gets a new object for each training from `begin()`, see `free_at.py`.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.attacks import Ball, Pgd, ascend, check_ball, check_number, images_in_box, logits, step_size
from harp.attacks.fast_forward import frozen
from harp.models.modes import Logits
from harp.pruning.papers import Paper
from harp.system.distributed.shared_noise import normal
from harp.training.base import AttackingObjective, Objective
from harp.training.free_at import FreeTraining

# The published code of TRADES and MART starts the attack at normal noise of this size around the image.
_NOISE = 0.001


@dataclass(frozen=True)
class Natural(AttackingObjective):
    """Ordinary training: the cross entropy of the images as they are.

    Example:
        harp.fit(model, batches, harp.Natural(), harp.Dense(units), epochs=1)
    """

    title: ClassVar[str] = "natural training"
    paper: ClassVar[Paper | None] = None
    taxonomy: ClassVar[str] = "Natural Training (NT)"

    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The images as they are."""
        return x


@dataclass(frozen=True, kw_only=True)
class AdversarialObjective(AttackingObjective):
    """The base of objectives that attack each batch, with the options of the attack."""

    epsilon: float = 8 / 255
    step: float | None = None  # a quarter of epsilon
    steps: int = 10
    norm: str = "linf"
    clean_statistics: bool = False
    fast: bool = True

    def __post_init__(self) -> None:
        check_ball(self)
        check_number("steps", self.steps, whole=True)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor, forward: Logits | None = None) -> Tensor:
        """Attack a batch and compute its loss."""
        if self.clean_statistics:
            with torch.no_grad():
                (forward or model)(x)
        return super().__call__(model, x, y, forward)

    def judge(self) -> Pgd:
        """The attack that held-out images are validated with: the training's, with at least ten steps."""
        return Pgd(self.epsilon, self.step, max(10, self.steps), norm=self.norm)

    def _ascend(self, model: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Logits, Tensor], Any]) -> Tensor:
        """Ascend the loss function that `loss(net, x)` returns, from normal noise around `x`."""
        x = images_in_box(x, y)
        if self.epsilon == 0 or len(x) == 0:
            return x
        ball = Ball(self.epsilon, self.norm)
        with torch.no_grad(), frozen(model, x, fast=self.fast) as net:
            start = ball.project(x + _NOISE * normal(x), x)
            return ascend(net, x, start, loss(net, x), ball, step_size(self.step, self.epsilon), self.steps)


@dataclass(frozen=True, kw_only=True)
class PgdTraining(AdversarialObjective):
    """Adversarial training (Madry et al. 2018): the cross entropy at the end of PGD from a random start.

        min_θ E max_{‖δ‖ ≤ ε} CE(f_θ(x + δ), y)

    The published pruning code makes one more forward pass of the clean images in train mode, before the attack on each
    batch. It is meant to display an accuracy, but the batch norms take about half of their running statistics from it.
    `clean_statistics` makes that pass too; by default it is left out.

    Arguments:
        epsilon: the radius of the ball around an image.
        step: the length of a step; None: a quarter of epsilon.
        steps: of the attack.
        norm: of the ball, "linf" or "l2".
        clean_statistics: make one more forward pass of the clean images in train mode, as the published code does.
        fast: run the attacked network folded, and sparse where that pays.

    Example:
        harp.fit(model, batches, harp.PgdTraining(epsilon=8 / 255, steps=1), harp.Dense(units), epochs=1)
    """

    title: ClassVar[str] = "adversarial training"
    paper: ClassVar[Paper | None] = Paper(
        "Towards Deep Learning Models Resistant to Adversarial Attacks",
        ("Madry", "Makelov", "Schmidt", "Tsipras", "Vladu"),
        "ICLR",
        2018,
        "https://arxiv.org/abs/1706.06083",
    )
    taxonomy: ClassVar[str] = "Adversarial Training (AT) PGD"

    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The last iterate of PGD."""
        return Pgd(self.epsilon, self.step, self.steps, norm=self.norm, fast=self.fast)(model, x, y)


@dataclass(frozen=True, kw_only=True)
class FastTraining(PgdTraining):
    """Fast adversarial training (Wong, Rice, Kolter: "Fast is better than free", ICLR 2020): one step, random start.

        δ ~ U(-ε, ε)    δ ← clip_ε(δ + step · sign ∇ CE(f(x + δ), y)),  step = 1.25 ε

    It can overfit to its own attack from one epoch to the next; validation uses PGD, which shows this.
    Departure from the authors' code: the gradient is taken in eval mode, as in all objectives here.

    Arguments:
        step: the length of the step; None: 1.25 times epsilon.
        steps: of the attack, one as published.
        epsilon, norm, clean_statistics, fast: as for `PgdTraining`.

    Example:
        harp.fit(model, batches, harp.FastTraining(epsilon=8 / 255), harp.Dense(units), epochs=1)
    """

    title: ClassVar[str] = "fast adversarial training"
    paper: ClassVar[Paper | None] = Paper(
        "Fast is better than free: Revisiting adversarial training",
        ("Wong", "Rice", "Kolter"),
        "ICLR",
        2020,
        "https://arxiv.org/abs/2001.03994",
    )
    taxonomy: ClassVar[str] = "Adversarial Training (AT) Fast"

    steps: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step is None:
            object.__setattr__(self, "step", 1.25 * self.epsilon)

    def judge(self) -> Pgd:
        """The attack that held-out images are validated with: PGD with its default steps."""
        return Pgd(self.epsilon, norm=self.norm)


@dataclass(frozen=True, kw_only=True)
class Trades(AdversarialObjective):
    """TRADES (Zhang et al. 2019): accuracy on clean images, and the same prediction around them.

        CE(f(x), y) + β · KL(p(x) ‖ p(x'))      x' = argmax KL(p(x) ‖ p(x')),  from x + 0.001 · N(0, 1)

    The gradient goes through both distributions. The published code makes three forward passes in train mode, two of
    them on the clean images; without dropout they give the same values, so one pass serves both terms here. Batch norms
    then see as many clean as adversarial images, instead of twice as many. In the attack, p(x) is constant and computed
    once. With the l2 norm this is plain PGD; the published code has an optimiser of its own there.

    Arguments:
        epsilon, step, steps, norm, clean_statistics, fast: as for `PgdTraining`.
        beta: the weight of the divergence.

    Example:
        harp.fit(model, batches, harp.Trades(steps=1), harp.Dense(units), epochs=1)
    """

    title: ClassVar[str] = "TRADES"
    paper: ClassVar[Paper | None] = Paper(
        "Theoretically Principled Trade-off between Robustness and Accuracy",
        ("Zhang", "Yu", "Jiao", "Xing", "El Ghaoui", "Jordan"),
        "ICML",
        2019,
        "https://arxiv.org/abs/1901.08573",
    )
    taxonomy: ClassVar[str] = "Adversarial Training (AT) TRADES"

    beta: float = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta)

    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Images near `x` whose predictions are furthest from those of `x`."""

        def divergence(net: Logits, x: Tensor) -> Callable[[Tensor], Tensor]:
            clean = logits(net, x).softmax(1)
            return lambda z: F.kl_div(z.log_softmax(1), clean, reduction="sum")

        return self._ascend(model, x, y, divergence)

    def loss(self, forward: Logits, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """The clean cross entropy and the divergence between the two predictions."""
        clean, adversarial = forward(x), forward(x_adv)
        divergence = F.kl_div(adversarial.log_softmax(1), clean.log_softmax(1), reduction="batchmean", log_target=True)
        return F.cross_entropy(clean, y) + self.beta * divergence


@dataclass(frozen=True, kw_only=True)
class Mart(AdversarialObjective):
    """MART (Wang et al. 2020): adversarial training that weights an image by how wrong its clean prediction is.

        CE(f(x'), y) − log(1.0001 − max_{j≠y} p_j(x') + 10⁻¹²) + β · KL(p(x) ‖ p(x')) · (1 − p_y(x) + 10⁻⁷)

    averaged over the batch; x' ascends the cross entropy from x + 0.001 · N(0, 1).

    Arguments:
        epsilon, step, steps, norm, clean_statistics, fast: as for `PgdTraining`.
        beta: the weight of the divergence.

    Example:
        harp.fit(model, batches, harp.Mart(steps=1), harp.Dense(units), epochs=1)
    """

    title: ClassVar[str] = "MART"
    paper: ClassVar[Paper | None] = Paper(
        "Improving Adversarial Robustness Requires Revisiting Misclassified Examples",
        ("Wang", "Zou", "Yi", "Bailey", "Ma", "Gu"),
        "ICLR",
        2020,
        "https://openreview.net/forum?id=rklOg6EFwS",
    )
    taxonomy: ClassVar[str] = "Adversarial Training (AT) MART"

    beta: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta)

    def attack(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Images near `x` with a high cross entropy."""
        return self._ascend(model, x, y, lambda net, x: lambda z: F.cross_entropy(z, y, reduction="sum"))

    def loss(self, forward: Logits, x: Tensor, x_adv: Tensor, y: Tensor) -> Tensor:
        """The boosted cross entropy and the weighted divergence."""
        clean, adversarial = forward(x).log_softmax(1), forward(x_adv).log_softmax(1)
        rival = adversarial.exp().scatter(1, y[:, None], 0).amax(1)
        boosted = F.nll_loss(adversarial, y) - torch.log(1.0001 - rival + 1e-12).mean()
        divergence = F.kl_div(adversarial, clean, reduction="none", log_target=True).sum(1)
        doubt = 1 - clean.exp().gather(1, y[:, None]).squeeze(1) + 1e-7
        return boosted + self.beta * (divergence * doubt).mean()


OBJECTIVES: dict[str, type[Objective]] = {
    "natural": Natural,
    "pgd": PgdTraining,
    "fast": FastTraining,
    "free": FreeTraining,
    "trades": Trades,
    "mart": Mart,
}


def options(name: str) -> set[str]:
    """The names of the options that an objective has in a recipe."""
    return set(inspect.signature(OBJECTIVES[name]).parameters)


def epsilon(part: Mapping[str, Any]) -> float | None:
    """The epsilon of the objective that a recipe describes; None if it does not attack."""
    return getattr(made(part), "epsilon", None)


def made(part: Mapping[str, Any]) -> Objective:
    """The objective that a recipe describes by its name and its options."""
    arguments = dict(part)
    return OBJECTIVES[arguments.pop("name")](**arguments)
