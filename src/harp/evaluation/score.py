"""Accuracy, clean and under attack, as results that name all they depend on."""

import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

import harp
from harp.attacks import Attack, as_attack, check_number
from harp.evaluation.confidence import wilson
from harp.evaluation.predict import classes_of
from harp.evaluation.runner import BATCH, AttackRun
from harp.system.distributed.peers import Alone
from harp.system.library_progress import of_this_call
from harp.system.notebook import html_table
from harp.system.progress import Quiet


@dataclass(frozen=True)
class Score:
    """How many images of each class are classified correctly, and the protocol of the measurement.

    Arguments:
        name: of the attack, or "clean".
        correct: images classified correctly, one number for each class.
        totals: all images, one number for each class.
        protocol: the attack and the other settings that the numbers depend on.

    Example:
        score = harp.accuracy(model, images, labels)
        print(score.accuracy, score.interval(), score.per_class)
    """

    name: str
    correct: tuple[int, ...]
    totals: tuple[int, ...]
    protocol: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        low, high = self.interval()
        return f"Score({self.name}: {self.accuracy:.1%} of {self.n:,} images, 95 % interval {low:.1%} – {high:.1%})"

    def _repr_html_(self) -> str:
        low, high = self.interval()
        row = [self.name, f"{self.accuracy:.1%}", f"{low:.1%} – {high:.1%}", f"{self.n:,}"]
        return html_table("accuracy", ("test", "accuracy", "95 % interval", "images"), [row])

    @property
    def n(self) -> int:
        """The number of images."""
        return sum(self.totals)

    @property
    def accuracy(self) -> float:
        """The share of images that are classified correctly."""
        return sum(self.correct) / self.n

    @property
    def per_class(self) -> tuple[float, ...]:
        """The accuracy of each class; NaN for a class without images."""
        pairs = zip(self.correct, self.totals, strict=True)
        return tuple(right / total if total else math.nan for right, total in pairs)

    @property
    def balanced_accuracy(self) -> float:
        """The mean of the classes' accuracies, over the classes that have images."""
        shares = [share for share, total in zip(self.per_class, self.totals, strict=True) if total]
        return sum(shares) / len(shares)

    def interval(self, balanced: bool = False) -> tuple[float, float]:
        """The 95 % confidence interval of the accuracy, or of the balanced accuracy.

        It is Wilson's for the accuracy. For the balanced accuracy of C classes the Wilson intervals (l_c, u_c) of the
        classes' accuracies p_c are combined (Zou & Donner, Statistics in Medicine 2008):

            mean p_c − √(Σ (p_c − l_c)²) / C   to   mean p_c + √(Σ (u_c − p_c)²) / C
        """
        if not balanced:
            return wilson(self.accuracy, self.n)
        classes = [(p, *wilson(p, n)) for p, n in zip(self.per_class, self.totals, strict=True) if n]
        below = math.hypot(*(p - low for p, low, _ in classes)) / len(classes)
        above = math.hypot(*(high - p for p, _, high in classes)) / len(classes)
        return self.balanced_accuracy - below, self.balanced_accuracy + above

    def summary(self, balanced: bool) -> dict[str, Any]:
        """The score as plain values, with the accuracy or the balanced accuracy as its value."""
        low, high = self.interval(balanced)
        value = self.balanced_accuracy if balanced else self.accuracy
        measure = "balanced accuracy" if balanced else "accuracy"
        return {**self.as_dict(), "measure": measure, "value": value, "low": low, "high": high}

    def as_dict(self) -> dict[str, Any]:
        """The score as plain values, for a report or a file."""
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
    attack: Attack | str | None = None,
    batch: int = BATCH,
    seed: int = 0,
    num_classes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    peers: Alone | None = None,
) -> Score:
    """The accuracy on images (floating point in [0, 1], or bytes) as they are, or after an attack.

    The plain model in eval mode classifies the attacked images in a pass of its own. The model's modes are restored
    and its buffers are not changed. The random numbers of a batch depend on the seed and the batch's index only, and
    the caller's random state is restored. `progress(done, all)` is called after each batch. `peers` are the processes
    that share the work: all of them must call this, and all get the whole score.

    Arguments:
        model: maps images in [0, 1] to logits.
        images: floating point in [0, 1], or bytes.
        labels: one integer for each image.
        attack: such as `harp.Pgd()`, or its name, such as "pgd-20"; None: the images as they are.
        batch: the number of images in a batch.
        seed: of the attack.
        num_classes: by default the number of logits.
        progress: called with the number of images done and the number of all images; None: what takes more than two
            seconds shows its progress on a terminal and in a notebook.
        peers: the processes that share the work.

    Example:
        score = harp.accuracy(model, images, labels, attack=harp.Pgd(steps=20))
        print(score.accuracy, score.interval())
    """
    attack = None if attack is None else as_attack(attack)
    classes = classes_of(model, images, labels, num_classes)

    alone = peers is None or peers.rank == 0
    display = of_this_call() if progress is None and alone else Quiet()

    def show(done: float, total: int, text: str) -> None:
        display.count(done, total, text)
        if progress is not None:
            progress(int(done), total)

    assault = AttackRun(
        model, images, labels, attack, classes=classes, batch=batch, seed=seed, progress=show, peers=peers
    )
    with display.counting("accuracy", len(images)):
        right = assault.run().right
    return score(right, labels, attack, classes=classes, batch=batch, seed=seed)


def score(right: Tensor, labels: Tensor, attack: Attack | None, *, classes: int, batch: int, seed: int) -> Score:
    """The score by flags of which images are right."""
    true = labels.cpu().long()
    return Score(
        "clean" if attack is None else getattr(attack, "name", type(attack).__name__),
        tuple(torch.bincount(true[right], minlength=classes).tolist()),
        tuple(torch.bincount(true, minlength=classes).tolist()),
        {"seed": seed, "batch": batch, "attack": described(attack)},
    )


def subset(n_total: int, examples: int | None, seed: int) -> Tensor:
    """The sorted indices of `examples` images out of `n_total`, drawn by the seed; all if there are not more."""
    if examples is None or examples >= n_total:
        return torch.arange(n_total)
    check_number("examples", examples, whole=True, least=1)
    return torch.randperm(n_total, generator=torch.Generator().manual_seed(seed))[:examples].sort().values


def described(attack: Attack | None) -> dict[str, Any] | None:
    """An attack and all its settings as plain values."""
    if attack is None:
        return None
    names: list[str] = [item.name for item in fields(attack)] if is_dataclass(attack) else []
    return {"type": type(attack).__name__, **{name: getattr(attack, name) for name in names}}


def epsilon_text(result: Mapping[str, Any]) -> str:
    """The epsilon of a result as text, in 255ths if that is a whole number."""
    epsilon = (result.get("attack") or {}).get("epsilon")
    if epsilon is None:
        return "–"
    levels = epsilon * 255
    return f"{round(levels)}/255" if abs(levels - round(levels)) < 1e-6 else f"{epsilon:.4g}"
