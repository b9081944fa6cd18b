"""APGD: gradient ascent that finds its step length by itself.

Croce & Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free attacks",
ICML 2020. From a random point of the ball's boundary, with momentum (eq. 3 and 4; a = 1 in the first step, then 3/4):

    z       = Π(x_k + η · steepest(∇ f(x_k)))
    x_{k+1} = Π(x_k + a (z − x_k) + (1 − a) (x_k − x_{k−1}))

η is 2 ε at first. The first checkpoint is after 22 % of the steps, and the distance to the next one shrinks by 3 % of
the steps each time, down to 6 %. At a checkpoint η is halved and the search goes back to the best point so far, if
since the last checkpoint

1.  no more than ρ = 75 % of the steps have raised the loss, or
2.  η was not halved there and the best loss is still the same.

The losses are the cross entropy, the difference of logits ratio (eq. 5, with the logits sorted z_1 ≥ z_2 ≥ ...)

    DLR = −(z_y − max_{j≠y} z_j) / (z_1 − z_3)

and its form towards a class t (eq. 6): −(z_y − z_t) / (z_1 − (z_3 + z_4)/2). The attack on an image ends as soon as a
point is misclassified.

Departures from the authors' code:

* The first step counts as a rise if its loss is higher than at the start, as in the paper; the code compares with zero.
* Steps in the Euclidean norm divide by the length of the gradient without an added constant, so that gradients below
  1e-12 work as well.
* Targets are chosen among the classes without the true one: a tie can't make the true class a target.
* A loss also works for fewer classes than it needs: with three classes both ratios divide by z_1 − z_3, with two the
  loss is the margin. There are never more targets than other classes.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from harp.attacks.batched import State, Stepwise, likeliest, next_runs, wrong
from harp.attacks.threat import Ball, check_number, length_of, margin, noise, per_image, slope
from harp.models.modes import Logits

_RHO = 0.75
_MOMENTUM = 0.75
_TINY = 1e-12  # in the denominators of the ratios, as in the authors' code


@dataclass(frozen=True)
class Apgd(Stepwise):
    """APGD on the cross entropy.

    Arguments:
        epsilon: the radius of the ball around an image.
        norm: of the ball, "linf" or "l2".
        steps: how many gradient steps are taken.
        restarts: runs from other random points.
        fast: fold batch norms, and use the sparse engine for a sparse network; results agree up to rounding.

    Example:
        attack = harp.Apgd(epsilon=8 / 255, steps=10)
        print(harp.accuracy(model, images, labels, attack=attack).accuracy)
    """

    epsilon: float = 8 / 255
    norm: str = "linf"
    steps: int = 100
    restarts: int = 1
    fast: bool = True

    code: ClassVar[str] = "apgd-ce"

    def loss(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        """The loss to climb, per image; an untargeted loss ignores `target`."""
        return F.cross_entropy(logits, y, reduction="none")

    def words(self, classes: int) -> str:
        """The loss."""
        return "cross entropy"

    def aims(self, classes: int) -> int:
        """The number of target classes; 1 for an untargeted attack."""
        return 1

    def longest(self, classes: int) -> int:
        """The number of steps for an image that is never fooled: one for the start and one for each further point."""
        return self.aims(classes) * self.restarts * (self.steps + 1)

    def begin(self, net: Logits, x: Tensor, y: Tensor, clean: Tensor, generator: torch.Generator) -> State:
        """The first run of every image, and its target classes."""
        targets = likeliest(clean, y, self.aims(clean.shape[1]))
        return {**self._run(x, generator), "run": torch.zeros_like(y), "targets": targets}

    def advance(
        self, net: Logits, x: Tensor, y: Tensor, state: State, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Evaluate the current point of each image, then move to the next one."""
        current, step = state["current"], state["step"]
        target = state["targets"].gather(1, state["run"][:, None] // self.restarts).squeeze(1)
        answer, loss, gradient = slope(net, current, lambda z: self.loss(z, y, target))
        fooled = wrong(answer, y)
        better = loss > state["best"]
        state["points"] = torch.where(per_image(better | fooled, x), current, state["points"])
        state["gradient"] = torch.where(per_image(better, x), gradient, state["gradient"])
        state["best"] = torch.where(better, loss, state["best"])
        state["rises"] += loss > state["last"]
        state["last"] = loss

        window = checkpoints(self.steps, step.device)[step]
        back = self._halve(state, window)
        if window.any():
            current = torch.where(per_image(back, x), state["points"], current)
            gradient = torch.where(per_image(back, x), state["gradient"], gradient)
        state["current"], state["previous"] = self._next(x, current, gradient, state), current
        state["step"] = step + 1

        ended, again = next_runs(state, step == self.steps, self.restarts * state["targets"].shape[1], fooled)
        if len(again):
            for key, rows in self._run(x[again], generator).items():
                state[key][again] = rows
        return fooled, ended

    def _run(self, x: Tensor, generator: torch.Generator) -> State:
        """The state before the first step of a run."""
        start = self._start(x, generator)
        number = torch.zeros(len(x), dtype=torch.long, device=x.device)
        value = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        return {
            "points": start,
            "current": start.clone(),
            "previous": start.clone(),
            "gradient": torch.zeros_like(x),  # at `points`
            "best": value - math.inf,
            "last": value + math.inf,
            "checked": value - math.inf,  # the best loss at the last checkpoint
            "size": value + 2 * self.epsilon,
            "rises": number,
            "step": number.clone(),
            "halved": torch.ones_like(number, dtype=torch.bool),
        }

    def _start(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Random points at distance epsilon from the images, clipped to the box."""
        offset = noise(x, self.norm, generator)
        return (x + offset * per_image(self.epsilon / (length_of(offset, self.norm) + _TINY), x)).clamp_(0, 1)

    def _halve(self, state: State, window: Tensor) -> Tensor:
        """Which images are at a checkpoint and go back to their best point with half the step length."""
        check = window > 0
        few = state["rises"] <= _RHO * window
        stuck = ~state["halved"] & (state["checked"] >= state["best"])
        back = check & (few | stuck)
        state["halved"] = torch.where(check, back, state["halved"])
        state["checked"] = torch.where(check | (state["step"] == 0), state["best"], state["checked"])
        state["rises"] = state["rises"].masked_fill(check, 0)
        state["size"] = torch.where(back, state["size"] / 2, state["size"])
        return back

    def _next(self, x: Tensor, current: Tensor, gradient: Tensor, state: State) -> Tensor:
        """A step along the gradient, with momentum."""
        ball = Ball(self.epsilon, self.norm)
        size = per_image(state["size"], x)
        drift = per_image((1 - _MOMENTUM) * (state["step"] > 0).to(x.dtype), x)
        aim = ball.project(torch.addcmul(current, ball.steepest(gradient), size), x)
        return ball.project(aim.lerp_(current, drift).add_((current - state["previous"]).mul_(drift)), x)


@dataclass(frozen=True)
class ApgdDlr(Apgd):
    """APGD on the difference of logits ratio.

    Arguments:
        epsilon: the radius of the ball around an image.
        norm: of the ball, "linf" or "l2".
        steps: how many gradient steps are taken.
        restarts: runs from other random points.
        fast: fold batch norms, and use the sparse engine for a sparse network; results agree up to rounding.

    Example:
        attack = harp.ApgdDlr(epsilon=8 / 255, steps=10)
        print(harp.accuracy(model, images, labels, attack=attack).accuracy)
    """

    code: ClassVar[str] = "apgd-dlr"

    def loss(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        """The negative margin, divided by the distance between the first and the third logit."""
        return -margin(logits, y) / _spread(logits, 3)

    def words(self, classes: int) -> str:
        """The loss for a number of classes."""
        return "margin, the ratio needs 3 classes" if classes < 3 else "difference of logits ratio"


@dataclass(frozen=True)
class ApgdT(Apgd):
    """APGD on the targeted difference of logits ratio, with `restarts` runs towards each target class.

    Arguments:
        epsilon: the radius of the ball around an image.
        norm: of the ball, "linf" or "l2".
        steps: how many gradient steps are taken.
        restarts: runs from other random points.
        fast: fold batch norms, and use the sparse engine for a sparse network; results agree up to rounding.
        targets: the number of target classes, the likeliest first.

    Example:
        attack = harp.ApgdT(epsilon=8 / 255, steps=10, targets=2)
        print(harp.accuracy(model, images, labels, attack=attack).accuracy)
    """

    targets: int = 9

    code: ClassVar[str] = "apgd-t"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("targets", self.targets, whole=True, least=1)

    def aims(self, classes: int) -> int:
        """The number of target classes."""
        return min(self.targets, classes - 1)

    def loss(self, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
        """By how much the target is above the true class, divided by the spread of the first four logits."""
        true, other = logits.gather(1, torch.stack([y, target], 1)).unbind(1)
        return (other - true) / _spread(logits, 4)

    def words(self, classes: int) -> str:
        """The loss and the number of targets for a number of classes."""
        ratio = ["margin, the ratio needs 3 classes", "difference of logits ratio over z₁ − z₃"]
        aims = self.aims(classes)
        loss = ratio[classes - 2] if classes < 4 else "difference of logits ratio"
        return f"{loss}, towards {aims} class{'es' * (aims > 1)}"


def _spread(logits: Tensor, wanted: int) -> Tensor | float:
    """The denominator of a ratio over `wanted` logits, or its nearest form for fewer classes."""
    wanted = min(wanted, logits.shape[1])
    if wanted < 3:
        return 1.0
    first, _, third, *fourth = logits.topk(wanted, dim=1).values.unbind(1)
    return first - (0.5 * (third + fourth[0]) if fourth else third) + _TINY


@cache
def checkpoints(steps: int, device: torch.device) -> Tensor:
    """For every number of steps taken: at a checkpoint the number of steps since the last one, else 0."""
    windows = torch.zeros(steps + 1, dtype=torch.long)
    length, at = max(int(0.22 * steps), 1), 0
    while (at := at + length) <= steps:
        windows[at] = length
        length = max(length - max(int(0.03 * steps), 1), max(int(0.06 * steps), 1))
    return windows.to(device)
