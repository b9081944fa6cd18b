"""Checks for false robustness: a model that looks robust because the attack on it fails.

The checks follow Athalye, Carlini & Wagner ("Obfuscated Gradients Give a False Sense of Security", ICML 2018), Carlini
et al. ("On Evaluating Adversarial Robustness", 2019) and Pintor et al. ("Indicators of Attack Failure", NeurIPS 2022).
`inspect` runs a few small attacks on the model itself; `harp.evaluation.consistency` checks measured results.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.attacks import Ball, margin
from harp.attacks.batched import wrong
from harp.errors import DataError, RecipeError
from harp.evaluation import model_checks
from harp.evaluation.model_checks import Finding, Verdict, graded, judged
from harp.evaluation.predict import as_input, example_of
from harp.evaluation.runner import seed_generators, seeded
from harp.evaluation.score import score
from harp.models.modes import Logits, evaluating
from harp.system.seeds import derive

_IMAGES = 128  # the largest number of images that are used
_STEPS = 40  # of the attacks here
_USUAL = 10  # the steps of a usual attack
_NOISES = 20  # random points for each image

_Loss = Callable[[Tensor, Tensor], Tensor]
_cross_entropy: _Loss = partial(F.cross_entropy, reduction="none")


def _negative_margin(answer: Tensor, y: Tensor) -> Tensor:
    return -margin(answer, y)


def inspect(model: nn.Module, images: Tensor, labels: Tensor, ball: Ball, *, seed: int = 0) -> list[Finding]:
    """Check on up to 128 images (in [0, 1], or bytes) whether attacks within a ball fail on a model.

    Copies of the model run in eval mode: its modes, parameters, buffers and gradients and the random state do not
    change. Checks that mean nothing after an earlier finding are left out.
    """
    if ball.epsilon == 0:
        raise RecipeError("epsilon 0 leaves nothing to attack: give the epsilon of the evaluation")
    if len(images) == 0:
        raise DataError("there are no images to inspect the model on")
    like = example_of(model, images)
    x, y = as_input(images[:_IMAGES], like), labels[:_IMAGES].to(like.device, torch.long)
    with torch.inference_mode(False), torch.no_grad(), _copies(model, x) as fresh:
        return list(_inspected(_Subject(fresh, seed), model_checks.normalisation(model), x.clone(), y.clone(), ball))


@dataclass(frozen=True)
class _Subject:
    """A source of fresh copies of the model, and the seed of all random numbers."""

    fresh: Callable[[], nn.Module]
    seed: int

    def ask(self, net: Logits, x: Tensor, *purpose: int | str) -> Tensor:
        """The logits, with random numbers seeded by the purpose."""
        self.seed_torch(x.device, *purpose)
        return net(x)

    def seed_torch(self, device: torch.device, *purpose: int | str) -> None:
        """Seed torch's generators, whose states are restored at the end of the inspection."""
        seed_generators(derive(self.seed, "suspicion", *purpose), device)

    def normal(self, like: Tensor, *purpose: int | str) -> Tensor:
        """Normal random numbers, the same on every device."""
        generator = torch.Generator().manual_seed(derive(self.seed, "suspicion", *purpose))
        return torch.randn(like.shape, generator=generator).to(like)


@contextmanager
def _copies(model: nn.Module, example: Tensor) -> Iterator[Callable[[], nn.Module]]:
    """A function that copies a model in eval mode. Running a copy changes neither the model nor torch's random state.

    A model that can't be copied is used itself, and its buffers are restored at the end.
    """
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def fresh() -> nn.Module:
        try:
            return copy.deepcopy(model)
        except Exception:  # a module may hold objects that can't be copied, such as generators or views
            return model

    with seeded(0, example.device), evaluating(model):
        try:
            yield fresh
        finally:
            for buffer, before in buffers:
                if not torch.equal(buffer, before):
                    buffer.copy_(before)


def _inspected(subject: _Subject, layer: Finding, x: Tensor, y: Tensor, ball: Ball) -> Iterator[Finding]:
    """Run the checks in order, and stop at one after which the others mean nothing."""
    net = subject.fresh()
    answer = subject.ask(net, x, "first")
    inputs, logits = model_checks.inputs(x), model_checks.answers(answer, y)
    yield inputs
    yield logits
    if answer.ndim != 2 or not answer.isfinite().all() or int(y.max()) >= answer.shape[1]:
        return
    yield _normalisation(subject, layer, x, y)
    calls = count()
    random = model_checks.determinism(lambda images: subject.ask(subject.fresh(), images, "random", next(calls)), x)
    yield random
    yield _state(subject, x, random=random.verdict != "good")
    right = answer.argmax(1) == y
    if inputs.verdict != "good":
        return
    if not right.any():
        yield Finding("accuracy", "look", f"none of {len(x)} images is classified right: there is nothing to attack")
        return
    x, y = x[right], y[right]
    subject.seed_torch(x.device, "gradients")
    yield model_checks.gradients(net, x, y)
    yield _preprocessing(subject, net, x, y)
    subject.seed_torch(x.device, "starts")
    losses, usual = _climb(net, x, y, ball, ball.epsilon / 4)
    yield _ascent(losses)
    yield _vanishing(net, x, y, ball, usual)
    yield _steps(usual)
    yield _noise(subject, net, x, y, ball, usual)
    yield _budget(net, x, y, ball)


def _normalisation(subject: _Subject, layer: Finding, x: Tensor, y: Tensor) -> Finding:
    """A heuristic: a model that is much better on standardised images was trained on them."""
    if layer.verdict == "good":
        return layer
    mean, std = x.mean((0, *range(2, x.ndim)), keepdim=True), x.std((0, *range(2, x.ndim)), keepdim=True)
    images = {"given": x, "standardised": (x - mean) / std.clamp_min(1e-3)}
    answers = [subject.ask(subject.fresh(), images[name], name) for name in images]
    given, other = (
        score((z.argmax(1) == y).cpu(), y, None, classes=z.shape[1], batch=len(x), seed=subject.seed) for z in answers
    )
    seen = f"{given.accuracy:.0%} of the images are right as given, {other.accuracy:.0%} when standardised"
    if other.interval()[0] > given.interval()[1]:
        text = f"{seen}: by this heuristic the model was trained on normalised images; put the normalisation inside"
        return Finding("normalisation", "bad", text)
    if given.interval()[0] <= 1 / len(given.totals):
        text = f"{seen}, no better than chance: by this heuristic the model is untrained or misses its normalisation"
        return Finding("normalisation", "look", text)
    return Finding("normalisation", "good", f"{seen}: nothing says that a normalisation is missing")


def _state(subject: _Subject, x: Tensor, *, random: bool) -> Finding:
    """Whether an image's logits depend on earlier batches or on other images of the batch."""
    net, other = subject.fresh(), 1 - x.flip(0)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    first = subject.ask(net, x, "state")
    subject.ask(net, other, "state")
    again = subject.ask(net, x, "state")
    if not _close(first, again):
        text = (
            f"asked again after another batch, the model gives logits that are off by {_off(first, again):.2g}: "
            "it keeps a state or draws random numbers of its own, so what an attack finds may not hold; remove that"
        )
        return Finding("state", "bad", text)
    beside = first if random else subject.ask(subject.fresh(), torch.cat([x, other]), "state")[: len(x)]
    if not _close(first, beside):
        text = (
            f"with other images beside it in the batch, an image's logits are off by {_off(first, beside):.2g}: "
            "they must depend on the image alone; let batch norms use their running statistics in eval mode"
        )
        return Finding("state", "bad", text)
    changed = [name for name, buffer in net.named_buffers() if not torch.equal(buffer, before[name])]
    if changed:
        text = f"in eval mode the model still writes into {', '.join(changed[:3])}: its answers may change with use"
        return Finding("state", "look", text)
    return Finding("state", "good", "an image's logits depend on nothing but the image")


def _preprocessing(subject: _Subject, net: Logits, x: Tensor, y: Tensor) -> Finding:
    """Whether a small change of the image changes the loss, and as much as the gradient predicts."""
    if x.dtype not in (torch.float32, torch.float64):
        return Finding("preprocessing", "good", f"not checked: steps are too small for {x.dtype}")
    before = subject.ask(net, x, "steps")
    after = subject.ask(net, x + 1e-5 * subject.normal(x, "nudge").sign(), "steps")
    flat = int((before == after).all(1).sum())
    verdict = graded(flat / len(x), 0.1, 0.5)
    if verdict != "good":
        text = (
            f"a change of 0.00001 in every pixel changes no logit of {flat} of {len(x)} images: inputs are quantised "
            "or the model is piecewise constant; attack it without that step, or through a differentiable stand-in"
        )
        return Finding("preprocessing", verdict, text)
    subject.seed_torch(x.device, "steps")
    gradient = _gradient(net, x, y, _negative_margin)[1]
    step = 1e-3 * gradient.sign()
    predicted = 2e-3 * gradient.abs().flatten(1).sum(1)
    ahead, back = (_negative_margin(subject.ask(net, x + side * step, "steps"), y) for side in (1, -1))
    ratio = (ahead - back) / predicted.clamp_min(torch.finfo(x.dtype).tiny)
    unlike = int(((predicted > 0) & ~((ratio > 0.1) & (ratio < 10))).sum())
    verdict = graded(unlike / len(x), 0.2, 0.5)
    if verdict != "good":
        text = (
            f"a small step along the gradient does not raise the loss as the gradient says on {unlike} of {len(x)} "
            "images: some step of the model has a gradient that is not its own; attack it without that step"
        )
        return Finding("preprocessing", verdict, text)
    return Finding("preprocessing", "good", "small steps change the loss as the gradient says")


def _climb(
    net: Logits, x: Tensor, y: Tensor, ball: Ball, step: float, loss: _Loss = _cross_entropy
) -> tuple[list[float], Tensor]:
    """Gradient ascent from random points: the mean loss at every step, and when each image was first fooled.

    An image that is never fooled has the number of steps plus one.
    """
    points, losses = ball.random(x), []  # a sparse network's gradient may be zero at the images themselves
    when = torch.full((len(x),), _STEPS + 1, device=x.device)
    for index in range(_STEPS + 1):
        answer, gradient = _gradient(net, points, y, loss)
        when = when.masked_fill(wrong(answer, y) & (when > index), index)
        losses.append(float(loss(answer, y).mean()))
        points = ball.project(points + step * ball.steepest(gradient), x)
    return losses, when


def _ascent(losses: Sequence[float]) -> Finding:
    """Whether the loss rises during gradient ascent."""
    path = losses[: _USUAL + 1]
    seen = f"the mean loss goes from {path[0]:.3g} to {path[-1]:.3g} in {_USUAL} steps of gradient ascent"
    if not all(map(math.isfinite, path)):
        text = f"{seen}: it must stay finite, or an attack has nothing to follow; look for overflows in the model"
        return Finding("ascent", "bad", text)
    rise = path[-1] - path[0]
    if rise <= 0:
        text = f"{seen}: it does not rise, so the gradient leads nowhere and robust accuracy would be false"
        return Finding("ascent", "bad", text)
    falls = sum(max(0.0, before - after) for before, after in pairwise(path))
    advice = f", but falls by {falls:.3g} on the way: the gradient is noisy; use smaller steps and more of them"
    return judged("ascent", "look" if falls > rise / 2 else "good", seen, advice)


def _vanishing(net: Logits, x: Tensor, y: Tensor, ball: Ball, when: Tensor) -> Finding:
    """Whether rounding loses the cross entropy's gradient, as in confident models, and the margin's finds more."""
    entropy, margin = (
        _gradient(net, x, y, loss)[1].abs().flatten(1).amax(1) for loss in (_cross_entropy, _negative_margin)
    )
    lost = (entropy <= torch.finfo(x.dtype).eps * margin) & (margin > 0)
    seen = f"the cross entropy's gradient is lost in rounding on {int(lost.sum())} of {len(x)} images"
    missed = 0
    if lost.any():
        by_margin = _climb(net, x[lost], y[lost], ball, ball.epsilon / 4, _negative_margin)[1]
        missed = int(((by_margin <= _STEPS) & (when[lost] > _STEPS)).sum())
    advice = (
        f", and the margin's fools {missed} of these that it leaves right: attacks on the cross entropy alone "
        "give false robustness; attack the margin too (cw, apgd-t, autoattack)"
    )
    return judged("vanishing", graded(missed / len(x), 0.01, 0.05) if missed > 1 else "good", seen, advice)


def _steps(when: Tensor) -> Finding:
    """Whether more steps fool many more images."""
    few, many = (float((when <= steps).double().mean()) for steps in (_USUAL, _STEPS))
    seen = f"{_USUAL} steps fool {few:.0%} of the images and {_STEPS} steps {many:.0%}"
    verdict: Verdict = "look" if many - few > 0.2 else "good"
    return judged("steps", verdict, seen, ": a short attack is not at its end; evaluate with more steps")


def _noise(subject: _Subject, net: Logits, x: Tensor, y: Tensor, ball: Ball, when: Tensor) -> Finding:
    """Whether random points on the ball's surface fool images that gradient ascent does not."""
    fooled = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    for index in range(_NOISES):
        noise = ball.epsilon * ball.steepest(subject.normal(x, "noise", index))
        answer = subject.ask(net, ball.project(x + noise, x), "noise", index)
        fooled |= answer.argmax(1) != y
    alone = int((fooled & (when > _STEPS)).sum())
    seen = f"random noise fools {int(fooled.sum())} of {len(x)} images, {alone} of them missed by gradient ascent"
    verdict = graded(alone / len(x), 0.01, 0.05) if alone > 1 else "good"
    advice = ": the gradient is worth less than chance there; add a black-box attack (autoattack has Square)"
    return judged("noise", verdict, seen, advice)


def _budget(net: Logits, x: Tensor, y: Tensor, ball: Ball) -> Finding:
    """Whether gradient ascent fools almost all images in a ball so large that images can be made grey.

    An almost constant model can be robust even there. To tell it from masked gradients, images are also moved towards
    grey and towards each other, which needs no gradient.
    """
    usual = 0.5 if ball.norm == "linf" else 0.5 * math.sqrt(x[0].numel())
    large = Ball(max(usual, ball.epsilon), ball.norm)
    left = _climb(net, x, y, large, large.epsilon / 20)[1] > _STEPS
    seen = (
        f"at {ball.norm} epsilon {large.epsilon:.3g} gradient ascent leaves {int(left.sum())} of {len(x)} images right"
    )
    moved = torch.zeros_like(left)
    if left.any():
        for target in (torch.full_like(x, 0.5), *(x.roll(shift, 0) for shift in range(1, min(_NOISES, len(x))))):
            moved |= net(large.project(target, x)).argmax(1) != y
    missed = int((left & moved).sum())
    if missed > 1 and missed > 0.05 * len(x):
        text = (
            f"{seen}, and {missed} of these are fooled by moving them towards grey or towards each other: gradients "
            "are masked, so robust accuracy by them alone would be false; add attacks without gradients (autoattack)"
        )
        return Finding("budget", "bad", text)
    advice = ", where hardly any can hold out: gradients are masked or the model is almost constant; look at both"
    return judged("budget", "look" if left.double().mean() > 0.05 else "good", seen, advice)


def _gradient(net: Logits, x: Tensor, y: Tensor, loss: _Loss) -> tuple[Tensor, Tensor]:
    """The logits, and the gradient of each image's loss; zero where there is none."""
    points = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        answer = net(points)
        total = loss(answer, y).sum()
        gradient = torch.autograd.grad(total, points, allow_unused=True)[0] if total.requires_grad else None
    return answer.detach(), torch.zeros_like(x) if gradient is None else gradient


def _off(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max())


def _close(first: Tensor, second: Tensor) -> bool:
    """Whether logits agree up to rounding in another order of summation."""
    return _off(first, second) <= 8 * math.sqrt(torch.finfo(first.dtype).eps) * float(first.abs().max())
