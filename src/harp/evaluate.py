"""Accuracy, clean and under attack: numbers that carry what they depend on."""

import math
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

import harp
from harp.attacks import Attack, check_number, logits
from harp.errors import DataError
from harp.frozen import frozen
from harp.seeds import derive

_Z = 1.959963984540054  # the standard normal distribution's 97.5 % point


@dataclass(frozen=True)
class Score:
    """How many images of each class were classified correctly, and by what protocol that was found."""

    name: str
    correct: tuple[int, ...]
    totals: tuple[int, ...]
    protocol: Mapping[str, Any] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """The number of images."""
        return sum(self.totals)

    @property
    def accuracy(self) -> float:
        """The share of images that were classified correctly."""
        return sum(self.correct) / self.n

    @property
    def per_class(self) -> tuple[float, ...]:
        """The share of each class; not a number for a class without images."""
        pairs = zip(self.correct, self.totals, strict=True)
        return tuple(right / total if total else math.nan for right, total in pairs)

    @property
    def balanced_accuracy(self) -> float:
        """The mean share over the classes that have images, each class counting the same."""
        shares = [share for share, total in zip(self.per_class, self.totals, strict=True) if total]
        return sum(shares) / len(shares)

    def interval(self, balanced: bool = False) -> tuple[float, float]:
        """The 95 % confidence interval of the accuracy, or of the balanced accuracy.

        Wilson's for the accuracy p of n images, which also holds near 0 and 1,

            (p + z²/2n ± z √(p (1 − p)/n + z²/4n²)) / (1 + z²/n)

        and for the balanced accuracy of C classes the normal one of a stratified sample, clipped to [0, 1]:

            mean p_c ± z √(Σ p_c (1 − p_c)/n_c) / C
        """
        if balanced:
            strata = [(p, n) for p, n in zip(self.per_class, self.totals, strict=True) if n]
            half = _Z * math.sqrt(sum(p * (1 - p) / n for p, n in strata)) / len(strata)
            return max(0.0, self.balanced_accuracy - half), min(1.0, self.balanced_accuracy + half)
        p, n = self.accuracy, self.n
        middle = p + _Z**2 / (2 * n)
        half = _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
        scale = 1 + _Z**2 / n
        return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for a report or a file."""
        return {
            "name": self.name,
            "n": self.n,
            "accuracy": self.accuracy,
            "interval": list(self.interval()),
            "balanced_accuracy": self.balanced_accuracy,
            "balanced_interval": list(self.interval(balanced=True)),
            "correct": list(self.correct),
            "totals": list(self.totals),
            **self.protocol,
            "versions": {
                "harp": harp.__version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
            },
        }


def accuracy(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    attack: Attack | None = None,
    batch: int = 256,
    seed: int = 0,
    num_classes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Score:
    """The accuracy on images (floating point in [0, 1], or bytes) as they are, or after an attack.

    What the attack returns is classified by the plain model in eval mode, in a pass of its own. The model's modes
    are restored and its buffers not touched. The random numbers of a batch follow from the seed and the batch's
    index alone, and the caller's random state is left as it was. `progress(done, all)` is called after each batch.
    """
    check_number("batch", batch, whole=True, least=1)
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros((), device=images.device))
    classes = _classes(model, images, labels, like, num_classes)
    right = []
    for index, start in enumerate(range(0, len(images), batch)):
        x = _as_input(images[start : start + batch], like)
        y = labels[start : start + batch].to(like.device, torch.long)
        with _seeded(derive(seed, "evaluate", index), like.device):
            if attack is not None:
                x = attack(model, x, y)
            right.append(_classified(model, x, y).cpu())
        if progress is not None:
            progress(start + len(y), len(images))
    true = labels.cpu().long()
    protocol = {"seed": seed, "batch": batch, "attack": _described(attack)}
    return Score(
        "clean" if attack is None else getattr(attack, "name", type(attack).__name__),
        tuple(torch.bincount(true[torch.cat(right)], minlength=classes).tolist()),
        tuple(torch.bincount(true, minlength=classes).tolist()),
        protocol,
    )


def subset(n_total: int, examples: int | None, seed: int) -> Tensor:
    """The indices of `examples` images out of `n_total`, drawn by the seed and sorted; all, if there are no more."""
    if examples is None or examples >= n_total:
        return torch.arange(n_total)
    check_number("examples", examples, whole=True, least=1)
    return torch.randperm(n_total, generator=torch.Generator().manual_seed(seed))[:examples].sort().values


def _classes(model: nn.Module, images: Tensor, labels: Tensor, like: Tensor, num_classes: int | None) -> int:
    """The number of classes, once it is clear that the model, the images and the labels go together."""
    if len(images) == 0:
        raise DataError("there are no images to evaluate on")
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise DataError(
            f"{len(images)} images need as many integer labels, not {tuple(labels.shape)} of {labels.dtype}"
        )
    if not images.is_floating_point() and images.dtype != torch.uint8:
        raise DataError(f"images must be bytes or floating point numbers in [0, 1], not {images.dtype}")
    first = _as_input(images[:1], like)
    with torch.no_grad(), frozen(model, first, fast=False) as net:
        width = logits(net, first).shape[1]
    classes = num_classes or width
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= min(classes, width):
        raise DataError(f"labels must be 0 to {min(classes, width) - 1}, these are {low} to {high}")
    return classes


def _as_input(images: Tensor, like: Tensor) -> Tensor:
    x = images.to(like.device).to(like.dtype)
    return x / 255 if images.dtype == torch.uint8 else x


@torch.no_grad()
def _classified(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Which images the model gets right. An answer that is not finite is never right, whatever its argmax."""
    with frozen(model, x, fast=False) as net:
        answer = logits(net, x)
    return (answer.argmax(1) == y) & answer.isfinite().all(1)


def _described(attack: Attack | None) -> dict[str, Any] | None:
    if attack is None:
        return None
    names: list[str] = [item.name for item in fields(attack)] if is_dataclass(attack) else []
    return {"type": type(attack).__name__, **{name: getattr(attack, name) for name in names}}


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of the CPU and of the device from a seed; afterwards they go on as if nothing was drawn."""
    accelerators = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(devices=accelerators, device_type=kind):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach devices that were not forked
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        elif accelerators:
            getattr(torch, kind).manual_seed(seed)
        yield
