"""The accuracy of a network on a test set, as a result that names all it depends on."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from harp.attacks import Ball
from harp.data.dataset import DataSet
from harp.data.decodable import readable
from harp.evaluation.predict import classes_of
from harp.evaluation.runner import BATCH, AttackRun, Outcome
from harp.evaluation.score import score, subset

DEFAULT = Ball(8 / 255, "linf")


@dataclass(frozen=True)
class Subject:
    """A network with the data that it is evaluated on, and the ball of perturbations that it was trained for."""

    model: nn.Module
    data: DataSet
    threat: Ball = DEFAULT
    dense: nn.Module | None = None  # the network before pruning, if a run has kept it
    measured: tuple[Path, ...] = ()  # folders that may hold results of it, as `harp.evaluation.results` writes them


def measure(
    model: nn.Module,
    source: DataSet,
    name: str,
    attack: Any,
    *,
    examples: int | None,
    seed: int,
    batch: int = BATCH,
    **options: Any,
) -> tuple[dict[str, Any], Outcome]:
    """The accuracy with its 95 % interval and all that it depends on except the network; and the attack's outcome.

    `options` are further arguments of `AttackRun`, such as `progress`, `path` and `stop`.
    """
    test = source.test.select(subset(len(source.test), examples, seed))
    requested, test = len(test), readable(test, options.get("progress")).split
    classes = classes_of(model, test.images, test.labels, source.num_classes)
    outcome = AttackRun(
        model, test.images, test.labels, attack, classes=classes, batch=batch, seed=seed, **options
    ).run()
    scored = score(outcome.right, test.labels, attack, classes=classes, batch=batch, seed=seed)
    facts = {"name": name, "data": source.name, "source": source.source}
    result = {**scored.summary(source.balanced), **facts}
    if len(test) < requested:
        result["undecodable"] = requested - len(test)  # images that were left out
    return result, outcome
