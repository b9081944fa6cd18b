"""FAB-T: the nearest point of another class, along linearised decision boundaries.

Croce & Hein, "Minimally distorted adversarial examples with a fast adaptive boundary attack", ICML 2020, in the form
towards one class t at a time that is part of AutoAttack (Croce & Hein, ICML 2020). With f = z_t − z_y and the plane

    π = {z : f(x_i) + ⟨∇f(x_i), z − x_i⟩ = 0},

a step projects both the current point and the image x onto π within the box (problem 3; d and d' are the two offsets),
overshoots a little, and stays near the image (eq. 7 and 9):

    α       = min(‖d‖ / (‖d‖ + ‖d'‖), α_max)
    x_{i+1} = clip((1 − α) (x_i + η d) + α (x + η d'))

A point that is misclassified is moved back towards the image, x ← x + β (x_{i+1} − x) (eq. 11). Targets are the
classes with the largest logits on the image itself. As in AutoAttack there is no final search: an image ends as soon as
a misclassified point within epsilon is found.

**The projection.** Both norms have a projection of the same form: with c = ⟨w, x⟩ − b, every pixel moves against the
sign of c w, by min(λ p_i, room_i). room_i is its distance to the edge of the box, and p_i its pace: 1 in the maximum
norm, |w_i| in the Euclidean norm. λ solves

    g(λ) = Σ |w_i| min(λ p_i, room_i) = |c|.

g is concave and piecewise linear. Newton's method from λ = 0 approaches the solution from the left, and is exact as
soon as no further pixel reaches the edge, after a few passes over the pixels. The authors' code sorts the pixels.

Departures from the authors' code:

* Points where a gradient is computed (after they were moved back, or at a random start) are checked as well, as their
  logits are there.
* c is computed from f and differences of images, without the large b that cancels.
* Gradients are scaled to a largest entry of one: in the Euclidean norm the code takes entries below 1e-8 for zero, and
  all entries of a confident network are below that.
* Targets are chosen among the classes without the true one: a tie can't make the true class a target. There are never
  more targets than other classes.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from harp.attacks.batched import State, Stepwise, likeliest, next_runs, wrong
from harp.attacks.threat import check_number, length_of, logits, noise, per_image, slope
from harp.errors import RecipeError
from harp.models.modes import Logits

_SHORTEST = 1e-8  # the least length in α, as in the authors' code


@dataclass(frozen=True)
class Fab(Stepwise):
    """FAB towards the likeliest other classes, one after the other, with `restarts` runs towards each.

    The first run starts at the image itself, the others at a random point at half of epsilon.

    Arguments:
        epsilon: the radius of the ball around an image.
        norm: of the ball, "linf" or "l2".
        steps: of a run.
        targets: the number of target classes, the likeliest first.
        restarts: runs towards each class.
        alpha_max: how much of a step may go back towards the image.
        eta: how far a step overshoots the decision boundary; 1 ends on it.
        beta: how much of the offset is kept when a misclassified point is moved back towards the image.
        fast: fold batch norms, and use the sparse engine for a sparse network; results agree up to rounding.

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
        super().__post_init__()
        check_number("targets", self.targets, whole=True, least=1)
        check_number("eta", self.eta, least=1)
        for name in ("alpha_max", "beta"):
            check_number(name, getattr(self, name))
            if getattr(self, name) > 1:
                raise RecipeError(f"{name} must be a number from 0 to 1, not {getattr(self, name)!r}")

    def aims(self, classes: int) -> int:
        """The number of target classes."""
        return min(self.targets, classes - 1)

    def longest(self, classes: int) -> int:
        """The number of steps for an image that is never fooled."""
        return self.aims(classes) * self.restarts * self.steps

    def words(self, classes: int) -> str:
        """The number of targets."""
        return f"{self.aims(classes)} target{'s' * (self.aims(classes) > 1)}"

    def begin(self, net: Logits, x: Tensor, y: Tensor, clean: Tensor, generator: torch.Generator) -> State:
        """The first run starts at the image itself."""
        return {
            "points": x.clone(),
            "current": x.clone(),
            "targets": likeliest(clean, y, self.aims(clean.shape[1])),
            "run": torch.zeros_like(y),
            "step": torch.zeros_like(y),
        }

    def advance(
        self, net: Logits, x: Tensor, y: Tensor, state: State, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Step over the linearised boundary to the target class; a misclassified point is moved back."""
        current = state["current"]
        target = state["targets"].gather(1, state["run"][:, None] // self.restarts).squeeze(1)
        answer, lead, gradient = slope(
            net, current, lambda z: (z.gather(1, target[:, None]) - z.gather(1, y[:, None]))[:, 0]
        )
        # Where a logit is not finite there is no plane: the point stays, and moves towards the image by α.
        lead, gradient = lead.nan_to_num(0, 0, 0), gradient.nan_to_num(0, 0, 0)
        fooled = wrong(answer, y) & (length_of(current - x, self.norm) <= self.epsilon)

        point = self._next(x, current, lead, gradient)
        beyond = wrong(logits(net, point), y)
        reached = beyond & (length_of(point - x, self.norm) <= self.epsilon)
        state["points"][fooled] = current[fooled]
        state["points"][reached] = point[reached]
        state["current"] = torch.lerp(point, x, per_image((1 - self.beta) * beyond.to(x.dtype), x))
        state["step"] = state["step"] + 1
        return fooled | reached, self._turn(x, state, generator)

    def _next(self, x: Tensor, current: Tensor, lead: Tensor, gradient: Tensor) -> Tensor:
        """The mean of the two projections, weighted by their lengths."""
        largest = gradient.abs().flatten(1).amax(1).clamp_min(torch.finfo(gradient.dtype).tiny)
        gradient, lead = gradient / per_image(largest, gradient), lead / largest
        lead_at_image = lead + (gradient * (x - current)).flatten(1).sum(1)
        step, back = to_plane(current, gradient, lead, self.norm), to_plane(x, gradient, lead_at_image, self.norm)
        length, length_back = (length_of(offset, self.norm).clamp_min(_SHORTEST) for offset in (step, back))
        alpha = per_image((length / (length + length_back)).clamp_max(self.alpha_max), x)
        return torch.lerp(current + self.eta * step, x + self.eta * back, alpha).clamp_(0, 1)

    def _turn(self, x: Tensor, state: State, generator: torch.Generator) -> Tensor:
        """Start the next run where one is over; which images have ended."""
        over, runs = state["step"] == self.steps, self.restarts * state["targets"].shape[1]
        ended, again = next_runs(state, over, runs, fooled=torch.zeros_like(over))
        if len(again):
            state["step"][again] = 0
            rerun = state["run"][again] % self.restarts > 0  # the first run towards a target starts at the image
            random = self._start(x[again], generator) if rerun.any() else x[again]
            state["current"][again] = torch.where(per_image(rerun, x), random, x[again])
        return ended

    def _start(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """A random point at half of epsilon, clipped to the box."""
        offset = noise(x, self.norm, generator)
        return (x + self.epsilon / 2 * offset / per_image(length_of(offset, self.norm), x)).clamp_(0, 1)


def to_plane(x: Tensor, slope: Tensor, value: Tensor, norm: str) -> Tensor:
    """The shortest offset d from `x`, within the box, with `value` + ⟨`slope`, d⟩ = 0.

    If there is none in the box, the offset to the corner where that is nearest to zero. Pixels with slope zero stay.
    """
    downhill = slope * per_image(1 - 2 * (value >= 0).to(x.dtype), x)
    # Comparisons write floats: products with booleans are several times slower.
    upwards, free = torch.empty_like(x), torch.empty_like(x).flatten(1)
    room = torch.gt(downhill, 0, out=upwards).sub_(x).abs_().flatten(1)
    size, number = downhill.abs().flatten(1), torch.finfo(x.dtype)
    pace = size.clamp_min(number.tiny) if norm == "l2" else x.new_ones(())
    meets = room / pace  # the λ at which a pixel reaches the edge
    gain = size * pace
    length, last = x.new_zeros(len(x), 1), x.new_full((len(x), 1), math.inf)
    while not torch.equal(last, rate := (gain * torch.gt(meets, length, out=free)).sum(1, keepdim=True)):
        rest = value.abs()[:, None] - (gain * torch.minimum(meets, length)).sum(1, keepdim=True)
        length = torch.where(rate > 0, length + rest.clamp_min(0) / rate, number.max).clamp_max(number.max)
        last = rate
    return downhill.sign() * torch.minimum(length * pace, room).view_as(x)
