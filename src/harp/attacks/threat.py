"""The threat: balls around images, in the box of valid ones, and what every attack checks before it starts."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from harp.errors import DataError, ModelError, RecipeError
from harp.models.modes import Logits
from harp.system.distributed.shared_noise import normal, uniform

NORMS = ("linf", "l2")

_OUTSIDE = 1e-6  # a rounding error of resizing; normalised images are far outside, and epsilon means nothing there


class Attack(Protocol):
    """What an attack is: a function of a model, images in [0, 1] and labels to images of the same shape.

    Example:
        def noise(model, x, y):
            return (x + 0.1 * torch.rand_like(x)).clamp(0, 1)
        print(harp.accuracy(model, images, labels, attack=noise).accuracy)
    """

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """Images of a high loss in the balls around `x`."""


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
        check_number("epsilon", self.epsilon)
        if self.norm not in NORMS:
            raise RecipeError(f"norm must be {' or '.join(NORMS)}, not {self.norm!r}")

    def random(self, x: Tensor) -> Tensor:
        """A uniformly random point of each ball, clipped to the box."""
        if self.norm == "linf":
            return self.project(x + self.epsilon * (2 * uniform(x) - 1), x)
        radius = uniform(x.new_empty(len(x))) ** (1 / x[0].numel())
        return self.project(x + self.epsilon * per_image(radius, x) * self.steepest(normal(x)), x)

    def project(self, points: Tensor, x: Tensor) -> Tensor:
        """The nearest points in the ball, clipped to the box (which can't leave the ball again)."""
        if self.norm == "linf":
            return torch.clamp(points, x - self.epsilon, x + self.epsilon).clamp_(0, 1)
        offset = points - x
        length = torch.linalg.vector_norm(offset.flatten(1), dim=1)
        shrink = (self.epsilon / length.clamp_min(torch.finfo(x.dtype).tiny)).clamp_max(1)
        return (x + offset * per_image(shrink, x)).clamp_(0, 1)

    def steepest(self, gradient: Tensor) -> Tensor:
        """The direction of length one along which a linear function with this gradient grows most."""
        if self.norm == "linf":
            return gradient.sign()
        # A confident network has gradients whose squares underflow: scale them first.
        tiny = torch.finfo(gradient.dtype).tiny
        gradient = gradient / per_image(gradient.abs().flatten(1).amax(1).clamp_min(tiny), gradient)
        length = torch.linalg.vector_norm(gradient.flatten(1), dim=1)
        return gradient / per_image(length.clamp_min(tiny), gradient)


def per_image(values: Tensor, images: Tensor) -> Tensor:
    """One number an image, in a shape that spreads over its pixels."""
    return values.reshape(-1, *[1] * (images.ndim - 1))


def length_of(offset: Tensor, norm: str) -> Tensor:
    """The lengths of offsets, one an image. The maximum is faster this way than as a norm."""
    offset = offset.flatten(1)
    length: Tensor = offset.abs().amax(1) if norm == "linf" else torch.linalg.vector_norm(offset, dim=1)
    return length


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
