"""Checks of a model before a long run: whether it can be pruned, and whether attacks on it are meaningful."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harp.errors import HarpError
from harp.models.inputs import described
from harp.models.modes import evaluating
from harp.pruning.channels import Channels
from harp.pruning.prunable import classify
from harp.pruning.units import Weights
from harp.system.files import reason
from harp.system.notebook import html_table

_LEFT_ALONE = 0.1  # the share of a network's weights that should not be left alone without a look

Verdict = Literal["good", "look", "bad"]


@dataclass(frozen=True)
class Finding:
    """The result of one check: its name, the verdict, and a text that says what to do."""

    check: str
    verdict: Verdict
    text: str


def judged(check: str, verdict: Verdict, observed: str, advice: str) -> Finding:
    """A finding whose text is what was observed, with the advice if the verdict is not good."""
    return Finding(check, verdict, observed if verdict == "good" else observed + advice)


@dataclass(frozen=True)
class Examination:
    """The results of all checks."""

    layers: list[dict[str, Any]]
    left_out: dict[str, str]
    left_sizes: dict[str, int]  # how many weights each of them has
    findings: list[Finding]
    spaces: list[dict[str, Any]]  # channels that may be pruned: name, size, readers, givers, share of the FLOPs
    whole: list[dict[str, Any]]  # channels that stay: readers, count, reason

    @property
    def healthy(self) -> bool:
        """Whether no verdict is bad."""
        return all(finding.verdict != "bad" for finding in self.findings)

    def _repr_html_(self) -> str:
        signs = {"good": "✓ good", "look": "! look", "bad": "✗ bad"}
        rows = [[one.check, signs[one.verdict], one.text] for one in self.findings]
        weights = sum(layer["size"] for layer in self.layers)
        layers = f"{len(self.layers)} layer{'s' if len(self.layers) != 1 else ''}"
        title = f"{weights:,} weights in {layers} can be pruned"
        return html_table(title, ("check", "", "finding"), rows, words=True)

    def as_dict(self) -> dict[str, Any]:
        """The examination as plain data."""
        return {**asdict(self), "healthy": self.healthy}


def examine(model: nn.Module, images: Tensor, labels: Tensor, *, channels: bool = True) -> Examination:
    """Examine a model on a batch of images, which should be in [0, 1]; tracing its channels may take a while."""
    try:
        units = Weights(model)
        layers = [{"name": name, "size": size} for name, size in zip(units.names, units.sizes, strict=True)]
        left_out, first = units.left_out, prunable(model, units)
    except HarpError as error:
        left_out = {name: reason for name, reason in classify(model) if reason is not None}
        layers, first = [], Finding("prunable", "bad", str(error))
    spaces, whole, second = _channels(model, images) if channels else ([], [], [])
    with evaluating(model):
        checks = [
            first,
            *second,
            inputs(images),
            normalisation(model),
            *attackable(model, images, labels),
        ]
    return Examination(layers, left_out, _sizes(model, left_out), checks, spaces, whole)


def _sizes(model: nn.Module, names: Iterable[str]) -> dict[str, int]:
    parameters = dict(model.named_parameters())
    lazy = nn.parameter.UninitializedParameter
    return {name: 0 if isinstance(parameters[name], lazy) else parameters[name].numel() for name in names}


def prunable(model: nn.Module, units: Weights) -> Finding:
    """How many weights can be pruned, and how many are left alone."""
    left = _sizes(model, units.left_out)
    share = sum(left.values()) / (units.size + sum(left.values()))
    text = f"{units.size:,} weights in {len(units.names)} layers; {sum(left.values()):,} are left alone, {share:.1%}"
    if share <= _LEFT_ALONE:
        return Finding("prunable", "good", text)
    largest = max(left, key=lambda name: left[name])
    return Finding("prunable", "look", f"{text}, most of them in {largest!r}: --include prunes such parameters too")


def _channels(model: nn.Module, images: Tensor) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[Finding]]:
    """The channels that may be pruned, those that may not, and a finding about them."""
    try:
        units = Channels(model, images)
    except Exception as error:  # the trial cuts run a changed copy of the model, which may raise any error
        text = str(error) if isinstance(error, HarpError) else f"can't be followed: {type(error).__name__}: {error}"
        return [], [], [Finding("channels", "look", " ".join(text.split()))]
    matrices = {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter.ndim > 1}
    spaces = []
    for number, space in enumerate(units.spaces):
        without = [0 if number == other else size for other, size in enumerate(units.sizes)]
        givers = [name for name in dict.fromkeys(space.givers) if name in matrices]
        facts = {"name": space.name, "size": units.sizes[number], "readers": space.readers, "givers": givers}
        spaces.append({**facts, "share": 1 - units.spend(without) / units.size})
    grouped: dict[str, dict[str, Any]] = {}
    for part in units.whole:
        same = grouped.setdefault(part.reason, {"readers": [], "count": 0, "reason": part.reason})
        same["readers"] += [name for name in part.readers if name not in same["readers"]]
        same["count"] += part.count
    least = units.spend(units.lower) / units.size
    groups = f"{len(spaces)} group" + "s" * (len(spaces) != 1)
    text = f"{sum(units.sizes):,} channels in {groups}; at least {least:.2%} of the FLOPs stay"
    return spaces, list(grouped.values()), [Finding("channels", "good", text)]


def inputs(images: Tensor) -> Finding:
    """Whether images are in [0, 1]."""
    low, high = float(images.min()), float(images.max())
    if low < -1e-6 or high > 1 + 1e-6:
        text = f"images span {low:.3g} to {high:.3g}: scale them to [0, 1], or epsilon has no meaning"
        return Finding("inputs", "bad", text)
    return Finding("inputs", "good", f"images are within [0, 1] ({low:.3g} to {high:.3g})")


def normalisation(model: nn.Module) -> Finding:
    """Whether a layer of the model normalises its inputs."""
    for name, module in model.named_modules():
        buffers = dict(module.named_buffers(recurse=False))
        if {"mean", "std"} <= buffers.keys():
            return Finding("normalisation", "good", f"inside the model, in {name or type(module).__name__!r}")
    text = "none found in the model: right if it was trained on [0, 1] images, else put it inside (model.normalize)"
    return Finding("normalisation", "look", text)


def attackable(model: nn.Module, images: Tensor, labels: Tensor) -> list[Finding]:
    """What concerns attacks: logits, determinism and gradients. Without logits nothing else can be checked."""
    try:
        outputs: Any = model(images.clone())
    except Exception as error:  # forward may do anything
        return [Finding("logits", "bad", f"the model can't run on images of {described(images)}: {reason(error)}")]
    if not isinstance(outputs, Tensor):
        text = (
            f"the model returns {type(outputs).__name__}, and attacks need a tensor of logits: prune it by `harp.fit`"
        )
        return [Finding("logits", "bad", f"{text} with an objective of your own")]
    first = answers(outputs.detach(), labels)
    return [first, determinism(model, images), gradients(model, images, labels)] if outputs.ndim == 2 else [first]


def answers(outputs: Tensor, labels: Tensor) -> Finding:
    """Whether a model's outputs are finite logits that fit the labels."""
    if outputs.ndim != 2:
        text = f"output has shape {tuple(outputs.shape)}: one row of logits for each image is needed"
        return Finding("logits", "bad", text)
    if not torch.isfinite(outputs).all():
        return Finding("logits", "bad", "output holds NaN or infinity")
    if int(labels.max()) >= outputs.shape[1]:
        return Finding("logits", "bad", f"{outputs.shape[1]} logits, but a label is {int(labels.max())}")
    ones = torch.ones(len(outputs), dtype=outputs.dtype, device=outputs.device)
    if (outputs >= 0).all() and torch.allclose(outputs.sum(1), ones, atol=1e-3):
        return Finding("logits", "bad", "output is a softmax: return the logits before it, or attacks see no gradient")
    if torch.allclose(outputs.logsumexp(1), 0 * ones, atol=1e-3):
        return Finding("logits", "look", "output is a log-softmax: return the logits before it")
    return Finding("logits", "good", f"{outputs.shape[1]} logits an image")


def determinism(logits: Callable[[Tensor], Tensor], images: Tensor) -> Finding:
    """Whether the same images give the same logits."""
    if torch.equal(logits(images), logits(images)):
        return Finding("determinism", "good", "the same image gives the same logits")
    return Finding("determinism", "bad", "the same image gives other logits: attacks on a random model need averaging")


def gradients(logits: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> Finding:
    """Whether every image has a gradient."""
    x = images.clone().requires_grad_()
    with torch.enable_grad():
        outputs = logits(x)
        loss = F.cross_entropy(outputs, labels.clamp(max=outputs.shape[-1] - 1), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, x, allow_unused=True) if loss.requires_grad else (None,)
    if gradient is None:
        return Finding("gradients", "bad", "the loss has no gradient for the image: nothing can be attacked")
    zero = int((gradient.flatten(1).abs().amax(1) == 0).sum())
    if zero:
        text = f"{zero} of {len(x)} images have a gradient of zero: robust accuracy would be false"
        return Finding("gradients", "bad" if 2 * zero > len(x) else "look", text)
    return Finding("gradients", "good", "every image has a gradient")


def graded(share: float, look: float, bad: float) -> Verdict:
    """The verdict on a share that should be small."""
    if share > bad:
        return "bad"
    return "look" if share > look else "good"
