"""Threat models: balls around images inside the box [0, 1]; and what all attacks use: checks, margins, gradients."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harp.errors import DataError, ModelError, RecipeError
from harp.models.modes import Logits
from harp.system.distributed.shared_noise import normal, uniform
from harp.system.numbers import brief, number

NORMS = ("linf", "l2")

_OUTSIDE = 1e-6  # a rounding error of resizing; normalised images are far outside


class Attack(Protocol):
    """An attack: a function of a model, images in [0, 1] and labels that returns images of the same shape.

    Example:
        def noise(model, x, y):
            return (x + 0.1 * torch.rand_like(x)).clamp(0, 1)
        print(harp.accuracy(model, images, labels, attack=noise).accuracy)
    """

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Images with a high loss in the balls around `x`."""


@dataclass(frozen=True)
class Ball:
    """The images within `epsilon` of an image, in the maximum or the Euclidean norm, that are in [0, 1].

    Arguments:
        epsilon: the radius of the ball around an image.
        norm: of the ball, "linf" or "l2".

    Example:
        ball = harp.Ball(8 / 255)
        points = ball.project(images + 0.1, images)
    """

    epsilon: float
    norm: str = "linf"

    def __post_init__(self) -> None:
        check_ball(self)

    def random(self, x: Tensor) -> Tensor:
        """A uniformly random point in each ball, clipped to the box."""
        if self.norm == "linf":
            return self.project(x + self.epsilon * (2 * uniform(x) - 1), x)
        radius = uniform(x.new_empty(len(x))) ** (1 / x[0].numel())
        return self.project(x + self.epsilon * per_image(radius, x) * self.steepest(normal(x)), x)

    def project(self, points: Tensor, x: Tensor) -> Tensor:
        """The nearest points in the ball, clipped to the box (a clipped point stays in the ball)."""
        if self.norm == "linf":
            return torch.clamp(points, x - self.epsilon, x + self.epsilon).clamp_(0, 1)
        offset = points - x
        length = torch.linalg.vector_norm(offset.flatten(1), dim=1)
        shrink = (self.epsilon / length.clamp_min(torch.finfo(x.dtype).tiny)).clamp_max(1)
        return (x + offset * per_image(shrink, x)).clamp_(0, 1)

    def steepest(self, gradient: Tensor) -> Tensor:
        """The unit direction along which a linear function with this gradient grows most."""
        if self.norm == "linf":
            return gradient.sign()
        # The squares of a confident network's gradients underflow: scale them first.
        tiny = torch.finfo(gradient.dtype).tiny
        gradient = gradient / per_image(gradient.abs().flatten(1).amax(1).clamp_min(tiny), gradient)
        length = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
        return gradient / per_image(length.clamp_min(tiny), gradient)


def per_image(values: Tensor, images: Tensor) -> Tensor:
    """One number for each image, in a shape that broadcasts over its pixels."""
    return values.reshape(-1, *[1] * (images.ndim - 1))


def length_of(offset: Tensor, norm: str) -> Tensor:
    """The norm of the offset of each image. `amax` is faster than torch's maximum norm."""
    offset = offset.flatten(1)
    length: Tensor = offset.abs().amax(1) if norm == "linf" else torch.linalg.vector_norm(offset, dim=1)
    return length


def noise(x: Tensor, norm: str, generator: torch.Generator) -> Tensor:
    """A random offset for each image: uniform in [-1, 1] for the maximum norm, normal for the Euclidean norm."""
    if norm == "linf":
        return 2 * torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype) - 1
    return torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)


def logits(net: Logits, x: Tensor) -> Tensor:
    """The logits of a network: one row of at least two numbers for each image."""
    answer: Any = net(x)
    if not isinstance(answer, Tensor) or answer.ndim != 2 or len(answer) != len(x) or answer.shape[1] < 2:
        actual = tuple(answer.shape) if isinstance(answer, Tensor) else type(answer).__name__
        raise ModelError(f"the model must return logits of shape (batch, classes), not {actual}")
    return answer


def margin(answer: Tensor, y: Tensor) -> Tensor:
    """By how much the logit of the true class is above the largest other one."""
    true = answer.gather(1, y[:, None]).squeeze(1)
    return true - answer.scatter(1, y[:, None], -math.inf).amax(1)


def slope(net: Logits, points: Tensor, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The logits at some points, the loss of each image, and the gradient of each loss with respect to its image."""
    points = points.detach().requires_grad_(True)
    with torch.enable_grad():
        answer = logits(net, points)
        losses = loss(answer)
        total = losses.sum()
    (gradient,) = torch.autograd.grad(total, points, allow_unused=True) if total.requires_grad else (None,)
    if gradient is None:
        raise ModelError(
            "the logits do not depend on the images by a gradient: the model detaches them or is quantised"
        )
    return answer.detach(), losses.detach().to(points.dtype), gradient


def images_in_box(x: Tensor, y: Tensor, model: nn.Module | None = None) -> Tensor:
    """Check a batch of images and labels, for a model, and return the images detached and exactly in [0, 1]."""
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise DataError(f"images and labels must be tensors, not {brief(x)} and {brief(y)}")
    if not x.is_floating_point():
        raise DataError(f"images must be floating point numbers in [0, 1], not {x.dtype}")
    like = None if model is None else next((p for p in model.parameters() if p.is_floating_point()), None)
    if x.dtype == torch.float64 and like is not None and like.dtype != x.dtype:
        raise DataError(f"images are {x.dtype} and the weights of the model {like.dtype}: give images.to({like.dtype})")
    if y.shape != x.shape[:1] or y.is_floating_point():
        raise DataError(
            f"there must be one integer label for each of {len(x)} images, not {tuple(y.shape)} of {y.dtype}"
        )
    if x.numel():
        low, high = (float(value) for value in torch.aminmax(x.detach()))
        if not (low >= -_OUTSIDE and high <= 1 + _OUTSIDE):
            raise DataError(
                f"images must be in [0, 1], not [{low:g}, {high:g}]: normalisation belongs inside the model"
            )
    return x.detach().clamp(0, 1)


def check_ball(attack: Any) -> None:
    """Check the norm, the epsilon and the step of a frozen dataclass, and turn text such as `8/255` into numbers."""
    norm = getattr(attack, "norm", "linf")
    if norm not in NORMS:
        raise RecipeError(f"norm must be {' or '.join(NORMS)}, not {brief(norm)}")
    for name in ("epsilon", "step"):
        value = getattr(attack, name, None)
        if value is not None:
            object.__setattr__(attack, name, length(name, value, norm))


def length(name: str, value: float | str, norm: str = "linf") -> float:
    """The length of a perturbation or a step, from a number or from text; grey levels are refused."""
    try:
        amount = number(value)
    except RecipeError as error:
        raise RecipeError(f"{name}: {error}") from error
    check_number(name, amount)
    if norm == "linf" and amount >= 1:
        advice = f"did you mean {amount:.6g}/255?" if amount <= 255 else "give less than 1, such as 8/255"
        raise RecipeError(f"{name} {amount:.6g}: images are in [0, 1]; {advice}")
    return float(amount) if isinstance(value, str) else amount


def step_size(step: float | None, epsilon: float) -> float:
    """The length of an attack's step: as given, or a quarter of epsilon."""
    return epsilon / 4 if step is None else step


def check_number(name: str, value: object, *, whole: bool = False, least: int = 0) -> None:
    """Raise `RecipeError` unless a field is a finite number of at least `least` (a recipe may hold anything)."""
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or not least <= value < math.inf:  # type: ignore[operator]  # `number` says so
        raise RecipeError(f"{name} must be a {'whole ' * whole}number of {least} or more, not {brief(value)}")
