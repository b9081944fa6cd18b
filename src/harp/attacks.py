"""Attacks: frozen dataclasses, called as `attack(model, x, y) -> x_adv`.

All of them climb a loss inside the ball around an image and the box of valid images [0, 1]. The model is attacked
in eval mode and left exactly as it was: its modes, parameters, gradients and buffers.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.errors import DataError, ModelError, RecipeError
from harp.frozen import Logits, frozen

NORMS = ("linf", "l2")

_OUTSIDE = 1e-6  # a rounding error of resizing; normalised images are far outside, and epsilon means nothing there


class Attack(Protocol):
    """What an attack is: a function of a model, images in [0, 1] and labels to images of the same shape."""

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Images of a high loss in the balls around `x`."""


@dataclass(frozen=True)
class Ball:
    """The images within `epsilon` of an image, in the maximum or the Euclidean norm, that are in [0, 1]."""

    epsilon: float
    norm: str = "linf"

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon)
        if self.norm not in NORMS:
            raise RecipeError(f"norm must be {' or '.join(NORMS)}, not {self.norm!r}")

    def random(self, x: Tensor) -> Tensor:
        """A uniformly random point of each ball, clipped to the box."""
        if self.norm == "linf":
            return self.project(x + self.epsilon * (2 * torch.rand_like(x) - 1), x)
        radius = torch.rand(len(x), device=x.device, dtype=x.dtype) ** (1 / x[0].numel())
        return self.project(x + self.epsilon * _per_image(radius, x) * self.steepest(torch.randn_like(x)), x)

    def project(self, points: Tensor, x: Tensor) -> Tensor:
        """The nearest points in the ball, clipped to the box (which can't leave the ball again)."""
        if self.norm == "linf":
            return torch.clamp(points, x - self.epsilon, x + self.epsilon).clamp_(0, 1)
        offset = points - x
        length = torch.linalg.vector_norm(offset.flatten(1), dim=1)
        shrink = (self.epsilon / length.clamp_min(torch.finfo(x.dtype).tiny)).clamp_max(1)
        return (x + offset * _per_image(shrink, x)).clamp_(0, 1)

    def steepest(self, gradient: Tensor) -> Tensor:
        """The direction of length one along which a linear function with this gradient grows most."""
        if self.norm == "linf":
            return gradient.sign()
        # A confident network has gradients whose squares underflow: scale them first.
        tiny = torch.finfo(gradient.dtype).tiny
        gradient = gradient / _per_image(gradient.abs().flatten(1).amax(1).clamp_min(tiny), gradient)
        length = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
        return gradient / _per_image(length.clamp_min(tiny), gradient)


def _per_image(values: Tensor, images: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (images.ndim - 1))


def ascend(
    net: Logits, x: Tensor, start: Tensor, loss: Callable[[Tensor], Tensor], ball: Ball, step: float, steps: int
) -> Tensor:
    """Projected gradient ascent from `start`: x ← Π(x + step · steepest(∇ Σ loss(net(x)))), the last iterate.

    The losses of the images are added and not averaged, so that an image's gradient, however small, does not
    depend on the size of its batch.
    """
    points = start
    for _ in range(steps):
        points = points.detach().requires_grad_(True)
        with torch.enable_grad():
            total = loss(logits(net, points)).sum()
        (gradient,) = torch.autograd.grad(total, points)
        points = ball.project(points.detach() + step * ball.steepest(gradient), x)
    return points.detach()


def logits(net: Logits, x: Tensor) -> Tensor:
    """The network's answer, which must be one row of at least two class scores for each image."""
    answer: Any = net(x)
    if not isinstance(answer, Tensor) or answer.ndim != 2 or len(answer) != len(x) or answer.shape[1] < 2:
        found = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
        raise ModelError(f"the model must return logits of shape (batch, classes), not {found}")
    return answer


def images_in_box(x: Tensor, y: Tensor) -> Tensor:
    """Check a batch of images and labels, and give the images detached and exactly in [0, 1]."""
    if not x.is_floating_point():
        raise DataError(f"images must be floating point numbers in [0, 1], not {x.dtype}")
    if y.shape != x.shape[:1] or y.is_floating_point():
        raise DataError(
            f"there must be one integer label for each of {len(x)} images, not {tuple(y.shape)} of {y.dtype}"
        )
    if x.numel():
        low, high = (float(value) for value in torch.aminmax(x.detach()))
        if not (low >= -_OUTSIDE and high <= 1 + _OUTSIDE):
            raise DataError(f"images must be in [0, 1], not [{low:g}, {high:g}]: normalisation belongs into the model")
    return x.detach().clamp(0, 1)


@dataclass(frozen=True)
class Pgd:
    """Projected gradient descent (Madry et al. 2018) on the cross entropy.

        x ← Π(x + step · sign ∇ CE(f(x), y))        linf
        x ← Π(x + step · ∇ CE / ‖∇ CE‖₂)            l2

    With one restart the last iterate is given. With several, per image: a point that is misclassified, else the
    one of the highest loss; images that are misclassified take no part in the restarts that follow.
    """

    epsilon: float = 8 / 255
    step: float | None = None  # a quarter of epsilon: the usual 2/255 at 8/255, and as strong at any other
    steps: int = 10
    restarts: int = 1
    norm: str = "linf"
    random_start: bool = True
    fast: bool = True

    code: ClassVar[str] = "pgd"

    def __post_init__(self) -> None:
        Ball(self.epsilon, self.norm)
        object.__setattr__(self, "step", step_size(self.step, self.epsilon))  # a record of the attack says the number
        check_number("steps", self.steps, whole=True)
        check_number("restarts", self.restarts, whole=True, least=1)
        if self.restarts > 1 and not self.random_start:
            raise RecipeError("restarts without a random start would all be the same: set random_start")

    @property
    def name(self) -> str:
        """The attack in short, as `named` reads it."""
        return f"{self.code}-{self.steps}" + (f"x{self.restarts}" if self.restarts > 1 else "")

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss to climb, per image."""
        return F.cross_entropy(logits, y, reduction="none")

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Images of a high loss in the balls around `x`."""
        with torch.inference_mode(False), torch.no_grad():
            x, y = images_in_box(x, y), y.clone()  # what inference mode made is not fit for gradients
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

    κ is how far beyond the decision boundary the attack still gains; with 50 it is the plain margin for all
    usual logits.
    """

    steps: int = 20
    kappa: float = 50.0

    code: ClassVar[str] = "cw"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("kappa", self.kappa)
        if self.norm != "linf":
            raise RecipeError(f"norm must be linf for this attack, not {self.norm!r}")

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """The negative margin, per image."""
        true = logits.gather(1, y[:, None]).squeeze(1)
        other = logits.scatter(1, y[:, None], -math.inf).amax(1)
        return -(true - other + self.kappa).clamp_min(0)


@dataclass(frozen=True)
class Fgsm:
    """The fast gradient sign method (Goodfellow et al. 2015): one step of length epsilon from the image itself."""

    epsilon: float = 8 / 255
    norm: str = "linf"
    fast: bool = True

    name: ClassVar[str] = "fgsm"

    def __post_init__(self) -> None:
        Ball(self.epsilon, self.norm)

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Images of a high loss in the balls around `x`."""
        return Pgd(self.epsilon, self.epsilon, 1, norm=self.norm, random_start=False, fast=self.fast)(model, x, y)


ATTACKS: dict[str, type[Fgsm] | type[Pgd]] = {"fgsm": Fgsm, "pgd": Pgd, "cw": CwInf}


def named(text: str, **fields: Any) -> Fgsm | Pgd:
    """The attack of a short name: `fgsm`, `pgd-20` (steps), `pgd-20x5` (and restarts), `cw`; with more fields."""
    match = re.fullmatch(r"([a-z]+)(?:-(?P<steps>\d+)(?:x(?P<restarts>\d+))?)?", text)
    if match is None or match[1] not in ATTACKS:
        raise RecipeError(f"no attack is called {text!r}: there are {', '.join(ATTACKS)}, pgd-20, pgd-20x5")
    told: dict[str, Any] = {key: int(match[key]) for key in ("steps", "restarts") if match[key]}
    try:
        return ATTACKS[match[1]](**told, **fields)
    except TypeError as error:
        raise RecipeError(f"the attack {text!r} does not take these fields: {', '.join({**told, **fields})}") from error


def step_size(step: float | None, epsilon: float) -> float:
    """The length of an attack's step: as given, or a quarter of epsilon."""
    if step is None:
        return epsilon / 4
    check_number("step", step)
    return step


def check_number(name: str, value: object, *, whole: bool = False, least: int = 0) -> None:
    """Raise the one-line error of a field that is no finite number or too small (a recipe may hold anything)."""
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or not least <= value < math.inf:  # type: ignore[operator]  # known by `number`
        raise RecipeError(f"{name} must be a {'whole ' * whole}number of {least} or more, not {value!r}")
