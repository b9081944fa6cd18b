"""FAB-T: the nearest point of another class, along linearised decision boundaries.

Croce & Hein, "Minimally distorted adversarial examples with a fast adaptive boundary attack", ICML 2020, in the form
towards one class t at a time that is part of AutoAttack (Croce & Hein, ICML 2020). With f = z_t − z_y and the plane

    π = {z : f(x_i) + ⟨∇f(x_i), z − x_i⟩ = 0},

a step projects both the current point and the image x onto π within the box (problem 3; d and d' are the two ways
there), goes a little too far, and stays near to the image (eq. 7 and 9):

    α       = min(‖d‖ / (‖d‖ + ‖d'‖), α_max)
    x_{i+1} = clip((1 − α) (x_i + η d) + α (x + η d'))

A point that is misclassified is drawn back to the image, x ← x + β (x_{i+1} − x) (eq. 11). Targets are the classes
with the highest scores on the image itself. There is no final search, as there is none in AutoAttack's use: all that
matters is a misclassified point within epsilon, and an image that has one is through.

**The projection.** Both norms have a projection of the same form: with c = ⟨w, x⟩ − b, every pixel moves against the
sign of c w, by min(λ p_i, room_i). room_i is its way to the edge of the box, and p_i its pace, 1 in the maximum norm
and |w_i| in the Euclidean one. λ is where

    g(λ) = Σ |w_i| min(λ p_i, room_i) = |c|.

g is concave and piecewise linear. Newton's method from λ = 0 stays on the left of the solution, grows, and is exact as
soon as no further pixel meets the edge, which takes a few passes over the pixels. The authors sort them.

Departures from the authors' code:

* Points are also looked at where a gradient is computed, which is after they were drawn back, or at a random start: it
  costs nothing, and one that is misclassified within epsilon is found there.
* c is computed from f and differences of images, without the large b that cancels.
* Gradients are scaled to a largest entry of one: the code takes entries below 1e-8 for zero in the Euclidean norm,
  which all are of a confident network.
* Classes are sorted without the true one to find targets: a tie can't make it a target. There are never more targets
  than other classes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harp.attacks.batched import State, Stepwise, wrong
from harp.attacks.threat import Ball, check_number, length_of, logits, per_image
from harp.errors import RecipeError
from harp.models.modes import Logits

_SHORTEST = 1e-8  # what a way of length zero counts in α, as the authors have it


@dataclass(frozen=True)
class Fab(Stepwise):
    """FAB towards the `targets` likeliest other classes, one after the other, each with `restarts` runs.

    The first run starts from the image itself, the others from a random point halfway to the edge of the ball.

    Arguments:
        epsilon: the radius of the ball around an image.
        norm: of the ball, "linf" or "l2".
        steps: of a run.
        targets: how many of the likeliest other classes are tried.
        restarts: runs towards each class.
        alpha_max: how much of a step may go back towards the image.
        eta: how far a step goes beyond the decision boundary; 1 is up to it.
        beta: how much of the way from the image is kept when a misclassified point is pulled back towards it.
        fast: run the network folded and, where it is sparse, on the sparse engine; the attack is the same up to
            rounding.

    Example:
        attack = harp.Fab(epsilon=8 / 255, steps=5, targets=2)
        print(harp.accuracy(model, images, labels, attack=attack).accuracy)
    """

    epsilon: float = 8 / 255
    norm: str = "linf"
    steps: int = 100
    targets: int = 9
    restarts: int = 1
    alpha_max: float = 0.1
    eta: float = 1.05
    beta: float = 0.9
    fast: bool = True

    code: ClassVar[str] = "fab-t"

    def __post_init__(self) -> None:
        Ball(self.epsilon, self.norm)
        for name in ("steps", "targets", "restarts"):
            check_number(name, getattr(self, name), whole=True, least=1)
        check_number("eta", self.eta, least=1)
        for name in ("alpha_max", "beta"):
            check_number(name, getattr(self, name))
            if getattr(self, name) > 1:
                raise RecipeError(f"{name} must be a number from 0 to 1, not {getattr(self, name)!r}")

    def aims(self, classes: int) -> int:
        """How many targets there are."""
        return min(self.targets, classes - 1)

    def longest(self, classes: int) -> int:
        """How many steps an image takes that is never fooled."""
        return self.aims(classes) * self.restarts * self.steps

    def words(self, classes: int) -> str:
        """The number of targets."""
        return f"{self.aims(classes)} target{'s' * (self.aims(classes) > 1)}"

    def begin(self, net: Logits, x: Tensor, y: Tensor, clean: Tensor, generator: torch.Generator) -> State:
        """Every image is its own first point."""
        order = clean.scatter(1, y[:, None], math.inf).argsort(dim=1, descending=True, stable=True)
        return {
            "points": x.clone(),
            "current": x.clone(),
            "targets": order[:, 1 : 1 + self.aims(clean.shape[1])],
            "run": torch.zeros_like(y),
            "step": torch.zeros_like(y),
        }

    def advance(
        self, net: Logits, x: Tensor, y: Tensor, state: State, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Step over the linearised boundary of the current target, and back from the other side."""
        current = state["current"]
        target = state["targets"].gather(1, state["run"][:, None] // self.restarts).squeeze(1)
        answer, value, slope = _lead(net, current, y, target)
        fooled = wrong(answer, y) & self._within(current - x)

        point = self._next(x, current, value, slope)
        beyond = wrong(logits(net, point), y)
        reached = beyond & self._within(point - x)
        state["points"][fooled] = current[fooled]
        state["points"][reached] = point[reached]
        state["current"] = torch.lerp(point, x, per_image((1 - self.beta) * beyond.to(x.dtype), x))
        state["step"] = state["step"] + 1
        return fooled | reached, self._turn(x, state, generator)

    def _within(self, offset: Tensor) -> Tensor:
        return length_of(offset, self.norm) <= self.epsilon

    def _next(self, x: Tensor, current: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        """The mean of the two projections, weighted by how far they are."""
        largest = slope.abs().flatten(1).amax(1).clamp_min(torch.finfo(slope.dtype).tiny)
        slope, value = slope / per_image(largest, slope), value / largest
        far = value + (slope * (x - current)).flatten(1).sum(1)
        step, home = to_plane(current, slope, value, self.norm), to_plane(x, slope, far, self.norm)
        here, there = (length_of(way, self.norm).clamp_min(_SHORTEST) for way in (step, home))
        alpha = per_image((here / (here + there)).clamp_max(self.alpha_max), x)
        return torch.lerp(current + self.eta * step, x + self.eta * home, alpha).clamp_(0, 1)

    def _turn(self, x: Tensor, state: State, generator: torch.Generator) -> Tensor:
        """Start the next run where one is over; which images have had their last."""
        over = state["step"] == self.steps
        state["run"] = state["run"] + over.long()
        ended = state["run"] == self.restarts * state["targets"].shape[1]
        again = (over & ~ended).nonzero().flatten()
        if len(again):
            state["step"][again] = 0
            start = x[again]
            rerun = state["run"][again] % self.restarts > 0
            if rerun.any():
                start = torch.where(per_image(rerun, x), self._start(start, generator), start)
            state["current"][again] = start
        return ended

    def _start(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """A random point at half of epsilon, clipped to the box."""
        if self.norm == "linf":
            noise = 2 * torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype) - 1
        else:
            noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)
        return (x + self.epsilon / 2 * noise / per_image(length_of(noise, self.norm), x)).clamp_(0, 1)


def to_plane(x: Tensor, slope: Tensor, value: Tensor, norm: str) -> Tensor:
    """The shortest way d from `x`, within the box, to where `value` + ⟨`slope`, d⟩ is zero.

    Where the box does not reach that far, the way to the corner at which it is nearest to zero. Pixels of slope zero
    stay.
    """
    downhill = slope * per_image(1 - 2 * (value >= 0).to(x.dtype), x)
    # Comparisons write numbers: products with booleans are several times slower.
    upwards, free = torch.empty_like(x), torch.empty_like(x).flatten(1)
    room = torch.gt(downhill, 0, out=upwards).sub_(x).abs_().flatten(1)
    size, number = downhill.abs().flatten(1), torch.finfo(x.dtype)
    pace = size.clamp_min(number.tiny) if norm == "l2" else x.new_ones(())
    meets = room / pace  # the λ at which a pixel is at the edge
    gain = size * pace
    length, last = x.new_zeros(len(x), 1), x.new_full((len(x), 1), math.inf)
    while not torch.equal(last, rate := (gain * torch.gt(meets, length, out=free)).sum(1, keepdim=True)):
        rest = value.abs()[:, None] - (gain * torch.minimum(meets, length)).sum(1, keepdim=True)
        length = torch.where(rate > 0, length + rest.clamp_min(0) / rate, number.max).clamp_max(number.max)
        last = rate
    return downhill.sign() * torch.minimum(length * pace, room).view_as(x)


def _lead(net: Logits, points: Tensor, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The scores, by how much the target's is above the true class's, and the gradient of that."""
    points = points.detach().requires_grad_(True)
    with torch.enable_grad():
        answer = logits(net, points)
        value = (answer.gather(1, target[:, None]) - answer.gather(1, y[:, None])).squeeze(1)
        (slope,) = torch.autograd.grad(value.sum(), points)
    # Where a score is not finite there is no plane: the point stays, and with α goes nearer to the image.
    return answer.detach(), value.detach().to(points.dtype).nan_to_num(0, 0, 0), slope.nan_to_num(0, 0, 0)
