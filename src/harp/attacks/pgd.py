"""PGD and its relatives: gradient steps of a fixed length."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.attacks.fast_forward import frozen
from harp.attacks.threat import Ball, check_ball, check_number, images_in_box, logits, margin, slope, step_size
from harp.errors import RecipeError
from harp.models.modes import Logits


def ascend(
    net: Logits, x: Tensor, start: Tensor, loss: Callable[[Tensor], Tensor], ball: Ball, step: float, steps: int
) -> Tensor:
    """Projected gradient ascent from `start`: x ← Π(x + step · steepest(∇ Σ loss(net(x)))), the last iterate.

    The losses of the images are added and not averaged, so that an image's gradient does not depend on the size of
    its batch.
    """
    points = start.detach()
    for _ in range(steps):
        gradient = slope(net, points, loss)[2]
        points = ball.project(points + step * ball.steepest(gradient), x)
    return points


@dataclass(frozen=True)
class Pgd:
    """Projected gradient descent (Madry et al. 2018) on the cross entropy.

        x ← Π(x + step · sign ∇ CE(f(x), y))        linf
        x ← Π(x + step · ∇ CE / ‖∇ CE‖₂)            l2

    With one restart the result is the last iterate. With several it is, for each image, a point that is misclassified,
    or else the point with the highest loss; a misclassified image takes no part in later restarts.

    Arguments:
        epsilon: the radius of the ball around an image.
        step: the length of a step; None: a quarter of epsilon.
        steps: how many gradient steps are taken.
        restarts: runs from other random points.
        norm: of the ball, "linf" or "l2".
        random_start: start at a random point of the ball, not at the image.
        fast: fold batch norms, and use the sparse engine for a sparse network; results agree up to rounding.

    Example:
        attack = harp.Pgd(epsilon=8 / 255, steps=20)
        print(harp.accuracy(model, images, labels, attack=attack).accuracy)
    """

    epsilon: float = 8 / 255
    step: float | None = None  # a quarter of epsilon: the usual 2/255 at 8/255
    steps: int = 10
    restarts: int = 1
    norm: str = "linf"
    random_start: bool = True
    fast: bool = True

    code: ClassVar[str] = "pgd"

    def __post_init__(self) -> None:
        check_ball(self)
        object.__setattr__(self, "step", step_size(self.step, self.epsilon))  # records of the attack need the number
        check_number("steps", self.steps, whole=True)
        check_number("restarts", self.restarts, whole=True, least=1)
        if self.restarts > 1 and not self.random_start:
            raise RecipeError("restarts without a random start are all the same: set random_start")

    @property
    def name(self) -> str:
        """The short name that `named` reads."""
        return f"{self.code}-{self.steps}" + (f"x{self.restarts}" if self.restarts > 1 else "")

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss to climb, per image."""
        return F.cross_entropy(logits, y, reduction="none")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Images with a high loss in the balls around `x`."""
        with torch.inference_mode(False), torch.no_grad():
            x, y = images_in_box(x, y, model), y.clone()  # tensors made in inference mode have no gradients
            if self.epsilon == 0 or len(x) == 0:
                return x
            with frozen(model, x, fast=self.fast) as net:
                return self._climb(net, x, y) if self.restarts == 1 else self._restart(net, x, y)

    def _climb(self, net: Logits, x: Tensor, y: Tensor) -> Tensor:
        ball = Ball(self.epsilon, self.norm)
        start = ball.random(x) if self.random_start else x
        return ascend(net, x, start, lambda z: self.loss(z, y), ball, step_size(self.step, self.epsilon), self.steps)

    def _restart(self, net: Logits, x: Tensor, y: Tensor) -> Tensor:
        best, highest = x.clone(), torch.full((len(x),), -math.inf, device=x.device, dtype=x.dtype)
        left = torch.arange(len(x), device=x.device)
        for _ in range(self.restarts):
            points = self._climb(net, x[left], y[left])
            answer = logits(net, points)
            fooled = answer.argmax(1) != y[left]
            loss = self.loss(answer, y[left]).to(x.dtype)
            better = fooled | (loss > highest[left])
            best[left[better]], highest[left[better]] = points[better], loss[better]
            left = left[~fooled]
            if len(left) == 0:
                break
        return best


@dataclass(frozen=True)
class CwInf(Pgd):
    """The maximum-norm attack of Carlini & Wagner (2017) as projected ascent on the negative margin.

        −max(z_y − max_{j≠y} z_j + κ, 0)

    κ limits how far beyond the decision boundary the loss still grows; 50 is no limit for usual logits.

    Arguments:
        epsilon: the radius of the ball around an image.
        step: the length of a step; None: a quarter of epsilon.
        steps: how many gradient steps are taken.
        restarts: runs from other random points.
        norm: "linf", no other.
        random_start: start at a random point of the ball, not at the image.
        fast: fold batch norms, and use the sparse engine for a sparse network; results agree up to rounding.
        kappa: κ.

    Example:
        attack = harp.CwInf(epsilon=8 / 255, steps=5)
        print(harp.accuracy(model, images, labels, attack=attack).accuracy)
    """

    steps: int = 20  # as in the code of HARP's authors; their paper says 10
    kappa: float = 50.0

    code: ClassVar[str] = "cw"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("kappa", self.kappa)
        if self.norm != "linf":
            raise RecipeError(f"norm must be linf for this attack, not {self.norm!r}")

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The negative margin, per image."""
        return -(margin(logits, y) + self.kappa).clamp_min(0)


@dataclass(frozen=True)
class Fgsm:
    """The fast gradient sign method (Goodfellow et al. 2015): one step of length epsilon from the image itself.

    Arguments:
        epsilon: the radius of the ball around an image.
        norm: of the ball, "linf" or "l2".
        fast: fold batch norms, and use the sparse engine for a sparse network; results agree up to rounding.

    Example:
        attack = harp.Fgsm(epsilon=8 / 255)
        print(harp.accuracy(model, images, labels, attack=attack).accuracy)
    """

    epsilon: float = 8 / 255
    norm: str = "linf"
    fast: bool = True

    name: ClassVar[str] = "fgsm"

    def __post_init__(self) -> None:
        check_ball(self)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Images with a high loss in the balls around `x`."""
        return Pgd(self.epsilon, self.epsilon, 1, norm=self.norm, random_start=False, fast=self.fast)(model, x, y)
