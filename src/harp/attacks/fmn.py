"""FMN: the nearest misclassified point, in a ball that shrinks and grows until it touches the decision boundary.

Pintor, Roli, Brendel & Biggio, "Fast minimum-norm adversarial attacks through adaptive norm constraints", NeurIPS
2021 (algorithm 1). With the margin m = z_y − max_{j≠y} z_j, the best offset so far δ*, and q the dual norm, the radius
of an image becomes

    min(r (1 − γ), ‖δ*‖)        where x + δ is misclassified
    r (1 + γ)                   where it is not, but a point before was
    ‖δ‖ + |m| / ‖∇m‖_q          where none was: the distance to the linearised boundary

and the offset follows the gradient into the ball of that radius and the box,

    δ ← Π(δ − α ∇m / ‖∇m‖₂).

α falls from its first value to a hundredth of it and γ to 0.001, both along a cosine.

Departures from the authors' code:

* If no misclassified point is found, the distance is infinite. Some users of the code take the last offset instead,
  which may be zero.
* An image that is misclassified without an attack has distance zero and takes no step.
* Before the first misclassified point the radius grows by at least 1 + γ in each step. The box cuts off a part of every
  offset, and with the third line alone the search can stop just before the boundary.
* α begins at 10, and in the code at 1. A step has Euclidean length α, or α / √d per pixel: on a robust network with
  images of 28 x 28 pixels the distances with 1 were larger for most images, after 50 steps and after 200.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from harp.attacks.batched import Packing, State, Stepwise, wrong
from harp.attacks.fast_forward import frozen
from harp.attacks.threat import Ball, check_ball, check_number, images_in_box, length_of, margin, per_image, slope
from harp.models.modes import Logits

_GAMMA_END = 0.001
_ALPHA_END = 0.01  # as a share of the first α


@dataclass(frozen=True)
class Fmn(Stepwise):
    """The minimum-norm attack: `distances` are those to the nearest misclassified points found.

    A call returns these points. With a finite epsilon it is an attack within a ball: an image ends as soon as a point
    within epsilon is found, and an image without such a point is returned as it is.

    Arguments:
        epsilon: how far a point may be; by default any distance.
        norm: of the distance, "linf" or "l2".
        steps: how many gradient steps are taken.
        alpha: the length of the first step; it decays along half a cosine.
        gamma: by what share the ball shrinks or grows at first; it decays as well.
        fast: fold batch norms, and use the sparse engine for a sparse network; results agree up to rounding.

    Example:
        attack = harp.Fmn(steps=10)
        print(attack.distances(model, images, labels))
    """

    epsilon: float = math.inf
    norm: str = "linf"
    steps: int = 100
    alpha: float = 10.0
    gamma: float = 0.05
    fast: bool = True

    code: ClassVar[str] = "fmn"

    def __post_init__(self) -> None:
        if self.epsilon == math.inf:
            Ball(0, self.norm)
        else:
            check_ball(self)
        check_number("steps", self.steps, whole=True, least=1)
        check_number("alpha", self.alpha)
        check_number("gamma", self.gamma)

    def longest(self, classes: int) -> int:
        """The number of steps for an image that is never fooled."""
        return self.steps

    def distances(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The distance to the nearest misclassified point, whatever epsilon; infinite where none was found.

        An image that is misclassified without an attack has distance zero.
        """
        with torch.inference_mode(False), torch.no_grad():
            x, y = images_in_box(x, y, model), y.clone()
            if len(x) == 0:
                return x.new_zeros(0)
            with frozen(model, x, fast=self.fast) as net:
                packing = Packing(replace(self, epsilon=math.inf), net, x, y, batch=len(x), seed=0)
                packing.run()
            return length_of(packing.points - x, self.norm).masked_fill(~packing.fooled, math.inf)

    def begin(self, net: Logits, x: Tensor, y: Tensor, clean: Tensor, generator: torch.Generator) -> State:
        """The search starts at the image itself."""
        return {
            "points": x.clone(),
            "current": x.clone(),
            "radius": x.new_zeros(len(x)),
            "nearest": x.new_full((len(x),), math.inf),
            "step": torch.zeros_like(y),
        }

    def advance(
        self, net: Logits, x: Tensor, y: Tensor, state: State, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Evaluate the current points, adapt the radii, and follow the gradient inside the balls."""
        current, step = state["current"], state["step"]
        answer, lead, gradient = slope(net, current, lambda z: margin(z, y))
        # Where a logit is not finite there is no direction: the point stays, and the ball shrinks around it.
        lead, gradient = lead.nan_to_num(0, 0, 0), gradient.nan_to_num(0, 0, 0)
        distance, beyond = length_of(current - x, self.norm), wrong(answer, y)
        nearer = beyond & (distance < state["nearest"])
        state["nearest"] = torch.where(nearer, distance, state["nearest"])
        inside = nearer & (distance <= self.epsilon)
        state["points"][inside] = current[inside]

        decay = (1 + torch.cos(math.pi / self.steps * step.to(x.dtype))) / 2  # from one to almost zero
        gamma = _GAMMA_END + (self.gamma - _GAMMA_END) * decay
        alpha = self.alpha * (_ALPHA_END + (1 - _ALPHA_END) * decay)
        dual = torch.linalg.vector_norm(gradient.flatten(1), 1 if self.norm == "linf" else 2, dim=1)
        to_boundary = distance + lead.abs() / dual.clamp_min(torch.finfo(x.dtype).tiny)
        inner = torch.minimum(state["radius"] * (1 - gamma), state["nearest"])
        outer = state["radius"] * (1 + gamma)
        outer = torch.where(state["nearest"].isfinite(), outer, torch.maximum(outer, to_boundary))
        corner = length_of(torch.maximum(x, 1 - x), self.norm)  # no point of the box is farther
        state["radius"] = torch.where(beyond, inner, outer).minimum(corner)
        forward = Ball(1, "l2").steepest(gradient)
        state["current"] = _into(x, current - per_image(alpha, x) * forward, state["radius"], self.norm)
        state["step"] = step + 1

        ended = state["step"] == self.steps
        if self.epsilon < math.inf:
            return inside, ended
        return ended & state["nearest"].isfinite(), ended


def _into(x: Tensor, points: Tensor, radius: Tensor, norm: str) -> Tensor:
    """The nearest points in balls with one radius for each image, clipped to the box."""
    if norm == "linf":
        reach = per_image(radius, x)
        return points.clamp(x - reach, x + reach).clamp_(0, 1)
    length = length_of(points - x, norm).clamp_min(torch.finfo(x.dtype).tiny)
    return (x + (points - x) * per_image((radius / length).clamp_max(1), x)).clamp_(0, 1)
