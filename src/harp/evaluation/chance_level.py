"""Whether a network is better than chance: its accuracy against that of the best constant answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from harp.evaluation.confidence import wilson


def constant_accuracy(totals: Sequence[int], balanced: bool = False) -> float:
    """The accuracy of the best constant answer, given the number of images of each class.

    It is the share of the most frequent class; for the balanced accuracy it is 1 / (number of classes with images).
    """
    present = [count for count in totals if count]
    return 1 / len(present) if balanced else max(present) / sum(present)


def at_chance(value: float, totals: Sequence[int], balanced: bool = False) -> bool:
    """Whether the 95 % interval of an accuracy (Wilson's) is not above the accuracy of the best constant answer.

    The balanced accuracy of C classes with n_c images each counts as a share of C² / Σ 1/n_c images, which is the
    number of all images if the classes are equally large. The result is False if there are so few images, or so many of
    one class, that even a perfect network would not pass.
    """
    present = [count for count in totals if count]
    if not present:
        return False
    images = len(present) ** 2 / sum(1 / count for count in present) if balanced else sum(present)
    constant = constant_accuracy(present, balanced)
    if wilson(1.0, images)[0] <= constant:
        return False
    return wilson(value, images)[0] <= constant


def is_balanced(result: Mapping[str, Any]) -> bool:
    """Whether the value of a result is the balanced accuracy."""
    return str(result.get("measure", "")).startswith("balanced")


def result_at_chance(result: Mapping[str, Any]) -> bool:
    """`at_chance` of a result, in the form of a run's files."""
    return at_chance(result["value"], result["totals"], is_balanced(result))


def natural(results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The accuracy without an attack, if it was measured."""
    return next((result for result in results if not result.get("attack")), None)


def warning(
    results: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]], trained: bool = True
) -> str | None:
    """A warning in one sentence if a finished network answers at chance level; None otherwise.

    Arguments:
        before: the results before pruning; empty for a run that does not prune.
        trained: whether the network before pruning was trained; one with random weights is not compared with.
    """
    clean, old = natural(results), natural(before)
    if clean is None or not result_at_chance(clean):
        return None
    share = constant_accuracy(clean["totals"], is_balanced(clean))
    measured = f"natural accuracy {clean['value']:.1%} on {sum(clean['totals']):,} test images"
    numbers = f"{measured}, where always the same answer gets {share:.1%}"
    if old is None or (not trained and result_at_chance(old)):
        return f"The network answers at chance level: {numbers}."
    if result_at_chance(old):
        return f"The network answers at chance level, as it did before pruning ({old['value']:.1%}): {numbers}."
    return f"Pruning left a network that answers at chance level: {numbers}; it was {old['value']:.1%} before pruning."
