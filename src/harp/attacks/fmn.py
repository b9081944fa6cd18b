"""FMN: the nearest misclassified point, inside a ball that shrinks and grows until it touches the boundary.

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

* An image for which no misclassified point was found is at an infinite distance. Some users of the code take the offset
  it ends with for the answer, which may be zero.
* An image that is misclassified by itself is at distance zero and takes no step.
* Before the first success the radius is never less than (1 + γ) times the last. The box takes a part of every offset
  away: the third line alone can end in balance with that, just before the boundary, and never find it.
* α begins at 10, where the code has 1. A step has Euclidean length α, which is α / √d a pixel: on a robust network with
  images of 28 x 28 a beginning of 1 ended farther from most images, after 50 steps and after 200.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from harp.attacks.batched import Packing, State, Stepwise, wrong
from harp.attacks.fast_forward import frozen
from harp.attacks.threat import Ball, check_number, images_in_box, length_of, logits, per_image
from harp.models.modes import Logits

_GAMMA_END = 0.001
_ALPHA_END = 0.01  # of the first α


@dataclass(frozen=True)
class Fmn(Stepwise):
    """The minimum-norm attack: `distances` gives how far the nearest misclassified point found is.

    Called, it gives these points. With a finite epsilon it is an attack within a ball: an image is through as soon as
    a point within epsilon is found, and one without such a point is given back as it is.

    Arguments:
        epsilon: how far a point may be; by default any distance.
        norm: of the distance, "linf" or "l2".
        steps: how many gradient steps are taken.
        alpha: the first step's length; it falls along half a cosine.
        gamma: by what share the ball shrinks or grows at first; it falls as well.
        fast: run the network folded and, where it is sparse, on the sparse engine; the attack is the same up to
            rounding.

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
        Ball(0 if self.epsilon == math.inf else self.epsilon, self.norm)
        check_number("steps", self.steps, whole=True, least=1)
        check_number("alpha", self.alpha)
        check_number("gamma", self.gamma)

    def longest(self, classes: int) -> int:
        """How many steps an image takes that is never fooled."""
        return self.steps

    def distances(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """How far the nearest misclassified point is, whatever epsilon; infinite where none was found.

        An image that is misclassified by itself is at distance zero.
        """
        with torch.inference_mode(False), torch.no_grad():
            x, y = images_in_box(x, y), y.clone()
            if len(x) == 0:
                return x.new_zeros(0)
            with frozen(model, x, fast=self.fast) as net:
                packing = Packing(replace(self, epsilon=math.inf), net, x, y, batch=len(x), seed=0)
                packing.run()
            return length_of(packing.points - x, self.norm).masked_fill(~packing.fooled, math.inf)

    def begin(self, net: Logits, x: Tensor, y: Tensor, clean: Tensor, generator: torch.Generator) -> State:
        """Every image is its own first point."""
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
        """Look at the current points, adapt the balls, and follow the gradient inside them."""
        current, step = state["current"], state["step"]
        answer, margin, slope = _margin(net, current, y)
        distance, beyond = length_of(current - x, self.norm), wrong(answer, y)
        nearer = beyond & (distance < state["nearest"])
        state["nearest"] = torch.where(nearer, distance, state["nearest"])
        found = nearer & (distance <= self.epsilon)
        state["points"][found] = current[found]

        decay = (1 + torch.cos(math.pi / self.steps * step.to(x.dtype))) / 2  # from one to nearly zero
        gamma = _GAMMA_END + (self.gamma - _GAMMA_END) * decay
        alpha = self.alpha * (_ALPHA_END + (1 - _ALPHA_END) * decay)
        state["radius"] = self._radius(x, state, beyond, distance + margin.abs() / _dual(slope, self.norm), gamma)
        forward = Ball(1, "l2").steepest(slope)
        state["current"] = _into(x, current - per_image(alpha, x) * forward, state["radius"], self.norm)
        state["step"] = step + 1

        ended = state["step"] == self.steps
        if self.epsilon < math.inf:
            return found, ended
        return ended & state["nearest"].isfinite(), ended

    def _radius(self, x: Tensor, state: State, beyond: Tensor, guess: Tensor, gamma: Tensor) -> Tensor:
        radius, nearest = state["radius"], state["nearest"]
        inner = torch.minimum(radius * (1 - gamma), nearest)
        outer = radius * (1 + gamma)
        outer = torch.where(nearest.isfinite(), outer, torch.maximum(outer, guess))
        # No point of the box is farther than its farthest corner.
        return torch.where(beyond, inner, outer).minimum(length_of(torch.maximum(x, 1 - x), self.norm))


def _margin(net: Logits, points: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The scores, by how much the true class's is above all others, and the gradient of that."""
    points = points.detach().requires_grad_(True)
    with torch.enable_grad():
        answer = logits(net, points)
        other = answer.scatter(1, y[:, None], -math.inf).amax(1)
        margin = answer.gather(1, y[:, None]).squeeze(1) - other
        (slope,) = torch.autograd.grad(margin.sum(), points)
    # Where a score is not finite there is no direction: the point stays, and the ball shrinks around it.
    return answer.detach(), margin.detach().to(points.dtype).nan_to_num(0, 0, 0), slope.nan_to_num(0, 0, 0)


def _into(x: Tensor, points: Tensor, radius: Tensor, norm: str) -> Tensor:
    """The nearest points in balls that each have a radius of their own, clipped to the box."""
    if norm == "linf":
        each = per_image(radius, x)
        return points.clamp(x - each, x + each).clamp_(0, 1)
    length = length_of(points - x, norm).clamp_min(torch.finfo(x.dtype).tiny)
    return (x + (points - x) * per_image((radius / length).clamp_max(1), x)).clamp_(0, 1)


def _dual(slope: Tensor, norm: str) -> Tensor:
    """The length of gradients in the norm in which they count; where there is none, as short as a number can be."""
    order = 1 if norm == "linf" else 2
    length: Tensor = torch.linalg.vector_norm(slope.flatten(1), order, dim=1)
    return length.clamp_min(torch.finfo(slope.dtype).tiny)
